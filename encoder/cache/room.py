"""Embeddings that wait for room in a full arena: a line in order of arrival, served when room appears.

    reserve --fits--> Reservation
       | full
    in line --room appears--> the first that fit get theirs --> Reservation
       | `wait_s` is over
    ArenaFull

Who does not fit holds nobody up: smaller ones behind it, and new ones, take what it cannot use. Its own wait is bounded
by `wait_s`; two requests that each hold what the other waits for are parted by that bound as well.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from encoder.cache.store import EmbeddingStore, Reservation
from encoder.errors import ArenaFull
from preprocess.types import PreparedMedia

# Decoded media that may stand in line before decoding pauses; a 1080p picture has 50 MB of patches.
MAX_WAITING_BYTES = 2**30


@dataclass(slots=True, eq=False)
class _Waiting:
    prepared: PreparedMedia
    granted: "asyncio.Future[Reservation]"

    @property
    def num_rows(self) -> int:
        return self.prepared.layout.num_rows


class RoomQueue:
    """The line in front of one store, on one event loop."""

    def __init__(self, store: EmbeddingStore, *, wait_s: float, clock: Callable[[], float]) -> None:
        """`wait_s` bounds one wait; `clock` is the time base of leases."""
        self._store = store
        self._wait_s = wait_s
        self._clock = clock
        self._line: list[_Waiting] = []
        self._is_short = asyncio.Event()
        self._is_short.set()
        self._is_due = False
        store.on_room = self._room_appeared

    def __len__(self) -> int:
        return len(self._line)

    async def reserve(self, prepared: PreparedMedia) -> Reservation:
        """Room for its rows, now or later. Raises EmbeddingTooLarge at once, ArenaFull after `wait_s`.

        Cancelling leaves the line.
        """
        self._store.expire(self._clock())
        try:
            return self._store.reserve(prepared.key, prepared.layout.num_rows)
        except ArenaFull as error:
            full = error
        waiting = _Waiting(prepared, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        self._measure()
        is_taken = False
        try:
            await asyncio.wait({waiting.granted}, timeout=self._wait_s)
            if not waiting.granted.done():
                raise full
            is_taken = True
            return waiting.granted.result()
        finally:
            if not waiting.granted.done():
                self._line.remove(waiting)
                self._measure()
            elif not is_taken:
                self._store.abandon(waiting.granted.result())

    async def wait_until_short(self) -> None:
        """Return once little enough stands in line in decoded form."""
        await self._is_short.wait()

    def _room_appeared(self) -> None:
        """Serve the line soon, not now: what was just published must be leased before room is made again."""
        if self._line and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._is_due = False
        refused_rows: int | None = None
        for waiting in list(self._line):
            # What was too much a moment ago still is: each grant leaves less.
            if refused_rows is not None and waiting.num_rows >= refused_rows:
                continue
            try:
                reservation = self._store.reserve(waiting.prepared.key, waiting.num_rows)
            except ArenaFull:
                refused_rows = waiting.num_rows
                continue
            self._line.remove(waiting)
            waiting.granted.set_result(reservation)
        self._measure()

    def _measure(self) -> None:
        if sum(_decoded_bytes(waiting.prepared) for waiting in self._line) >= MAX_WAITING_BYTES:
            self._is_short.clear()
        else:
            self._is_short.set()


def _decoded_bytes(prepared: PreparedMedia) -> int:
    patches = 0 if prepared.patches is None else prepared.patches.pixel_values.nbytes
    mel = 0 if prepared.mel is None else prepared.mel.log_mel.nbytes
    return patches + mel
