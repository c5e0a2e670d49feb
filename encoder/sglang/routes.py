"""The dialect's HTTP endpoints. Bodies are JSON; so are answers: `null`, or what went wrong.

{"status": "error", "message": "...", "req_id": "..."}
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web

from encoder.errors import EncoderError
from encoder.pace import Pace, PaceLimits
from encoder.sglang.dialect import SglangDialect
from encoder.sglang.errors import BodyTooLarge, BodyTooSlow, DialectError, NotObject, NotServed
from encoder.sglang.requests import is_id, read_encode, read_id, read_registration

logger = logging.getLogger(__name__)

# More JSON than this is read on a thread: base64 of pictures would hold up the loop.
_INLINE_JSON_BYTES: Final = 1 << 18

_Body = dict[str, Any]
_Call = Callable[[_Body], Awaitable[object]]


def add_routes(app: web.Application, dialect: SglangDialect, *, pace: PaceLimits | None = None) -> None:
    """Serve the dialect in this application. The caller starts and stops it, and answers `/health`. `pace` is how
    slowly bodies may come."""
    calls = _Calls(dialect, pace or PaceLimits())
    app.router.add_post("/encode", calls.encode)
    app.router.add_post("/scheduler_receive_url", calls.scheduler_receive_url)
    app.router.add_post("/scheduler_receive_meta_data", calls.mooncake)
    app.router.add_post("/send", calls.mooncake)
    app.router.add_get("/health_generate", calls.health)


class _Calls:
    def __init__(self, dialect: SglangDialect, pace: PaceLimits) -> None:
        self._dialect = dialect
        self._pace = pace

    async def encode(self, request: web.Request) -> web.Response:
        async def call(body: _Body) -> None:
            try:
                self._dialect.check_open()
                part = read_encode(body, self._dialect.config)
            except DialectError as error:
                if is_id(body.get("req_id")):
                    self._dialect.refuse(body["req_id"], error)
                raise
            await self._dialect.encode(part)

        return await self._answer(request, call)

    async def scheduler_receive_url(self, request: web.Request) -> web.Response:
        async def call(body: _Body) -> None:
            await self._dialect.register(read_registration(body, self._dialect.config))

        return await self._answer(request, call)

    async def mooncake(self, request: web.Request) -> web.Response:
        async def call(body: _Body) -> None:
            refusal = NotServed(
                f"{request.path} belongs to the mooncake backend, which this encoder does not speak; start the "
                "language-only server with --encoder-transfer-backend zmq_to_scheduler"
            )
            self._dialect.fail(read_id(body), refusal)
            raise refusal

        return await self._answer(request, call)

    async def health(self, request: web.Request) -> web.Response:
        """Whether an encoder is there; answered from memory, at once under any load."""
        return web.Response(status=200 if self._dialect.is_healthy else 503)

    async def _answer(self, request: web.Request, call: _Call) -> web.Response:
        body: _Body = {}
        try:
            body = await _read(request, self._dialect.config.max_body_bytes, self._pace)
            await call(body)
        except DialectError as error:
            return _failure(error, body)
        except EncoderError as error:
            return _failure(DialectError(error.message, status=error.status), body)
        except Exception:  # the outermost of a call: the other side must hear something it can read
            logger.exception("%s of %s failed", request.path, str(body.get("req_id"))[:80])
            return _failure(DialectError("internal error of the encoder"), body)
        return web.Response(body=b"null", content_type="application/json")


def _failure(error: DialectError, body: Mapping[str, Any]) -> web.Response:
    req_id = body.get("req_id")
    content = {"status": "error", "message": error.message, "req_id": req_id if is_id(req_id) else None}
    headers = {}
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    return web.Response(
        body=msgspec.json.encode(content), status=error.status, content_type="application/json", headers=headers
    )


async def _read(request: web.Request, max_bytes: int, limits: PaceLimits) -> _Body:
    """The body. Read here and not by the framework, whose limit is of the whole application and low."""
    if request.content_length is not None and request.content_length > max_bytes:
        raise BodyTooLarge(f"the body has {request.content_length} bytes, allowed are {max_bytes}")
    content = bytearray()
    pace = Pace(limits)
    try:
        async with pace.timeout:
            async for chunk in request.content.iter_any():
                content += chunk
                if len(content) > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes, which are allowed")
                pace.note(len(content))
    except TimeoutError as error:
        if not pace.timeout.expired():
            raise
        raise BodyTooSlow(pace.complaint(len(content))) from error
    try:
        if len(content) <= _INLINE_JSON_BYTES:
            body = msgspec.json.decode(content)
        else:
            body = await asyncio.to_thread(msgspec.json.decode, content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotObject(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise NotObject(f"the body is {type(body).__name__}, allowed is an object")
    return body
