"""Who waits for which part. A receiver may say where it listens before, while or after its part is encoded.

    first registration, then /encode     it waits for the part, for a bounded time
    /encode, then registrations          each is served as it comes, until `receive_count` different ones were
    registration after a failure         it is told of the failure
    registration after the end           the same one again is fine, another is refused

Times are of a monotonic clock, in seconds. Everything happens on one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from encoder.sglang.errors import BadRequest, DialectError, DuplicatePart, Overloaded, TimedOut
from encoder.sglang.message import PartId
from encoder.sglang.requests import Registration
from preprocess.types import Modality

# What is remembered of parts that ended; each takes a few hundred bytes.
_MAX_ENDED: Final = 16384


class Part:
    """One part between `/encode` and its end."""

    def __init__(self, part_id: PartId, endpoints: tuple[str, ...] | None, *, is_shared: bool) -> None:
        """With `endpoints` there is nobody to wait for. `is_shared`: the receivers' sockets serve many requests."""
        self.id = part_id
        self.is_shared = is_shared
        self.endpoints: list[str] = list(endpoints or ())
        self.receive_count: int | None = None if endpoints is None else len(self.endpoints)
        self._changed = asyncio.Event()
        self._error: DialectError | None = None

    def fail(self, error: DialectError) -> None:
        """End the waiting for receivers."""
        self._error = error
        self._changed.set()

    def add(self, registration: Registration) -> None:
        """Take one receiver in, once however often it says so. Raises BadRequest when it contradicts the others."""
        if self.receive_count not in (None, registration.receive_count):
            raise BadRequest(
                f"receive_count is {registration.receive_count}, other receivers of {self.id.req_id} said "
                f"{self.receive_count}"
            )
        if registration.endpoint in self.endpoints:
            return
        if len(self.endpoints) == registration.receive_count:
            raise BadRequest(f"{self.id.req_id} has its {registration.receive_count} receivers already")
        self.receive_count = registration.receive_count
        self.endpoints.append(registration.endpoint)
        self._changed.set()

    async def destinations(self) -> AsyncIterator[str]:
        """Every receiver as it becomes known, until all there will be are. Raises what the part fails with."""
        num_seen = 0
        while self.receive_count is None or num_seen < self.receive_count:
            while num_seen == len(self.endpoints):
                if self._error is not None:
                    raise self._error
                self._changed.clear()
                await self._changed.wait()
            yield self.endpoints[num_seen]
            num_seen += 1


@dataclass(frozen=True, slots=True)
class _Ended:
    part: Part
    error: DialectError | None
    ended_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Early:
    """A receiver whose part has not come yet. The future is of no value: it ends when the receiver is known."""

    registration: Registration
    known: asyncio.Future[None]


class Receivers:
    """All parts of one process. `tell` is called for a receiver of a part that has failed."""

    def __init__(
        self,
        *,
        tell: Callable[[Part, str, DialectError], None],
        clock: Callable[[], float],
        registration_timeout_s: float,
        memory_s: float,
        max_parts: int,
        max_waiting: int,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._registration_timeout_s = registration_timeout_s
        self._memory_s = memory_s
        self._max_parts = max_parts
        self._max_waiting = max_waiting
        self._parts: dict[str, Part] = {}
        self._early: dict[str, list[_Early]] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    @property
    def num_parts(self) -> int:
        """Parts between `open` and `close`."""
        return len(self._parts)

    @property
    def num_waiting(self) -> int:
        """Receivers whose part has not come."""
        return sum(len(early) for early in self._early.values())

    @property
    def num_ended(self) -> int:
        """Parts that are remembered."""
        return len(self._ended)

    def open(self, part_id: PartId, endpoints: tuple[str, ...] | None, *, is_shared: bool = True) -> Part:
        """Begin a part; receivers that came before it are its own from now on.

        Raises DuplicatePart while one of this id is open, Overloaded.
        """
        if part_id.req_id in self._parts:
            raise DuplicatePart(f"{part_id.req_id} is being encoded; an id is for one part")
        if len(self._parts) >= self._max_parts:
            raise Overloaded(f"{self._max_parts} parts are being encoded, the most at a time", retry_after_s=1.0)
        self._ended.pop(part_id.req_id, None)
        part = self._parts[part_id.req_id] = Part(part_id, endpoints, is_shared=is_shared)
        self._adopt(part)
        return part

    def _adopt(self, part: Part) -> None:
        for early in self._early.pop(part.id.req_id, []):
            if early.known.done():
                # Its time is up, or its caller has gone, in this very moment.
                continue
            try:
                part.add(early.registration)
            except BadRequest as error:
                early.known.set_exception(error)
            else:
                early.known.set_result(None)

    def refuse(self, req_id: str, error: DialectError) -> None:
        """Note a part whose call made no sense or came too many, so that its receivers hear why and wait no longer."""
        if req_id in self._parts:
            return
        # Of a failure nothing is read but the id.
        part = Part(PartId(req_id, 1, 0, Modality.IMAGE), None, is_shared=True)
        self._parts[req_id] = part
        self._adopt(part)
        self.close(part, error)

    def fail(self, req_id: str, error: DialectError) -> None:
        """End the waiting of one part, if there is one, or note that it will not be served."""
        part = self._parts.get(req_id)
        if part is None:
            self.refuse(req_id, error)
        else:
            part.fail(error)

    def close(self, part: Part, error: DialectError | None = None) -> None:
        """End a part; with an `error`, its receivers are told, and those that come later will be."""
        del self._parts[part.id.req_id]
        self._ended[part.id.req_id] = _Ended(part, error, self._clock())
        if error is not None:
            for endpoint in part.endpoints:
                self._tell(part, endpoint, error)
        self.sweep()

    def sweep(self) -> None:
        """Forget parts that ended long ago."""
        oldest_s = self._clock() - self._memory_s
        while self._ended:
            ended = next(iter(self._ended.values()))
            if ended.ended_s > oldest_s and len(self._ended) <= _MAX_ENDED:
                return
            self._ended.popitem(last=False)

    async def register(self, registration: Registration) -> None:
        """Returns when the receiver is known to its part. Raises BadRequest, Overloaded, TimedOut."""
        req_id = registration.req_id
        part = self._parts.get(req_id)
        if part is not None:
            part.add(registration)
            return
        ended = self._ended.get(req_id)
        if ended is not None:
            self._greet_late(ended, registration)
            return
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} receivers wait for their parts, the most at a time")
        early = _Early(registration, asyncio.get_running_loop().create_future())
        self._early.setdefault(req_id, []).append(early)
        try:
            await asyncio.wait_for(early.known, self._registration_timeout_s)
        except TimeoutError as error:
            raise TimedOut(
                f"{req_id} was not sent to this encoder within {self._registration_timeout_s:g} s"
            ) from error
        finally:
            self._forget(early)

    def _forget(self, early: _Early) -> None:
        waiting = self._early.get(early.registration.req_id)
        if waiting is not None and early in waiting:
            waiting.remove(early)
            if not waiting:
                del self._early[early.registration.req_id]

    def _greet_late(self, ended: _Ended, registration: Registration) -> None:
        if ended.error is not None:
            # Answered with 200: a refusal would reach the client's user in place of what really happened.
            ended.part.add(registration)
            self._tell(ended.part, registration.endpoint, ended.error)
        elif registration.endpoint not in ended.part.endpoints:
            raise BadRequest(f"{registration.req_id} has been sent to all its receivers and is over")
