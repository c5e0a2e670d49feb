"""`/v1/files`: upload, list, describe, read and delete files, in OpenAI's shapes."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal
from urllib.parse import quote

from aiohttp import web
from pydantic import BaseModel

from epd.config import GatewayConfig
from epd.errors import InvalidRequest
from epd.gateway.admission import Admission
from epd.gateway.files import FileLimits, FileStore
from epd.gateway.files_form import UploadReader, checked_purpose, on_disk
from epd.gateway.operations import Answer, FormBody, Operation, Parameter
from epd.gateway.owner import owner_of
from epd.gateway.schema_files import FileDeleted, FileList, FileObject, UploadForm
from epd.gateway.sse import ANSWER_HEADERS
from epd.gateway.validation import shown

_PIECE_BYTES: Final = 256 << 10
_SWEEP_PERIOD_S: Final = 60.0
_MAX_PAGE: Final = 10_000
_UNSAFE_IN_NAME: Final = re.compile(r"[^A-Za-z0-9._ ()-]")

# A stored page must not run in this origin, whatever a browser thinks of its content.
_INERT: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cache-Control": "private, no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_FILE_ID: Final = Parameter(
    name="file_id",
    where="path",
    description="The id that the upload was answered with",
    schema={"type": "string", "pattern": "^file-[0-9a-f]{32}$"},
    required=True,
)
_LIST_PARAMETERS: Final = (
    Parameter(
        name="limit",
        where="query",
        description="Most files of a page",
        schema={"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": _MAX_PAGE},
    ),
    Parameter(name="after", where="query", description="The last id of the page before this one"),
    Parameter(
        name="order",
        where="query",
        description="By time of upload, the newest first or the oldest",
        schema={"type": "string", "enum": ["desc", "asc"], "default": "desc"},
    ),
    Parameter(
        name="purpose",
        where="query",
        description="Only files with this purpose",
        schema={"type": "string", "enum": ["user_data", "vision", "assistants"]},
    ),
)


class Files:
    """Everything shared is handed in. `run` belongs to the application's life."""

    def __init__(self, config: GatewayConfig, *, store: FileStore, admission: Admission) -> None:
        self._store = store
        self._admission = admission
        self._uploads = UploadReader(store, body_timeout_s=config.body_timeout_s)

    def operations(self) -> tuple[Operation, ...]:
        of_file = {"tag": "files", "parameters": (_FILE_ID,), "errors": (404,)}
        return (
            Operation(
                method="POST",
                path="/v1/files",
                handler=self.upload_file,
                tag="files",
                summary="Keep a file, to be named by its id in later requests",
                request=FormBody(shape=UploadForm),
                responses={200: Answer(description="The file", shape=FileObject)},
                errors=(403,),
            ),
            Operation(
                method="GET",
                path="/v1/files",
                handler=self.list_files,
                tag="files",
                summary="List the files of this API key",
                responses={200: Answer(description="A page of files", shape=FileList)},
                errors=(400,),
                parameters=_LIST_PARAMETERS,
            ),
            Operation(
                method="GET",
                path="/v1/files/{file_id}",
                handler=self.retrieve_file,
                summary="Describe a file",
                responses={200: Answer(description="The file", shape=FileObject)},
                **of_file,  # type: ignore[arg-type]
            ),
            Operation(
                method="GET",
                path="/v1/files/{file_id}/content",
                handler=self.file_content,
                summary="The bytes of a file",
                responses={200: Answer(description="The bytes, with their recognised type", media_type="*/*")},
                **of_file,  # type: ignore[arg-type]
            ),
            Operation(
                method="DELETE",
                path="/v1/files/{file_id}",
                handler=self.delete_file,
                summary="Delete a file",
                responses={200: Answer(description="It is gone", shape=FileDeleted)},
                **of_file,  # type: ignore[arg-type]
            ),
        )

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Opens the store, removes what expires while the application runs, and closes it."""
        await on_disk(self._store.open)
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
            await on_disk(self._store.close)

    async def upload_file(self, request: web.Request) -> web.Response:
        async with self._admission.session():
            self._admission.check()
            file = await self._uploads.read(request, owner_of(request))
            return _json(FileObject.of(file))

    async def list_files(self, request: web.Request) -> web.Response:
        query = _Page(request)
        files = await on_disk(self._store.of, owner_of(request))
        if query.purpose is not None:
            files = [file for file in files if file.purpose == query.purpose]
        if query.order == "desc":
            files.reverse()
        if query.after is not None:
            places = [place for place, file in enumerate(files) if file.id == query.after]
            if not places:
                raise InvalidRequest(f"after is {shown(query.after)}; there is no such file", param="after")
            files = files[places[0] + 1 :]
        page = [FileObject.of(file) for file in files[: query.limit]]
        return _json(
            FileList(
                data=page,
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=len(files) > len(page),
            )
        )

    async def retrieve_file(self, request: web.Request) -> web.Response:
        file = await on_disk(self._store.get, owner_of(request), request.match_info["file_id"])
        return _json(FileObject.of(file))

    async def delete_file(self, request: web.Request) -> web.Response:
        file_id = request.match_info["file_id"]
        await on_disk(self._store.delete, owner_of(request), file_id)
        return _json(FileDeleted(id=file_id))

    async def file_content(self, request: web.Request) -> web.StreamResponse:
        file, descriptor = await on_disk(self._store.open_content, owner_of(request), request.match_info["file_id"])
        try:
            response = web.StreamResponse(headers=_INERT)
            response.headers.update(request[ANSWER_HEADERS])
            response.headers["Content-Type"] = file.media_type
            response.headers["Content-Disposition"] = _attachment(file.filename)
            response.content_length = file.size_bytes
            await response.prepare(request)
            if request.method != "HEAD":
                for start in range(0, file.size_bytes, _PIECE_BYTES):
                    await response.write(await on_disk(os.pread, descriptor, _PIECE_BYTES, start))
            await response.write_eof()
            return response
        finally:
            os.close(descriptor)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_PERIOD_S)
            # A full or broken disk is no reason to stop serving; requests tell of it.
            with contextlib.suppress(OSError):
                await on_disk(self._store.sweep)


def file_store(config: GatewayConfig, *, unix_clock: Callable[[], float]) -> FileStore | None:
    """Where the gateway keeps files; None where it keeps none."""
    if config.files_dir is None or not config.files_bytes:
        return None
    limits = FileLimits(
        file_max_bytes=config.file_max_bytes,
        total_bytes=config.files_bytes,
        max_count=config.files_count,
        ttl_s=config.files_ttl_s,
    )
    return FileStore(config.files_dir, limits, unix_clock=unix_clock)


class _Page:
    """What a list is asked for. Raises InvalidRequest."""

    def __init__(self, request: web.Request) -> None:
        query = request.query
        limit = query.get("limit", str(_MAX_PAGE))
        is_number = limit.isascii() and limit.isdigit() and len(limit) <= len(str(_MAX_PAGE))
        if not is_number or not 1 <= int(limit) <= _MAX_PAGE:
            raise InvalidRequest(f"limit is {shown(limit)}; allowed: 1 to {_MAX_PAGE}", param="limit")
        self.limit = int(limit)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f'order is {shown(order)}; allowed: "asc", "desc"', param="order")
        self.order: Literal["asc", "desc"] = "asc" if order == "asc" else "desc"
        self.after = query.get("after")
        self.purpose = checked_purpose(query["purpose"]) if "purpose" in query else None


def _attachment(filename: str) -> str:
    """RFC 6266: a name in plain letters for old clients, and the name itself."""
    plain = _UNSAFE_IN_NAME.sub("_", filename)
    encoded = quote(filename.encode("utf-8", "replace"), safe="")
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}"


def _json(shape: BaseModel) -> web.Response:
    return web.Response(body=shape.model_dump_json().encode(), content_type="application/json")
