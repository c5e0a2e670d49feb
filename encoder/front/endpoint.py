"""The story of `POST /v1/encode`, for whichever process serves it: the front of encoders alone, or a gateway.

body -> items -> all at once: fetch -> key -> replica -> rows -> one answer in the order of the items
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
from aiohttp import web

from encoder.errors import EmbeddingUnknown, EncoderError
from encoder.front.accept import SAFETENSORS, wants_safetensors
from encoder.front.body import BodyReader
from encoder.front.config import EncodeLimits
from encoder.front.desk import EncodeDesk, Encoding
from encoder.front.items import EncodeBody, FileItem, Item
from encoder.front.problems import Problem, Refused, internal_problem, invalid, problem_of
from encoder.front.reply import Result, all_failed, safetensors_head, write_json, write_rows
from encoder.quoting import shown
from preprocess.errors import MediaError, MediaInvalid, MediaUnsupported
from preprocess.local import decode_data_url
from preprocess.recognise import modality_of
from preprocess.sniff import sniff
from preprocess.types import MediaKey, MediaOptions, Modality

logger = logging.getLogger(__name__)


class Shelf(Protocol):
    """What a server keeps for the client that asks: uploaded files, and content by key. Raises Refused."""

    async def kind_of_file(self, file_id: str, param: str) -> Modality: ...
    async def file(self, file_id: str, param: str) -> bytes: ...
    def content_of(self, key: MediaKey) -> tuple[bytes, Modality, MediaOptions] | None: ...


class EmptyShelf:
    """Of a server that keeps nothing but embeddings."""

    async def kind_of_file(self, file_id: str, param: str) -> Modality:
        raise _no_files(param)

    async def file(self, file_id: str, param: str) -> bytes:
        raise _no_files(param)

    def content_of(self, key: MediaKey) -> tuple[bytes, Modality, MediaOptions] | None:
        return None


_EMPTY = EmptyShelf()


class EncodeEndpoint:
    """Everything shared is handed in. Who serves it has seen to API keys and to the end of the whole request."""

    def __init__(self, limits: EncodeLimits, *, desk: EncodeDesk) -> None:
        self._limits = limits
        self._desk = desk
        self._bodies = BodyReader(max_bytes=limits.max_body_bytes, pace=limits.body_pace, max_items=limits.max_items)
        self._copied_bytes = 0

    async def answer(
        self,
        request: web.Request,
        *,
        headers: Mapping[str, str],
        deadline_unix_s: float,
        shelf: Shelf = _EMPTY,
        place: AbstractContextManager[None] | None = None,
    ) -> web.StreamResponse:
        """Read the request and answer it, with these headers; `place` is held from when its body is there.

        Raises Refused, EncoderError, and what `place` raises.
        """
        # Known to be in vain before the body is read, and looked at again once it is there.
        self._desk.check_room(1)
        async with self._bodies.body(request) as body:
            with nullcontext() if place is None else place:
                return await self._answer_body(request, body, headers, deadline_unix_s, shelf)

    async def _answer_body(
        self,
        request: web.Request,
        body: EncodeBody,
        headers: Mapping[str, str],
        deadline_unix_s: float,
        shelf: Shelf,
    ) -> web.StreamResponse:
        self._check_model(body)
        _check_form(request, body)
        self._desk.check_room(len(body.items))
        async with contextlib.AsyncExitStack() as stack:
            asking = _Asking(self._desk, shelf, deadline_unix_s, self._limits.max_file_bytes)
            results = await self._encode_items(body, asking, headers, stack)
            problems = [result for result in results if isinstance(result, Problem)]
            if len(problems) == len(results):
                return all_failed(problems)
            return await self._write(request, results, body, headers)

    async def _encode_items(
        self, body: EncodeBody, asking: "_Asking", headers: Mapping[str, str], stack: contextlib.AsyncExitStack
    ) -> list[Result]:
        """Every item on its own, all at the same time. What is leased or copied ends with the stack."""
        request_id = headers.get("X-Request-Id", "")

        async def one(item: Item | FileItem | Refused) -> Result:
            if isinstance(item, Refused):
                return item.problem
            try:
                encoding = await asking.encode(item)
            except Refused as refused:
                return refused.problem
            except (MediaError, EncoderError) as error:
                option = error.field if isinstance(error, MediaInvalid) else None
                return problem_of(error, param=item.param_of(option), option=option)
            except Exception:
                # The outermost loop of an item: it must not take its neighbours with it.
                logger.exception("item %s of request %s failed", item.param, request_id)
                return internal_problem(request_id, param=item.param)
            stack.callback(encoding.release)
            self._copy(encoding, stack)
            return encoding

        tasks = [asyncio.create_task(one(item)) for item in body.items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _copy(self, encoding: Encoding, stack: contextlib.AsyncExitStack) -> None:
        """Out of the arena while there is room for copies, so that a client that reads slowly holds none of it."""
        size_bytes = encoding.rows.nbytes
        if self._copied_bytes + size_bytes > self._limits.max_reply_bytes:
            return
        self._copied_bytes += size_bytes
        # By numpy, which does not hold the interpreter's lock meanwhile.
        encoding.rows = np.array(np.frombuffer(encoding.rows, np.uint8)).data
        encoding.release()

        def forget() -> None:
            self._copied_bytes -= size_bytes

        stack.callback(forget)

    async def _write(
        self, request: web.Request, results: Sequence[Result], body: EncodeBody, given: Mapping[str, str]
    ) -> web.StreamResponse:
        headers = dict(given)
        head: bytes | None = None
        if _is_file_wanted(request):
            head, size_bytes = safetensors_head(results, model=self._limits.model_name)
            response = web.StreamResponse(headers=headers | {"Content-Type": SAFETENSORS})
            response.content_length = size_bytes
        else:
            response = web.StreamResponse(headers=headers | {"Content-Type": "application/json; charset=utf-8"})
        await response.prepare(request)
        try:
            if head is None:
                form = body.encoding_format
                await write_json(response, results, model=self._limits.model_name, encoding_format=form)
            else:
                await response.write(head)
                await write_rows(response, results)
            await response.write_eof()
        except BaseException:
            # Too late for an error in its place: what is cut off must not look whole.
            if request.transport is not None:
                request.transport.abort()
            raise
        return response

    def _check_model(self, body: EncodeBody) -> None:
        served = self._limits.model_name
        if body.model not in (None, served):
            words = f"model {shown(body.model)} is not served here; served: {shown(served)}"
            raise Refused(404, "model_not_found", words, param="model")


class _Asking:
    """The items of one request, asked for."""

    def __init__(self, desk: EncodeDesk, shelf: Shelf, deadline_unix_s: float, max_file_bytes: int) -> None:
        self._desk = desk
        self._shelf = shelf
        self._deadline_unix_s = deadline_unix_s
        self._max_file_bytes = max_file_bytes

    async def encode(self, item: Item | FileItem) -> Encoding:
        """Raises Refused, MediaError, EncoderError."""
        if isinstance(item, FileItem):
            item = await self._recognised(item)
        encoding = await self._encode(item)
        if item.key is not None and encoding.key != item.key:
            encoding.release()
            raise invalid(
                f"{item.path}.key is {item.key}; the key of the content, with these options, is {encoding.key}",
                f"{item.path}.key",
            )
        if encoding.layout.modality is not item.source.modality:
            encoding.release()
            raise invalid(
                f"{item.path}.key stands for a medium of kind {encoding.layout.modality}, the part is of kind "
                f"{item.source.modality}",
                f"{item.path}.key",
            )
        return encoding

    async def _encode(self, item: Item) -> Encoding:
        source, deadline_unix_s = item.source, self._deadline_unix_s
        content, modality, options = item.content, source.modality, source.options
        if content is None and item.file_id is not None:
            content = await self._shelf.file(item.file_id, f"{item.param}.file_id")
        elif content is None and source.url:
            # One asker for all items: a request has a share of the downloads and no more.
            return await self._desk.encode(source, asker=self, deadline_unix_s=deadline_unix_s)
        elif content is None and item.key is not None:
            kept = self._shelf.content_of(item.key)
            if kept is None:
                return await self._encode_key(item.key, modality, item.path)
            content, modality, options = kept
        assert content is not None, "an item has content, or a name"
        return await self._desk.encode_content(content, modality, options, deadline_unix_s=deadline_unix_s)

    async def _encode_key(self, key: MediaKey, modality: Modality, path: str) -> Encoding:
        try:
            return await self._desk.encode_key(key, modality, deadline_unix_s=self._deadline_unix_s)
        except EmbeddingUnknown as error:
            words = f"{path}.key is {shown(key)}; nobody here has that medium (any more): send its content"
            raise Refused(404, error.code, words, param=f"{path}.key") from error

    async def _recognised(self, item: FileItem) -> Item:
        """A file is what its bytes say. Raises Refused, MediaError."""
        if item.file_id is not None:
            modality = await self._shelf.kind_of_file(item.file_id, f"{item.param}.file_id")
            return item.as_item(modality, None)
        content = await asyncio.to_thread(decode_data_url, item.data_url, self._max_file_bytes)
        found = modality_of(content)
        if found is None:
            raise MediaUnsupported(f"the content ({sniff(content)}) is no picture, video or sound")
        return item.as_item(found, content)


def _no_files(param: str) -> Refused:
    return invalid(f"{param} names an uploaded file; this server keeps none", param)


def _is_file_wanted(request: web.Request) -> bool:
    return wants_safetensors(request.headers.getall("Accept", []))


def _check_form(request: web.Request, body: EncodeBody) -> None:
    """Raises Refused where both the header and the body say what form rows have, and not the same."""
    if body.encoding_format == "float" and _is_file_wanted(request):
        words = (
            f'encoding_format is "float" and the Accept header asks for {SAFETENSORS}, which holds rows as bytes; '
            "give one"
        )
        raise Refused(400, "invalid_request", words, param="encoding_format")
