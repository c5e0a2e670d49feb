"""A front put together and taken apart: the door, the loop that works, and the order in which they stop."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from encoder.checkpoint import read_json_object
from encoder.client import EncoderClient
from encoder.connections import GuardedRunner
from encoder.front.app import Front
from encoder.front.config import FrontConfig
from encoder.front.connection import lobby_of
from encoder.front.desk import EncodeDesk
from encoder.front.door import Door, open_listener
from encoder.front.health import HealthBoard
from encoder.front.metrics import FrontMetrics
from encoder.sglang.config import SglangConfig
from encoder.sglang.dialect import SglangDialect
from encoder.sglang.routes import add_routes
from preprocess.config import ProcessorConfig
from preprocess.fetch import Fetcher

logger = logging.getLogger(__name__)

_PULSE_S: Final = 0.2
_DELIVERY_POLL_S: Final = 0.02
# What is left to write after the drain: bodies of refusals.
_LAST_WORDS_S: Final = 2.0


class FrontServer:
    """Serves from `start` to `stop`, on the running loop. Fetcher and client are the caller's."""

    def __init__(
        self, config: FrontConfig, *, fetcher: Fetcher, encoder: EncoderClient, sglang: SglangConfig | None = None
    ) -> None:
        """Without `sglang`, or with it switched off, only the native dialect is spoken.

        Raises CheckpointError or ValueError for a model directory that holds no processor.
        """
        self._config = config
        self._encoder = encoder
        self._metrics = FrontMetrics(infos=encoder.infos)
        self.board = HealthBoard(tuple(encoder.infos()))
        self.desk = EncodeDesk(
            fetcher=fetcher,
            encoder=encoder,
            processor=ProcessorConfig.from_hf(read_json_object(config.model_dir / "config.json")),
            max_inflight=config.max_inflight,
            # A front that stops waits for nobody: what is down then stays down.
            patience_s=lambda: 0.0 if self._front.admission.draining else config.restart_wait_s,
            on_end=self._metrics.medium_ended,
        )
        self._front = Front(config, desk=self.desk, board=self.board, metrics=self._metrics)
        self.app = self._front.app()
        self._dialect: SglangDialect | None = None
        if sglang is not None and sglang.enabled:
            self._dialect = SglangDialect(self.desk, sglang, is_healthy=lambda: self.board.health().status == 200)
            add_routes(self.app, self._dialect, pace=config.body_pace)
            self._metrics.watch_sglang(self._dialect.gauges)
        self._runner = GuardedRunner(
            self.app,
            lobby=lobby_of(config),
            # A client that leaves ends its request everywhere.
            handler_cancellation=True,
            # Compressed bodies are refused by their header; inflating them first would be work for nothing.
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=_LAST_WORDS_S,
        )
        self._door: Door | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._arriving: set[asyncio.Task[object]] = set()

    @property
    def port(self) -> int:
        """Where it listens; the system's choice for 0."""
        assert self._door is not None, "start() comes first"
        return self._door.port

    @property
    def pulse(self) -> "asyncio.Task[None]":
        """Ends before `stop` only when something failed, and the front with it."""
        assert self._pulse is not None, "start() comes first"
        return self._pulse

    async def start(self) -> None:
        """Listen. Raises OSError for an address that cannot be used."""
        self._loop = asyncio.get_running_loop()
        door = Door(
            open_listener(self._config.host, self._config.port),
            probes={"/health": self.board.health, "/ready": self.board.ready},
            hand_over=self._hand_over,
            max_waiting=self._config.max_idle_connections,
        )
        await self._runner.setup()
        if self._dialect is not None:
            await self._dialect.start()
        self._note()
        self._pulse = asyncio.create_task(self._beat(door))
        self._door = door
        door.open()
        if self._dialect is not None:
            self._dialect.announce(door.port, host=self._config.host)

    async def stop(self) -> None:
        """Refuse what is new, let answers in flight end, then close everything."""
        if self._dialect is not None:
            await self._dialect.withdraw()
        over_s = asyncio.get_running_loop().time() + self._config.drain_s
        await self._front.admission.drain(self._config.drain_s)
        if self._dialect is not None:
            while self._is_delivering() and asyncio.get_running_loop().time() < over_s:  # noqa: ASYNC110 - another's state
                await asyncio.sleep(_DELIVERY_POLL_S)
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        if self._door is not None:
            await asyncio.to_thread(self._door.close)
        await asyncio.gather(*self._arriving, return_exceptions=True)
        await self._runner.cleanup()
        if self._dialect is not None:
            await self._dialect.stop()

    def _is_delivering(self) -> bool:
        """Whether parts of the other dialect are still being encoded or pushed."""
        gauges = {} if self._dialect is None else self._dialect.gauges()
        return any(gauges[name] for name in ("parts", "messages", "leases"))

    async def _beat(self, door: Door) -> None:
        while door.is_open:
            self._note()
            await asyncio.sleep(_PULSE_S)
        raise RuntimeError("the thread that listens has ended")

    def _note(self) -> None:
        self.board.note(self._encoder.infos(), draining=self._front.admission.draining)

    def _hand_over(self, connection: socket.socket) -> None:
        """From the door's thread."""
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(self._take, connection)
        except RuntimeError:
            # The loop is closed.
            connection.close()

    def _take(self, connection: socket.socket) -> None:
        arriving: asyncio.Task[object] = asyncio.ensure_future(self._attach(connection))
        self._arriving.add(arriving)
        arriving.add_done_callback(self._arriving.discard)

    async def _attach(self, connection: socket.socket) -> None:
        server = self._runner.server
        if server is None:
            connection.close()
            return
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(server, connection)


@asynccontextmanager
async def running_front(
    config: FrontConfig, encoder: EncoderClient, sglang: SglangConfig | None = None
) -> AsyncIterator[FrontServer]:
    """A front over a client that is open, with a fetcher of its own, serving until the block ends."""
    async with Fetcher(config.fetch) as fetcher:
        server = FrontServer(config, fetcher=fetcher, encoder=encoder, sglang=sglang)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()
