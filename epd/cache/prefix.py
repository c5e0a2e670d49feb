"""The prefix cache: what the engine talks to. One object over both pools and the tree.

    hit = cache.match(keys, num_tokens)              # looks; changes nothing
    if cache.fits(full, window): pages = cache.begin(keys, num_tokens)
    pages.extend(...); pages.commit(...); pages.finish()           # see sequence_pages.py

A hit is one joint answer of both pools: every full page of the prefix and every window page its last window needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd.cache.audit import audit
from epd.cache.l3.base import StoreStats
from epd.cache.ledger import TreeLedger
from epd.cache.pins import PathPin
from epd.cache.radix import Walk
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.host import HostStats
from epd.cache.victims import VictimPolicy, make_policy
from epd.cache.window import num_window_pages, window_floor
from epd.kv.dual import DualPool
from epd.kv.numbers import require_at_least
from epd.kv.pages import PagePool

__all__ = ["CacheStats", "PoolStats", "PrefixCache", "PrefixHit"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a lookup found, in tokens, multiples of the page size.

    `num_tokens` can be resumed from at once. `num_full_only_tokens` >= `num_tokens` is how far full pages reach: beyond
    `num_tokens` windows are missing (a decode worker that is sent windows, or healing, can use it).
    """

    num_tokens: int
    num_full_only_tokens: int
    num_host_tokens: int = 0
    """Of `num_tokens`, those whose full pages are in host memory alone (`TieredCache`): the last ones."""

    @property
    def num_device_tokens(self) -> int:
        """Of `num_tokens`, those whose full pages are on the device."""
        return self.num_tokens - self.num_host_tokens


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of one pool by state; free + evictable + leased == total."""

    total: int
    free: int
    evictable: int
    leased: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot for metrics. Counters run from the start of the cache."""

    full: PoolStats
    window: PoolStats
    num_nodes: int
    num_sequences: int
    num_lookup_tokens: int
    num_hit_tokens: int
    num_full_only_hit_tokens: int
    num_evicted_full_pages: int
    num_evicted_window_pages: int
    host: HostStats | None = None
    store: StoreStats | None = None


class PrefixCache:
    """Prefix tree over a DualPool. Single-threaded: one engine step at a time."""

    def __init__(
        self,
        pool: DualPool,
        *,
        page_size: int,
        window_tokens: int,
        retention: RetentionPolicy,
        enabled: bool = True,
        policy: VictimPolicy | None = None,
    ) -> None:
        """`window_tokens`: earlier tokens the widest window layer reads (its `window_left`), 0 without window layers.

        Disabled, the cache never hits and publishes nothing, and still allocates and releases pages the same way.
        """
        require_at_least(1, page_size=page_size)
        require_at_least(0, window_tokens=window_tokens)
        self.page_size = page_size
        self.window_tokens = window_tokens
        self.window_pages = num_window_pages(window_tokens, page_size)
        self.enabled = enabled
        self.retention = retention
        self._pool = pool
        self._ledger = TreeLedger(
            pool,
            window_pages=self.window_pages,
            policy=policy
            or make_policy(
                "marginal",
                window_pages=self.window_pages,
                tail_pages=retention.tail_pages,
                page_size=page_size,
                num_window_pages=pool.window.num_pages,
                heal_tokens=0,
            ),
        )
        self._sequences: set[SequencePages] = set()
        self._pins: set[PathPin] = set()
        self._num_lookup_tokens = 0
        self._num_hit_tokens = 0
        self._num_full_only_hit_tokens = 0

    @property
    def ledger(self) -> TreeLedger:
        """The books behind this cache, for those that keep books beside it (tiers/)."""
        return self._ledger

    def match(self, keys: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """Longest usable cached prefix of a prompt of `num_tokens` tokens, at most `num_tokens - 1`. Changes nothing.

        `keys`: chained page keys of the prompt, one per whole page (see keys.py). Raises ValueError for a negative
        `num_tokens`.
        """
        require_at_least(0, num_tokens=num_tokens)
        walk = self.walk(keys, num_tokens)
        return PrefixHit(walk.usable_pages * self.page_size, walk.num_pages * self.page_size)

    def fits(
        self,
        num_full: int,
        num_window: int,
        *,
        keys: Sequence[bytes] = (),
        num_tokens: int = 0,
        full_only: bool = False,
    ) -> bool:
        """Whether so many pages could be had now, evicting if need be. Changes nothing.

        With `keys` and `num_tokens`, pages that begin(keys, num_tokens, full_only=full_only) would pin do not count as
        evictable. Without window layers no sequence ever takes a window page, so `num_window` counts for nothing.
        Raises ValueError for a negative number.
        """
        require_at_least(0, num_full=num_full, num_window=num_window, num_tokens=num_tokens)
        num_window = num_window if self.window_pages else 0
        walk = self.walk(keys, num_tokens)
        leased = walk.num_pages if full_only else walk.usable_pages
        floor = leased if full_only else window_floor(leased, self.window_pages)
        pinned_full, pinned_window = self.would_pin(walk, leased, floor)
        return self.has_room(num_full + pinned_full, num_window + pinned_window)

    def has_room(self, num_full: int, num_window: int) -> bool:
        """Whether so many pages are free or evictable; those that a lease would pin are to be counted in."""
        ledger, pool = self._ledger, self._pool
        return (
            num_full <= pool.full.num_free + ledger.num_evictable_full
            and num_window <= pool.window.num_free + ledger.num_evictable_window
        )

    def begin(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        max_cached_tokens: int | None = None,
        full_only: bool = False,
    ) -> SequencePages:
        """Start a sequence whose prompt has `num_tokens` tokens, leasing the prefix match() finds now.

        `max_cached_tokens` caps the lease at what a plan relied on. `full_only` leases as far as full pages reach,
        without any window: the caller writes the windows itself, after `extend(..., window_start=...)`.
        Raises ValueError for a negative number.
        """
        require_at_least(0, num_tokens=num_tokens)
        if max_cached_tokens is not None:
            require_at_least(0, max_cached_tokens=max_cached_tokens)
        limit = num_tokens if max_cached_tokens is None else min(num_tokens, max_cached_tokens + 1)
        found = self.walk(keys, num_tokens)
        walk = found if limit == num_tokens else self.walk(keys, limit)
        return self.open_row(
            keys,
            num_tokens,
            num_leased_pages=walk.num_pages if full_only else walk.usable_pages,
            with_window=not full_only,
            usable_pages=found.usable_pages,
            reached_pages=found.num_pages,
            counted_pages=(walk.num_pages if full_only else walk.usable_pages, walk.num_pages),
        )

    def open_row(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        num_leased_pages: int,
        with_window: bool,
        usable_pages: int,
        reached_pages: int,
        counted_pages: tuple[int, int],
    ) -> SequencePages:
        """A row that leases `num_leased_pages` pages, which the tree holds; for begin() and TieredCache.

        A lookup found `usable_pages` to resume from and full pages of `reached_pages`; `counted_pages` are the same as
        they count for the statistics.
        """
        self._ledger.num_lookups += 1
        learns = self.retention.learns_from(usable_pages * self.page_size, reached_pages * self.page_size)
        pages = SequencePages(
            self._ledger,
            self.retention,
            page_size=self.page_size,
            window_tokens=self.window_tokens,
            num_prompt_tokens=num_tokens,
            junction=reached_pages if learns else None,
            publishes=self.enabled,
            on_close=self._sequences.discard,
        )
        pages.lease(keys, num_leased_pages, with_window=with_window)
        self._sequences.add(pages)
        self._num_lookup_tokens += num_tokens
        self._num_hit_tokens += counted_pages[0] * self.page_size
        self._num_full_only_hit_tokens += counted_pages[1] * self.page_size
        return pages

    def pin(self, keys: Sequence[bytes], num_pages: int, *, window_start: int | None = None) -> PathPin:
        """Keep the first `num_pages` > 0 pages of `keys`, which the tree holds, and their windows from `window_start`
        on, all live, until the pin is released. None: no window."""
        start = num_pages if window_start is None else window_start
        pin = PathPin(self._ledger, keys, num_pages, start, self._pins.discard)
        self._pins.add(pin)
        return pin

    def window_frontier(self, num_tokens: int) -> int:
        """First page whose window is needed to go on after `num_tokens` tokens: what a handoff sends.

        A row with so many tokens committed begins there or earlier (earlier by its tail pages, unless it resumed from
        a hit less than a page ago), so a sender always has these pages. Without window layers it is the end of the row.
        """
        require_at_least(0, num_tokens=num_tokens)
        if self.window_pages == 0:
            return -(-num_tokens // self.page_size)
        return window_floor(num_tokens // self.page_size, self.window_pages)

    def clear(self) -> int:
        """Drop everything no running sequence uses; returns the full pages freed."""
        ledger = self._ledger
        # What is dropped on purpose is kept nowhere else either.
        witness, ledger.witness = ledger.witness, None
        freed = ledger.evict_full(ledger.num_evictable_full)
        ledger.evict_window(ledger.num_evictable_window)
        ledger.witness = witness
        return freed

    def stats(self) -> CacheStats:
        """Page states of both pools and the counters."""
        ledger = self._ledger
        return CacheStats(
            full=_pool_stats(self._pool.full, ledger.num_evictable_full),
            window=_pool_stats(self._pool.window, ledger.num_evictable_window),
            num_nodes=len(ledger.tree.nodes) - 1,
            num_sequences=len(self._sequences),
            num_lookup_tokens=self._num_lookup_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_full_only_hit_tokens=self._num_full_only_hit_tokens,
            num_evicted_full_pages=ledger.num_evicted_full,
            num_evicted_window_pages=ledger.num_evicted_window,
        )

    def check(self) -> None:
        """Raise PageStateError unless every page of both pools is accounted for exactly once."""
        audit(self._ledger, self._sequences, self._pins)

    def walk(self, keys: Sequence[bytes], num_tokens: int) -> Walk:
        """Where the tree's pages of a prompt end, the last token left out; see RadixTree.walk()."""
        stop = min(len(keys), max(0, num_tokens - 1) // self.page_size) if self.enabled else 0
        return self._ledger.tree.walk(keys, stop=stop, window_pages=self.window_pages)

    def would_pin(self, walk: Walk, num_pages: int, floor: int) -> tuple[int, int]:
        """(full, window) evictable pages that a lease of `num_pages` pages of the walk, and of windows from page
        `floor` on, would make pinned."""
        num_full, num_window = 0, 0
        for node in self._ledger.tree.upwards(walk.node):
            if node.start >= num_pages:
                continue
            stop = min(node.stop, num_pages)
            if not node.is_protected:
                num_full += stop - node.start
            window = node.window_pages[max(0, floor - node.window_start) : max(0, stop - node.window_start)]
            num_window += sum(page not in self._ledger.refs for page in window)
            if node.is_protected and node.start <= floor:
                break
        return num_full, num_window


def _pool_stats(pool: PagePool, evictable: int) -> PoolStats:
    return PoolStats(
        total=pool.num_pages,
        free=pool.num_free,
        evictable=evictable,
        leased=pool.num_pages - pool.num_free - evictable,
    )
