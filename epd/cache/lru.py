"""Victims in order: a priority queue whose ranks may change, with lazy invalidation."""

from __future__ import annotations

import heapq

__all__ = ["Rank", "VictimQueue"]

Rank = tuple[int, int]
"""(class, last access): the smallest is evicted first. The class is where an eviction policy speaks."""


class VictimQueue:
    """Item ids by rank. All operations are O(log n), amortised; stale heap entries are skipped and swept when many."""

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._ranks: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, item: int) -> bool:
        return item in self._ranks

    def put(self, item: int, rank: Rank) -> None:
        """Add `item`, or change its rank."""
        if self._ranks.get(item) == rank:
            return
        self._ranks[item] = rank
        heapq.heappush(self._heap, (rank, item))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(live, key) for key, live in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, item: int) -> None:
        """Remove `item` if present."""
        self._ranks.pop(item, None)

    def first(self) -> int | None:
        """The next victim, left in the queue; None when empty."""
        while self._heap:
            rank, item = self._heap[0]
            if self._ranks.get(item) == rank:
                return item
            heapq.heappop(self._heap)
        return None

    def rank(self, item: int) -> Rank | None:
        return self._ranks.get(item)
