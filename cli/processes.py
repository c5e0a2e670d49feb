"""The processes of a deployment: which there are, running them until a signal, and waiting until they are ready."""

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from cli.arena import arena_name, host_arena
from cli.load import ConfigError, ServeConfig
from cli.load_role import EncoderDeployment, RoleDeployment
from cli.port_owner import port_owner
from cli.signals import Stop
from cli.stage import EncoderStage, FrontStage, GatewayStage, Stage, WorkerStage
from cli.startup import PlainView
from cli.supervisor import StageEvent, StageFailed, Supervisor
from cli.terminal import error_console, os_words
from encoder.cluster import ClusterKeys

console = error_console()


def build_stages(config: ServeConfig) -> list[Stage]:
    """The processes of a deployment, the gateway last."""
    stages: list[Stage] = [*encoder_stages(config, config.gateway.encoders)]
    engines = [
        *zip(config.prefill, config.gateway.prefill, strict=True),
        *zip(config.decode, config.gateway.decode, strict=True),
    ]
    stages += [WorkerStage(config=settings, address=address) for settings, address in engines]
    return [*stages, GatewayStage(config=config.gateway)]


def encoder_stages(
    config: ServeConfig | EncoderDeployment | RoleDeployment, addresses: Sequence[str]
) -> list[EncoderStage]:
    """The encoder processes of a deployment; they share the arena that `host_arena` makes."""
    return [
        EncoderStage(
            config=settings,
            model_dir=config.model_dir,
            name=f"encoder-{i}",
            address=addresses[i],
            arena=arena_name(config.runtime_dir),
            arena_is_shared=True,
            cluster=config.cluster if isinstance(config, RoleDeployment) else None,
        )
        for i, settings in enumerate(config.encoders)
    ]


def stop_signal(runtime_dir: Path) -> Stop:
    """Set once this process is told to stop; told again, it ends at once and takes `runtime_dir` with it."""
    stop = Stop(runtime_dir)
    stop.listen()
    return stop


async def serve_processes(
    config: ServeConfig | EncoderDeployment | RoleDeployment,
    stages: Sequence[Stage],
    stop: Stop,
    *,
    announce: Callable[[], Coroutine[Any, Any, None]],
    keys: ClusterKeys | None = None,
    view: PlainView | None = None,
) -> None:
    """Keep the stages alive until `stop`, then end them in order. `announce` runs beside them, once.

    Raises StageFailed for a stage that is beyond restarting, and what `announce` raises.
    """
    view = PlainView(console) if view is None else view
    with host_arena(config.encoders, config.runtime_dir):
        supervisor = Supervisor(
            stages,
            runtime_dir=config.runtime_dir,
            config=config.supervisor,
            keys=keys,
            on_event=view.event,
            on_log=view.log if view.captures_logs else None,
        )
        heads = any(isinstance(stage, GatewayStage | FrontStage) for stage in stages)
        # The head drains first, and those behind it after that.
        within_s = config.supervisor.drain_s * (1 + (heads and len(stages) > 1))
        stop.on_first = lambda: view.stopping(within_s)
        stop.on_second = lambda number: view.line_at_once(number, supervisor.kill())
        await supervisor.start()
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(supervisor.failed()),
            asyncio.create_task(announce()),
        ]
        try:
            stopped, failed, announced = waits
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if announced.done():
                announced.result()
                await asyncio.wait([stopped, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            await supervisor.stop()
    view.stopped()


def show_event(event: StageEvent) -> None:
    """One line of what happened to a process."""
    PlainView(console).event(event)


async def until_ready(config: ServeConfig | EncoderDeployment | RoleDeployment) -> None:
    """Wait until every stage is ready. Raises StageFailed after `start_timeout_s`."""
    import aiohttp

    started_s = time.monotonic()
    url = f"{base_url(config)}/ready"
    reasons = "no answer yet"
    # Its certificate is for the names that clients use.
    connector = aiohttp.TCPConnector(ssl=False)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), connector=connector) as session:
        while time.monotonic() - started_s < config.supervisor.start_timeout_s:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
                    reasons = await response.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                reasons = str(error) or type(error).__name__
            await asyncio.sleep(0.1)
    raise StageFailed(f"not ready after {config.supervisor.start_timeout_s:.0f} s: {reasons}")


def reach(config: ServeConfig | EncoderDeployment | RoleDeployment) -> str:
    """host:port to reach a server that may listen on every interface."""
    server = config.front if isinstance(config, EncoderDeployment) else config.gateway
    assert server is not None, "this one speaks no HTTP"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    return f"{host}:{server.port}"


def base_url(config: ServeConfig | EncoderDeployment | RoleDeployment) -> str:
    """Where this host's clients reach it."""
    server = None if isinstance(config, EncoderDeployment) else config.gateway
    return f"{'https' if server is not None and server.tls_certificate is not None else 'http'}://{reach(config)}"


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def require_free_port(host: str, port: int, *, flag: str = "--port") -> None:
    """Raises ConfigError, which names the flag that sets the port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        owner = port_owner(port) if error.errno == errno.EADDRINUSE else None
        whose = f", by {owner}" if owner else ""
        raise ConfigError(
            f"cannot listen on {host}:{port}: {os_words(error)}{whose}; choose another with {flag}"
        ) from error
