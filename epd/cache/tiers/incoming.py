"""Host pages that the store is filling: who wants each, and when it is anybody's to use again.

    absent --reserve--> filling --arrived--> publish: ready, pinned for all who want it
                           | missed, or nobody wants it any more
                           `--once the store's call is over--> absent

The store writes into a page until it says that the page arrived, or that the call is over. Until then the page stays
`filling`, whoever gives up. Requests that want the same page share one read of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from epd.cache.tiers.inbox import Inbox
from epd.cache.tiers.ports import Cancel, HostPools, OnKey, OnKeys, PageKind, PageStore, PageView, store_key

__all__ = ["ArrivalState", "Incoming", "IncomingPage"]

ArrivalState = Literal["coming", "arrived", "missed"]


@dataclass(slots=True, eq=False)
class IncomingPage:
    """One page that is being filled. `wanted_by`: request ids."""

    kind: PageKind
    key: bytes
    call: _Call
    state: ArrivalState = "coming"
    wanted_by: set[str] = field(default_factory=set)
    is_published: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    """One `get` of the store."""

    group: str
    pages: list[IncomingPage] = field(default_factory=list)
    cancel: Cancel | None = None
    is_cancelled: bool = False
    is_over: bool = False
    absent: list[bytes] = field(default_factory=list)
    """Store keys of what it did not bring before anybody gave it up."""


class Incoming:
    """Owned by the engine thread; the store's answers come through the inbox."""

    def __init__(
        self,
        store: PageStore,
        pools: HostPools,
        view: PageView,
        inbox: Inbox,
        *,
        batch_pages: int,
        on_landed: Callable[[str, str, Sequence[bytes], Sequence[bytes]], None],
    ) -> None:
        """`on_landed(place, group, came, missed)` for every call that is over, with store keys."""
        self._store = store
        self._pools = pools
        self._view = view
        self._inbox = inbox
        self._batch_pages = batch_pages
        self._on_landed = on_landed
        self._pages: dict[tuple[PageKind, bytes], IncomingPage] = {}
        self._calls: set[_Call] = set()
        # Requests for which something changed since `news` was last taken.
        self._news: set[str] = set()
        self.counters: Counter[str] = Counter()

    @property
    def num_pages(self) -> int:
        """Pages that are filling."""
        return len(self._pages)

    @property
    def is_busy(self) -> bool:
        return bool(self._calls)

    def get(self, kind: PageKind, key: bytes) -> IncomingPage | None:
        """The page if it is coming and may be joined."""
        page = self._pages.get((kind, key))
        if page is None or page.state == "missed" or (page.state == "coming" and page.call.is_cancelled):
            return None
        return page

    def take_news(self) -> set[str]:
        news, self._news = self._news, set()
        return news

    def join(self, request_id: str, page: IncomingPage) -> None:
        if request_id not in page.wanted_by:
            page.wanted_by.add(request_id)
            self.counters["shared"] += 1

    def read(
        self, request_id: str, group: str, wanted: Sequence[tuple[PageKind, bytes, int]], *, deadline_s: float
    ) -> list[IncomingPage]:
        """Have the store fill reserved pages (kind, key, host page), in this order."""
        pages: list[IncomingPage] = []
        for start in range(0, len(wanted), self._batch_pages):
            call, items = _Call(group), []
            for kind, key, number in wanted[start : start + self._batch_pages]:
                page = IncomingPage(kind, key, call, wanted_by={request_id})
                self._pages[kind, key] = page
                call.pages.append(page)
                items.append((store_key(kind, key), (self._view(kind, number),)))
            self._calls.add(call)
            pages += call.pages
            self.counters["asked"] += len(items)
            call.cancel = self._store.get(
                group,
                items,
                deadline_s=deadline_s,
                on_key=_posting_key(self._inbox, partial(self._key_done, call)),
                on_done=_posting(self._inbox, partial(self._done, call, self._store.place(group))),
            )
        return pages

    def publish(self, page: IncomingPage) -> frozenset[str]:
        """An arrived page becomes ready, and pinned once for each request that wants it: these are returned."""
        pool, wanted_by = self._pools[page.kind], frozenset(page.wanted_by)
        pool.publish((page.key,))
        page.is_published = True
        page.wanted_by.clear()
        del self._pages[page.kind, page.key]
        self._news |= wanted_by
        if pool.get(page.key) is None:
            # Condemned in the host's books while it came.
            self.counters["discarded"] += 1
            return frozenset()
        for _ in wanted_by:
            pool.pin((page.key,))
        self.counters["published"] += 1
        return wanted_by

    def leave(self, request_id: str, pages: Iterable[IncomingPage]) -> None:
        """The request wants these no more. What nobody wants goes, once the store is done with it."""
        calls = set()
        for page in pages:
            page.wanted_by.discard(request_id)
            calls.add(page.call)
        for call in calls:
            self._settle(call)

    def condemn(self, keys: Iterable[bytes]) -> None:
        """What comes under these keys is of no use to anybody."""
        for key in keys:
            for kind in self._pools:
                page = self._pages.get((kind, key))
                if page is not None:
                    self._miss(page)
                    self._settle(page.call)

    def _key_done(self, call: _Call, index: int, came: bool) -> None:
        page = call.pages[index]
        if call.is_over or page.state != "coming":
            return
        if came:
            page.state = "arrived"
            self._news |= page.wanted_by
            return
        if not call.is_cancelled:
            call.absent.append(store_key(page.kind, page.key))
        self._miss(page)
        self._settle(call)

    def _done(self, call: _Call, place: str, came: tuple[bool, ...]) -> None:
        # What was not answered by now was not looked for: that says nothing.
        unanswered = [index for index, page in enumerate(call.pages) if page.state == "coming"]
        call.absent, absent = [], call.absent
        for index in unanswered:
            self._key_done(call, index, came[index])
        call.is_over = True
        self._calls.discard(call)
        self._settle(call)
        taken = [store_key(page.kind, page.key) for page in call.pages if page.state == "arrived"]
        self._on_landed(place, call.group, taken, absent)

    def _miss(self, page: IncomingPage) -> None:
        page.state = "missed"
        self._news |= page.wanted_by
        page.wanted_by.clear()

    def _settle(self, call: _Call) -> None:
        """Cancel what nobody waits for; give back what the store is done with and nobody wants."""
        if call.is_over:
            for page in call.pages:
                if not page.is_published and not page.wanted_by and self._pages.get((page.kind, page.key)) is page:
                    del self._pages[page.kind, page.key]
                    self._pools[page.kind].discard((page.key,))
                    self.counters["discarded"] += 1
            return
        is_awaited = any(page.state == "coming" and page.wanted_by for page in call.pages)
        if not is_awaited and call.cancel is not None and not call.is_cancelled:
            call.is_cancelled = True
            call.cancel()


def _posting_key(inbox: Inbox, act: OnKey) -> OnKey:
    # Of single pages somebody hears soon enough; a page that is missing changes what is to be done.
    return lambda index, came: inbox.post(partial(act, index, came), wakes=not came)


def _posting(inbox: Inbox, act: OnKeys) -> OnKeys:
    return lambda came: inbox.post(partial(act, came))
