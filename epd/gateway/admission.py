"""Which requests are in flight, how long each may take, and how they end when the gateway stops.

serving     every request that finds a place is taken
draining    nothing new is taken; what is in flight goes on
over        what is still in flight is ended with `ShuttingDown`
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from epd.errors import DeadlineExceeded, Overloaded, ShuttingDown

_RETRY_AFTER_STOP_S = 5.0


class Admission:
    """`on_change` hears the number of requests in flight. Belongs to one event loop."""

    def __init__(self, *, max_inflight: int, timeout_s: float, on_change: Callable[[int], object]) -> None:
        self._max_inflight = max_inflight
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._num_inflight = 0
        self._sessions: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_inflight(self) -> int:
        return self._num_inflight

    def check(self) -> None:
        """Raises ShuttingDown or Overloaded when a request that is complete now would be refused."""
        if self.draining:
            raise _shutting_down()
        if self._num_inflight >= self._max_inflight:
            raise Overloaded(f"{self._max_inflight} requests are in flight, which is the limit", retry_after_s=1.0)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the requests in flight. Raises as `check` does: nothing queues without bound."""
        self.check()
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None, None]:
        """The whole life of a request, its arrival included. Raises ShuttingDown when the drain is over."""
        try:
            async with asyncio.timeout(None) as timeout:
                self._sessions.add(timeout)
                self._idle.clear()
                try:
                    yield
                finally:
                    self._sessions.discard(timeout)
                    if not self._sessions:
                        self._idle.set()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise _shutting_down() from error

    @asynccontextmanager
    async def deadline(self) -> AsyncGenerator[None, None]:
        """Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"the answer was not complete after {self._timeout_s:g} s") from error

    async def drain(self, drain_s: float) -> None:
        """Take nothing new, let what is in flight go on for `drain_s`, then tell the rest to end."""
        self.draining = True
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            now = asyncio.get_running_loop().time()
            for session in self._sessions:
                session.reschedule(now)

    def _count(self, change: int) -> None:
        self._num_inflight += change
        self._on_change(self._num_inflight)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("this server is shutting down", retry_after_s=_RETRY_AFTER_STOP_S)
