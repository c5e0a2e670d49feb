"""Whether the books of an arena balance: every page has one owner, every lease its entry, every entry its leases."""

from collections import Counter
from itertools import pairwise

from encoder.cache.index import Index


def audit(index: Index) -> None:
    """Read everything at one moment. Raises AssertionError naming what does not fit."""
    with index.reading():
        entries = index.rows("SELECT start, stop, key, num_leases FROM entries")
        reserved = index.rows("SELECT start, stop, holder FROM reservations")
        free = index.rows("SELECT start, stop FROM free ORDER BY start")
        leases = Counter(key for (key,) in index.rows("SELECT key FROM leases"))
        holders = {holder for (holder,) in index.rows("SELECT id FROM holders")}
    counted = {key: num_leases for _, _, key, num_leases in entries if num_leases}
    assert counted == leases, f"entries count leases {counted}, there are {dict(leases)}"
    strays = {holder for _, _, holder in reserved} - holders
    assert not strays, f"reservations of nobody: {strays}"
    assert all(before[1] < after[0] for before, after in pairwise(free)), "free runs touch"
    position = 0
    for start, stop in sorted(row[:2] for row in [*entries, *reserved, *free]):
        assert start == position, f"pages [{start}, {stop}) overlap or leave a hole at page {position}"
        assert stop > start, f"an extent of no pages at {start}"
        position = stop
    assert position == index.geometry.num_pages, f"pages end at {position} of {index.geometry.num_pages}"
