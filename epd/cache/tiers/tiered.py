"""The cache the engine holds: pages on the device, pages in host memory, pages in a store, one answer over them.

    hit = cache.match(keys, num_tokens)                     # joint; changes nothing
    if cache.fits(full, window, keys=..., num_tokens=...):
        pages = cache.resume(keys, num_tokens, hit.num_tokens)   # leases, allocates, starts the copy; see pages.arrival
    cache.admitted(keys, hit); ... cache.prefilled(keys, n); ... cache.ended(keys, n)     # what is copied to the host
    cache.poll()                                            # once per step

Without a host tier it is the device's prefix cache and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from epd.cache.prefix import CacheStats, PrefixCache, PrefixHit
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.below import Below, StoreLink
from epd.cache.tiers.hit import joint_hit
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.staging import StagedPages, StagedPagesLost
from epd.kv.copies import PageMover
from epd.kv.numbers import require_at_least

__all__ = ["StagedPages", "StagedPagesLost", "StoreLink", "TieredCache"]


class TieredCache:
    """Single-threaded: the engine thread owns all books. Copies run elsewhere and touch bytes only."""

    def __init__(
        self,
        device: PrefixCache,
        *,
        host: HostTier | None = None,
        mover: PageMover | None = None,
        store: StoreLink | None = None,
        hit_threshold: int = 2,
    ) -> None:
        """`hit_threshold`: the lookup that copies to the host what it hits on the device.

        Raises ValueError for a host tier without a mover or the other way round, and for a store without a host tier.
        """
        require_at_least(1, hit_threshold=hit_threshold)
        if (host is None) != (mover is None):
            raise ValueError("host and mover: allowed are both, or neither")
        if store is not None and host is None:
            raise ValueError("a store is given and no host tier; allowed: a store with one, since KV passes through it")
        self.device = device
        self.host = host
        self._below = None if host is None or mover is None else Below(device, host, mover, store, hit_threshold)

    @property
    def page_size(self) -> int:
        return self.device.page_size

    @property
    def window_tokens(self) -> int:
        return self.device.window_tokens

    @property
    def window_pages(self) -> int:
        return self.device.window_pages

    @property
    def enabled(self) -> bool:
        return self.device.enabled

    @property
    def retention(self) -> RetentionPolicy:
        return self.device.retention

    @property
    def next_event_pending(self) -> bool:
        """Whether copies are under way or queued, or calls of the store: poll() will have something to do soon."""
        return self._below is not None and self._below.is_busy

    def match(self, keys: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """Longest usable prefix over device and host together, at most `num_tokens - 1`. Changes nothing.

        As PrefixCache.match(): every full page of it, and every window page its end needs, is in one of the two.
        """
        if self._below is None:
            return self.device.match(keys, num_tokens)
        require_at_least(0, num_tokens=num_tokens)
        joint, page_size = joint_hit(self.device, self._below.host, keys, num_tokens), self.page_size
        return PrefixHit(
            joint.num_pages * page_size,
            joint.num_reached_pages * page_size,
            max(0, joint.num_pages - joint.walk.num_pages) * page_size,
        )

    def fits(
        self,
        num_full: int,
        num_window: int,
        *,
        keys: Sequence[bytes] = (),
        num_tokens: int = 0,
        full_only: bool = False,
    ) -> bool:
        """Whether so many device pages could be had now beside those that resume(keys, num_tokens, None,
        full_only=full_only) takes or leases. Changes nothing. Raises ValueError for a negative number."""
        if self._below is not None and keys:
            require_at_least(0, num_full=num_full, num_window=num_window, num_tokens=num_tokens)
            plan = self._below.plan(keys, num_tokens, None, full_only=full_only)
            if plan.copies:
                needed_full, needed_window = self._below.loads.room_needed(plan.row)
                num_window = num_window if self.window_pages else 0
                return self.device.has_room(num_full + needed_full, num_window + needed_window)
        return self.device.fits(num_full, num_window, keys=keys, num_tokens=num_tokens, full_only=full_only)

    def begin(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        max_cached_tokens: int | None = None,
        full_only: bool = False,
    ) -> SequencePages:
        """PrefixCache.begin(): leases what the device alone has. Copies nothing."""
        return self.device.begin(keys, num_tokens, max_cached_tokens=max_cached_tokens, full_only=full_only)

    def resume(
        self, keys: Sequence[bytes], num_tokens: int, hit_tokens: int | None = None, *, full_only: bool = False
    ) -> SequencePages:
        """Start a sequence whose prompt has `num_tokens` tokens from what match() finds now, `hit_tokens` at most.

        What the device has is leased, what only the host has is copied to pages of the sequence's own: the row's
        `arrival`. `num_cached_tokens` says how much it is, at times less than was promised and never more. `full_only`
        takes full pages as far as they reach and no window, as in PrefixCache.begin(). Raises NoPages, with nothing
        changed, when there is no room for the pages to be copied to, and ValueError for a negative number.
        """
        if self._below is None:
            return self.device.begin(keys, num_tokens, max_cached_tokens=hit_tokens, full_only=full_only)
        require_at_least(0, num_tokens=num_tokens)
        if hit_tokens is not None:
            require_at_least(0, hit_tokens=hit_tokens)
        return self._below.resume(keys, num_tokens, hit_tokens, full_only=full_only)

    def ended(self, keys: Sequence[bytes], num_pages: int, *, group: str = "") -> None:
        """A request is over that has left `num_pages` pages of `keys`: the host gets what it lacks of them.

        Call it after the row's finish(). `group` names the session, for the store; "": all that begins alike is one.
        """
        if self._below is not None:
            self._below.keep(keys, num_pages, group, tells_all=True)

    def prefilled(self, keys: Sequence[bytes], num_pages: int, *, group: str = "") -> None:
        """The first `num_pages` pages of a prompt are computed and committed: the host gets what it lacks of them, the
        window at their end among it."""
        if self._below is not None:
            self._below.keep(keys, num_pages, group, tells_all=False)

    def admitted(self, keys: Sequence[bytes], hit: PrefixHit, *, group: str = "") -> None:
        """A sequence was given pages for `hit`: uses are noted in every tier, and what was hit often is saved."""
        if self._below is not None:
            self._below.admitted(keys, hit, group)

    def condemn(self, keys: Sequence[bytes]) -> None:
        """Some page of this path holds wrong KV, nobody knows which: no tier may find it, or what was built on it.

        Call it after the row's condemn(). O(pages of the host).
        """
        if keys:
            self.device.ledger.condemn(keys[0])
            if self._below is not None:
                self._below.condemn(keys)

    def stage(self, keys: Sequence[bytes], num_tokens: int) -> StagedPages | None:
        """Host pages for the KV of `num_tokens` tokens that has arrived from another worker: what the host lacks, the
        windows of the end among it. None, with nothing changed, without a host tier or room in it.

        The caller writes the pages named before the next poll(), and calls resume_staged() or unstage(), once.
        """
        require_at_least(1, num_tokens=num_tokens)
        return None if self._below is None else self._below.staging.stage(keys, num_tokens)

    def resume_staged(self, staged: StagedPages) -> SequencePages:
        """The row of a staged sequence with room for its tokens: what the device has is leased, the rest is copied.

        Commit its tokens with `commit(staged.num_tokens, keys)`. The staged pages that are whole stay in host memory,
        for others to find. Raises NoPages with nothing changed; it may be tried again, unless it is StagedPagesLost.
        """
        if self._below is None:
            raise ValueError("nothing can have been staged: there is no host tier")
        return self._below.staging.take(staged)

    def unstage(self, staged: StagedPages) -> None:
        """Give up what was staged, written or not."""
        if self._below is None:
            raise ValueError("nothing can have been staged: there is no host tier")
        self._below.staging.give_up(staged)

    def poll(self) -> None:
        """Once per step: books the copies that are over and starts those that wait."""
        if self._below is not None:
            self._below.poll()

    def window_frontier(self, num_tokens: int) -> int:
        """As PrefixCache.window_frontier()."""
        return self.device.window_frontier(num_tokens)

    def clear(self) -> int:
        """Drop everything nobody uses, on the device and in host memory; returns the device's full pages freed. A
        store keeps what it has."""
        if self._below is not None:
            self._below.clear()
        return self.device.clear()

    def stats(self) -> CacheStats:
        """Page states and counters of all tiers."""
        stats = self.device.stats()
        if self._below is None:
            return stats
        store = self._below.store
        return replace(stats, host=self._below.stats(), store=None if store is None else store.stats())

    def check(self) -> None:
        """Raise PageStateError unless every page of every pool is accounted for exactly once."""
        self.device.check()
        if self._below is not None:
            self._below.host.check()
