"""Waiting for an arena that another process keeps locked, without standing still.

A lock is held for microseconds, unless its holder is stopped in a transaction, or was killed in one and the kernel is
still taking it apart, or somebody opens the arena with a tool. Nobody can be served by another replica then: all of a
host share the lock. So what needs it is tried again and again from the event loop until it is there.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

from encoder.errors import ArenaLocked

AGAIN_S: Final = 0.015

_T = TypeVar("_T")


async def unlocked(act: Callable[[], _T], *, wait_s: float) -> _T:
    """What `act` returns, tried until the arena lets it; ArenaLocked when it does not within `wait_s`.

    Nothing else of the loop runs between the try that succeeds and whoever awaits this.
    """
    give_up_s = time.monotonic() + wait_s
    while True:
        try:
            return act()
        except ArenaLocked:
            if time.monotonic() >= give_up_s:
                raise
        await asyncio.sleep(AGAIN_S)
