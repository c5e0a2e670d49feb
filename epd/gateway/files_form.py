"""An upload on its way in: a form with one file, which goes to disk piece by piece as it comes.

Whatever ends it early (the client leaves, sends too much or too slowly) leaves nothing behind.
"""

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar, get_args

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from encoder import Pace, PaceLimits
from epd.errors import BodyTimeout, ForeignPage, InvalidRequest, Overloaded, UnsupportedMediaType
from epd.gateway.files import Arriving, FileStore, Purpose, StoredFile, too_large
from epd.gateway.validation import shown

_PIECE_BYTES: Final = 256 << 10
_MAX_FIELD_BYTES: Final = 1024
_MAX_NAME_CHARS: Final = 255
# What a form takes besides its file.
_FORM_BYTES: Final = 64 << 10
# At a time: each has a descriptor and a piece in memory.
_MAX_UPLOADS: Final = 128
_CODECS: Final = ("", "binary", "8bit", "7bit")
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

_P = ParamSpec("_P")
_T = TypeVar("_T")


class UploadReader:
    """On one event loop."""

    def __init__(self, store: FileStore, *, body_timeout_s: float) -> None:
        self._store = store
        self._pace = PaceLimits(timeout_s=body_timeout_s)
        self._num_uploads = 0

    async def read(self, request: web.Request, owner: str) -> StoredFile:
        """The file, kept. Raises ServeError."""
        limits = self._store.limits
        _check_headers(request)
        if request.content_length is not None and request.content_length > limits.file_max_bytes + _FORM_BYTES:
            raise too_large(limits, f"{request.content_length} bytes with its form")
        if self._num_uploads >= _MAX_UPLOADS:
            raise Overloaded(f"{_MAX_UPLOADS} files are arriving, which is the limit", retry_after_s=5.0)
        self._num_uploads += 1
        upload = _Upload(self._store, owner, Pace(self._pace))
        try:
            async with upload.pace.timeout:
                await upload.read(request)
            return await upload.keep()
        except TimeoutError as error:
            if not upload.pace.timeout.expired():
                raise
            raise BodyTimeout(f"the body came too slowly; {upload.size_bytes} bytes had arrived") from error
        except (BadHttpMessage, web.RequestPayloadError) as error:
            raise InvalidRequest("the body is not framed as its headers say") from error
        finally:
            self._num_uploads -= 1
            await upload.abandon()


class _Upload:
    """The parts of one form so far."""

    def __init__(self, store: FileStore, owner: str, pace: Pace) -> None:
        self._store = store
        self._owner = owner
        self.pace = pace
        self.size_bytes = 0
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._arriving: Arriving | None = None

    async def read(self, request: web.Request) -> None:
        """All parts of the form. Raises ServeError."""
        try:
            reader = await request.multipart()
            while (part := await reader.next()) is not None:
                if not isinstance(part, BodyPartReader):
                    raise InvalidRequest("a part of the form is itself a form; allowed: one file, and fields")
                await self._take(part)
        except ValueError as error:
            raise InvalidRequest(f"the body is no form: {error}") from error

    async def keep(self) -> StoredFile:
        """Raises ServeError for a form that lacks something."""
        if self._arriving is None or self._filename is None:
            raise InvalidRequest("field file is required, a file with a name", param="file")
        purpose, ttl_s = self._purpose(), self._ttl_s()
        arriving, filename = self._arriving, self._filename
        kept = asyncio.ensure_future(
            asyncio.to_thread(lambda: arriving.commit(filename=filename, purpose=purpose, ttl_s=ttl_s))
        )
        try:
            return await asyncio.shield(kept)
        except asyncio.CancelledError:
            # Its sender does not learn the id: it would upload the file again.
            await asyncio.wait({kept})
            if kept.exception() is None:
                await on_disk(self._store.delete, self._owner, kept.result().id)
            raise

    async def abandon(self) -> None:
        if self._arriving is not None:
            await on_disk(self._arriving.abandon)

    async def _take(self, part: BodyPartReader) -> None:
        name = part.name or ""
        codec = part.headers.get("Content-Transfer-Encoding", "").strip().lower()
        if codec not in _CODECS:
            allowed = ", ".join(filter(None, _CODECS))
            raise InvalidRequest(
                f"Content-Transfer-Encoding of {shown(name)} is {shown(codec)}; allowed: {allowed}", param=name
            )
        if name == "file":
            if self._arriving is not None:
                raise InvalidRequest("the form has more than one file; allowed: one", param="file")
            self._filename = _checked_name(part.filename)
            await self._store_content(part)
        elif name in _FIELDS:
            if name in self._fields:
                raise InvalidRequest(f"field {name} is given twice", param=name)
            self._fields[name] = await self._text(part, name)
        else:
            allowed = ", ".join(("file", *_FIELDS))
            raise InvalidRequest(f"unknown field {shown(name)}; allowed: {allowed}", param=name or None)

    async def _store_content(self, part: BodyPartReader) -> None:
        self._arriving = await on_disk(self._store.begin, self._owner)
        pending = bytearray()
        while chunk := await part.read_chunk(_PIECE_BYTES):
            self._note(chunk)
            pending += chunk
            if len(pending) >= _PIECE_BYTES:
                await on_disk(self._arriving.write, bytes(pending))
                pending.clear()
        await on_disk(self._arriving.write, bytes(pending))

    async def _text(self, part: BodyPartReader, name: str) -> str:
        raw = bytearray()
        while chunk := await part.read_chunk(_MAX_FIELD_BYTES):
            self._note(chunk)
            raw += chunk
            if len(raw) > _MAX_FIELD_BYTES:
                raise InvalidRequest(f"field {name} has more than {_MAX_FIELD_BYTES} bytes", param=name)
        return raw.decode("utf-8", "replace").strip()

    def _note(self, chunk: bytes) -> None:
        self.size_bytes += len(chunk)
        self.pace.note(self.size_bytes)

    def _purpose(self) -> Purpose:
        given = self._fields.get("purpose")
        allowed: tuple[Purpose, ...] = get_args(Purpose)
        if given is None:
            raise InvalidRequest(f"field purpose is required; allowed: {', '.join(allowed)}", param="purpose")
        return checked_purpose(given)

    def _ttl_s(self) -> float:
        longest_s = self._store.limits.ttl_s
        anchor, seconds = (self._fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return longest_s
        if anchor != "created_at":
            raise InvalidRequest(
                f'expires_after[anchor] is {shown(anchor)}; allowed: "created_at"', param="expires_after[anchor]"
            )
        if seconds is None or not seconds.isascii() or not seconds.isdigit() or not 1 <= int(seconds) <= longest_s:
            raise InvalidRequest(
                f"expires_after[seconds] is {shown(seconds)}; allowed: 1 to {longest_s:.0f} (gateway.files_ttl_s)",
                param="expires_after[seconds]",
            )
        return float(seconds)


def checked_purpose(given: str) -> Purpose:
    """Raises InvalidRequest."""
    allowed: tuple[Purpose, ...] = get_args(Purpose)
    for purpose in allowed:
        if given == purpose:
            return purpose
    raise InvalidRequest(f"purpose is {shown(given)}; allowed: {', '.join(allowed)}", param="purpose")


async def on_disk(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """On a thread, and not left before it has ended: what it works on must not be taken away under it."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Looked at, so that nobody reports it as unseen.
        task.exception()
        raise cancelled
    return task.result()


def _check_headers(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding is {encoding[:80]}; allowed: identity", param="Content-Encoding")
    if request.content_type != "multipart/form-data":
        given = request.headers.get("Content-Type", "absent")
        raise UnsupportedMediaType(f"Content-Type is {given[:80]}; allowed: multipart/form-data", param="Content-Type")
    # A browser asks before a foreign page may post JSON, but not before it posts a form.
    if request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise ForeignPage("forms are not taken from pages of other sites")


def _checked_name(name: str | None) -> str:
    """A name is only ever shown; one that is a path is somebody's mistake or worse. Raises InvalidRequest."""
    if name is None:
        raise InvalidRequest("field file is text; it must be a file with a name", param="file")
    is_path = "/" in name or "\\" in name or name in ("", ".", "..")
    if is_path or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
        raise InvalidRequest(
            f"the file's name is {shown(name)}; allowed: 1 to {_MAX_NAME_CHARS} printable characters, and no path",
            param="file",
        )
    return name
