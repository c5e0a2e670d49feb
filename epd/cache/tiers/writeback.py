"""Host to store: pages that just became ready are written, in batches, while nobody waits for them.

    saved(keys) -> lane of the place -> put (pinned) --kept--> believed stored
                       | full: given up        | not kept: given up, the next save tries again
                       | gone from host: given up, and what follows it in the chain

A chain with a hole is worth nothing beyond it, so pages go in path order: the beginnings first, windows last, and where
there is no room the ends stay behind. Pages are pinned only while a put reads them: what waits may be evicted, and a
store that is slow never keeps host memory.

What the store is believed to hold is not written again. Of what was not heard of for a while the store is asked first:
somebody may have emptied it, or it evicted pages that are hot above and so never read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from epd.cache.keys import KEY_BYTES
from epd.cache.l3.notices import NodeNotices
from epd.cache.tiers.belief import Belief
from epd.cache.tiers.inbox import Inbox
from epd.cache.tiers.ports import KINDS, HostPools, PageKind, PageStore, PageView, store_key

__all__ = ["WriteBack"]

_MAX_BATCHES: Final = 2
"""Puts under way to one place: one that is written, one that waits for it."""

_RECHECK_PATIENCE_S: Final = 2.0

_Page = tuple[PageKind, bytes]


@dataclass(slots=True)
class _Chain:
    """Pages of one `saved` call that were not put yet, in the order in which they go."""

    group: str
    pages: deque[_Page] = field(default_factory=deque)


@dataclass(slots=True)
class _Lane:
    """What goes to one place."""

    chains: deque[_Chain] = field(default_factory=deque)
    queued: set[_Page] = field(default_factory=set)
    num_batches: int = 0


class WriteBack:
    """Owned by the engine thread; the store's answers come through the inbox."""

    def __init__(
        self,
        store: PageStore,
        pools: HostPools,
        view: PageView,
        belief: Belief,
        inbox: Inbox,
        *,
        clock: Callable[[], float],
        batch_pages: int,
        batch_bytes: int,
        max_queued_pages: int,
        recheck_s: float,
    ) -> None:
        """A put has `batch_pages` and about `batch_bytes` at most; `max_queued_pages` wait for each place. What was
        not heard of for `recheck_s` is asked about before it is taken for written."""
        self._store = store
        self._pools = pools
        self._view = view
        self._belief = belief
        self._inbox = inbox
        self._clock = clock
        self._batch_pages = batch_pages
        self._batch_bytes = batch_bytes
        self._max_queued_pages = max_queued_pages
        self._recheck_s = recheck_s
        # Places with a question under way.
        self._rechecking: set[str] = set()
        self._is_stopped = False
        self._lanes: dict[str, _Lane] = {}
        self._flying: Counter[_Page] = Counter()
        # Condemned while a put was reading them: discarded in the store once it has them.
        self._condemned: OrderedDict[_Page, str] = OrderedDict()
        self.counters: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        """Pages by the place that they would have gone to."""
        self._notices: dict[str, NodeNotices] = {}

    @property
    def num_queued(self) -> int:
        return sum(len(lane.queued) for lane in self._lanes.values())

    @property
    def num_flying(self) -> int:
        """Pages that a put is reading."""
        return self._flying.total()

    @property
    def is_busy(self) -> bool:
        return bool(self._flying or self._rechecking) or any(lane.queued for lane in self._lanes.values())

    def saved(self, keys_full: Sequence[bytes], keys_window: Sequence[bytes], group: str) -> None:
        """These host pages, each list in path order, became ready. Queues what the store is not believed to hold."""
        place, now_s = self._store.place(group), self._clock()
        lane = self._lanes.setdefault(place, _Lane())
        chain = _Chain(group)
        doubtful: list[_Page] = []
        for page in _pages(keys_full, keys_window):
            if page in lane.queued or self._flying[page]:
                self.counters["known"] += 1
            elif self._belief.holds(place, name := store_key(*page), now_s):
                self.counters["known"] += 1
                if self._belief.is_older(place, name, now_s - self._recheck_s):
                    doubtful.append(page)
            elif len(lane.queued) >= self._max_queued_pages:
                self._drop(place, 1)
                self._notices_of(place).dropped.add(1, f"{len(lane.queued):,} pages wait to be written, as many as may")
            else:
                chain.pages.append(page)
                lane.queued.add(page)
        if chain.pages:
            lane.chains.append(chain)
        if doubtful and place not in self._rechecking:
            self._recheck(place, group, doubtful)

    def pump(self) -> None:
        """Put what may go now."""
        for place, lane in self._lanes.items():
            while lane.chains and lane.num_batches < _MAX_BATCHES:
                self._put(place, lane)
        for notices in self._notices.values():
            notices.tell()

    def condemn(self, keys: Iterable[bytes], group: str) -> None:
        """Write none of these; what a put is reading now is discarded in the store afterwards."""
        gone = {(kind, key) for key in keys for kind in self._pools}
        for lane in self._lanes.values():
            for page in lane.queued & gone:
                lane.queued.discard(page)
        for page in gone:
            if self._flying[page]:
                self._condemned[page] = group

    def stop(self) -> None:
        """Begin nothing more."""
        self._is_stopped = True
        for place, lane in self._lanes.items():
            if lane.queued:
                self._drop(place, len(lane.queued))
            lane.chains.clear()
            lane.queued.clear()

    def _recheck(self, place: str, group: str, pages: Sequence[_Page]) -> None:
        """Ask whether they are still there, and save what is not."""
        deadline_s = self._clock() + _RECHECK_PATIENCE_S
        names = [store_key(*page) for page in pages]
        self._rechecking.add(place)
        self.counters["rechecked"] += len(pages)

        def answered(there: tuple[bool, ...]) -> None:
            self._rechecking.discard(place)
            now_s = self._clock()
            self._belief.confirm(place, (name for name, is_there in zip(names, there, strict=True) if is_there), now_s)
            # After that time a no may be no more than the lack of an answer.
            if self._is_stopped or now_s >= deadline_s:
                return
            lost = [page for page, is_there in zip(pages, there, strict=True) if not is_there]
            self._belief.forget(place, (store_key(*page) for page in lost))
            self.counters["lost"] += len(lost)
            full, window = ([key for kind, key in lost if kind == wanted] for wanted in KINDS)
            self.saved(full, window, group)

        self._store.exists(
            group, names, deadline_s=deadline_s, on_done=lambda there: self._inbox.post(partial(answered, there))
        )

    def _drop(self, place: str, num_pages: int) -> None:
        self.counters["dropped"] += num_pages
        self.dropped[place] += num_pages

    def _notices_of(self, place: str) -> NodeNotices:
        if place not in self._notices:
            self._notices[place] = NodeNotices(place or "(none works)", self._clock)
        return self._notices[place]

    def _put(self, place: str, lane: _Lane) -> None:
        chain = lane.chains[0]
        batch = self._next_batch(lane, chain)
        if not chain.pages:
            lane.chains.popleft()
        if not batch:
            return
        items = []
        for kind, key, view in batch:
            self._pools[kind].pin((key,))
            self._flying[kind, key] += 1
            items.append((store_key(kind, key), (view,)))
        lane.num_batches += 1
        self.counters["puts"] += 1
        pages = tuple((kind, key) for kind, key, _ in batch)
        done = partial(self._done, place, chain.group, pages)
        self._store.put(chain.group, items, on_done=lambda kept: self._inbox.post(partial(done, kept)))

    def _next_batch(self, lane: _Lane, chain: _Chain) -> list[tuple[PageKind, bytes, memoryview]]:
        batch: list[tuple[PageKind, bytes, memoryview]] = []
        size_bytes = 0
        while chain.pages and len(batch) < self._batch_pages and size_bytes < self._batch_bytes:
            page = chain.pages.popleft()
            if page not in lane.queued:
                continue
            lane.queued.discard(page)
            number = self._pools[page[0]].get(page[1])
            if number is not None:
                batch.append((*page, self._view(page[0], number)))
                size_bytes += batch[-1][2].nbytes
                continue
            self.counters["evicted"] += 1
            if page[0] == "full":
                # The rest hangs in the air without it.
                rest = lane.queued.intersection(chain.pages)
                self.counters["evicted"] += len(rest)
                lane.queued -= rest
                chain.pages.clear()
        return batch

    def _done(self, place: str, group: str, pages: tuple[_Page, ...], kept: tuple[bool, ...]) -> None:
        self._lanes[place].num_batches -= 1
        taken, condemned = [], []
        for page, is_kept in zip(pages, kept, strict=True):
            self._pools[page[0]].unpin((page[1],))
            self._flying[page] -= 1
            if not self._flying[page]:
                del self._flying[page]
            if page in self._condemned:
                del self._condemned[page]
                condemned.append(store_key(*page))
            elif is_kept:
                taken.append(store_key(*page))
        self.counters["written"] += sum(kept)
        self.counters["refused"] += len(kept) - sum(kept)
        self._belief.confirm(place, taken, self._clock())
        if condemned:
            self._store.discard(group, condemned)


def _pages(keys_full: Sequence[bytes], keys_window: Sequence[bytes]) -> Iterable[_Page]:
    """Keys of whole pages: an unfinished last page has a name of its caller's that nobody will ask for."""
    yield from (("full", key) for key in keys_full if len(key) == KEY_BYTES)
    yield from (("window", key) for key in keys_window if len(key) == KEY_BYTES)
