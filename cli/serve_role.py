"""One process of a pipeline over many machines, supervised: `mimo serve --role gateway`, prefill, decode and others."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from cli.cluster import cluster_keys, near
from cli.load import ConfigError
from cli.load_role import ENCODER_WORKER, RoleDeployment
from cli.preflight import check_deployment, unservable
from cli.processes import (
    base_url,
    console,
    encoder_stages,
    require_free_port,
    serve_processes,
    stop_signal,
    until_ready,
)
from cli.stage import GatewayStage, Stage, WorkerStage
from cli.startup import PlainView, plain_view
from cli.supervisor import StageFailed
from cli.terminal import quoted
from encoder.cluster import ClusterKeys
from epd import StageHealth, encoder_health, serving_health, worker_health
from epd.types import Role

_POLL_S = 0.1


def serve_role(config: RoleDeployment) -> None:
    """Serve until told to stop. Raises ConfigError for what cannot work, StageFailed for a process that cannot run."""
    keys = cluster_keys(config.cluster)
    cluster = config.cluster
    if config.gateway is not None:
        if (unusable := unservable(config.model_dir)) is not None:
            raise ConfigError(unusable)
        require_free_port(config.gateway.host, config.gateway.port)
        asyncio.run(_serve_gateway(config, keys))
        return
    if config.role != ENCODER_WORKER:
        check_deployment(config)
    host, _, port = cluster.listen.removeprefix("tcp://").rpartition(":")
    require_free_port(host.strip("[]"), int(port), flag="--listen")
    if cluster.health_port is not None:
        require_free_port(cluster.health_host, cluster.health_port, flag="--health-port")
    asyncio.run(_serve_worker(config, keys))


async def _serve_gateway(config: RoleDeployment, keys: ClusterKeys | None) -> None:
    assert config.gateway is not None, "this is for the gateway"
    stages: list[Stage] = [GatewayStage(config=config.gateway, cluster=config.cluster)]
    view = _view(config)
    announce = partial(_announce_gateway, config, view)
    await serve_processes(config, stages, stop_signal(config.runtime_dir), announce=announce, keys=keys, view=view)


def _view(config: RoleDeployment) -> PlainView:
    """No table: there is one process."""
    return plain_view(console, config.supervisor.log_format)


async def _announce_gateway(config: RoleDeployment, view: PlainView) -> None:
    """Say where the API is, and what it waits for: the other stages may start later, and need not be found yet."""
    started_s = time.monotonic()
    if view.is_for_machines:
        await until_ready(config)
        view.ready(time.monotonic() - started_s, base_url(config))
        return
    console.print(f"\n[bold]{quoted(config.model_name)}[/]'s gateway at [bold]{base_url(config)}[/]   (Ctrl-C stops)")
    while True:
        try:
            await until_ready(config)
        except StageFailed as error:
            console.print(quoted(str(error)), style="yellow")
        else:
            console.print("every stage is ready")
            return


async def _serve_worker(config: RoleDeployment, keys: ClusterKeys | None) -> None:
    cluster = config.cluster
    stages: list[Stage] = [*encoder_stages(config, [cluster.listen])]
    stages += [
        WorkerStage(config=engine, address=cluster.listen, cluster=cluster) for engine in config.prefill + config.decode
    ]
    async with AsyncExitStack() as stack:
        health = await stack.enter_async_context(_health(config, keys))
        if cluster.health_port is not None:
            serving = serving_health(health, host=cluster.health_host, port=cluster.health_port)
            await stack.enter_async_context(serving)
        view = _view(config)
        announce = partial(_announce_worker, config, health, view)
        await serve_processes(config, stages, stop_signal(config.runtime_dir), announce=announce, keys=keys, view=view)


@asynccontextmanager
async def _health(config: RoleDeployment, keys: ClusterKeys | None) -> AsyncIterator[StageHealth]:
    address = near(config.cluster.listen)
    asked = (
        encoder_health(address, keys=keys)
        if config.role == ENCODER_WORKER
        else worker_health(address, Role(config.role), keys=keys)
    )
    async with asked as health:
        yield health


async def _announce_worker(config: RoleDeployment, health: StageHealth, view: PlainView) -> None:
    """Raises StageFailed after `start_timeout_s`."""
    started_s, cluster = time.monotonic(), config.cluster
    while (why := health.why_not_ready()) is not None:
        if time.monotonic() - started_s > config.supervisor.start_timeout_s:
            raise StageFailed(f"not ready after {config.supervisor.start_timeout_s:.0f} s: {why}")
        await asyncio.sleep(_POLL_S)
    if view.is_for_machines:
        view.ready(time.monotonic() - started_s, cluster.listen)
        return
    console.print(f"ready after {time.monotonic() - started_s:.1f} s")
    console.print(
        f"\n[bold]{quoted(config.model_name)}[/]'s {config.role} at [bold]{cluster.listen}[/], for others at "
        f"[bold]{cluster.advertise}[/]   (Ctrl-C stops)"
    )
    if cluster.health_port is not None:
        console.print(f"http://{cluster.health_host}:{cluster.health_port}/health, /ready, /metrics")
