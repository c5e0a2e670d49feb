"""Ctrl-C while a command is loaded or is leaving: one quiet exit.

What is loaded takes longer than a person's patience, and not every library lets a KeyboardInterrupt through: extension
modules make ImportErrors of it, or none at all. Nothing is open yet, so the process may simply end.
"""

import atexit
import os
import signal
from types import FrameType
from typing import Final

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


def leave_at_once() -> None:
    """From here on Ctrl-C ends this process as it stands. For the main thread; where Ctrl-C is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
        # At its very end the interpreter takes handlers away, and Ctrl-C would kill what has done its work.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def interrupt_again() -> None:
    """From here on Ctrl-C is KeyboardInterrupt, after `leave_at_once`: there may be something to clean up after."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interrupted(error: BaseException | None) -> bool:
    """Whether an exception is what came of a Ctrl-C, as when it hits an import that makes another fault of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
