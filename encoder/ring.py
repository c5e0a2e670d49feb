"""Which replica serves a key: consistent hashing with bounded load. Pure; equal inputs give equal answers everywhere.

Each replica owns `POINTS_PER_REPLICA` points on a circle of 64-bit hashes; a key belongs to the first point at or after
its own hash. When replicas come and go only the keys of their own arcs move. A replica that already carries more than
its share of the load is passed over, and the key goes to the next one on the circle.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence

import xxhash

POINTS_PER_REPLICA = 128
# A replica may carry this much more than the mean before keys spill over, and always this many jobs: spilling costs a
# cache miss, so a few jobs of imbalance are cheaper.
LOAD_FACTOR = 1.25
MIN_CAPACITY = 8


class Ring:
    """The circle of a fixed set of replica names."""

    def __init__(self, replicas: Sequence[str]) -> None:
        """No replicas is a circle that never chooses anybody. Raises ValueError for a name given twice."""
        if len(set(replicas)) != len(replicas):
            raise ValueError(f"replicas must be distinct: {list(replicas)}")
        self._num_replicas = len(replicas)
        points = sorted((_hash(f"{name}/{i}"), name) for name in replicas for i in range(POINTS_PER_REPLICA))
        self._hashes = [point for point, _ in points]
        self._owners = [name for _, name in points]

    def preference(self, key: str) -> Iterator[str]:
        """Every replica once, the key's owner first, then in the order met along the circle."""
        start = bisect.bisect_left(self._hashes, _hash(key))
        seen: set[str] = set()
        for step in range(len(self._owners)):
            name = self._owners[(start + step) % len(self._owners)]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == self._num_replicas:
                    return

    def choose(self, key: str, loads: Mapping[str, int], exclude: frozenset[str] = frozenset()) -> str | None:
        """The first replica of `preference` that is up and below capacity; `loads` holds jobs in flight of those up.

        Replicas in `exclude` are skipped. When all others are at capacity the owner takes it anyway; None when none
        is up.
        """
        usable = [name for name in self.preference(key) if name in loads and name not in exclude]
        if not usable:
            return None
        capacity = max(MIN_CAPACITY, bounded_capacity(sum(loads.values()), len(loads)))
        return next((name for name in usable if loads[name] < capacity), usable[0])


def bounded_capacity(num_jobs: int, num_replicas: int) -> int:
    """Jobs one replica may hold once one more job is placed: the ceiling of LOAD_FACTOR times the mean."""
    return -int(-(LOAD_FACTOR * (num_jobs + 1)) // num_replicas)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
