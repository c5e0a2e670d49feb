"""One pool and the pair of pools: ownership, atomicity, conservation."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd.kv.dual import DualPool
from epd.kv.errors import NoPages, PageStateError
from epd.kv.pages import PageOwner, PagePool
from tests.oracles.effort import effort


def test_low_ids_first_and_every_page_once() -> None:
    pool = PagePool("full", 5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.num_free == 0
    pool.check()


def test_refusal_names_the_numbers_and_changes_nothing() -> None:
    pool = PagePool("window", 3)
    pool.allocate(1)
    with pytest.raises(NoPages, match="window pool: 3 pages needed, 2 free") as refusal:
        pool.allocate(3)
    assert (refusal.value.pool, refusal.value.needed, refusal.value.free) == ("window", 3, 2)
    assert pool.num_free == 2


def test_double_free_and_free_by_a_non_owner_are_errors() -> None:
    pool = PagePool("full", 4)
    first, second = pool.allocate(2)
    pool.free([first], PageOwner.SEQUENCE)
    for pages, owner in (
        ([first], PageOwner.SEQUENCE),
        ([second], PageOwner.TREE),
        ([second, second], PageOwner.SEQUENCE),
        ([second, first], PageOwner.SEQUENCE),
        ([4], PageOwner.SEQUENCE),
        ([-1], PageOwner.SEQUENCE),
        ([second], PageOwner.FREE),
    ):
        with pytest.raises(PageStateError):
            pool.free(pages, owner)
        assert pool.count(PageOwner.SEQUENCE) == 1
        pool.check()


def test_hand_over_moves_between_owners_only() -> None:
    pool = PagePool("full", 2)
    pages = pool.allocate(2)
    pool.hand_over(pages, PageOwner.SEQUENCE, PageOwner.TREE)
    assert [pool.owner(page) for page in pages] == [PageOwner.TREE] * 2
    with pytest.raises(PageStateError, match="held by TREE"):
        pool.hand_over(pages, PageOwner.SEQUENCE, PageOwner.TREE)
    with pytest.raises(PageStateError, match="through free"):
        pool.hand_over(pages, PageOwner.TREE, PageOwner.FREE)


def test_check_finds_a_corrupted_book() -> None:
    pool = PagePool("full", 3)
    pool.allocate(1)
    pool._owners[2] = PageOwner.TREE
    with pytest.raises(PageStateError):
        pool.check()


@pytest.mark.parametrize(("num_full", "num_window", "short"), [(5, 1, "full"), (1, 4, "window"), (5, 4, "full")])
def test_joint_allocation_is_all_or_nothing(num_full: int, num_window: int, short: str) -> None:
    pool = DualPool(num_full_pages=4, num_window_pages=3)
    assert not pool.fits(num_full, num_window)
    with pytest.raises(NoPages) as refusal:
        pool.allocate(num_full, num_window)
    assert refusal.value.pool == short
    assert (pool.full.num_free, pool.window.num_free) == (4, 3)
    grant = pool.allocate(4, 3)
    assert (len(grant.full_pages), len(grant.window_pages)) == (4, 3)


@effort(100)
@given(data=st.data())
def test_any_schedule_conserves_pages(data: st.DataObject) -> None:
    pool = PagePool("full", data.draw(st.integers(0, 12)))
    held: dict[PageOwner, list[int]] = {PageOwner.SEQUENCE: [], PageOwner.TREE: []}
    for _ in range(30):
        action = data.draw(st.sampled_from(["allocate", "free", "hand_over"]))
        owner = data.draw(st.sampled_from([PageOwner.SEQUENCE, PageOwner.TREE]))
        if action == "allocate":
            held[PageOwner.SEQUENCE] += pool.allocate(data.draw(st.integers(0, pool.num_free)))
        else:
            pages = data.draw(st.permutations(held[owner]))[: data.draw(st.integers(0, 4))]
            held[owner] = [page for page in held[owner] if page not in pages]
            if action == "free":
                pool.free(pages, owner)
            else:
                pool.hand_over(pages, owner, PageOwner.TREE)
                held[PageOwner.TREE] += pages
        pool.check()
        for who, pages in held.items():
            assert all(pool.owner(page) is who for page in pages)
            assert pool.count(who) == len(pages)


def test_page_operations_cost_the_same_in_a_large_pool() -> None:
    """4,000 rounds over a million pages: anything that looked at the whole pool would take minutes."""
    pool = DualPool(num_full_pages=1_000_000, num_window_pages=1_000_000)
    started_s = time.process_time()
    for _ in range(4000):
        grant = pool.allocate(2, 1)
        pool.full.hand_over(grant.full_pages, PageOwner.SEQUENCE, PageOwner.TREE)
        assert pool.full.count(PageOwner.TREE) == 2
        pool.full.free(grant.full_pages, PageOwner.TREE)
        pool.window.free(grant.window_pages, PageOwner.SEQUENCE)
        assert pool.fits(1_000_000, 1_000_000)
    assert time.process_time() - started_s < 5
    pool.check()
