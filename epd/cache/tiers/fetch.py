"""One request's prefetch: what it looks for, what it found out, what it holds. epd.cache.tiers.prefetch acts on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from epd.cache.tiers.host import HostPool
from epd.cache.tiers.incoming import ArrivalState, IncomingPage
from epd.cache.tiers.ports import HostPools, PageKind
from epd.cache.tiers.reach import Above, WindowProbe, deepest_boundary
from epd.cache.window import window_floor

__all__ = ["Fetch", "Outcome", "Stage"]

Stage = Literal["asking_full", "asking_windows", "starting", "reading", "ended"]
Outcome = Literal["hit", "partial", "miss", "timeout", "no_room", "aborted"]
PageState = ArrivalState | Literal["ready"]


@dataclass(slots=True, eq=False)
class Fetch:
    """Numbers are pages from the start of the prompt; while reading, `0 <= frontier <= stop <= reach <= len(keys)`."""

    request_id: str
    keys: tuple[bytes, ...]
    group: str
    above: Above
    window_pages: int
    heal_pages: int | None
    started_s: float
    limit_s: float
    """Not later than this, whatever is fetched: the request's own deadline."""
    deadline_s: float
    stage: Stage = "asking_full"
    is_asking: bool = False
    reach: int = 0
    """Full pages are above, or said to be in the store, up to here; while asking, as far as is known."""
    reach_limit: int = 0
    """And no further than this."""
    stored: dict[PageKind, set[int]] = field(default_factory=lambda: {"full": set(), "window": set()})
    lacking: set[int] = field(default_factory=set)
    """Windows that the store lacks."""
    probe: WindowProbe | None = None
    boundary: int | None = None
    """The boundary whose windows are fetched."""
    stop: int = 0
    """Full pages are fetched up to here."""
    frontier: int = 0
    """Full pages are ready, on the device or in the host, up to here."""
    coming: dict[PageKind, dict[int, IncomingPage]] = field(default_factory=lambda: {"full": {}, "window": {}})
    pinned: dict[PageKind, dict[int, bytes]] = field(default_factory=lambda: {"full": {}, "window": {}})
    is_short: bool = False
    """Something that the store said it had did not come."""
    num_fetched: int = 0
    """Full pages that the store brought."""
    lease_s: float = 0.0
    """When what it holds is let go, once it has ended."""

    def on_device(self, kind: PageKind, page: int) -> bool:
        if kind == "full":
            return page < self.above.num_full_pages
        return page in self.above.window_pages

    def is_ready(self, kind: PageKind, page: int, pool: HostPool) -> bool:
        """Whether the device or the host has it now."""
        return self.on_device(kind, page) or pool.get(self.keys[page]) is not None

    def is_obtainable(self, kind: PageKind, page: int, pool: HostPool) -> bool:
        """Whether it is above, on its way there, or said to be in the store."""
        return self.on_device(kind, page) or page in self.stored[kind] or pool.knows(self.keys[page])

    def usable(self, pools: HostPools) -> int:
        """The boundary that device and host can be resumed from as they are now."""
        pool, window_pool = pools["full"], pools["window"]
        num_full = pool.num_leading(self.keys, min(self.above.num_full_pages, len(self.keys)), len(self.keys))
        boundary = deepest_boundary(
            lambda page: self.is_ready("window", page, window_pool),
            stop=num_full,
            above=0,
            window_pages=self.window_pages,
        )
        return boundary or 0

    def deepest(self, stop: int, above: int, pools: HostPools) -> int | None:
        """The deepest boundary in `(above, stop]` whose windows can be had, as far as is known."""
        pool, floor = pools["window"], 0 if self.probe is None else self.probe.floor
        return deepest_boundary(
            lambda page: page >= floor and self.is_obtainable("window", page, pool),
            stop=stop,
            above=above,
            window_pages=self.window_pages,
        )

    def aim(self, reach: int, usable: int) -> int:
        """How far full pages are worth fetching: to the boundary, or as far as healing is cheaper than computing."""
        boundary = usable if self.boundary is None else self.boundary
        if self.heal_pages is not None and reach - boundary > self.heal_pages:
            return reach
        return min(reach, boundary)

    def learn(self, kind: PageKind, pages: Sequence[int], there: Sequence[bool]) -> None:
        """What the store says of these pages."""
        for page, is_there in zip(pages, there, strict=True):
            if is_there:
                self.stored[kind].add(page)
            elif kind == "full":
                self.reach_limit = min(self.reach_limit, page)
            else:
                self.lacking.add(page)

    def plan(self, usable: int, pools: HostPools) -> None:
        """Reach, boundary and stop, with what device and host have now; `usable` of it at once."""
        pool, reach = pools["full"], 0
        while reach < min(self.reach, self.reach_limit) and self.is_obtainable("full", reach, pool):
            reach += 1
        self.reach = reach
        self.boundary = self.deepest(reach, usable, pools)
        self.stop = self.aim(reach, usable)

    def window_range(self) -> range:
        """Pages whose windows the boundary needs."""
        if self.boundary is None:
            return range(0)
        return range(window_floor(self.boundary, self.window_pages), self.boundary)

    def wanted(self, pools: HostPools) -> list[tuple[PageKind, int]]:
        """Pages to come, in the order in which they serve: up to the boundary, its windows, what is beyond."""
        full, window = pools["full"], pools["window"]
        boundary = 0 if self.boundary is None else self.boundary
        missing = [page for page in range(self.stop) if not self.is_ready("full", page, full)]
        wanted: list[tuple[PageKind, int]] = [("full", page) for page in missing if page < boundary]
        wanted += [("window", page) for page in self.window_range() if not self.is_ready("window", page, window)]
        return wanted + [("full", page) for page in missing if page >= boundary]

    def look(self, kind: PageKind, page: int, pool: HostPool) -> PageState:
        """How a page that was wanted stands."""
        if self.is_ready(kind, page, pool):
            return "ready"
        one = self.coming[kind].get(page)
        return "missed" if one is None or one.is_published else one.state

    def hold(self, pools: HostPools) -> None:
        """Pin what of the aim is in the host alone, so that making room does not take it; and nothing else."""
        aims: dict[PageKind, range] = {"full": range(self.stop), "window": self.window_range()}
        for kind, pages in aims.items():
            pool, pinned = pools[kind], self.pinned[kind]
            excess = [page for page in sorted(pinned) if page not in pages]
            pool.unpin([pinned.pop(page) for page in excess])
            for page in pages:
                key = self.keys[page]
                if page not in pinned and not self.on_device(kind, page) and pool.get(key) is not None:
                    pool.pin((key,))
                    pinned[page] = key

    def let_go(self, pools: HostPools) -> None:
        """Pin nothing any more."""
        for kind, pool in pools.items():
            pinned = self.pinned[kind]
            pool.unpin([pinned[page] for page in sorted(pinned)])
            pinned.clear()
