"""Connections of an HTTP side before a route is known: heads that are no HTTP, heads that never end, TLS that never
begins, and connections without any request. For the encoder's front and for the gateway.

aiohttp bounds neither how long a head takes nor how many connections wait for one, and answers in words of its own.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from encoder.seldom import Seldom

logger = logging.getLogger(__name__)

# How long a connection may stand on which nothing is asked.
IDLE_S: Final = 75.0
_BACKLOG: Final = 1024
# When descriptors are short.
_ACCEPT_PAUSE_S: Final = 0.1

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
        self.no_http = Seldom()
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
        if (added := self._lobby.no_http.due()) is not None:
            logger.warning("a request from %s is no HTTP: %s%s", request.remote, what, added)
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
        """Raises OSError for an address that cannot be used."""
        # Not that of TCPSite, which counts nobody before TLS stands.
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None, "the runner is set up first"
        loop = asyncio.get_running_loop()
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        found = await loop.getaddrinfo(self._host, self._port, type=kind, flags=flags)
        listeners = []
        try:
            for family, *_, address in dict.fromkeys(found):
                listeners.append(_listener(family, address))
        except OSError:
            for listener in listeners:
                listener.close()
            raise
        tls_server = _TlsServer(
            listeners, lambda accepted: _Handshake(accepted, server, self._context, self._lobby).run()
        )
        # As much of a server as a site asks for.
        self._server = cast(asyncio.AbstractServer, tls_server)


def _listener(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class _TlsServer:
    """Accepts until it is closed; the loop's own server tells nothing of connections whose TLS does not stand yet."""

    def __init__(
        self, listeners: list[socket.socket], welcome: Callable[[socket.socket], Coroutine[Any, Any, None]]
    ) -> None:
        self.sockets = listeners
        self._welcome = welcome
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in listeners]

    def close(self) -> None:
        for task in (*self._accepting, *self._shaking):
            task.cancel()
        for listener in self.sockets:
            listener.close()
        self.sockets = []

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Descriptors are short, or the client has gone already.
                logger.warning("a connection was not accepted: %s", error.strerror or error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            shaking = asyncio.create_task(self._welcome(accepted))
            self._shaking.add(shaking)
            shaking.add_done_callback(self._shaking.discard)


class _Handshake:
    """A connection that is not yet safe."""

    def __init__(self, accepted: socket.socket, server: web.Server, context: ssl.SSLContext, lobby: Lobby) -> None:
        self._accepted = accepted
        self._server = server
        self._context = context
        self._lobby = lobby
        self._task: asyncio.Task[None] | None = None

    def force_close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        self._lobby.enter(self)
        accepted = self._accepted
        accepted.setblocking(False)
        peer = "somewhere"
        try:
            peer = accepted.getpeername()[0]
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server, accepted, ssl=self._context, ssl_handshake_timeout=self._lobby.head_timeout_s
            )
        except OSError as error:
            # No TLS at all, a client that does not trust the certificate, one that left or is late: all are OSError.
            what = "plain HTTP" if getattr(error, "reason", None) == "HTTP_REQUEST" else str(error) or "it has ended"
            logger.debug("a connection from %s is no TLS: %s", peer, what)
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise
        finally:
            self._lobby.leave(self)
