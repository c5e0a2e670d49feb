"""Properties of the parts the cache is made of: the release frontier, the usable prefix, the pools."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.cache.window import longest_usable, num_window_pages, release_frontier, window_floor
from epd.kv.dual import DualPool
from epd.kv.errors import NoPages, PageStateError
from epd.kv.pages import PageOwner, PagePool
from tests.oracles.effort import scaled

thorough = settings(max_examples=scaled(2000), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@thorough
@given(
    st.integers(1, 9), st.integers(0, 40), st.integers(1, 3), st.integers(1, 20), st.integers(0, 200), st.integers(0, 9)
)
def test_the_release_frontier_is_monotone_and_leaves_the_window(
    page_size: int, window_tokens: int, tail_pages: int, interval_tokens: int, num_tokens: int, more: int
) -> None:
    frontiers = [
        release_frontier(
            committed,
            window_tokens=window_tokens,
            page_size=page_size,
            tail_pages=tail_pages,
            interval_tokens=interval_tokens,
        )
        for committed in range(num_tokens, num_tokens + more + 1)
    ]
    assert all(before <= after for before, after in pairwise(frontiers))
    for committed, frontier in zip(range(num_tokens, num_tokens + more + 1), frontiers, strict=True):
        assert 0 <= frontier * page_size <= max(0, committed - window_tokens)
        # The boundary the next publish uses, and the tail boundaries before it, keep their windows whole.
        boundary = committed // page_size
        for kept in range(max(0, boundary - tail_pages), boundary + 1):
            assert frontier <= window_floor(kept, num_window_pages(window_tokens, page_size))
        # What stays is bounded: window, tail and interval, and a part of a page at either end.
        most = window_tokens + interval_tokens - 1 + (tail_pages + 2) * page_size
        assert committed - frontier * page_size <= most


@thorough
@given(st.integers(0, 2**13 - 1), st.integers(1, 4), st.integers(0, 13), st.integers(0, 12))
def test_the_usable_prefix_is_the_longest_whose_window_tokens_are_live(
    bits: int, page_size: int, window_tokens: int, max_pages: int
) -> None:
    live = [digit == "1" for digit in f"{bits:b}"[1:]]
    usable = [
        pages
        for pages in range(min(len(live), max_pages) + 1)
        if all(
            live[token // page_size] for token in range(max(0, pages * page_size - window_tokens), pages * page_size)
        )
    ]
    assert longest_usable(live, num_window_pages(window_tokens, page_size), max_pages) == usable[-1]


@thorough
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 2**32))
def test_the_order_of_frees_does_not_matter(num_pages: int, num_freed: int, seed: int) -> None:
    pools = [PagePool("full", num_pages) for _ in range(2)]
    taken, _ = (pool.allocate(num_pages) for pool in pools)
    freed = taken[:num_freed]
    order = random.Random(seed).sample(freed, len(freed))
    pools[0].free(freed, PageOwner.SEQUENCE)
    for page in order:
        pools[1].free([page], PageOwner.SEQUENCE)
    for pool in pools:
        pool.check()
        assert sorted(pool._free) == sorted(freed)
    assert pools[0]._owners == pools[1]._owners
    for page in order:
        with pytest.raises(PageStateError):
            pools[1].free([page], PageOwner.SEQUENCE)
    # What is handed out next is the same set, whatever the order was.
    assert set(pools[0].allocate(len(freed))) == set(pools[1].allocate(len(freed)))


@thorough
@given(st.integers(0, 6), st.integers(0, 6), st.binary(max_size=6))
def test_a_joint_allocation_takes_all_or_nothing(num_full: int, num_window: int, wants: bytes) -> None:
    pool = DualPool(num_full_pages=num_full, num_window_pages=num_window)
    for byte in wants:
        want = byte % 5, byte // 5 % 5
        before = list(pool.full._free), list(pool.window._free), bytes(pool.full._owners), bytes(pool.window._owners)
        fits = want[0] <= len(before[0]) and want[1] <= len(before[1])
        assert pool.fits(*want) == fits
        if fits:
            grant = pool.allocate(*want)
            assert (len(set(grant.full_pages)), len(set(grant.window_pages))) == want
            assert set(grant.full_pages) <= set(before[0])
            assert set(grant.window_pages) <= set(before[1])
            continue
        with pytest.raises(NoPages) as refusal:
            pool.allocate(*want)
        assert (refusal.value.pool == "full") == (want[0] > len(before[0]))
        assert before == (pool.full._free, pool.window._free, bytes(pool.full._owners), bytes(pool.window._owners))
    pool.check()
