"""Connections before a route is known: heads that are no HTTP, heads that never end, and connections without any.

aiohttp bounds neither how long a head takes nor how many connections wait for one, and answers in words of its own.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from encoder.front.problems import Problem

logger = logging.getLogger(__name__)


class Lobby:
    """Connections on which no request is under way, the one that came first in front. Beyond `max_waiting` it goes."""

    def __init__(self, *, max_waiting: int, head_timeout_s: float) -> None:
        self._max_waiting = max_waiting
        self.head_timeout_s = head_timeout_s
        self._waiting: dict[FrontConnection, None] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, connection: "FrontConnection") -> None:
        self.leave(connection)
        self._waiting[connection] = None
        if len(self._waiting) > self._max_waiting:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.force_close()

    def leave(self, connection: "FrontConnection") -> None:
        self._waiting.pop(connection, None)


class FrontConnection(RequestHandler):
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
        words = f"the head of a request was not there within {self._lobby.head_timeout_s:g} s (front.head_timeout_s)"
        body = Problem(HTTPStatus.REQUEST_TIMEOUT, "head_timeout", words).json_bytes()
        head = (
            "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
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
        problem = Problem(status, "malformed_request", f"the request is not valid HTTP: {what}")
        response = web.Response(body=problem.json_bytes(), status=status, content_type="application/json")
        response.force_close()
        return response


class FrontRunner(web.AppRunner):
    """Connections are `FrontConnection`; they come from elsewhere, so it needs no site."""

    def __init__(self, app: web.Application, *, lobby: Lobby, **settings: Any) -> None:
        super().__init__(app, **settings)
        self._lobby = lobby

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        front = _FrontServer(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )
        front.lobby = self._lobby
        return front


class _FrontServer(web.Server):
    lobby: Lobby

    def __call__(self) -> RequestHandler:
        return FrontConnection(self, lobby=self.lobby, loop=self._loop, **self._kwargs)
