"""The gateway as a process: settings to sockets, HTTP until a signal."""

import asyncio
import logging
import signal
import sys
import time
from contextlib import AbstractAsyncContextManager

import uvloop

from encoder.checkpoint import CheckpointError
from encoder.client import EncoderClient
from encoder.cluster import ClusterKeys
from epd.config import GatewayConfig
from epd.gateway.app import create_app, start_gateway
from epd.gateway.files import FilesUnusable
from epd.gateway.files_routes import file_store
from epd.gateway.keys import ApiKeys, KeysUnusable
from epd.gateway.render import Renderer
from epd.gateway.tls import Tls, TlsUnusable
from epd.router.discovery import Discovery, Stage, is_name
from epd.router.workers import Fleet
from epd.transport.sockets import WorkerChannel
from epd.types import Role
from preprocess.config import FetchLimits
from preprocess.fetch import Fetcher

logger = logging.getLogger(__name__)

_EXIT_REFUSED = 2


def fetch_limits(config: GatewayConfig) -> FetchLimits:
    """The gateway's fetch policy in the fetcher's own terms."""
    return config.fetch.limits


async def serve_gateway(config: GatewayConfig, stop: asyncio.Event, *, keys: ClusterKeys | None = None) -> None:
    """Serve until `stop` is set. Raises CheckpointError for a model directory, KeysUnusable, TlsUnusable and
    FilesUnusable for what belongs to it, and OSError for a port that cannot be used."""
    tls = read_tls(config)
    renderer = Renderer.load(config.model_dir)
    encoders = [address for address in config.encoders if not is_name(address)]
    async with Fetcher(fetch_limits(config)) as fetcher, EncoderClient.connect(encoders, keys=keys) as encoder:
        app = create_app(
            config,
            renderer=renderer,
            fetcher=fetcher,
            encoder=encoder,
            prefill=[WorkerChannel(address, keys=keys) for address in config.prefill if not is_name(address)],
            decode=[WorkerChannel(address, keys=keys) for address in config.decode if not is_name(address)],
            discovery=lambda fleet: discovering(config, fleet, encoder, keys=keys),
        )
        runner, port = await start_gateway(app, host=config.host, port=config.port, tls=tls)
        logger.info("gateway serves %s on %s:%d", config.model_name, config.host, port)
        try:
            await stop.wait()
        finally:
            await runner.cleanup()


def read_tls(config: GatewayConfig) -> Tls | None:
    """Raises TlsUnusable."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return Tls(config.tls_certificate, config.tls_key)


def check_gateway(config: GatewayConfig) -> None:
    """Whether what the settings name can be used, before any process starts. Raises KeysUnusable, TlsUnusable,
    FilesUnusable."""
    ApiKeys(config.api_keys, config.api_keys_file)
    read_tls(config)
    files = file_store(config, unix_clock=time.time)
    if files is not None:
        files.check()


def discovering(
    config: GatewayConfig, fleet: Fleet, encoder: EncoderClient, *, keys: ClusterKeys | None
) -> AbstractAsyncContextManager[None]:
    """Follow the host names among the addresses: whoever is behind them joins the fleet and the encoders' ring."""

    def workers(name: str, addresses: tuple[str, ...], role: Role) -> Stage:
        return Stage(
            name=name,
            targets=tuple(filter(is_name, addresses)),
            add=lambda address: fleet.add(WorkerChannel(address, keys=keys), role),
            retire=lambda address: fleet.retire(address, role),
        )

    encoders = Stage(
        name="encoder", targets=tuple(filter(is_name, config.encoders)), add=encoder.add, retire=encoder.retire
    )
    prefill = workers("prefill", config.prefill, fleet.roles[0])
    decode = workers("decode", config.decode, Role.DECODE)
    return Discovery([prefill, decode, encoders], period_s=config.resolve_period_s).running()


def run_gateway(config: GatewayConfig, *, keys: ClusterKeys | None = None) -> None:
    """Run the gateway in this process until SIGTERM. `keys` are those of its cluster.

    A checkpoint, keys or a certificate that cannot work end it with one line in the log and exit code 2: starting
    again is no use.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        # SIGINT is the supervisor's: a Ctrl-C reaches every stage at once and would end them in no order.
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        try:
            await serve_gateway(config, stop, keys=keys)
        except (CheckpointError, FilesUnusable, KeysUnusable, TlsUnusable) as error:
            logger.error("gateway cannot start: %s", " ".join(str(error).split()))
            sys.exit(_EXIT_REFUSED)

    uvloop.run(main())
