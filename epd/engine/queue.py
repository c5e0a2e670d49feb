"""The waiting line: fewest real tokens to compute first, with a linear credit for waiting.

A request that waited t seconds is worth `credit` * t tokens less. Since the credit grows at the same rate for everyone,

    compute - credit * (now - arrival)   orders like   compute + credit * arrival,

which does not change while waiting: a heap suffices. Nobody starves: who comes later than arrival + compute / credit is
always behind. A key is renewed when the hit, and with it `compute`, changes.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from epd.engine.sequence import Sequence


@dataclass(order=True, slots=True)
class _Entry:
    """Ties go by arrival, so that a sequence that was put back is not behind its likes."""

    key: float
    arrival_s: float
    order: int
    num_compute_tokens: int = field(compare=False)
    sequence: Sequence = field(compare=False)
    is_live: bool = field(default=True, compare=False)


class WaitingQueue:
    """A heap of waiting sequences, each known by its request id. Removal is lazy."""

    def __init__(self, *, credit_tokens_per_s: float) -> None:
        self._credit = credit_tokens_per_s
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._orders = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (entry.sequence for entry in self._entries.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def put(self, sequence: Sequence, num_compute_tokens: int) -> None:
        """Add a sequence, or renew its key; ties go by arrival, then by the order of first being put."""
        old = self._entries.get(sequence.request_id)
        if old is not None:
            if old.num_compute_tokens == num_compute_tokens:
                return
            old.is_live = False
        order = next(self._orders) if old is None else old.order
        key = num_compute_tokens + self._credit * sequence.arrival_s
        entry = _Entry(key, sequence.arrival_s, order, num_compute_tokens, sequence)
        self._entries[sequence.request_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def first(self) -> Sequence | None:
        """The sequence to admit next; it stays in line."""
        entry = self._first()
        return None if entry is None else entry.sequence

    def behind_first(self, limit: int) -> list[Sequence]:
        """The next ones, at most `limit`, that may go before the first while there is no room for it.

        They came before arrival + compute / credit of the first: only so many did, and who comes later stays behind it.
        """
        first = self._first()
        if first is None:
            return []
        entries = heapq.nsmallest(limit + 1, self._entries.values())
        return [entry.sequence for entry in entries[1:] if self._credit * entry.arrival_s <= first.key]

    def num_compute_tokens(self, request_id: str) -> int:
        """What the sequence was put with last. Raises KeyError when it is not in line."""
        return self._entries[request_id].num_compute_tokens

    def remove(self, request_id: str) -> Sequence:
        """Raises KeyError when it is not in line."""
        entry = self._entries.pop(request_id)
        entry.is_live = False
        return entry.sequence

    def _first(self) -> _Entry | None:
        while self._heap and not self._heap[0].is_live:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None
