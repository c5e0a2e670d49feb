"""How much of an arena is in which state."""

from dataclasses import dataclass

from encoder.cache.index import Index


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Bytes of the arena by state; the four add up to `capacity_bytes`."""

    capacity_bytes: int
    free_bytes: int
    evictable_bytes: int
    leased_bytes: int
    reserved_bytes: int


def usage_of(index: Index) -> StoreUsage:
    """Of one moment; what is neither free nor leased nor reserved can be evicted."""
    page_bytes, num_pages = index.geometry.page_bytes, index.geometry.num_pages
    free, leased, reserved = index.row(
        "SELECT (SELECT coalesce(sum(stop - start), 0) FROM free),"
        " (SELECT coalesce(sum(stop - start), 0) FROM entries WHERE num_leases > 0),"
        " (SELECT coalesce(sum(stop - start), 0) FROM reservations)"
    )
    return StoreUsage(
        capacity_bytes=num_pages * page_bytes,
        free_bytes=free * page_bytes,
        evictable_bytes=(num_pages - free - leased - reserved) * page_bytes,
        leased_bytes=leased * page_bytes,
        reserved_bytes=reserved * page_bytes,
    )
