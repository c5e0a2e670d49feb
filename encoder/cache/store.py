"""The embedding cache of one encoder process: reserve -> publish, lease -> release, eviction in between.

Room is reserved before the tower runs (the number of rows is known from the layout), so a full arena costs no
computation. The first published value of a key is its value as long as it stays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from encoder.cache.arena import Arena, Extent
from encoder.cache.index import CacheIndex, Entry
from encoder.errors import ArenaFull, EmbeddingTooLarge
from encoder.types import EmbeddingRef
from preprocess.types import MediaKey, MediaLayout


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Room for one embedding, to be published or abandoned exactly once. `destination` is where its bytes go."""

    key: MediaKey
    extent: Extent
    destination: memoryview


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Bytes of the arena by state; the four add up to `capacity_bytes`."""

    capacity_bytes: int
    free_bytes: int
    evictable_bytes: int
    leased_bytes: int
    reserved_bytes: int


class EmbeddingStore:
    """Facade over arena and index. `width` and `dtype` describe every row; used from one thread."""

    def __init__(self, arena: Arena, index: CacheIndex, *, width: int, dtype: str, row_bytes: int) -> None:
        self._arena = arena
        self._index = index
        self._width = width
        self._dtype = dtype
        self._row_bytes = row_bytes
        self._reserved: set[Reservation] = set()
        self.on_room: Callable[[], None] | None = None
        """Called whenever something can be evicted, or is free, that was not before."""

    def __len__(self) -> int:
        return len(self._index)

    def reserve(self, key: MediaKey, num_rows: int) -> Reservation:
        """Room for `num_rows`, evicting unleased embeddings if need be.

        Raises EmbeddingTooLarge if the arena could never hold it, ArenaFull if leases are in the way; then nothing was
        evicted.
        """
        size_bytes = num_rows * self._row_bytes
        num_pages = self._arena.pages_for(size_bytes)
        if num_pages > self._arena.pages.num_pages:
            raise EmbeddingTooLarge(
                f"the embedding of this medium needs {size_bytes} bytes, the arena has {self._arena.size_bytes}"
            )
        extent = self._arena.pages.reserve(num_pages)
        if extent is None and self._longest_obtainable() < num_pages:
            raise ArenaFull(
                f"no {size_bytes} bytes in one piece are free of leases", retry_after_s=1.0, needed_bytes=size_bytes
            )
        for victim in self._index.victims():
            if extent is not None:
                break
            self._arena.pages.free(self._index.remove(victim.key).extent)
            extent = self._arena.pages.reserve(num_pages)
        assert extent is not None, "evicting everything gives the longest obtainable run"
        reservation = Reservation(key, extent, self._arena.view(extent, size_bytes))
        self._reserved.add(reservation)
        return reservation

    def publish(
        self, reservation: Reservation, *, layout: MediaLayout, checksum: int, warnings: tuple[str, ...] = ()
    ) -> None:
        """Make the bytes in `reservation.destination` the value of the key. Raises ValueError for a published key."""
        self._index.add(Entry(reservation.key, reservation.extent, layout, checksum, warnings))
        self._reserved.remove(reservation)
        reservation.destination.release()
        self._room_appeared(1)

    def abandon(self, reservation: Reservation) -> None:
        """Give unused room back."""
        self._reserved.remove(reservation)
        reservation.destination.release()
        self._arena.pages.free(reservation.extent)
        self._room_appeared(1)

    def lookup(self, key: MediaKey) -> Entry | None:
        return self._index.lookup(key)

    def lease(self, key: MediaKey, *, owner: str, expires_s: float) -> EmbeddingRef:
        """A reference that keeps the embedding until released or expired. Raises KeyError for an unknown key."""
        lease = self._index.lease(key, owner=owner, expires_s=expires_s)
        entry = self._index.lookup(key)
        assert entry is not None
        return EmbeddingRef(
            key=key,
            arena=self._arena.name,
            offset_bytes=self._arena.offset_bytes(entry.extent),
            num_rows=entry.layout.num_rows,
            width=self._width,
            dtype=self._dtype,
            checksum=entry.checksum,
            lease_id=lease.lease_id,
        )

    def release(self, lease_id: str) -> bool:
        """End a lease; False for an id that is not current."""
        return self._room_appeared(self._index.release(lease_id)) > 0

    def release_owner(self, owner: str) -> int:
        """End all leases of an owner; how many there were."""
        return self._room_appeared(self._index.release_owner(owner))

    def expire(self, now_s: float) -> int:
        """End leases past their time; how many there were."""
        return self._room_appeared(self._index.expire(now_s))

    def content(self, key: MediaKey) -> bytes:
        """A copy of the bytes of a published embedding, for readers on other hosts."""
        entry = self._index.lookup(key)
        if entry is None:
            raise KeyError(key)
        return bytes(self._arena.view(entry.extent, entry.layout.num_rows * self._row_bytes))

    @property
    def num_leases(self) -> int:
        return self._index.num_leases

    def _room_appeared(self, num_ended: int) -> int:
        if num_ended and self.on_room is not None:
            self.on_room()
        return num_ended

    def _longest_obtainable(self) -> int:
        """Pages of the longest run between those that are leased or reserved."""
        kept = [entry.extent for entry in self._index.entries() if entry.leases]
        kept += [reservation.extent for reservation in self._reserved]
        end = self._arena.pages.num_pages
        borders = [(0, 0), *sorted((extent.start, extent.stop) for extent in kept), (end, end)]
        return max(start - stop for (_, stop), (start, _) in pairwise(borders))

    def usage(self) -> StoreUsage:
        page = self._arena.page_bytes
        leased = sum(entry.extent.num_pages for entry in self._index.entries() if entry.leases)
        idle = sum(entry.extent.num_pages for entry in self._index.entries() if not entry.leases)
        return StoreUsage(
            capacity_bytes=self._arena.size_bytes,
            free_bytes=self._arena.pages.num_free * page,
            evictable_bytes=idle * page,
            leased_bytes=leased * page,
            reserved_bytes=sum(reservation.extent.num_pages for reservation in self._reserved) * page,
        )

    def check(self) -> None:
        """Books balance: free + evictable + leased + reserved == capacity, and no page has two owners."""
        self._index.check()
        usage = self.usage()
        total = usage.free_bytes + usage.evictable_bytes + usage.leased_bytes + usage.reserved_bytes
        assert total == usage.capacity_bytes, f"pages leak: {usage}"
        owned = [entry.extent for entry in self._index.entries()]
        owned += [reservation.extent for reservation in self._reserved]
        ordered = sorted([*owned, *self._arena.pages.free_extents], key=lambda extent: extent.start)
        position = 0
        for extent in ordered:
            assert extent.start == position, f"{extent} overlaps or leaves a hole at page {position}"
            position = extent.stop
        assert position == self._arena.pages.num_pages, f"pages end at {position}"

    def close(self) -> None:
        """Unlink the arena."""
        self._arena.close()
