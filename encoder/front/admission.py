"""Which requests are in flight, and how they end when the front stops.

serving     every request is taken
draining    nothing new is taken; what is in flight goes on
over        what is still in flight is ended with 503
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from encoder.front.problems import Refused

_RETRY_AFTER_STOP_S = 5.0


class Admission:
    """Belongs to one event loop."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sessions: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_inflight(self) -> int:
        return len(self._sessions)

    def check(self) -> None:
        """Raises Refused when nothing new is taken."""
        if self.draining:
            raise _shutting_down()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[None, None]:
        """The whole life of a request, its arrival included. Raises Refused: 503 when stopping, 504 when too long."""
        self.check()
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(deadline_s) as timeout:
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
            if asyncio.get_running_loop().time() < deadline_s:
                raise _shutting_down() from error
            words = f"the answer was not complete after {self._timeout_s:g} s"
            raise Refused(504, "deadline_exceeded", words) from error

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


def _shutting_down() -> Refused:
    return Refused(503, "shutting_down", "this server is shutting down", retry_after_s=_RETRY_AFTER_STOP_S)
