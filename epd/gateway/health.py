"""A process that serves one stage by itself, as seen from beside it: alive, ready, and what it counts, over HTTP.

    /health    the process that keeps the stage alive answers
    /ready     the stage has loaded its model and its loop answers, as a gateway would ask it; else 503 and why
    /metrics   what a gateway would show of this process

It is asked over its own socket, as everybody asks it: a process that hangs is not ready, whatever its threads say.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from encoder.client import EncoderClient
from encoder.cluster import ClusterKeys
from encoder.metrics import replica_metrics
from encoder.seldom import Seldom
from epd.gateway.metrics_workers import STAGE_OF_ROLE, role_metrics
from epd.router.workers import Fleet
from epd.transport.sockets import WorkerChannel
from epd.types import Role

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_SILENT_AFTER_S = 10.0


class StageHealth:
    """What is known of one process: why it is not ready, None when it is, and its metrics."""

    def __init__(self, *, why_not_ready: Callable[[], str | None], metrics: Callable[[], Iterable[Metric]]) -> None:
        self.why_not_ready = why_not_ready
        self._registry = CollectorRegistry()
        self._registry.register(_Collected(metrics))

    def metrics_text(self) -> bytes:
        return generate_latest(self._registry)


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


@asynccontextmanager
async def worker_health(address: str, role: Role, *, keys: ClusterKeys | None) -> AsyncIterator[StageHealth]:
    """Of the prefill or decode worker at `address`, for as long as the block runs."""
    fleet = Fleet(
        prefill=[],
        decode=[],
        heartbeat_s=_HEARTBEAT_S,
        timeout_s=_SILENT_AFTER_S,
        clock=time.monotonic,
        has_decode=True,
    )
    fleet.add(WorkerChannel(address, keys=keys), role)
    fleet.start()
    try:
        yield StageHealth(
            why_not_ready=fleet.workers[0].why_not_ready,
            metrics=lambda: role_metrics(f"mimo_{STAGE_OF_ROLE[role]}", fleet.workers),
        )
    finally:
        await fleet.stop()


@asynccontextmanager
async def encoder_health(address: str, *, keys: ClusterKeys | None) -> AsyncIterator[StageHealth]:
    """Of the encoder at `address`, for as long as the block runs."""
    async with EncoderClient.connect([address], keys=keys) as client:

        def why_not_ready() -> str | None:
            why = client.why_not_up()[address]
            return None if why is None else f"{address}: {why}"

        yield StageHealth(why_not_ready=why_not_ready, metrics=lambda: replica_metrics(client.infos()))


@asynccontextmanager
async def serving_health(health: StageHealth, *, host: str, port: int) -> AsyncIterator[None]:
    """Answer probes while the block runs. Raises OSError for an address that cannot be used."""

    async def alive(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        why = health.why_not_ready()
        status = {"status": "ready"} if why is None else {"status": "waiting", "waiting_for": [why]}
        return web.json_response(status, status=200 if why is None else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=health.metrics_text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/health", alive), web.get("/ready", ready), web.get("/metrics", metrics)])
    runner = _HealthRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


class _HealthConnection(RequestHandler):
    """What is no HTTP is refused, and told in one line: port scanners, and processes that took it for another port."""

    __slots__ = ("seldom",)
    seldom: Seldom

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
        if (added := self.seldom.due()) is not None:
            logger.warning("a request to the health port, from %s, is no HTTP: %s%s", request.remote, what, added)
        response = web.json_response({"error": f"the request is not valid HTTP: {what}"}, status=status)
        response.force_close()
        return response


class _HealthServer(web.Server):
    seldom: Seldom

    def __call__(self) -> RequestHandler:
        connection = _HealthConnection(self, loop=self._loop, **self._kwargs)
        connection.seldom = self.seldom
        return connection


class _HealthRunner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        health = _HealthServer(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )
        health.seldom = Seldom()
        return health
