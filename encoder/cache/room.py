"""Embeddings that wait for room in a full arena: a line in order of arrival, served when room appears.

    reserve --fits--> Reservation
       | full
    in line --room appears--> the first that fit get theirs --> Reservation
       | `wait_s` is over
    ArenaFull

Room appears by what this process does, which the store tells, and by what the others of the host do, which is looked
for every `POLL_S` while somebody waits. Who does not fit holds nobody up: smaller ones behind it, and new ones, take
what it cannot use. Its own wait is bounded by `wait_s`; two requests that each hold what the other waits for are parted
by that bound as well. Nobody stands in line with anything decoded in hand.

An arena that another process keeps locked is waited for in the same line, and looked at as often.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from encoder.cache.store import EmbeddingStore, Reservation
from encoder.errors import ArenaFull, ArenaLocked, EmbeddingTooLarge, EncoderBusy
from preprocess.types import MediaKey

POLL_S: Final = 0.02
# A process that dies changes nothing by itself: after so many looks the store is asked anyway.
_POLLS_PER_TRY: Final = 25


@dataclass(slots=True, eq=False)
class _Waiting:
    key: MediaKey
    num_rows: int
    granted: "asyncio.Future[Reservation]"
    refusal: EncoderBusy | ArenaFull
    """Why not yet."""


class RoomQueue:
    """The line in front of one store, on one event loop."""

    def __init__(self, store: EmbeddingStore, *, wait_s: float, clock: Callable[[], float]) -> None:
        """`wait_s` bounds one wait; `clock` is the time base of leases."""
        self._store = store
        self._wait_s = wait_s
        self._clock = clock
        self._line: list[_Waiting] = []
        self._is_due = False
        self._was_locked = False
        self._num_polls = 0
        self._poll: asyncio.TimerHandle | None = None
        store.on_room = self._room_appeared

    def __len__(self) -> int:
        return len(self._line)

    def try_reserve(self, key: MediaKey, num_rows: int) -> Reservation | None:
        """Room now, or None. Raises EmbeddingTooLarge, EncoderBusy."""
        try:
            return self._reserve(key, num_rows)
        except (ArenaFull, ArenaLocked):
            return None

    async def reserve(self, key: MediaKey, num_rows: int) -> Reservation:
        """Room now or later. Raises EmbeddingTooLarge and EncoderBusy at once, ArenaFull, ArenaLocked after `wait_s`.

        Cancelling leaves the line.
        """
        try:
            return self._reserve(key, num_rows)
        except (ArenaFull, ArenaLocked) as error:
            refusal = error
        self._was_locked |= isinstance(refusal, ArenaLocked)
        waiting = _Waiting(key, num_rows, asyncio.get_running_loop().create_future(), refusal)
        self._line.append(waiting)
        self._poll_later()
        is_taken = False
        try:
            await asyncio.wait({waiting.granted}, timeout=self._wait_s)
            if not waiting.granted.done():
                raise waiting.refusal
            is_taken = True
            return waiting.granted.result()
        finally:
            if not waiting.granted.done():
                self._line.remove(waiting)
            elif not is_taken and waiting.granted.exception() is None:
                self._store.abandon(waiting.granted.result())

    def abandon(self, reservation: Reservation) -> None:
        """Give unused room back."""
        self._store.abandon(reservation)

    def _reserve(self, key: MediaKey, num_rows: int) -> Reservation:
        self._store.expire(self._clock())
        return self._store.reserve(key, num_rows)

    def _room_appeared(self) -> None:
        """Serve the line soon, not now: what was just published must be leased before room is made again."""
        if self._line and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _poll_later(self) -> None:
        if self._line and self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _look(self) -> None:
        self._poll = None
        self._num_polls += 1
        try:
            # A lock that ends changes nothing.
            is_due = self._was_locked or self._num_polls % _POLLS_PER_TRY == 0
            if self._store.changed_elsewhere() or is_due:
                self._store.expire(self._clock())
                self._serve()
        except EncoderBusy:
            # Somebody keeps the arena locked; the next look is as good.
            pass
        self._poll_later()

    def _serve(self) -> None:
        self._is_due = self._was_locked = False
        refused_rows: int | None = None
        for waiting in list(self._line):
            # What was too much a moment ago still is: each grant leaves less.
            if refused_rows is not None and waiting.num_rows >= refused_rows:
                continue
            try:
                reservation = self._store.reserve(waiting.key, waiting.num_rows)
            except ArenaFull as error:
                refused_rows, waiting.refusal = waiting.num_rows, error
                continue
            except EmbeddingTooLarge as error:
                # Which nobody could say while the arena was locked.
                self._line.remove(waiting)
                waiting.granted.set_exception(error)
                continue
            except EncoderBusy as error:
                # The poll comes back to them.
                self._was_locked, waiting.refusal = True, error
                return
            self._line.remove(waiting)
            waiting.granted.set_result(reservation)
