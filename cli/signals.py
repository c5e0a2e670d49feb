"""SIGTERM as Ctrl-C is: an exception that whoever has children or files half written cleans up after."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


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
