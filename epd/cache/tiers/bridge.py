"""Between host memory and the store of KV: what the engine and the tiered cache talk to. One object, one thread.

    bridge.prefetch(request_id, keys, num_tokens, above, group=...)      # as soon as it is enqueued
    bridge.poll()                                                        # once per step, and when woken
    for request_id in bridge.collect(): ...                              # its prefix is in the host, or will not come
    bridge.forget(request_id)                                            # it has its pages, or is gone
    bridge.saved(keys_full, keys_window, group)                          # host pages just became ready
    bridge.touch_hot(keys, group)                                        # a chain was hit above

All books are the engine thread's. The store's threads read and write bytes of host pages and post what they have done;
poll() acts on it. Whatever the store does or leaves undone, no call waits for it or raises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from epd.cache.l3.base import StoreStats
from epd.cache.tiers.asking import Asker
from epd.cache.tiers.belief import Belief
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.inbox import Inbox
from epd.cache.tiers.incoming import Incoming
from epd.cache.tiers.keepalive import KeepAlive
from epd.cache.tiers.ports import HostPools, PageStore, PageView, both_keys
from epd.cache.tiers.prefetch import Prefetcher
from epd.cache.tiers.reach import Above
from epd.cache.tiers.writeback import WriteBack

__all__ = ["BridgeSettings", "BridgeStats", "StoreBridge"]

_NUMBERS: Final = (
    "read_pages",
    "write_pages",
    "write_bytes",
    "ask_keys",
    "touch_keys",
    "max_queued_pages",
    "max_believed_keys",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings:
    """Times in seconds. Numbers of pages are per call of the store, unless they say otherwise."""

    prefetch_timeout_s: float = 0.2
    """How long a request waits for its prefix, and `prefetch_page_timeout_s` longer for each page of it."""
    prefetch_page_timeout_s: float = 0.001
    lease_s: float = 30.0
    """How long what was fetched stays pinned for a request that nobody forgets."""
    ttl_s: float = 3600.0
    """After so long the store may forget what nobody reads."""
    heal_pages: int | None = None
    """Full pages beyond the last whole window are fetched when they are more than this; None: never."""
    read_pages: int = 64
    write_pages: int = 32
    write_bytes: int = 8 << 20
    """About so much goes in one put, and one page at least."""
    ask_keys: int = 1024
    touch_keys: int = 256
    max_queued_pages: int = 4096
    """Pages waiting to be written to one node; more are given up."""
    recheck_s: float = 30.0
    """Whether a page that is saved again is still in the store is asked so long after the last sign of it."""
    max_believed_keys: int = 1 << 17
    """Keys of each node that are believed to be there."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least 1")
        for name in ("prefetch_timeout_s", "prefetch_page_timeout_s", "lease_s", "ttl_s", "recheck_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: not negative")
        if self.heal_pages is not None and self.heal_pages < 0:
            raise ValueError(f"heal_pages is {self.heal_pages}; allowed: not negative, or None")


@dataclass(frozen=True, slots=True)
class BridgeStats:
    """Counters from the start, by name; numbers of pages as they are now.

    `prefetch`: begun, hit, partial, miss, timeout, no_room, aborted (each prefetch has one of these six outcomes),
    fetched_pages, shortfalls, shortened, leases_expired, asks, asked_keys. `incoming`: asked, shared, published,
    discarded. `writeback`: puts, written, refused, known, dropped, evicted,
    rechecked, lost. `keepalive`: batches, touches,
    chains_dropped.
    """

    prefetch: Mapping[str, int]
    incoming: Mapping[str, int]
    writeback: Mapping[str, int]
    keepalive: Mapping[str, int]
    num_fetching: int
    num_incoming_pages: int
    num_queued_pages: int
    num_flying_pages: int
    num_believed_keys: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Of `writeback`, by the node of the store that they would have gone to; "" while none works."""


class StoreBridge:
    """Not thread-safe, but for the callbacks it hands to the store."""

    def __init__(
        self,
        store: PageStore,
        host: HostTier,
        view: PageView,
        *,
        page_size: int,
        window_pages: int,
        settings: BridgeSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`view(kind, page)`: the bytes of a host page. `clock`: that of the store's deadlines.

        `wake` is called from threads of the store when there is something for poll() to do.
        """
        settings = settings or BridgeSettings()
        self._store = store
        self._clock = clock
        self._is_closed = False
        self._inbox = Inbox(wake)
        pools: HostPools = {"full": host.full, "window": host.window}
        self._belief = Belief(max_keys=settings.max_believed_keys, lifetime_s=settings.ttl_s)
        self._keepalive = KeepAlive(
            store,
            clock=clock,
            interval_s=settings.ttl_s / 3,
            window_pages=window_pages,
            batch_keys=settings.touch_keys,
            max_keys=settings.max_believed_keys,
        )
        self._incoming = Incoming(
            store, pools, view, self._inbox, batch_pages=settings.read_pages, on_landed=self._landed
        )
        self._asker = Asker(store, self._belief, self._inbox, clock=clock)
        self._prefetcher = Prefetcher(
            pools,
            self._incoming,
            self._asker,
            clock=clock,
            page_size=page_size,
            window_pages=window_pages,
            timeout_s=settings.prefetch_timeout_s,
            page_timeout_s=settings.prefetch_page_timeout_s,
            lease_s=settings.lease_s,
            batch_keys=settings.ask_keys,
            heal_pages=settings.heal_pages,
        )
        self._writeback = WriteBack(
            store,
            pools,
            view,
            self._belief,
            self._inbox,
            clock=clock,
            batch_pages=settings.write_pages,
            batch_bytes=settings.write_bytes,
            max_queued_pages=settings.max_queued_pages,
            recheck_s=settings.recheck_s,
        )

    @property
    def is_busy(self) -> bool:
        """Whether answers of the store are awaited, or pages wait to be written: poll() has something to do soon."""
        return bool(self._prefetcher.num_active) or self._incoming.is_busy or self._writeback.is_busy

    def prefetch(
        self,
        request_id: str,
        keys: Sequence[bytes],
        num_tokens: int,
        above: Above,
        *,
        group: str,
        deadline_s: float = math.inf,
    ) -> bool:
        """Fetch what device and host lack of the prefix of a prompt of `num_tokens` tokens.

        `keys`: page keys of its whole pages; `above`: what of them the device has; `group`: the session. `deadline_s`:
        the request's own, on the bridge's clock: it waits for no page longer. False when there is nothing to look for:
        then it is never collected, and there is nothing to forget.
        """
        if self._is_closed:
            return False
        return self._prefetcher.begin(request_id, keys, num_tokens, above, group or _first(keys), deadline_s)

    def is_fetching(self, request_id: str) -> bool:
        return self._prefetcher.is_fetching(request_id)

    def num_fetched_pages(self, request_id: str) -> int:
        """Full pages that the store brought for this request, until it is forgotten."""
        return self._prefetcher.num_fetched(request_id)

    def collect(self) -> tuple[str, ...]:
        """Requests whose prefetch ended since the last call. What it brought is pinned until forget()."""
        return self._prefetcher.collect()

    def forget(self, request_id: str) -> None:
        """The request has its pages, or is gone. An unknown one is no error."""
        self._prefetcher.forget(request_id)

    def next_deadline_s(self) -> float | None:
        """Until when poll() has to be called though nothing wakes it; None: any time."""
        return self._prefetcher.next_deadline_s()

    def saved(self, keys_full: Sequence[bytes], keys_window: Sequence[bytes], group: str) -> None:
        """These host pages, each list in path order, just became ready: the store gets what it may lack of them."""
        if self._is_closed:
            return
        self._prefetcher.absolve(keys_full)
        self._writeback.saved(keys_full, keys_window, group or _first(keys_full or keys_window))

    def touch_hot(self, keys: Sequence[bytes], group: str) -> None:
        """A chain, from the first page on, was hit on the device or in the host. Cheap; acted on by poll()."""
        self._keepalive.hot(keys, group or _first(keys))

    def condemn(self, keys: Sequence[bytes]) -> None:
        """Pages of these keys hold what they should not: the store is to forget them, and none is fetched until it was
        saved anew."""
        store_keys = both_keys(keys)
        self._belief.forget_everywhere(store_keys)
        self._writeback.condemn(keys, _first(keys))
        self._incoming.condemn(keys)
        self._prefetcher.condemn(keys)
        if store_keys and not self._is_closed:
            self._store.discard(_first(keys), store_keys)

    def poll(self) -> None:
        """Act on what the store answered and on the time that passed. Cheap when there is nothing."""
        self._inbox.empty()
        self._prefetcher.tick()
        self._writeback.pump()
        if not self._is_closed:
            self._keepalive.pump(self._num_moved_keys())

    def stats(self) -> StoreStats:
        """What the store says of itself."""
        return self._store.stats()

    def bridge_stats(self) -> BridgeStats:
        return BridgeStats(
            prefetch=dict(self._prefetcher.counters + self._asker.counters),
            incoming=dict(self._incoming.counters),
            writeback=dict(self._writeback.counters),
            keepalive=dict(self._keepalive.counters),
            num_fetching=self._prefetcher.num_active,
            num_incoming_pages=self._incoming.num_pages,
            num_queued_pages=self._writeback.num_queued,
            num_flying_pages=self._writeback.num_flying,
            num_believed_keys=len(self._belief),
            dropped=dict(self._writeback.dropped),
        )

    def close(self, flush_s: float = 0.0) -> None:
        """Give up all prefetches, write what waits for `flush_s` at most, and close the store. No host page is held
        afterwards."""
        if self._is_closed:
            return
        self._prefetcher.abort_all()
        by_s = self._clock() + flush_s
        while self._writeback.is_busy and (left_s := by_s - self._clock()) > 0:
            self.poll()
            self._inbox.wait(min(left_s, 0.05))
        self._is_closed = True
        self._writeback.stop()
        self._store.close(max(0.0, by_s - self._clock()))
        self._inbox.empty()

    def _num_moved_keys(self) -> int:
        """Keys the store was asked for, gave or took so far."""
        asked = self._asker.counters["asked_keys"] + self._incoming.counters["asked"]
        return asked + self._writeback.counters["written"] + self._writeback.counters["refused"]

    def _landed(self, place: str, group: str, came: Sequence[bytes], missed: Sequence[bytes]) -> None:
        self._belief.confirm(place, came, self._clock())
        self._belief.forget(place, missed)
        self._keepalive.confirmed(group, came)


def _first(keys: Sequence[bytes]) -> str:
    """The group of those who named no session: all that begins alike."""
    return keys[0].hex() if keys else ""
