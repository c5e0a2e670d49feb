"""The event loop's time, moved by hand: deadlines of 30 s pass at once, and real sockets work as ever."""

import asyncio

# Loopback delivers at once; a write, the wake-up and the reader's own steps take a few rounds of the loop.
_ROUNDS = 50


class LoopClock:
    """Takes over `time` of the running loop until `restore`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time()
        self._loop.time = lambda: self._now_s  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        """Let what is on its way arrive, move time, and let what is due happen."""
        await settle()
        self._now_s += seconds
        await settle()

    def restore(self) -> None:
        del self._loop.time  # type: ignore[method-assign]


async def settle() -> None:
    """Give every task the time to get as far as it can without the clock."""
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
