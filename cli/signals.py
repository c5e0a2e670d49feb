"""SIGTERM as Ctrl-C is: an exception that whoever has children or files half written cleans up after. And for what
serves, `Stop`: the first signal lets it finish, the second ends it."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Final

from cli.runtime import remove_run

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)
# `timeout`, `uv run` and others send a signal to a process and to its group: one stop, heard twice.
_ECHO_S: Final = 0.5


class Stop(asyncio.Event):
    """Set by the first SIGINT or SIGTERM. The second ends this process where it stands, with exit code 130 or 143.

    That works whatever the loop does: a drain that hangs, or a checkpoint that is being read.
    """

    def __init__(self, runtime_dir: Path) -> None:
        """`runtime_dir` goes with this process."""
        super().__init__()
        self._runtime_dir = runtime_dir
        self._heard_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_first: Callable[[], None] = lambda: None
        """Called on the loop."""
        self.on_second: Callable[[int], str] = lambda number: ""
        """Called with the signal's number wherever the main thread is: kills what is left; the line to end with."""

    def listen(self) -> None:
        """From here on signals are heard. For the main thread, inside the loop."""
        self._loop = asyncio.get_running_loop()
        for number in _STOPPING:
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._heard_s is None:
            self._heard_s = now_s
            # The loop may have ended by itself in this moment.
            with contextlib.suppress(RuntimeError):
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._begin)
        elif now_s - self._heard_s >= _ECHO_S:
            self._end(number)

    def _begin(self) -> None:
        self.set()
        self.on_first()

    def _end(self, number: int) -> None:
        for other in _STOPPING:
            signal.signal(other, signal.SIG_IGN)
        line = self.on_second(number)
        # Not through `sys.stderr`, which this may have interrupted.
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
        remove_run(self._runtime_dir)
        os._exit(128 + number)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """By which shells know it: 143 after SIGTERM, 130 after Ctrl-C."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` while the context lasts. For the main thread."""
    former = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started meanwhile do not hear Ctrl-C, which reaches all of a terminal: whoever started them ends them.

    Nothing is lost: this process hears it when the context ends.
    """
    # As it starts, it would let Ctrl-C in again.
    resource_tracker.ensure_running()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _terminate(number: int, frame: FrameType | None) -> None:
    # Once: what cleans up is not interrupted in turn.
    signal.signal(number, signal.SIG_IGN)
    raise Terminated
