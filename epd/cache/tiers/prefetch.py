"""Store to host, as soon as a request is enqueued: what neither device nor host has of its prefix.

    prefetch -> ask for full pages -> ask for windows -> reserve, read -> publish in path order -> ended, pinned
                 until the first       from deep to       full pages to    what came              until forget()
                 that is missing       shallow            the boundary,    by the deadline        or the lease is over
                                                          its windows,
                                                          what is beyond

All or part of it may fail to come, at any point, and then the hit is shorter: nobody relies on what the store said. A
request that waits is let go at its deadline with what has come by then. Pages the store still writes into are given
back when it is done with them (epd.cache.tiers.incoming), whoever has left meanwhile.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from epd.cache.tiers.asking import Asker
from epd.cache.tiers.fetch import Fetch, Outcome
from epd.cache.tiers.incoming import Incoming
from epd.cache.tiers.ports import HostPools, PageKind
from epd.cache.tiers.reach import Above, WindowProbe

__all__ = ["Prefetcher"]

_FIRST_PROBE: Final = 32
_MAX_SHARE: Final = 0.75
"""Of each host pool, what prefetches may hold: the rest is for what the device gives up meanwhile."""
_MAX_CONDEMNED: Final = 1 << 16


class Prefetcher:
    """Owned by the engine thread. Answers and pages arrive in between: `tick` acts on them."""

    def __init__(
        self,
        pools: HostPools,
        incoming: Incoming,
        asker: Asker,
        *,
        clock: Callable[[], float],
        page_size: int,
        window_pages: int,
        timeout_s: float,
        page_timeout_s: float,
        lease_s: float,
        batch_keys: int,
        heal_pages: int | None,
    ) -> None:
        """`batch_keys`: asked for at once. `heal_pages`: more full pages than this are fetched beyond the last whole
        window; None: none are."""
        self._pools = pools
        self._incoming = incoming
        self._asker = asker
        self._clock = clock
        self._page_size = page_size
        self._window_pages = window_pages
        self._timeout_s = timeout_s
        self._page_timeout_s = page_timeout_s
        self._lease_s = lease_s
        self._batch_keys = batch_keys
        self._heal_pages = heal_pages
        self._fetches: dict[str, Fetch] = {}
        # Those under way, and those that ended: the first of these has the earliest end of lease.
        self._active: dict[str, Fetch] = {}
        self._ended: OrderedDict[str, Fetch] = OrderedDict()
        self._to_collect: dict[str, None] = {}
        self._condemned: OrderedDict[bytes, None] = OrderedDict()
        self.counters: Counter[str] = Counter()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def held(self, kind: PageKind) -> set[bytes]:
        """Keys of host pages that prefetches have pinned or are waiting for."""
        held: set[bytes] = set()
        for fetch in self._fetches.values():
            held.update(fetch.pinned[kind].values())
            held.update(page.key for page in fetch.coming[kind].values())
        return held

    def next_deadline_s(self) -> float | None:
        """When something ends that no news may announce."""
        return min((fetch.deadline_s for fetch in self._active.values()), default=None)

    def begin(
        self, request_id: str, keys: Sequence[bytes], num_tokens: int, above: Above, group: str, deadline_s: float
    ) -> bool:
        """Look for the prefix of a prompt of `num_tokens` tokens. False when there is nothing to look for.

        At least one token is computed, so a page that holds the last one is none of the prefix. `deadline_s`: the
        request's own. A request that had a prefetch has only this one from now on.
        """
        self.forget(request_id)
        num_pages = min(len(keys), max(0, num_tokens - 1) // self._page_size)
        if num_pages and self._condemned:
            num_pages = next((i for i in range(num_pages) if keys[i] in self._condemned), num_pages)
        now_s = self._clock()
        fetch = Fetch(
            request_id,
            tuple(keys[:num_pages]),
            group,
            above,
            self._window_pages,
            self._heal_pages,
            now_s,
            deadline_s,
            min(now_s + self._timeout_s, deadline_s),
            reach_limit=num_pages,
        )
        if fetch.usable(self._pools) == num_pages or now_s >= fetch.deadline_s:
            return False
        self._fetches[request_id] = self._active[request_id] = fetch
        self.counters["begun"] += 1
        self._advance(fetch)
        return True

    def is_fetching(self, request_id: str) -> bool:
        return request_id in self._active

    def num_fetched(self, request_id: str) -> int:
        """Full pages that the store brought for this request."""
        return self._fetches[request_id].num_fetched if request_id in self._fetches else 0

    def collect(self) -> tuple[str, ...]:
        """Requests whose prefetch ended since the last call, in the order of their ends."""
        ended = tuple(self._to_collect)
        self._to_collect.clear()
        return ended

    def forget(self, request_id: str) -> None:
        """The request has its pages, or needs none: let go of what was held for it. An unknown one is no error."""
        fetch = self._fetches.get(request_id)
        if fetch is None:
            return
        if fetch.stage != "ended":
            self._end(fetch, "aborted")
        self._let_go(fetch)

    def tick(self) -> None:
        """Act on what arrived and on the time that passed."""
        news = set(self._active)
        while news:
            for request_id in sorted(news):
                fetch = self._active.get(request_id)
                if fetch is not None:
                    self._advance(fetch)
            # What one published another may have waited for.
            news = self._incoming.take_news()
        now_s = self._clock()
        for fetch in tuple(self._active.values()):
            if now_s >= fetch.deadline_s:
                self._end(fetch, "timeout")
        while self._ended and now_s >= (first := next(iter(self._ended.values()))).lease_s:
            self.counters["leases_expired"] += 1
            self._let_go(first)

    def condemn(self, keys: Iterable[bytes]) -> None:
        """Fetch none of these again, until they are saved anew."""
        for key in keys:
            self._condemned[key] = None
        while len(self._condemned) > _MAX_CONDEMNED:
            self._condemned.popitem(last=False)
        for fetch in tuple(self._active.values()):
            stop = next((i for i, key in enumerate(fetch.keys) if key in self._condemned), len(fetch.keys))
            fetch.reach_limit = min(fetch.reach_limit, stop)
            self._advance(fetch)

    def absolve(self, keys: Iterable[bytes]) -> None:
        """These were computed and saved anew."""
        for key in keys if self._condemned else ():
            self._condemned.pop(key, None)

    def abort_all(self) -> None:
        for request_id in tuple(self._fetches):
            self.forget(request_id)

    def _advance(self, fetch: Fetch) -> None:
        self._harvest(fetch)
        if fetch.stage == "asking_full" and not fetch.is_asking:
            self._ask_full(fetch)
        if fetch.stage == "asking_windows" and not fetch.is_asking:
            self._ask_windows(fetch)
        if fetch.stage == "starting":
            self._start(fetch)
        if fetch.stage == "reading":
            self._settle(fetch)

    def _ask_full(self, fetch: Fetch) -> None:
        pool, batch = self._pools["full"], list[int]()
        while fetch.reach < fetch.reach_limit and fetch.is_obtainable("full", fetch.reach, pool):
            fetch.reach += 1
        for page in range(fetch.reach, fetch.reach_limit):
            if len(batch) == self._batch_keys:
                break
            if not fetch.is_obtainable("full", page, pool):
                batch.append(page)
        if batch:
            self._asker.ask(fetch, "full", batch)
        else:
            self._probe_windows(fetch)

    def _probe_windows(self, fetch: Fetch) -> None:
        fetch.stage = "asking_windows"
        fetch.probe = WindowProbe(
            stop=fetch.reach,
            above=fetch.usable(self._pools),
            window_pages=self._window_pages,
            first_batch=_FIRST_PROBE,
            max_batch=self._batch_keys,
        )

    def _ask_windows(self, fetch: Fetch) -> None:
        probe, pool, usable = fetch.probe, self._pools["window"], fetch.usable(self._pools)
        assert probe is not None

        def is_known(page: int) -> bool:
            return page in fetch.lacking or fetch.is_obtainable("window", page, pool)

        while fetch.deepest(fetch.reach, usable, self._pools) is None and not probe.is_exhausted:
            if probe.skip(is_known):
                continue
            self._asker.ask(fetch, "window", probe.next_batch(is_known))
            return
        fetch.stage = "starting"

    def _start(self, fetch: Fetch) -> None:
        """Reserve what is to come, as far as there is room, and have it read. Waits for pages that others still use."""
        usable, reach = fetch.usable(self._pools), min(fetch.reach, fetch.reach_limit)
        fetch.plan(usable, self._pools)
        if fetch.reach < reach:
            # The host had more a while ago; the store may have it too.
            fetch.stage = "asking_full"
            self._advance(fetch)
            return
        if not fetch.wanted(self._pools):
            self._end(fetch, "miss")
            return
        planned = fetch.stop, fetch.boundary
        if self._are_free(fetch):
            self._fit(fetch, usable)
        if not self._are_free(fetch):
            # It may turn out that they do not come, so the next look begins from the start.
            fetch.reach, fetch.stage = 0, "asking_full"
            return
        fetch.hold(self._pools)
        if (fetch.stop, fetch.boundary) != planned:
            self.counters["shortened"] += 1
        wanted = fetch.wanted(self._pools)
        numbers = self._reserve(fetch, wanted) if wanted else None
        if numbers is None:
            self._end(fetch, "no_room")
            return
        self._read(fetch, wanted, numbers)

    def _fit(self, fetch: Fetch, usable: int) -> None:
        """Shorten to what there is room for."""
        stop = self._room(fetch, "full", range(fetch.stop))
        if stop < fetch.stop:
            fetch.boundary = fetch.deepest(stop, usable, self._pools)
            fetch.stop = fetch.aim(stop, usable)
        windows = fetch.window_range()
        if self._room(fetch, "window", windows) < windows.stop:
            fetch.boundary = None
            fetch.stop = fetch.aim(fetch.stop, usable)

    def _room(self, fetch: Fetch, kind: PageKind, pages: range) -> int:
        """The first of these pages that the host has no room for, in path order; `pages.stop` if it has for all.

        A page that is ready needs room too: what is to be pinned cannot be evicted to make room.
        """
        pool, held = self._pools[kind], self.held(kind)
        num_share, num_free = int(_MAX_SHARE * pool.num_pages) - len(held), pool.num_reservable
        for page in pages:
            if fetch.on_device(kind, page):
                continue
            key = fetch.keys[page]
            num_share -= key not in held
            num_free -= pool.num_evictable_of((key,)) or not pool.knows(key)
            if num_share < 0 or num_free < 0:
                return page
        return pages.stop

    def _are_free(self, fetch: Fetch) -> bool:
        """Whether each page that is wanted can be joined or reserved now: none is in another's hands."""
        return not any(
            self._pools[kind].knows(fetch.keys[page]) and self._incoming.get(kind, fetch.keys[page]) is None
            for kind, page in fetch.wanted(self._pools)
        )

    def _reserve(self, fetch: Fetch, wanted: list[tuple[PageKind, int]]) -> dict[tuple[PageKind, int], int] | None:
        """Host pages for what nobody is fetching yet; None, with nothing changed, without room for all."""
        numbers: dict[tuple[PageKind, int], int] = {}
        for kind, pool in self._pools.items():
            pages = [page for of_kind, page in wanted if of_kind == kind and not pool.knows(fetch.keys[page])]
            reserved = pool.reserve([fetch.keys[page] for page in pages], root=fetch.keys[0])
            if reserved is None:
                for other, page in numbers:
                    self._pools[other].discard((fetch.keys[page],))
                return None
            numbers.update({(kind, page): number for page, number in zip(pages, reserved, strict=True)})
        return numbers

    def _read(self, fetch: Fetch, wanted: list[tuple[PageKind, int]], numbers: dict[tuple[PageKind, int], int]) -> None:
        fetch.stage = "reading"
        allowed_s = self._timeout_s + self._page_timeout_s * len(wanted)
        fetch.deadline_s = max(fetch.deadline_s, min(fetch.started_s + allowed_s, fetch.limit_s))
        fresh = [(kind, page) for kind, page in wanted if (kind, page) in numbers]
        for kind, page in wanted:
            if (kind, page) not in numbers:
                shared = self._incoming.get(kind, fetch.keys[page])
                assert shared is not None
                self._incoming.join(fetch.request_id, shared)
                fetch.coming[kind][page] = shared
        items = [(kind, fetch.keys[page], numbers[kind, page]) for kind, page in fresh]
        coming = self._incoming.read(fetch.request_id, fetch.group, items, deadline_s=fetch.deadline_s)
        for (kind, page), one in zip(fresh, coming, strict=True):
            fetch.coming[kind][page] = one

    def _settle(self, fetch: Fetch) -> None:
        """Look again for less where something did not come, and end where all did."""
        lost = [page for page, one in fetch.coming["full"].items() if one.state == "missed"]
        if fetch.frontier < fetch.stop and fetch.look("full", fetch.frontier, self._pools["full"]) == "missed":
            lost.append(fetch.frontier)
        if lost:
            fetch.reach_limit = min(lost)
            self._again(fetch)
            return
        windows = {page: fetch.look("window", page, self._pools["window"]) for page in fetch.window_range()}
        missed = [page for page, state in windows.items() if state == "missed"]
        if missed:
            fetch.stored["window"].difference_update(missed)
            fetch.lacking.update(missed)
            self._again(fetch)
        elif fetch.frontier >= fetch.stop and all(state == "ready" for state in windows.values()):
            self._end(fetch, "hit")

    def _harvest(self, fetch: Fetch) -> None:
        """Publish full pages as far as they go without a hole, and then the windows, if whole."""
        while fetch.frontier < fetch.stop and self._take(fetch, "full", fetch.frontier):
            fetch.frontier += 1
        pages, pool = fetch.window_range(), self._pools["window"]
        if fetch.frontier >= pages.stop and all(fetch.look("window", p, pool) in ("ready", "arrived") for p in pages):
            for page in pages:
                self._take(fetch, "window", page)

    def _take(self, fetch: Fetch, kind: PageKind, page: int) -> bool:
        """Whether the page is ready, now that it is published if it had arrived."""
        pool = self._pools[kind]
        if fetch.look(kind, page, pool) == "arrived":
            for request_id in self._incoming.publish(fetch.coming[kind][page]):
                other = self._fetches[request_id]
                del other.coming[kind][page]
                other.pinned[kind][page] = other.keys[page]
                other.num_fetched += kind == "full"
        return fetch.look(kind, page, pool) == "ready"

    def _again(self, fetch: Fetch) -> None:
        """Aim at what can still be had. What is coming of it goes on coming."""
        fetch.is_short = True
        self.counters["shortfalls"] += 1
        fetch.reach = min(fetch.reach, fetch.reach_limit)
        fetch.boundary, fetch.stop = None, fetch.reach
        self._leave(fetch, "full", [page for page in fetch.coming["full"] if page >= fetch.reach])
        self._leave(fetch, "window", list(fetch.coming["window"]))
        self._probe_windows(fetch)
        self._advance(fetch)

    def _leave(self, fetch: Fetch, kind: PageKind, pages: list[int]) -> None:
        self._incoming.leave(fetch.request_id, [fetch.coming[kind].pop(page) for page in pages])

    def _end(self, fetch: Fetch, outcome: Outcome) -> None:
        for kind in self._pools:
            self._leave(fetch, kind, list(fetch.coming[kind]))
        if outcome in ("hit", "miss") and fetch.is_short:
            outcome = "partial"
        self.counters[outcome] += 1
        self.counters["fetched_pages"] += fetch.num_fetched
        fetch.stage, fetch.lease_s = "ended", self._clock() + self._lease_s
        del self._active[fetch.request_id]
        self._ended[fetch.request_id] = fetch
        self._to_collect[fetch.request_id] = None

    def _let_go(self, fetch: Fetch) -> None:
        fetch.let_go(self._pools)
        del self._fetches[fetch.request_id]
        del self._ended[fetch.request_id]
        self._to_collect.pop(fetch.request_id, None)
