"""Connections of the gateway: what is refused before any route is known, in the API's own words, and how they end.

A server that stops tells it: from the signal on every answer says `Connection: close`, and it listens until it goes.
Who asks on a connection that stood before hears so as well; only those on which nobody asks are closed untold.
"""

import asyncio
import logging
from contextlib import suppress

from aiohttp import web

from encoder.connections import GuardedRunner, Lobby
from epd.config import GatewayConfig
from epd.gateway.admission import Admission
from epd.gateway.problems import Problem, new_request_id
from epd.router.workers import Fleet

logger = logging.getLogger(__name__)

SERVER_NAME = "mimo-epd"
"""What the header Server says: no versions, of nothing."""

# What is left to write after the drain: last events of streams, bodies of refusals.
_LAST_WORDS_S = 2.0
# How long connections that stand are listened to after the last answer, so that they can be told.
_NOTICE_S = 1.0
_NOTICE_POLL_S = 0.01


class Drain:
    """How the gateway stops."""

    def __init__(self, config: GatewayConfig, *, fleet: Fleet, admission: Admission) -> None:
        self.config = config
        self._fleet = fleet
        self._admission = admission

    async def run(self) -> None:
        """Refuse what is new, wait for nothing that is down, let answers go on for a while and then end them."""
        self._fleet.stop_waiting()
        await self._admission.drain(self.config.drain_s)

    async def mark(self, _: web.Request, response: web.StreamResponse) -> None:
        """Called with every answer before its head is written."""
        response.headers["Server"] = SERVER_NAME
        if self._admission.draining:
            response.force_close()
            response.headers["Connection"] = "close"


class GatewayRunner(GuardedRunner):
    """Serves an application. `drain` and then `cleanup`, which drains if nobody has; between them it still answers."""

    def __init__(self, app: web.Application, *, drain: Drain) -> None:
        config = drain.config
        super().__init__(
            app,
            lobby=Lobby(
                max_waiting=config.max_idle_connections,
                head_timeout_s=config.head_timeout_s,
                setting="gateway.head_timeout_s",
                refuse=_refuse,
            ),
            # A client that leaves ends its request everywhere.
            handler_cancellation=True,
            # Compressed bodies are refused by their header; inflating them first would be work for nothing.
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=_LAST_WORDS_S,
        )
        self._drain = drain
        self._has_drained = False

    async def drain(self) -> None:
        """Answers in flight end, and connections that stand are told. What is new hears why not, until `cleanup`."""
        if self._has_drained:
            return
        self._has_drained = True
        await self._drain.run()
        with suppress(TimeoutError):
            async with asyncio.timeout(_NOTICE_S):
                while self.server is not None and self.server.connections:  # noqa: ASYNC110 - aiohttp's state
                    await asyncio.sleep(_NOTICE_POLL_S)

    async def cleanup(self) -> None:
        await self.drain()
        await super().cleanup()

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        handle = server.request_handler

        async def expecting_what_is_known(request: web.BaseRequest) -> web.StreamResponse:
            # aiohttp looks at it before any middleware, and refuses in words of its own.
            expected = request.headers.get("Expect", "100-continue")
            if expected.lower() == "100-continue":
                return await handle(request)
            logger.info("a request from %s expects %r", request.remote, expected[:80])
            response = _refuse(
                417, "expectation_failed", f"Expect is {expected[:80]!r}; allowed: 100-continue", param="Expect"
            )
            response.force_close()
            return response

        server.request_handler = expecting_what_is_known
        return server


def _refuse(status: int, code: str, message: str, param: str | None = None) -> web.Response:
    return web.Response(
        body=Problem(status, code, message, param).json_bytes(),
        status=status,
        content_type="application/json",
        headers={"X-Request-Id": new_request_id(), "Server": SERVER_NAME},
    )
