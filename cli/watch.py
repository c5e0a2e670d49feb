"""Asks every stage for a sign of life: a process that hangs looks alive to the operating system and to nobody else.

A stage is judged only once it has answered since its start, so a model may take its time to load.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from cli.cluster import near
from cli.load import SupervisorConfig
from cli.stage import EncoderStage, FrontStage, GatewayStage, Stage, WorkerStage
from encoder.cluster import ClusterKeys, secure_client
from encoder.types import Ping, ToEncoder
from encoder.wire import Codec
from epd.types import Hello, ToWorker


class Watch:
    """Calls `on_silence(name)` for a stage that has stopped answering, and `on_first(name)` for one that begins to:
    each once per start of its process."""

    def __init__(
        self,
        stages: Sequence[Stage],
        config: SupervisorConfig,
        *,
        on_silence: Callable[[str, float], None],
        on_first: Callable[[str], None] = lambda name: None,
        keys: ClusterKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stages = tuple(stages)
        self._config = config
        self._on_silence = on_silence
        self._on_first = on_first
        self._keys = keys
        self._clock = clock
        self._heard_s: dict[str, float] = {}

    def heard(self, name: str) -> None:
        """The stage has answered."""
        is_first = name not in self._heard_s
        self._heard_s[name] = self._clock()
        if is_first:
            self._on_first(name)

    def started(self, name: str) -> None:
        """The stage is a new process: nothing is expected of it until it answers."""
        self._heard_s.pop(name, None)

    def look(self) -> None:
        """Report whoever has been silent for too long."""
        now_s = self._clock()
        for name, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > self._config.silence_s:
                del self._heard_s[name]
                self._on_silence(name, now_s - heard_s)

    async def run(self) -> None:
        """Probe and look until cancelled."""
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as probes:
                for stage in self._stages:
                    probes.create_task(self._probe(stage, context))
                while True:
                    waited_s = self._clock()
                    await asyncio.sleep(self._config.probe_period_s)
                    # A supervisor that was itself stopped or starved must not blame the stages for its own silence.
                    if self._clock() - waited_s > self._config.silence_s / 2:
                        for name in self._heard_s:
                            self.heard(name)
                    self.look()
        finally:
            context.destroy(linger=0)

    async def _probe(self, stage: Stage, context: zmq.asyncio.Context) -> None:
        match stage:
            case GatewayStage():
                await self._probe_http(stage, "/health")
            case FrontStage():
                # Not its /health, which a thread of its own answers: what must be seen to live is the loop that works.
                await self._probe_http(stage, "/v1/models")
            case EncoderStage():
                await self._probe_socket(stage.name, stage.address, Codec(ToEncoder).encode(Ping(sequence=0)), context)
            case WorkerStage():
                await self._probe_socket(stage.name, stage.address, Codec(ToWorker).encode(Hello(sequence=0)), context)

    async def _probe_socket(
        self, name: str, address: str, greeting: list[bytes | bytearray | memoryview], context: zmq.asyncio.Context
    ) -> None:
        """Greet at intervals; whatever comes back is a sign of life. The socket reconnects to a restarted process."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 2)
        # Greetings for a process that is not there are dropped, not kept for the next one.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        secure_client(socket, address, self._keys)
        socket.connect(near(address))
        while True:
            with contextlib.suppress(zmq.Again):
                await socket.send_multipart(greeting, flags=zmq.NOBLOCK)
            deadline_s = self._clock() + self._config.probe_period_s
            while (left_s := deadline_s - self._clock()) > 0:
                if await socket.poll(left_s * 1000):
                    await socket.recv_multipart()
                    self.heard(name)

    async def _probe_http(self, stage: GatewayStage | FrontStage, path: str) -> None:
        # Only here: the command line is completed without it.
        import aiohttp

        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(stage.config.host, stage.config.host)
        has_tls = isinstance(stage, GatewayStage) and stage.config.tls_certificate is not None
        url = f"{'https' if has_tls else 'http'}://{host}:{stage.config.port}{path}"
        timeout = aiohttp.ClientTimeout(total=self._config.silence_s)
        # Whether it lives is asked, not who it is.
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url):
                        self.heard(stage.name)
                await asyncio.sleep(self._config.probe_period_s)
