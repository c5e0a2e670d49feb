"""Keeps the processes of one deployment alive: start, watch, restart with a growing pause, stop in order.

A process that hangs is killed (see `cli.watch`). A process that dies is started again under the same name and address;
who waited on it learns of the loss from its socket and retries or ends the request. The supervisor itself never touches
a request, and should it be killed its processes end by themselves (see `cli.orphan`).
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli.load import SupervisorConfig
from cli.stage import EXIT_USAGE, FrontStage, GatewayStage, Stage, stage_kind, write_settings
from cli.watch import Watch
from encoder.cluster import ClusterKeys

_READ_OUT_S = 1.0
_KILLED_S = 5.0


class StageFailed(Exception):
    """A stage cannot run: it keeps exiting by itself soon after its start. `stage` is its name, if it is one alone."""

    def __init__(self, message: str, *, stage: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class StageRefused(StageFailed):
    """A stage refused its settings; starting it again is no use."""


@dataclass(frozen=True, slots=True)
class StageEvent:
    """What happened to a process, for whoever shows it. `was_told`: it has ended because the supervisor stops."""

    name: str
    what: Literal["started", "ready", "exited", "silent"]
    pid: int
    returncode: int | None = None
    silent_s: float = 0.0
    was_told: bool = False


class Supervisor:
    """Owns the child processes. All are started at once; gateway or front is stopped before those it needs."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        runtime_dir: Path,
        config: SupervisorConfig,
        keys: ClusterKeys | None = None,
        on_event: Callable[[StageEvent], None] = lambda event: None,
        on_log: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_log(name, line)` is told what the stages write; None leaves it to this process's standard error."""
        self._stages = tuple(stages)
        self._runtime_dir = runtime_dir
        self._config = config
        self._on_event = on_event
        self._on_log = on_log
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] | None = None
        self._stopping = False
        self._watch = Watch(stages, config, on_silence=self._kill_silent, on_first=self._first_heard, keys=keys)
        self._watching: asyncio.Task[None] | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Live processes by name."""
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        for stage in self._stages:
            write_settings(stage, self._settings_path(stage))
            self._keepers[stage.name] = asyncio.create_task(self._keep(stage), name=f"keep {stage.name}")
        self._watching = asyncio.create_task(self._watch.run(), name="watch")
        self._watching.add_done_callback(self._watch_ended)

    async def failed(self) -> None:
        """Return never, or raise StageFailed once a stage is beyond restarting."""
        assert self._failure is not None, "start() comes first"
        await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """SIGTERM the gateway or front, wait for its drain, then the others; SIGKILL what overstays `drain_s`."""
        self._stopping = True
        if self._watching is not None:
            # A stage that drains answers no probes; from here on only `drain_s` counts.
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        gateways = [stage for stage in self._stages if isinstance(stage, GatewayStage | FrontStage)]
        await asyncio.gather(*(self._end(stage) for stage in gateways))
        await asyncio.gather(*(self._end(stage) for stage in self._stages if stage not in gateways))

    def kill(self) -> int:
        """SIGKILL all that live, and see them gone; how many there were. Anywhere, a signal handler included."""
        self._stopping = True
        pids = list(self.pids.values())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        give_up_s = time.monotonic() + _KILLED_S
        for pid in pids:
            # Whoever else waits for them may have been first.
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < give_up_s:
                    time.sleep(0.01)
        return len(pids)

    async def _end(self, stage: Stage) -> None:
        process, keeper = self._processes.get(stage.name), self._keepers.get(stage.name)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self._config.drain_s)
            except TimeoutError:
                # It may have ended in the moment of the timeout.
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    def _settings_path(self, stage: Stage) -> Path:
        return self._runtime_dir / f"{stage.name}.json"

    async def _keep(self, stage: Stage) -> None:
        pause_s, num_early_exits = self._config.backoff_s, 0
        while not self._stopping:
            started_s = time.monotonic()
            process = await self._spawn(stage)
            returncode = await process.wait()
            await self._read_out(stage.name)
            self._on_event(StageEvent(stage.name, "exited", process.pid, returncode, was_told=self._stopping))
            if self._stopping:
                return
            lived_s = time.monotonic() - started_s
            if lived_s > self._config.young_s:
                pause_s, num_early_exits = self._config.backoff_s, 0
            # A process killed from outside (negative code) is always worth another try; one that gives up is not.
            num_early_exits += returncode >= 0
            if returncode == EXIT_USAGE or num_early_exits >= self._config.max_early_exits:
                self._give_up(stage, returncode, num_early_exits)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._config.max_backoff_s)

    async def _spawn(self, stage: Stage) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command(stage),
            stdout=None if self._on_log is None else asyncio.subprocess.PIPE,
            stderr=None if self._on_log is None else asyncio.subprocess.STDOUT,
            # Ctrl-C in a terminal reaches the whole group; the order of the stop is the supervisor's to keep.
            preexec_fn=_ignore_interrupt,
        )
        self._processes[stage.name] = process
        if self._on_log is not None and process.stdout is not None:
            reading = _relay(process.stdout, stage.name, self._on_log)
            self._readers[stage.name] = asyncio.create_task(reading, name=f"log of {stage.name}")
        self._watch.started(stage.name)
        self._on_event(StageEvent(stage.name, "started", process.pid))
        return process

    async def _read_out(self, name: str) -> None:
        """What an ended process has written is told; a child of its that holds the pipe is not waited for."""
        reader = self._readers.pop(name, None)
        if reader is not None:
            await asyncio.wait([reader], timeout=_READ_OUT_S)
            reader.cancel()

    def _first_heard(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:
            self._on_event(StageEvent(name, "ready", process.pid))

    def _command(self, stage: Stage) -> list[str]:
        return [
            *(sys.executable, "-m", "cli.stage", stage_kind(stage)),
            *("--name", stage.name),
            *("--settings", str(self._settings_path(stage))),
            *("--parent", str(os.getpid())),
            *("--drain-s", str(self._config.drain_s)),
            *("--log-format", self._config.log_format),
        ]

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        """Without the watch nobody would see a stage hang: better to end loudly than to go on half blind."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._fail(StageFailed(f"the watch over the stages failed: {error!r}"))

    def _fail(self, error: StageFailed) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _kill_silent(self, name: str, silent_s: float) -> None:
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            self._on_event(StageEvent(name, "silent", process.pid, silent_s=silent_s))
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _give_up(self, stage: Stage, returncode: int, num_exits: int) -> None:
        if returncode == EXIT_USAGE:
            self._fail(
                StageRefused(
                    f"{stage.name} refused its settings or its checkpoint; its log above says why", stage=stage.name
                )
            )
        else:
            times = f"{num_exits} times in a row (exit code {returncode})"
            self._fail(StageFailed(f"{stage.name} exited by itself {times}; see its log above", stage=stage.name))


async def _relay(stream: asyncio.StreamReader, name: str, on_log: Callable[[str, str], None]) -> None:
    """Line by line, however long; the last one may lack its end."""
    rest = b""
    while chunk := await stream.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            on_log(name, line.decode(errors="replace"))
    if rest:
        on_log(name, rest.decode(errors="replace"))


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
