"""Connections of an HTTP side before a route is known: heads that are no HTTP, heads that never end, TLS that never
begins, and connections without any request. For the encoder's front and for the gateway.

aiohttp bounds neither how long a head takes nor how many connections wait for one, and answers in words of its own.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

logger = logging.getLogger(__name__)

# How long a connection may stand on which nothing is asked.
IDLE_S: Final = 75.0

Refuse = Callable[[int, str, str], web.Response]
"""An error answer in the words of the API, of a status, a code and a message."""


class Waiting(Protocol):
    """A connection on which no request is under way."""

    def force_close(self) -> None: ...


class Lobby:
    """Connections on which no request is under way, the one that came first in front. Beyond `max_waiting` it goes.

    `head_timeout_s` is from the first byte of a request to the end of its head; `setting` is how it is called.
    """

    def __init__(self, *, max_waiting: int, head_timeout_s: float, setting: str, refuse: Refuse) -> None:
        self._max_waiting = max_waiting
        self.head_timeout_s = head_timeout_s
        self.setting = setting
        self.refuse = refuse
        self._waiting: dict[Waiting, None] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, connection: Waiting) -> None:
        self.leave(connection)
        self._waiting[connection] = None
        if len(self._waiting) > self._max_waiting:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.force_close()

    def leave(self, connection: Waiting) -> None:
        self._waiting.pop(connection, None)


class GuardedConnection(RequestHandler):
    """One connection. Broken requests are the client's fault: one line in the log, no traceback."""

    __slots__ = ("_head_limit", "_lobby")

    def __init__(self, manager: web.Server, *, lobby: Lobby, loop: asyncio.AbstractEventLoop, **settings: Any) -> None:
        super().__init__(manager, loop=loop, **settings)
        self._lobby = lobby
        self._head_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._lobby.enter(self)
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lobby.leave(self)
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # From its first byte on: more of the same head gives no more time.
        if self._head_limit is None and self._waits_for_head():
            self._expect_head()

    async def _handle_request(self, request: web.BaseRequest, *rest: Any) -> tuple[web.StreamResponse, bool]:
        """aiohttp calls it with every head that is whole, or never will be."""
        self._lobby.leave(self)
        self._expect_nothing()
        try:
            return await super()._handle_request(request, *rest)
        finally:
            if self.transport is not None:
                self._lobby.enter(self)

    def _waits_for_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _expect_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_limit = loop.call_later(self._lobby.head_timeout_s, self._head_is_late)

    def _expect_nothing(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _head_is_late(self) -> None:
        self._head_limit = None
        if not self._waits_for_head() or self.transport is None:
            return
        words = f"the head of a request was not there within {self._lobby.head_timeout_s:g} s ({self._lobby.setting})"
        response = self._lobby.refuse(HTTPStatus.REQUEST_TIMEOUT, "head_timeout", words)
        body = response.body if isinstance(response.body, bytes) else b""
        lines = [
            "HTTP/1.1 408 Request Timeout",
            *(f"{name}: {value}" for name, value in response.headers.items()),
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        # The first line says what is wrong, the others show the bytes with a pointer under them.
        what = (message or "it cannot be read").strip().partition("\n")[0].rstrip(":")
        logger.info("a request from %s is no HTTP: %s", request.remote, what)
        response = self._lobby.refuse(status, "malformed_request", f"the request is not valid HTTP: {what}")
        response.force_close()
        return response


class GuardedRunner(web.AppRunner):
    """An application whose connections are `GuardedConnection`."""

    def __init__(self, app: web.Application, *, lobby: Lobby, **settings: Any) -> None:
        super().__init__(app, keepalive_timeout=IDLE_S, **settings)
        self.lobby = lobby

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        guarded = _GuardedServer(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )
        guarded.lobby = self.lobby
        return guarded


class _GuardedServer(web.Server):
    lobby: Lobby

    def __call__(self) -> RequestHandler:
        return GuardedConnection(self, lobby=self.lobby, loop=self._loop, **self._kwargs)


class TlsSite(web.TCPSite):
    """A listener whose connections must agree on TLS within the time of a head, and are counted while they do not."""

    def __init__(self, runner: GuardedRunner, host: str, port: int, *, context: ssl.SSLContext) -> None:
        super().__init__(runner, host, port)
        self._context = context
        self._lobby = runner.lobby

    async def start(self) -> None:
        # Not that of TCPSite, which would listen without TLS.
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None, "the runner is set up first"
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Handshake(server, self._context, self._lobby), self._host, self._port, backlog=self._backlog
        )


class _Handshake(asyncio.Protocol):
    """A connection that is not yet safe. What it says right after the handshake is kept for the one it becomes."""

    def __init__(self, server: web.Server, context: ssl.SSLContext, lobby: Lobby) -> None:
        self._server = server
        self._context = context
        self._lobby = lobby
        self._early = bytearray()
        self._transport: asyncio.Transport | None = None
        self._shaking: asyncio.Task[None] | None = None

    def force_close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._shaking is not None:
            self._shaking.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()
        self._lobby.enter(self)
        self._shaking = asyncio.get_running_loop().create_task(self._shake(self._transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lobby.leave(self)

    async def _shake(self, plain: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._lobby.head_timeout_s
        try:
            safe = await loop.start_tls(plain, self, self._context, server_side=True, ssl_handshake_timeout=timeout_s)
        except (OSError, TimeoutError) as error:
            # What is no TLS, a certificate that is not trusted, and who does not finish: ssl.SSLError is an OSError.
            peer = plain.get_extra_info("peername")
            what = "plain HTTP" if getattr(error, "reason", None) == "HTTP_REQUEST" else str(error) or "it has ended"
            logger.debug("a connection from %s is no TLS: %s", peer[0] if peer else "somewhere", what)
            plain.abort()
            return
        finally:
            self._lobby.leave(self)
        if safe is None or safe.is_closing():
            plain.abort()
            return
        connection = self._server()
        safe.set_protocol(connection)
        connection.connection_made(safe)
        if self._early:
            connection.data_received(bytes(self._early))
