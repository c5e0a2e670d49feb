"""The page at `/`: its files, read once from the package and served from memory.

    GET /              the page
    GET /page/NAME     its styles, scripts and samples

The content policy lets the page load and reach nothing but this server, and run no script that is not one of its files.
Files are asked for again every time and answered 304 while they are the same, so an upgrade shows at once.
"""

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import ETag, hdrs, web

from epd.gateway.operations import Answer, Operation, Parameter

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "mp4": "video/mp4",
    "flac": "audio/flac",
}
_PACKED = frozenset({"html", "css", "js", "json", "svg"})
_INDEX = "index.html"

CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        # What was dropped, pasted or recorded is shown from memory.
        "img-src 'self' blob: data:",
        "media-src 'self' blob: data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text becomes HTML or script, not even by mistake.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file in memory. `packed` is its gzip form where that is worth it. The tag is weak: both forms share it."""

    content: bytes
    packed: bytes | None
    media_type: str
    etag: ETag

    @classmethod
    def read(cls, file: Traversable) -> "PageFile":
        content = file.read_bytes()
        ending = file.name.rpartition(".")[2]
        return cls(
            content=content,
            packed=gzip.compress(content, mtime=0) if ending in _PACKED else None,
            media_type=_TYPES[ending],
            etag=ETag(hashlib.sha256(content).hexdigest()[:24], is_weak=True),
        )


class PageFiles:
    """Serves the page to everybody: it holds nothing of anybody, and asks for a key itself where one is needed."""

    def __init__(self) -> None:
        self._files = {file.name: PageFile.read(file) for file in _page_files(files("epd.gateway") / "page")}

    def operations(self) -> tuple[Operation, ...]:
        media_type = _TYPES["html"].partition(";")[0]
        return (
            Operation(
                method="GET",
                path="/",
                handler=self.index,
                tag="page",
                summary="The page: a chat, and the pipeline at work beside it",
                responses={
                    200: Answer(description="The page", media_type=media_type),
                    304: Answer(description="The page has not changed"),
                },
                is_open=True,
            ),
            Operation(
                method="GET",
                path="/page/{name}",
                handler=self.file,
                tag="page",
                summary="A file of the page",
                responses={
                    200: Answer(description="The file", media_type="*/*"),
                    304: Answer(description="The file has not changed"),
                },
                errors=(404,),
                is_open=True,
                parameters=(
                    Parameter(
                        name="name",
                        where="path",
                        description="Name of the file",
                        schema={"type": "string", "enum": sorted(self._files)},
                    ),
                ),
            ),
        )

    async def index(self, request: web.Request) -> web.Response:
        return self._answer(request, self._files[_INDEX])

    async def file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        return self._answer(request, found)

    def _answer(self, request: web.Request, file: PageFile) -> web.Response:
        known = request.if_none_match or ()
        is_known = any(tag.value in (file.etag.value, "*") for tag in known)
        response = web.Response(status=304 if is_known else 200, headers=_HEADERS)
        response.etag = file.etag
        if file.packed is not None:
            response.headers[hdrs.VARY] = hdrs.ACCEPT_ENCODING
        if is_known:
            return response
        response.headers[hdrs.CONTENT_TYPE] = file.media_type
        if file.packed is not None and _takes_gzip(request):
            response.headers[hdrs.CONTENT_ENCODING] = "gzip"
            response.body = file.packed
        else:
            response.body = file.content
        return response


def _page_files(folder: Traversable) -> Iterator[Traversable]:
    """All files in the folder and in those below it; their names are unique."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _page_files(entry)
        else:
            yield entry


def _takes_gzip(request: web.Request) -> bool:
    """Whether the client names gzip and does not rule it out by a weight of zero."""
    for offer in request.headers.get(hdrs.ACCEPT_ENCODING, "").lower().split(","):
        coding, _, weight = offer.partition(";")
        if coding.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
