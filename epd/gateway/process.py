"""The gateway as a process: settings to sockets, HTTP until a signal."""

import asyncio
import logging
import signal
import sys

import uvloop

from encoder.checkpoint import CheckpointError
from encoder.client import EncoderClient
from epd.config import GatewayConfig
from epd.gateway.app import create_app, start_gateway
from epd.gateway.render import Renderer
from epd.transport.sockets import WorkerChannel
from preprocess.config import FetchLimits
from preprocess.fetch import Fetcher

logger = logging.getLogger(__name__)

_EXIT_REFUSED = 2


def fetch_limits(config: GatewayConfig) -> FetchLimits:
    """The gateway's fetch policy in the fetcher's own terms."""
    return config.fetch.limits


async def serve_gateway(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises CheckpointError for a model directory and OSError for a port that cannot be
    used."""
    renderer = Renderer.load(config.model_dir)
    async with Fetcher(fetch_limits(config)) as fetcher, EncoderClient.connect(config.encoders) as encoder:
        app = create_app(
            config,
            renderer=renderer,
            fetcher=fetcher,
            encoder=encoder,
            prefill=[WorkerChannel(address) for address in config.prefill],
            decode=[WorkerChannel(address) for address in config.decode],
        )
        runner, port = await start_gateway(app, host=config.host, port=config.port)
        logger.info("gateway serves %s on %s:%d", config.model_name, config.host, port)
        try:
            await stop.wait()
        finally:
            await runner.cleanup()


def run_gateway(config: GatewayConfig) -> None:
    """Run the gateway in this process until SIGTERM.

    A checkpoint that cannot work ends it with one line in the log and exit code 2: starting again is no use.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        # SIGINT is the supervisor's: a Ctrl-C reaches every stage at once and would end them in no order.
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        try:
            await serve_gateway(config, stop)
        except CheckpointError as error:
            logger.error("gateway cannot start: %s", " ".join(str(error).split()))
            sys.exit(_EXIT_REFUSED)

    uvloop.run(main())
