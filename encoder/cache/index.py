"""Which embeddings an arena holds, who leases them, and which go first. Pure; times are given, extents are opaque.

lookup -> Entry | None            a predicate: changes nothing
lease / release / expire          an entry with a lease is never evicted
add / remove                      by the store, which owns the pages
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from encoder.cache.arena import Extent
from preprocess.types import MediaKey, MediaLayout


@dataclass(slots=True)
class Entry:
    """One published embedding; `leases` are the ids that keep it."""

    key: MediaKey
    extent: Extent
    layout: MediaLayout
    checksum: int
    warnings: tuple[str, ...] = ()
    leases: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Lease:
    lease_id: str
    key: MediaKey
    owner: str
    expires_s: float


class CacheIndex:
    """Entries by key, leases by id, and the order in which unleased entries are evicted (least recently used first)."""

    def __init__(self, lease_prefix: str) -> None:
        """`lease_prefix` starts every lease id, so that ids of an earlier process never match."""
        self._prefix = lease_prefix
        self._entries: dict[MediaKey, Entry] = {}
        self._leases: dict[str, Lease] = {}
        self._idle: OrderedDict[MediaKey, None] = OrderedDict()
        self._num_issued = 0

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: MediaKey) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Publish an entry, at first without a lease. Raises ValueError for a key that is present."""
        if entry.key in self._entries:
            raise ValueError(f"{entry.key} is already published; the first value is the value")
        self._entries[entry.key] = entry
        self._idle[entry.key] = None

    def lease(self, key: MediaKey, *, owner: str, expires_s: float) -> Lease:
        """A new lease on a published key. Raises KeyError for an unknown one."""
        entry = self._entries[key]
        self._num_issued += 1
        lease = Lease(f"{self._prefix}:{self._num_issued}", key, owner, expires_s)
        self._leases[lease.lease_id] = lease
        entry.leases.add(lease.lease_id)
        self._idle.pop(key, None)
        return lease

    def release(self, lease_id: str) -> bool:
        """End one lease; False for an id that is unknown, expired or already released."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        entry = self._entries[lease.key]
        entry.leases.remove(lease_id)
        if not entry.leases:
            # Released last means used last: it goes to the young end.
            self._idle[lease.key] = None
        return True

    def release_owner(self, owner: str) -> int:
        """End all leases of one owner; how many there were."""
        ids = [lease.lease_id for lease in self._leases.values() if lease.owner == owner]
        return sum(self.release(lease_id) for lease_id in ids)

    def expire(self, now_s: float) -> int:
        """End the leases whose time has passed, those of vanished peers among them; how many there were."""
        ids = [lease.lease_id for lease in self._leases.values() if lease.expires_s <= now_s]
        return sum(self.release(lease_id) for lease_id in ids)

    def next_expiry_s(self) -> float | None:
        """The earliest end of a lease, None without leases."""
        return min((lease.expires_s for lease in self._leases.values()), default=None)

    def victims(self) -> Iterator[Entry]:
        """Unleased entries, least recently used first. Safe to remove what was yielded."""
        for key in tuple(self._idle):
            yield self._entries[key]

    def remove(self, key: MediaKey) -> Entry:
        """Take an unleased entry out. Raises KeyError for an unknown key, ValueError for a leased one."""
        entry = self._entries[key]
        if entry.leases:
            raise ValueError(f"{key} has {len(entry.leases)} leases")
        del self._idle[key]
        return self._entries.pop(key)

    def entries(self) -> Iterator[Entry]:
        """Every published entry, in no particular order."""
        return iter(self._entries.values())

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        """Entries, leases and the eviction order agree. Raises AssertionError naming what does not."""
        for entry in self._entries.values():
            assert (entry.key in self._idle) == (not entry.leases), f"{entry.key}: idle order and leases disagree"
            for lease_id in entry.leases:
                assert self._leases[lease_id].key == entry.key, f"lease {lease_id} names another key"
        assert len(self._leases) == sum(len(entry.leases) for entry in self._entries.values()), "stray leases"
        assert self._idle.keys() <= self._entries.keys(), "eviction order names unknown keys"
