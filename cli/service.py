"""A deployment for as long as a block runs: what `mimo serve` starts, for a command that needs a service of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cli.arena import host_arena
from cli.load import ServeConfig
from cli.preflight import check_deployment
from cli.processes import base_url, build_stages, show_event, until_ready
from cli.supervisor import Supervisor


@asynccontextmanager
async def service(config: ServeConfig) -> AsyncIterator[str]:
    """The base URL of the service once every stage is ready; it is stopped in order when the block ends.

    A stage that dies meanwhile is started again, as under `mimo serve`; one that is beyond that ends the block. Raises
    StageFailed then, and ConfigError for a checkpoint, or settings of the unified mode, that cannot work.
    """
    check_deployment(config)
    if config.mode == "unified":
        from cli.unified import unified_server

        async with unified_server(config) as port:
            yield f"http://{config.gateway.host}:{port}"
        return
    with host_arena(config.encoders, config.runtime_dir):
        supervisor = Supervisor(
            build_stages(config), runtime_dir=config.runtime_dir, config=config.supervisor, on_event=show_event
        )
        await supervisor.start()
        block = asyncio.current_task()
        assert block is not None
        watch = asyncio.create_task(supervisor.failed())
        watch.add_done_callback(lambda watch: watch.cancelled() or block.cancel())
        try:
            await until_ready(config)
            yield base_url(config)
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled() and (failure := watch.exception()) is not None:
                block.uncancel()
                raise failure from None
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await supervisor.stop()
