"""Schedules that broke real systems, one by one, and the shapes of the tree they must leave.

Long because each schedule is told whole, next to its neighbours, and shares their small language of steps.
"""

from __future__ import annotations

import time

import pytest

from epd.cache.keys import PageKeyChain
from epd.cache.retention import RetentionPolicy
from epd.kv.errors import NoPages, PageStateError
from tests.fakes.cache_driver import SEED, text
from tests.fakes.cache_driver import CacheDriver as Bench


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("window_tokens", [1, 127, 128, 129])
@pytest.mark.parametrize("tail_pages", [1, 2])
def test_identical_prompt_sent_again_hits(page_size: int, off: int, window_tokens: int, tail_pages: int) -> None:
    """Schedules 1, 2 and 5: lengths and windows around page multiples, pages larger than the window."""
    policy = RetentionPolicy(retention_stride_tokens=0, at_chunk_ends=False, tail_pages=tail_pages)
    bench = Bench(page_size, window_tokens, 3000, 3000, policy)
    num_tokens = 6 * max(page_size, 64) + off
    bench.serve(text(0, num_tokens), chunk_tokens=max(page_size, 100))
    assert bench.hit(text(0, num_tokens)) == (num_tokens - 1) // page_size * page_size
    assert bench.hit([*text(0, num_tokens), 1, 2, 3]) == num_tokens // page_size * page_size
    # The second tail page keeps the boundary before that one too.
    shorter = (num_tokens // page_size - tail_pages) * page_size
    assert bench.hit(text(0, num_tokens)[: shorter + 1]) == shorter


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5])
def test_prompts_around_one_page(num_tokens: int) -> None:
    """Schedule 25."""
    bench = Bench()
    assert bench.serve(text(0, num_tokens)) == 0
    assert bench.hit(text(0, num_tokens)) == (num_tokens - 1) // 4 * 4
    assert bench.cache.match([], 0).num_tokens == 0


def test_next_turn_continues_the_response() -> None:
    bench = Bench()
    prompt = text(0, 41)
    pages = bench.prefill(prompt, chunk_tokens=16)
    chain = PageKeyChain(page_size=4, seed=SEED)
    chain.extend(prompt)
    for token in range(30):
        pages.extend(pages.num_committed_tokens + 1)
        chain.append(token)
        pages.commit(chain.num_tokens, chain.keys)
        bench.cache.check()
        assert len(pages.window_pages) <= 2 + 1 + 2
    pages.finish()
    assert bench.hit([*prompt, *range(30), 5, 6]) == 68
    assert bench.hit([*prompt, 999, 998]) == 40
    assert bench.hit([*prompt, *range(10), 999]) == 40


def test_a_shared_chunk_is_computed_twice_and_kept_once() -> None:
    """Two prompts race through the same prefix: rows end up on the same pages and nothing leaks."""
    bench = Bench()
    tokens = text(0, 24)
    keys = bench.keys(tokens)
    first, second = bench.cache.begin(keys, 24), bench.cache.begin(keys, 24)
    first.extend(24)
    second.extend(24)
    own = list(second.full_pages)
    first.commit(24, keys)
    second.commit(24, keys)
    bench.cache.check()
    assert first.full_pages == second.full_pages != own
    assert first.window_pages == second.window_pages
    assert bench.cache.stats().full.leased == 6
    first.abort()
    bench.cache.check()
    assert bench.cache.stats().full.leased == 6
    second.finish()
    assert bench.cache.stats().full.leased == 0


def test_recovering_a_tombstone_locked_by_another_request() -> None:
    """Schedules 3 and 4: the released window page is somebody else's by the time the hole is filled again."""
    bench = Bench()
    reader = bench.prefill(text(0, 40))
    assert reader.window_start == 7
    middle = text(0, 17)
    assert bench.hit(middle) == 0
    other = bench.prefill(text(1, 30))
    recovering = bench.prefill(middle)
    bench.cache.check()
    assert recovering.full_pages[:4] == reader.full_pages[:4]
    assert not set(recovering.window_pages) & set(other.window_pages)
    recovering.finish()
    assert bench.hit(middle) == 16
    for pages in (other, reader):
        pages.finish()
        bench.cache.check()
    assert bench.hit(text(0, 40)) == 36
    assert (
        bench.cache.clear() == bench.num_full - bench.pool.full.num_free or bench.pool.full.num_free == bench.num_full
    )


def test_eviction_is_asked_of_the_pool_that_is_short() -> None:
    """Schedule 8: window pages short with the full pool half empty, then the reverse."""
    bench = Bench(num_full=400, num_window=8)
    bench.serve(text(0, 40), chunk_tokens=8)
    bench.serve(text(1, 40), chunk_tokens=8)
    full_before = bench.cache.stats().full.evictable
    bench.serve(text(2, 40), chunk_tokens=8)
    assert bench.cache.stats().full.evictable == full_before + 10
    assert bench.hit(text(2, 40)) == 36
    bench = Bench(num_full=20, num_window=200)
    bench.serve(text(0, 40))
    bench.serve(text(1, 40))
    bench.serve(text(2, 40))
    assert bench.hit(text(2, 40)) == 36
    assert bench.hit(text(0, 40)) == 0


def test_refusal_counts_what_was_evictable_and_changes_nothing() -> None:
    bench = Bench(num_full=20, num_window=20)
    bench.serve(text(0, 24))
    pages = bench.cache.begin(bench.keys(text(1, 200)), 200)
    before = bench.cache.stats()
    with pytest.raises(NoPages) as refusal:
        pages.extend(200)
    assert (refusal.value.pool, refusal.value.needed, refusal.value.free, refusal.value.evictable) == (
        "full",
        50,
        14,
        6,
    )
    assert bench.cache.stats() == before
    pages.extend(80)
    pages.abort()
    bench.cache.check()


def test_window_eviction_leaves_full_pages_and_their_length_in_the_answer() -> None:
    bench = Bench()
    bench.serve(text(0, 40))
    bench.cache._ledger.evict_window(100)
    bench.cache.check()
    hit = bench.cache.match(bench.keys(text(0, 40)), 40)
    assert (hit.num_tokens, hit.num_full_only_tokens) == (0, 36)


def test_a_branch_that_lost_its_window_is_the_first_to_lose_full_pages() -> None:
    bench = Bench()
    bench.serve(text(0, 40))
    bench.serve(text(1, 40))
    assert bench.hit(text(0, 40)) == 36
    bench.cache._ledger.evict_window(1)
    assert (bench.hit(text(0, 40)), bench.hit(text(0, 41))) == (0, 40)
    bench.cache._ledger.evict_window(1)
    assert bench.hit(text(0, 41)) == 0
    bench.serve(text(0, 5) + text(2, 30))
    bench.cache._ledger.evict_full(9)
    assert bench.hit(text(1, 40)) == 36
    bench.cache.check()


@pytest.mark.parametrize("num_sessions", [2, 4, 6])
def test_round_robin_sessions_do_not_fall_off_a_cliff(num_sessions: int) -> None:
    """Schedule 6: turns of several sessions in a window pool that holds little more than their ends."""
    bench = Bench(
        num_full=2000, num_window=num_sessions * 4 + 14, retention=RetentionPolicy(retention_stride_tokens=16)
    )
    histories = [text(session, 40) for session in range(num_sessions)]
    for turn in range(6):
        for session, history in enumerate(histories):
            cached = bench.serve(history, chunk_tokens=16)
            if turn:
                assert cached == len(history) - 10 - (len(history) - 10) % 4
            histories[session] = history + [turn * 100 + session] * 10


def test_an_idle_session_survives_busy_ones() -> None:
    """Schedule 7: a tool call waits while another session turns over the window pool's interior many times."""
    bench = Bench(num_full=4000, num_window=30, retention=RetentionPolicy(retention_stride_tokens=8))
    idle = text(0, 41)
    bench.serve(idle)
    busy = text(1, 41)
    for turn in range(20):
        bench.serve(busy, chunk_tokens=16)
        busy = busy + [turn] * 12
    assert bench.hit([*idle, 7]) == 40


def test_dense_retention_keeps_every_boundary() -> None:
    bench = Bench(retention=RetentionPolicy(dense_retention_tokens=40, retention_stride_tokens=0, at_chunk_ends=False))
    bench.serve(text(0, 80), chunk_tokens=10)
    for boundary in range(0, 41, 4):
        assert bench.hit(text(0, 80)[: boundary + 1]) == boundary
    assert bench.hit(text(0, 80)[:60]) == 40


def test_stride_and_chunk_ends_are_anchors() -> None:
    bench = Bench(retention=RetentionPolicy(retention_stride_tokens=32, at_chunk_ends=True))
    bench.serve(text(0, 200), chunk_tokens=50)
    assert [bench.hit(text(0, 200)[: boundary + 1]) for boundary in (32, 48, 64, 100, 148, 160)] == [
        32,
        48,
        64,
        100,
        148,
        160,
    ]
    assert bench.hit(text(0, 200)[:80]) == 64


def test_a_boundary_that_was_hit_is_kept() -> None:
    """Two users share a head no policy anchors; the second user's hit makes it an anchor for the third."""
    bench = Bench()
    leader = bench.cache.begin(bench.keys(text(0, 60)), 60)
    keys = bench.keys(text(0, 60))
    leader.extend(24)
    leader.commit(24, keys)
    follower_tokens = text(0, 24) + text(1, 20)
    follower = bench.prefill(follower_tokens)
    assert follower.num_cached_tokens == 24
    leader.extend(60)
    leader.commit(60, keys)
    leader.finish()
    follower.finish()
    bench.cache.check()
    assert bench.hit(text(0, 24) + text(2, 20)) == 24


def test_a_received_prompt_needs_windows_at_its_end_only() -> None:
    bench = Bench(num_window=6)
    tokens = text(0, 101)
    keys = bench.keys(tokens)
    pages = bench.cache.begin(keys, 101, full_only=True)
    start = bench.cache.window_frontier(101)
    assert pages.pages_needed(101, window_start=start) == (26, 3)
    pages.extend(101, window_start=start)
    pages.commit(101, keys)
    bench.cache.check()
    assert (pages.window_start, len(pages.window_pages)) == (23, 3)
    pages.finish()
    # The next turn is sent whole again by prefill: full pages are known here, windows are not needed for that.
    bench.cache._ledger.evict_window(10)
    longer = [*tokens, *range(20)]
    pages = bench.cache.begin(bench.keys(longer), len(longer), full_only=True)
    assert pages.num_cached_tokens == 100
    with pytest.raises(ValueError, match="no window at its end"):
        pages.extend(len(longer))
    pages.extend(len(longer), window_start=bench.cache.window_frontier(len(longer)))
    pages.commit(len(longer), bench.keys(longer))
    pages.finish()
    bench.cache.check()
    assert bench.hit([*longer, 1]) == 120


@pytest.mark.parametrize("more_tokens", [1, 2, 3, 4, 5, 9])
def test_a_sender_that_resumed_from_a_hit_has_every_window_it_must_send(more_tokens: int) -> None:
    """A hit leases no tail page, and the rest of the prompt may be too short to grow one."""
    bench = Bench()
    bench.serve(text(0, 40))
    pages = bench.prefill(text(0, 40) + text(1, more_tokens))
    assert pages.num_cached_tokens == 40
    first = bench.cache.window_frontier(40 + more_tokens)
    assert pages.window_start <= first
    assert None not in [pages.window_page(index) for index in range(first, len(pages.full_pages))]


def test_a_received_window_beyond_a_live_tail_leaves_both() -> None:
    """The receiver's tree ends in a live window; the next window starts further on, with a gap between."""
    bench = Bench()
    bench.serve(text(0, 40))
    longer = text(0, 80)
    pages = bench.cache.begin(bench.keys(longer), 80, full_only=True)
    assert pages.num_cached_tokens == 40
    pages.extend(80, window_start=bench.cache.window_frontier(80))
    pages.commit(80, bench.keys(longer))
    bench.cache.check()
    pages.finish()
    assert [bench.hit(longer[:stop]) for stop in (41, 61)] == [40, 40]
    assert bench.hit([*longer, 1]) == 80
    assert bench.cache.match(bench.keys(longer), 61).num_full_only_tokens == 60


def test_a_window_written_again_makes_the_prefix_usable_again() -> None:
    """The seam healing uses: full pages leased, windows before the end recomputed, then adopted by the tree."""
    bench = Bench()
    tokens = text(0, 61)
    keys = bench.keys(tokens)
    bench.serve(tokens)
    bench.cache._ledger.evict_window(100)
    assert bench.hit(tokens) == 0
    pages = bench.cache.begin(keys, 61, full_only=True)
    assert pages.num_cached_tokens == 60
    full = list(pages.full_pages)
    pages.extend(61, window_start=5)
    pages.commit(61, keys)
    bench.cache.check()
    assert pages.full_pages[:15] == full
    pages.finish()
    assert bench.hit(tokens) == 60


def test_disabled_cache_never_hits_and_still_bounds_windows() -> None:
    bench = Bench(enabled=False, num_window=8)
    pages = bench.prefill(text(0, 200), chunk_tokens=12)
    assert bench.cache.stats().full.evictable == 0
    assert len(pages.window_pages) == 3
    pages.finish()
    assert bench.serve(text(0, 200), chunk_tokens=12) == 0
    assert (bench.pool.full.num_free, bench.pool.window.num_free) == (bench.num_full, 8)


def test_misuse_is_refused() -> None:
    bench = Bench()
    keys = bench.keys(text(0, 20))
    pages = bench.cache.begin(keys, 20)
    with pytest.raises(ValueError, match="room for 0"):
        pages.commit(4, keys)
    pages.extend(20)
    with pytest.raises(ValueError, match="needs 5 page keys, got 2"):
        pages.commit(20, keys[:2])
    with pytest.raises(ValueError, match="window_start is 6; allowed: 0 to 5"):
        pages.extend(20, window_start=6)
    for call in (pages.pages_needed, pages.extend):
        with pytest.raises(ValueError, match="num_tokens is -5; allowed: 0 or more"):
            call(-5)
        with pytest.raises(ValueError, match="window_start is -1; allowed: 0 or more"):
            call(20, window_start=-1)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        pages.commit(-1, keys)
    pages.commit(20, keys)
    with pytest.raises(ValueError, match="20 committed"):
        pages.commit(19, keys)
    pages.finish()
    pages.finish()
    pages.abort()
    with pytest.raises(PageStateError, match="already given back"):
        pages.extend(24)
    with pytest.raises(PageStateError, match="already given back"):
        pages.commit(20, keys)


def test_check_notices_a_stolen_page() -> None:
    bench = Bench()
    pages = bench.prefill(text(0, 22))
    pages.full_pages[-1] = pages.full_pages[0]
    with pytest.raises(PageStateError):
        bench.cache.check()


@pytest.mark.parametrize(("heat", "heat_at"), [(-1.0, 0), (float("inf"), 0), (float("nan"), 0), (1.0, 2)])
def test_check_notices_heat_that_cannot_be(heat: float, heat_at: int) -> None:
    bench = Bench()
    bench.serve(text(0, 22))
    (node,) = bench.cache._ledger.tree.root.children.values()
    node.heat, node.heat_at = heat, heat_at
    with pytest.raises(PageStateError, match="heat"):
        bench.cache.check()


def test_a_chat_grows_one_node_and_lookups_do_not_grow_with_it() -> None:
    bench = Bench(page_size=1, num_full=500, num_window=500)
    history = text(0, 10)
    for turn in range(50):
        assert bench.serve(history) == (0 if turn == 0 else len(history) - 3)
        history = history + [turn] * 3
    assert bench.cache.stats().num_nodes <= 2 * 50


def test_a_very_long_sequence_costs_the_same_per_token() -> None:
    """No step walks the whole sequence: 65,536 pages, then a thousand decode steps; and nothing recurses."""
    bench = Bench(
        page_size=1,
        window_tokens=8,
        num_full=80_000,
        num_window=2_000,
        retention=RetentionPolicy(retention_stride_tokens=64),
    )
    tokens = list(range(65_536))
    keys = bench.keys(tokens)
    pages = bench.cache.begin(keys, len(tokens))
    for stop in range(512, len(tokens) + 1, 512):
        pages.extend(stop)
        pages.commit(stop, keys)
    chain = PageKeyChain(page_size=1, seed=SEED)
    chain.extend(tokens)
    started_s = time.process_time()
    for token in range(1000):
        pages.extend(pages.num_committed_tokens + 1)
        chain.append(token)
        pages.commit(chain.num_tokens, chain.keys)
    per_step_s = (time.process_time() - started_s) / 1000
    pages.finish()
    bench.cache.check()
    assert bench.hit([*tokens, *range(1000), 1]) == 66_536
    assert per_step_s < 1e-3
    bench.cache.clear()
    bench.cache.check()
    assert bench.cache.stats().num_nodes == 0


def test_fits_counts_windows_a_hit_would_pin_even_under_locked_nodes() -> None:
    bench = Bench()
    bench.serve(text(0, 24))
    bench.serve(text(0, 20) + text(1, 20))
    runner = bench.prefill(text(0, 24) + text(2, 60))
    prompt = [*text(0, 24), 9]
    assert runner.num_cached_tokens == bench.hit(prompt) == 24
    stats = bench.cache.stats()
    available = stats.window.free + stats.window.evictable
    assert bench.cache.fits(0, available)
    fits = [bench.cache.fits(0, available - less, keys=bench.keys(prompt), num_tokens=25) for less in (0, 1, 2)]
    assert fits == [False, False, True]
    assert bench.cache.stats() == stats
    pages = bench.cache.begin(bench.keys(prompt), 25)
    assert bench.cache.fits(0, available - 2)
    assert not bench.cache.fits(0, available - 1)
    pages.finish()
    runner.finish()


def test_begin_can_be_held_to_what_a_plan_relied_on() -> None:
    bench = Bench(retention=RetentionPolicy(dense_retention_tokens=1000))
    bench.serve(text(0, 40))
    keys = bench.keys(text(0, 40))
    for cap, cached in ((None, 36), (36, 36), (35, 32), (3, 0), (0, 0), (100, 36)):
        pages = bench.cache.begin(keys, 40, max_cached_tokens=cap)
        assert pages.num_cached_tokens == cached
        pages.abort()
        bench.cache.check()


def test_several_leases_on_one_path_end_in_any_order() -> None:
    """Every receipt released once, in any order, returns all counters to zero."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        bench = Bench(retention=RetentionPolicy(dense_retention_tokens=1000))
        bench.serve(text(0, 60))
        before = bench.cache.stats()
        rows = [bench.cache.begin(bench.keys(text(0, stop)), stop) for stop in (60, 30, 45)]
        assert [row.num_cached_tokens for row in rows] == [56, 28, 44]
        assert bench.cache.stats().full.leased == 14
        for index in order:
            rows[index].abort()
            bench.cache.check()
        after = bench.cache.stats()
        assert (after.full, after.window, after.num_nodes) == (before.full, before.window, before.num_nodes)
