"""Embedding rows on their way to the steps that read them: fetched beside the loop, held until they are computed.

    want --> in line for room --> fetched (row_source.py, its own threads) --> here --> last row computed: dropped
                                               | lost
                                               +--> told once to everyone who wants them

A step reads what is here and nothing else: no copy, no checksum and no first touch of shared memory happens inside one.
One embedding that several requests want is fetched and held once.

Memory. Rows that are held or under way stay within `limit_bytes`, with one exception, without which a large request
could wait for ever: when nothing else is held, the request in front gets all its rows. Room is given in the order in
which requests asked, so those behind hold nothing in part, and who holds everything runs and gives it back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import Tensor

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef

# Where the bytes are. References under different leases meet here.
_Place = tuple[str, str, int, int]
Deliver = Callable[[Tensor | EmbeddingLost], None]


class RowSource(Protocol):
    """Where embedding references lead: `epd.engine.row_source.HostSource`."""

    def fetch(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        """Begin to fetch, without waiting. `deliver` is called once, from any thread, with `[num_rows, width]` on the
        CPU in memory of its own or with why there are none. Calling what is returned ends it; then `deliver` may stay
        uncalled."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests that have everything they want now, and those that never will: in the order in which it happened."""

    ready: tuple[str, ...] = ()
    lost: tuple[tuple[str, EmbeddingLost], ...] = ()


class RowSupply(Protocol):
    """The scheduler's side: an `EmbeddingFeed` or, in front of one on every rank, an `epd.engine.ranks.RankFeed`."""

    def want(self, request_id: str, refs: Sequence[EmbeddingRef], deadline_unix_s: float) -> None:
        """From now on keep these for the request and no others; fetch what is not here."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
        ...

    def holds(self, request_id: str, refs: Sequence[EmbeddingRef]) -> bool:
        """Whether the rows of all these are here and kept for the request."""
        ...

    def collect(self) -> Arrivals:
        """What has changed since the last call; once per step, before planning."""
        ...

    def tensor(self, ref: EmbeddingRef) -> Tensor:
        """`[num_rows, width]` of rows that are held. Raises EmbeddingLost if they are not."""
        ...

    @property
    def held_bytes(self) -> int: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Record:
    """One embedding. `held_bytes` is 0 before it has room and after it was lost."""

    ref: EmbeddingRef
    deadline_unix_s: float
    holders: dict[str, None] = field(default_factory=dict)
    rows: Tensor | None = None
    cancel: Callable[[], None] | None = None
    held_bytes: int = 0

    @property
    def has_begun(self) -> bool:
        return self.cancel is not None


class EmbeddingFeed:
    """All methods on the loop's thread; the source's threads only put what they have into a queue and call `wake`."""

    def __init__(self, source: RowSource, *, limit_bytes: int, wake: Callable[[], None]) -> None:
        self._source = source
        self._limit_bytes = limit_bytes
        self._wake = wake
        self._records: dict[_Place, _Record] = {}
        self._wanted: dict[str, dict[_Place, _Record]] = {}
        # Requests some of whose rows have no room yet, in the order in which they asked.
        self._hungry: dict[str, None] = {}
        self._delivered: SimpleQueue[tuple[_Record, Tensor | EmbeddingLost]] = SimpleQueue()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that are here or being fetched."""
        return self._held_bytes

    @property
    def num_requests(self) -> int:
        """Requests that want something."""
        return len(self._wanted)

    def want(self, request_id: str, refs: Sequence[EmbeddingRef], deadline_unix_s: float) -> None:
        wanted = {_place(ref): ref for ref in refs}
        had = self._wanted.pop(request_id, {})
        for place in [place for place in had if place not in wanted]:
            self._let_go(had.pop(place), request_id)
        for place, ref in wanted.items():
            if place not in had:
                record = self._records.setdefault(place, _Record(ref, deadline_unix_s))
                record.holders[request_id] = None
                had[place] = record
        if had:
            self._wanted[request_id] = had
        if any(not record.has_begun for record in had.values()):
            self._hungry.setdefault(request_id)
        else:
            self._hungry.pop(request_id, None)
        self._begin()

    def forget(self, request_id: str) -> None:
        if request_id in self._wanted:
            self.want(request_id, (), 0.0)

    def holds(self, request_id: str, refs: Sequence[EmbeddingRef]) -> bool:
        wanted = self._wanted.get(request_id, {})
        records = [wanted.get(_place(ref)) for ref in refs]
        return all(record is not None and record.rows is not None for record in records)

    def collect(self) -> Arrivals:
        ready: dict[str, None] = {}
        lost: dict[str, EmbeddingLost] = {}
        while True:
            try:
                record, result = self._delivered.get_nowait()
            except Empty:
                break
            if isinstance(result, EmbeddingLost):
                self._lose(record)
                lost |= {holder: result for holder in record.holders if holder not in lost}
            else:
                record.rows = result
                ready |= dict.fromkeys(holder for holder in record.holders if self._is_whole(holder))
        self._begin()
        return Arrivals(tuple(ready), tuple(lost.items()))

    def tensor(self, ref: EmbeddingRef) -> Tensor:
        record = self._records.get(_place(ref))
        if record is None or record.rows is None:
            raise EmbeddingLost(f"the rows of {ref.key} are not held by this worker")
        return record.rows

    def close(self) -> None:
        """End what is under way; nothing is held any more."""
        for request_id in list(self._wanted):
            self.forget(request_id)
        self._source.close()

    def check(self) -> None:
        """The books balance. Raises AssertionError naming what does not."""
        holders = {(id(record), holder) for record in self._records.values() for holder in record.holders}
        for request_id, wanted in self._wanted.items():
            assert all(request_id in record.holders for record in wanted.values()), f"{request_id} is no holder"
        assert all(request_id in self._wanted for _, request_id in holders), "a holder is not known"
        held_bytes = sum(record.held_bytes for record in self._records.values())
        assert held_bytes == self._held_bytes, f"{self._held_bytes} bytes are booked, {held_bytes} are held"
        assert self._hungry.keys() <= self._wanted.keys(), "someone in line wants nothing"

    def _is_whole(self, request_id: str) -> bool:
        return all(record.rows is not None for record in self._wanted[request_id].values())

    def _begin(self) -> None:
        """Give room to those in front while there is some."""
        while self._hungry:
            request_id = next(iter(self._hungry))
            records = self._wanted[request_id].values()
            for record in records:
                if record.has_begun:
                    continue
                size_bytes = record.ref.size_bytes
                own_bytes = sum(own.held_bytes for own in records)
                if self._held_bytes + size_bytes > self._limit_bytes and self._held_bytes > own_bytes:
                    return
                record.held_bytes = size_bytes
                self._held_bytes += size_bytes
                record.cancel = self._source.fetch(record.ref, record.deadline_unix_s, self._deliver_to(record))
            del self._hungry[request_id]

    def _deliver_to(self, record: _Record) -> Deliver:
        def deliver(result: Tensor | EmbeddingLost) -> None:
            self._delivered.put((record, result))
            self._wake()

        return deliver

    def _let_go(self, record: _Record, request_id: str) -> None:
        del record.holders[request_id]
        if record.holders:
            return
        if record.cancel is not None:
            record.cancel()
        self._lose(record)

    def _lose(self, record: _Record) -> None:
        """Hold it no longer. Whoever wants it after this has it fetched again."""
        self._held_bytes -= record.held_bytes
        record.held_bytes = 0
        record.rows = None
        if self._records.get(_place(record.ref)) is record:
            del self._records[_place(record.ref)]


def _place(ref: EmbeddingRef) -> _Place:
    return ref.key, ref.arena, ref.offset_bytes, ref.checksum
