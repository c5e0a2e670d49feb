"""The tiered cache, situation by situation: what is hit, what is copied, who waits, and what a fault leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from epd.cache.prefix import PrefixCache, PrefixHit
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.tiered import StagedPagesLost, TieredCache
from epd.kv.copies import CopyFailed, InstantMover
from epd.kv.dual import DualPool
from epd.kv.errors import NoPages
from tests.fakes.tag_mover import TagMover
from tests.oracles.tier_oracle import Memory

P, W = 4, 8
"""Tokens of a page and of a window; a window is two pages, and one more is kept with it at ends."""


def keys(name: str, num_pages: int, *, after: Sequence[bytes] = ()) -> list[bytes]:
    """Page keys of a path of that name, from the first page or behind others."""
    return [*after, *(f"{name}{index:04}".encode().rjust(16, b"_") for index in range(len(after), num_pages))]


def make_device(full: int, window: int) -> PrefixCache:
    return PrefixCache(
        DualPool(num_full_pages=full, num_window_pages=window),
        page_size=P,
        window_tokens=W,
        retention=RetentionPolicy(retention_stride_tokens=0, learning_threshold_tokens=P, at_chunk_ends=False),
    )


class Bench:
    """A cache whose copies end when told to, and sequences in one call."""

    def __init__(
        self, *, full: int = 40, window: int = 40, host_full: int = 60, host_window: int = 60, **options: Any
    ) -> None:
        self.device = make_device(full, window)
        self.host = HostTier(num_full_pages=host_full, num_window_pages=host_window)
        self.mover = TagMover(Memory(full, window), Memory(host_full, host_window))
        self.cache = TieredCache(self.device, host=self.host, mover=self.mover, **options)

    def compute(self, path: Sequence[bytes]) -> SequencePages:
        """A sequence that computes all pages of the path and one token more, resumed from what there is."""
        row = self.cache.resume(path, len(path) * P + 1)
        row.extend(len(path) * P + 1)
        row.commit(len(path) * P, path)
        return row

    def serve(self, path: Sequence[bytes], *, saves: bool = True, ends_copies: bool = True) -> None:
        self.compute(path).finish()
        if saves:
            self.cache.ended(path, len(path))
        if ends_copies:
            self.end_copies()

    def end_copies(self) -> None:
        while self.cache.next_event_pending:
            for ticket in self.mover.pending:
                ticket.end()
            self.cache.poll()

    def hit(self, path: Sequence[bytes]) -> PrefixHit:
        return self.cache.match(path, len(path) * P + 1)

    def close(self) -> None:
        self.end_copies()
        self.cache.check()
        stats = self.cache.stats()
        assert stats.host is not None
        assert (stats.full.leased, stats.window.leased) == (0, 0)
        assert (stats.host.full.pinned, stats.host.full.filling, stats.host.window.pinned) == (0, 0, 0)


def test_without_a_host_tier_it_is_the_device_cache() -> None:
    device = make_device(40, 40)
    cache, path = TieredCache(device), keys("a", 6)
    row = cache.resume(path, 25)
    row.extend(25)
    row.commit(24, path)
    row.finish()
    assert row.arrival is None
    assert cache.match(path, 25) == device.match(path, 25) == PrefixHit(24, 24)
    assert device.ledger.witness is None
    assert cache.stats() == device.stats()
    assert cache.stage(path, 20) is None
    assert not cache.next_event_pending
    for call in (cache.ended, cache.prefilled):
        call(path, 6)
    cache.admitted(path, PrefixHit(24, 24))
    cache.poll()
    assert cache.clear() == 6


def test_what_does_not_go_together_is_refused() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="host and mover"):
        TieredCache(bench.device, host=bench.host)
    with pytest.raises(ValueError, match="host and mover"):
        TieredCache(bench.device, mover=InstantMover())
    with pytest.raises(ValueError, match="hit_threshold"):
        TieredCache(bench.device, hit_threshold=0)


def test_backup_eviction_and_load_restore_the_identical_hit() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path)
    before = bench.hit(path)
    assert before == PrefixHit(36, 36)
    bench.device.clear()
    assert bench.device.match(path, 37) == PrefixHit(0, 0)
    assert bench.hit(path) == PrefixHit(36, 36, num_host_tokens=36)
    row = bench.cache.resume(path, 37)
    assert (row.num_cached_tokens, row.num_published_pages) == (36, 0)
    (load,) = bench.mover.pending
    assert (len(load.copies.full), len(load.copies.window), len(load.copies.local_window)) == (9, 2, 0)
    row.extend(37)
    row.commit(36, path)
    assert bench.device.match(path, 37) == PrefixHit(36, 36)
    row.finish()
    # Idempotent: the host has all of it, and the device as well.
    bench.cache.ended(path, 9)
    assert not bench.mover.pending
    bench.close()


def test_a_window_alone_comes_from_the_host_and_goes_into_the_tree() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path)
    bench.device.ledger.evict_window(40)
    assert bench.device.match(path, 37) == PrefixHit(0, 36)
    assert bench.hit(path) == PrefixHit(36, 36)
    row = bench.cache.resume(path, 37)
    (load,) = bench.mover.pending
    assert (load.copies.full, len(load.copies.window)) == ((), 2)
    row.extend(37)
    row.commit(36, path)
    row.abort()
    bench.end_copies()
    # Anchored as a boundary that was hit: it outlives the sequence.
    assert bench.device.match(path, 37) == PrefixHit(36, 36)
    bench.close()


def test_a_window_half_here_and_half_there_is_one_hit() -> None:
    """Exactly what the device lacks comes from the host; what it has is copied on the device."""
    bench, path = Bench(), keys("a", 9)
    bench.serve(path)
    bench.device.ledger.evict_window(2)
    bench.host.window.discard(path[8:])
    device_windows = [index for index in (7, 8) if _has_window(bench, path, index)]
    assert device_windows == [8]
    assert bench.hit(path) == PrefixHit(36, 36)
    row = bench.cache.resume(path, 37)
    (load,) = bench.mover.pending
    assert (len(load.copies.full), len(load.copies.window), len(load.copies.local_window)) == (0, 1, 1)
    row.abort()
    bench.close()


def _has_window(bench: Bench, path: Sequence[bytes], index: int) -> bool:
    walk = bench.device.walk(path, len(path) * P + 1)
    return any(
        node.start <= index < node.stop and node.window_page(index) is not None
        for node in bench.device.ledger.tree.upwards(walk.node)
    )


def test_what_the_host_lost_after_the_lookup_is_not_relied_on() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path)
    bench.device.clear()
    hit = bench.hit(path)
    bench.host.full.discard(path[6:7])
    row = bench.cache.resume(path, 37, hit.num_tokens)
    assert row.num_cached_tokens == 0  # no window before page 6
    row.abort()
    bench.host.full.clear()
    assert bench.hit(path) == PrefixHit(0, 0)
    bench.close()


def test_a_cap_is_kept_to() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path[:6])
    bench.serve(path)
    bench.device.clear()
    row = bench.cache.resume(path, 37, 27)
    assert row.num_cached_tokens == 24
    row.abort()
    bench.close()


def test_two_sequences_load_overlapping_paths_at_once() -> None:
    bench, path = Bench(), keys("a", 9)
    fork = keys("b", 9, after=path[:6])
    bench.serve(path)
    bench.serve(fork)
    bench.device.clear()
    rows = [bench.cache.resume(path, 37), bench.cache.resume(fork, 37)]
    assert len(bench.mover.pending) == 2
    for row, names in zip(rows, (path, fork), strict=True):
        row.extend(37)
        row.commit(36, names)
        bench.cache.check()
    assert rows[0].full_pages[:6] == rows[1].full_pages[:6]  # the second took the tree's, and freed its own
    for row in rows:
        row.finish()
    bench.close()


@pytest.mark.parametrize("end", ["abort", "finish", "condemn"])
def test_a_row_that_ends_waits_for_its_copy(end: str) -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path)
    bench.device.clear()
    row = bench.cache.resume(path, 37)
    (load,) = bench.mover.pending
    getattr(row, end)()
    assert load.is_done()
    assert bench.device.match(path, 37) == PrefixHit(0, 0)  # nothing was computed, nothing is shown
    bench.close()


def test_a_copy_that_fails_is_a_failed_commit_and_leaves_nothing() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path)
    bench.device.clear()
    row = bench.cache.resume(path, 37)
    row.extend(37)
    bench.mover.pending[0].end(fails=True)
    with pytest.raises(CopyFailed):
        row.commit(37, path)
    assert row.num_published_pages == 0
    row.abort()
    bench.cache.poll()
    stats = bench.cache.stats().host
    assert stats is not None
    assert (stats.num_failed_loads, stats.num_loaded_full_pages) == (1, 0)
    bench.close()


def test_an_allocation_waits_for_the_copies_that_keep_pages() -> None:
    """Evicting a page that is being saved would lose what the host was promised; there is no need to give up either."""
    bench, path = Bench(full=12, window=12), keys("a", 9)
    bench.serve(path, ends_copies=False)
    assert bench.mover.pending
    assert not bench.cache.fits(12, 0)
    row = bench.cache.resume(keys("b", 12), 49)
    row.extend(48)
    assert len(row.full_pages) == 12
    assert bench.host.full.num_ready == 9
    row.abort()
    assert bench.hit(path) == PrefixHit(36, 36, num_host_tokens=36)
    bench.close()


def test_an_allocation_waits_for_a_load_that_keeps_windows() -> None:
    bench, path = Bench(full=20, window=6), keys("a", 9)
    bench.serve(path[:3])
    bench.device.ledger.evict_window(2)
    bench.host.window.discard(path[2:3])
    row = bench.cache.resume(path[:3], 13)
    (load,) = bench.mover.pending
    assert load.copies.local_window
    row.extend(20)
    with pytest.raises(NoPages):
        row.extend(40)
    assert load.is_done()
    row.abort()
    bench.close()


def test_what_nobody_saved_is_saved_on_its_way_out() -> None:
    """An aborted request was not written through; its full pages go to the host before the device loses them."""
    bench, path = Bench(), keys("a", 9)
    bench.compute(path).abort()
    bench.device.ledger.evict_full(4)
    assert [bench.host.full.get(key) is not None for key in path] == [False] * 5 + [True] * 4
    bench.device.ledger.evict_full(40)
    assert bench.hit(path).num_full_only_tokens == 36
    stats = bench.cache.stats().host
    assert stats is not None
    assert stats.num_rescued_pages >= 9
    bench.close()


def test_a_rescue_that_fails_is_a_loss_and_no_more() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.compute(path).abort()
    bench.mover.fails = True
    assert bench.device.ledger.evict_full(40) == 9
    assert bench.hit(path) == PrefixHit(0, 0)
    bench.close()


def test_a_backup_that_fails_is_tried_again_by_the_next_request() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path, ends_copies=False)
    for ticket in bench.mover.pending:
        ticket.end(fails=True)
    bench.end_copies()
    assert bench.host.full.num_free == 60
    bench.serve(path)
    bench.device.clear()
    assert bench.hit(path) == PrefixHit(36, 36, num_host_tokens=36)
    bench.close()


def test_a_host_full_of_pins_holds_up_nothing() -> None:
    bench, path, other = Bench(full=12, host_full=9), keys("a", 9), keys("b", 9)
    bench.serve(path)
    bench.host.full.pin(path)
    bench.serve(other)
    assert bench.hit(other) == PrefixHit(36, 36)
    bench.serve(keys("c", 9))  # evicts what the host had no room for
    assert bench.hit(other).num_tokens == 0
    bench.host.full.unpin(path)
    assert bench.hit(path).num_tokens == 36
    stats = bench.cache.stats().host
    assert stats is not None
    assert stats.num_unsaved_pages >= 18
    bench.close()


def test_a_path_longer_than_the_host_is_saved_from_its_beginning() -> None:
    bench, path = Bench(host_full=6), keys("a", 9)
    bench.serve(path)
    assert [bench.host.full.get(key) is not None for key in path] == [True] * 6 + [False] * 3
    assert bench.host.window.num_ready == 0  # a window behind pages that are not there is of no use
    bench.close()


def test_a_path_that_grows_makes_no_room_by_losing_its_own_beginning() -> None:
    bench, path = Bench(host_full=8), keys("a", 12)
    bench.serve(path[:6])
    bench.serve(path)
    assert [bench.host.full.get(key) is not None for key in path] == [True] * 8 + [False] * 4
    bench.close()


def test_a_path_that_grows_takes_the_room_of_those_used_before_it() -> None:
    bench, path, other = Bench(host_full=8), keys("a", 8), keys("b", 2)
    bench.serve(path[:6])
    bench.serve(other)
    bench.serve(path)
    assert bench.host.full.ready([*path, *other]) == path
    bench.close()


def test_room_for_what_is_copied_is_counted_before_it_is_promised() -> None:
    bench, path = Bench(full=12, window=12), keys("a", 9)
    bench.serve(path)
    bench.device.clear()
    assert bench.cache.fits(3, 10, keys=path, num_tokens=37)
    assert not bench.cache.fits(4, 10, keys=path, num_tokens=37)
    assert not bench.cache.fits(3, 11, keys=path, num_tokens=37)
    assert bench.cache.fits(3, 12, keys=path, num_tokens=37, full_only=True)
    other = bench.cache.begin(keys("b", 4), 17)
    other.extend(16)
    books = bench.cache.stats().full
    with pytest.raises(NoPages):
        bench.cache.resume(path, 37)
    assert bench.cache.stats().full == books
    other.abort()
    bench.close()


def test_pages_are_saved_while_their_sequence_runs_once_they_were_hit_often() -> None:
    bench, path = Bench(hit_threshold=3), keys("a", 9)
    first = bench.compute(path)
    for number in (1, 2, 3):
        assert bench.host.full.num_ready == 0
        hit = bench.hit(path)
        row = bench.cache.resume(path, 37, hit.num_tokens)
        bench.cache.admitted(path, hit)
        bench.end_copies()
        row.abort()
        assert bool(bench.host.full.num_ready) == (number == 3)
    first.abort()
    bench.device.clear()
    assert bench.hit(path) == PrefixHit(36, 36, num_host_tokens=36)
    bench.close()


def test_a_branch_that_was_learned_is_known_to_the_host() -> None:
    """Where two prompts part the window is kept on the device; when it has gone there, the host has it."""
    bench, trunk = Bench(), keys("a", 6)
    bench.serve(keys("b", 10, after=trunk))
    bench.serve(keys("c", 10, after=trunk))
    bench.device.clear()
    third = keys("d", 10, after=trunk)
    assert bench.hit(third) == PrefixHit(24, 24, num_host_tokens=24)
    bench.close()


def test_windows_left_behind_make_room_before_those_of_others() -> None:
    """One conversation that goes on leaves windows behind; the one that waits keeps its own."""
    bench, waiting = Bench(full=400, window=200, host_full=300, host_window=9), keys("w", 9)
    bench.serve(waiting)
    path: list[bytes] = []
    for turn in range(1, 6):
        path = keys("t", 6 * turn, after=path)
        hit = bench.hit(path)
        row = bench.compute(path)
        bench.cache.admitted(path, hit)
        row.finish()
        bench.cache.ended(path, len(path))
        bench.end_copies()
    bench.device.clear()
    assert bench.hit(waiting) == PrefixHit(36, 36, num_host_tokens=36)
    assert bench.hit(path).num_tokens == len(path) * P
    bench.close()


def test_condemned_pages_are_forgotten_everywhere_and_by_rows_that_loaded_them() -> None:
    bench, path, other = Bench(), keys("a", 9), keys("b", 9)
    bench.serve(path)
    bench.serve(other)
    bench.device.clear()
    wrong, beside = bench.cache.resume(path, 37), bench.cache.resume(path, 37)
    wrong.condemn()
    bench.cache.condemn(path)
    assert bench.hit(path) == PrefixHit(0, 0)
    assert bench.hit(other).num_tokens == 36
    # It loaded the same pages, and may go on, but shows them to nobody.
    beside.extend(37)
    beside.commit(37, path)
    beside.finish()
    assert bench.hit(path) == PrefixHit(0, 0)
    bench.end_copies()
    assert bench.host.full.num_free == 60 - 9
    bench.close()


def test_pages_condemned_while_they_are_saved_do_not_come_back() -> None:
    bench, path = Bench(), keys("a", 9)
    bench.serve(path, ends_copies=False)
    bench.cache.condemn(path)
    bench.end_copies()
    assert bench.hit(path) == PrefixHit(0, 0)
    assert bench.host.full.num_free == 60
    bench.serve(path)
    assert bench.hit(path).num_tokens == 36
    bench.close()


class Log:
    """A store that writes down what it is told."""

    is_busy = False

    def __init__(self) -> None:
        self.saves: list[tuple[int, int, str]] = []
        self.hot: list[tuple[int, str]] = []
        self.condemned: set[bytes] = set()

    def saved(self, keys_full: Sequence[bytes], keys_window: Sequence[bytes], group: str) -> None:
        self.saves.append((len(keys_full), len(keys_window), group))

    def touch_hot(self, names: Sequence[bytes], group: str) -> None:
        self.hot.append((len(names), group))

    def condemn(self, names: Sequence[bytes]) -> None:
        self.condemned.update(names)

    def poll(self) -> None:
        """Nothing is under way."""

    def stats(self) -> Any:
        return None


def test_the_store_is_told_of_what_is_ready_and_of_the_whole_path_at_the_end() -> None:
    log = Log()
    bench, path = Bench(store=log), keys("a", 9)
    row = bench.compute(path)
    bench.cache.prefilled(path, 6, group="one")
    assert log.saves == []
    bench.end_copies()
    assert log.saves == [(6, 0, "one")]  # the row has let go of the windows there
    row.finish()
    bench.cache.ended(path, 9, group="two")
    bench.end_copies()
    assert log.saves[1:] == [(9, 3, "two")]
    bench.serve(path)
    assert log.saves[2:] == [(9, 3, path[0].hex())]
    bench.cache.admitted(path, bench.hit(path), group="one")
    assert log.hot == [(9, "one")]
    bench.cache.condemn(path[:4])
    assert log.condemned == set(path)
    bench.close()


def test_staged_pages_become_a_row_and_stay_for_others() -> None:
    bench, path = Bench(), keys("a", 9)
    staged = bench.cache.stage(path, 38)  # nine pages and two tokens of a tenth
    assert staged is not None
    assert [index for index, _ in staged.full] == list(range(10))
    assert [index for index, _ in staged.window] == [7, 8, 9]
    assert bench.hit(path) == PrefixHit(0, 0)  # not written yet
    bench.cache.poll()
    assert bench.hit(path) == PrefixHit(36, 36, num_host_tokens=36)
    row = bench.cache.resume_staged(staged)
    assert (len(row.full_pages), row.window_start, len(row.window_pages)) == (10, 7, 3)
    row.commit(38, path)
    row.finish()
    bench.end_copies()
    assert bench.host.full.num_ready == 9  # the unfinished page is gone
    with pytest.raises(ValueError, match="taken or given up"):
        bench.cache.resume_staged(staged)
    again = bench.cache.stage(path, 38)
    assert again is not None
    assert [index for index, _ in again.full] == [9]
    bench.cache.unstage(again)
    bench.close()


def test_staged_pages_wait_for_room_and_rely_on_nothing_of_the_device() -> None:
    bench, path = Bench(full=12, window=12), keys("a", 9)
    bench.serve(path)
    staged = bench.cache.stage(path, 36)
    assert staged is not None
    assert staged.full == ()
    assert bench.host.full.reserve(keys("x", 52)) is None  # 51 are free, nine are pinned
    other = bench.cache.begin(keys("b", 8), 33)
    other.extend(33)
    with pytest.raises(NoPages):
        bench.cache.resume_staged(staged)
    other.abort()
    bench.device.clear()
    row = bench.cache.resume_staged(staged)
    assert len(row.full_pages) == 9
    row.abort()
    bench.close()


def test_without_room_in_the_host_nothing_is_staged() -> None:
    bench, path = Bench(host_full=8), keys("a", 9)
    assert bench.cache.stage(path, 36) is None
    bench.host.window.reserve(keys("w", 59))
    assert bench.cache.stage(path[:4], 16) is None
    assert bench.host.full.num_free == 8
    bench.host.window.discard(keys("w", 59))
    bench.close()


def test_staged_pages_that_were_condemned_are_lost_by_name() -> None:
    bench, path = Bench(), keys("a", 9)
    staged = bench.cache.stage(path, 36)
    assert staged is not None
    bench.cache.condemn(path)
    with pytest.raises(StagedPagesLost):
        bench.cache.resume_staged(staged)
    bench.cache.unstage(staged)
    assert bench.host.full.num_free == 60
    bench.close()
