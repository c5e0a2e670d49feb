"""A process that serves one stage by itself, as seen from beside it: alive, ready, and what it counts, over HTTP.

    /health    the process that keeps the stage alive answers
    /ready     the stage has loaded its model and its loop answers, as a gateway would ask it; else 503 and why
    /metrics   what a gateway would show of this process

It is asked over its own socket, as everybody asks it: a process that hangs is not ready, whatever its threads say.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from encoder.client import EncoderClient
from encoder.cluster import ClusterKeys
from encoder.connections import GuardedRunner, Lobby
from encoder.metrics import replica_metrics
from epd.gateway.metrics_workers import STAGE_OF_ROLE, role_metrics
from epd.router.workers import Fleet
from epd.transport.sockets import WorkerChannel
from epd.types import Role

_HEARTBEAT_S = 0.5
_SILENT_AFTER_S = 10.0
_MAX_IDLE = 64
_HEAD_TIMEOUT_S = 5.0


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
    lobby = Lobby(max_waiting=_MAX_IDLE, head_timeout_s=_HEAD_TIMEOUT_S, setting="of a health port", refuse=_refuse)
    runner = GuardedRunner(app, lobby=lobby, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


def _refuse(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)
