"""All stages in one process: the same stage code over the in-memory transport, for `mimo chat` and small machines."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager

import torch

from cli.arena import arena_name, host_arena
from cli.load import ConfigError, ServeConfig
from cli.signals import Stop
from cli.startup import PlainView
from encoder import MemoryLink, open_server
from encoder.client import EncoderClient
from encoder.errors import EncoderError
from encoder.tracing import exporting
from epd import REFUSALS, EngineThread, MemoryNetwork, Renderer, create_app, fetch_limits, start_gateway
from preprocess.fetch import Fetcher


@asynccontextmanager
async def unified_server(config: ServeConfig) -> AsyncIterator[int]:
    """The pipeline of `config` in this process; gives the HTTP port. Everything is stopped when the block ends."""
    (engine_config,) = config.prefill
    torch.set_num_threads(engine_config.threads)
    network = MemoryNetwork()
    arena = arena_name(config.runtime_dir)
    with ExitStack() as stack:
        try:
            renderer = Renderer.load(config.model_dir)
            engine = await asyncio.to_thread(EngineThread, engine_config, network.endpoint(config.gateway.prefill[0]))
            stack.enter_context(host_arena(config.encoders, config.runtime_dir))
            # One, or none for a model of text alone.
            encoders = [
                stack.enter_context(
                    open_server(settings, model_dir=config.model_dir, name=f"encoder-{i}", arena=arena, shared=True)
                )
                for i, settings in enumerate(config.encoders)
            ]
        except (*REFUSALS, EncoderError) as error:
            raise ConfigError(str(error)) from error
        stack.callback(engine.stop)
        engine.start()
        for encoder in encoders:
            encoder.start()
        running = list(encoders)

        async def end_stages() -> None:
            while running:
                await running.pop(0).stop()
            await asyncio.to_thread(engine.drain, config.supervisor.drain_s)

        links = [MemoryLink(*named) for named in zip(config.gateway.encoders, encoders, strict=True)]
        try:
            async with (
                Fetcher(fetch_limits(config.gateway)) as fetcher,
                EncoderClient(links) as client,
            ):
                app = create_app(
                    config.gateway,
                    renderer=renderer,
                    fetcher=fetcher,
                    encoder=client,
                    prefill=[network.channel(address) for address in config.gateway.prefill],
                )
                runner, port = await start_gateway(app, host=config.gateway.host, port=config.gateway.port)
                try:
                    yield port
                finally:
                    # It still answers, and says that it stops, until what takes long is over.
                    await runner.drain()
                    await end_stages()
                    await runner.cleanup()
        finally:
            await end_stages()


async def serve_unified(
    config: ServeConfig, stop: Stop, *, view: PlainView, on_ready: Callable[[], Awaitable[None]]
) -> None:
    """Serve until `stop` is set."""
    stop.on_first = lambda: view.stopping(config.gateway.drain_s + config.supervisor.drain_s)
    stop.on_second = lambda number: view.line_at_once(number, 0)
    with exporting("unified", "unified"):
        async with unified_server(config):
            # What is there now stays: a full collection that looks at all of torch stops everybody for a tenth of a
            # second.
            gc.freeze()
            if not stop.is_set():
                await on_ready()
            await stop.wait()
    view.stopped()
    # All of it goes with the process: to look through it for cycles took seconds in which nobody is answered.
    gc.freeze()
