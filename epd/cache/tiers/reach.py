"""How far a prefix could reach with what the store has: pure arithmetic on page indices, from deep to shallow.

The rule is that of epd.cache.window: a boundary after b pages can be resumed from iff its full pages are live and the
windows of its last `window_pages` pages are. Here windows are known bit by bit, since each has to be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.cache.window import window_floor

__all__ = ["Above", "WindowProbe", "deepest_boundary"]


@dataclass(frozen=True, slots=True)
class Above:
    """What the device has of a prompt: full pages from the start, and indices of the pages whose windows are live."""

    num_full_pages: int = 0
    window_pages: frozenset[int] = frozenset()


def deepest_boundary(live: Callable[[int], bool], *, stop: int, above: int, window_pages: int) -> int | None:
    """The deepest boundary in `(above, stop]` whose windows are all `live`; None without one."""
    if window_pages == 0:
        return stop if stop > above else None
    run = 0
    for page in range(stop - 1, window_floor(above + 1, window_pages) - 1, -1):
        run = run + 1 if live(page) else 0
        if run == window_pages or (page == 0 and run):
            return page + run if page + run > above else None
    return None


class WindowProbe:
    """Which windows to ask for next, until the deepest whole one is found: from deep to shallow, more each time.

    `floor`: windows from there on are known; those below were not asked for.
    """

    __slots__ = ("_bottom", "_max_batch", "_next_batch", "floor")

    def __init__(self, *, stop: int, above: int, window_pages: int, first_batch: int, max_batch: int) -> None:
        """Boundaries in `(above, stop]` are of interest."""
        self.floor = stop
        self._bottom = window_floor(above + 1, window_pages)
        self._max_batch = max_batch
        self._next_batch = min(max_batch, max(first_batch, window_pages))

    @property
    def is_exhausted(self) -> bool:
        return self.floor <= self._bottom

    def skip(self, is_known: Callable[[int], bool]) -> bool:
        """Go down over pages that need no asking, to the first that does; False when that is the next one."""
        before = self.floor
        while self.floor > self._bottom and is_known(self.floor - 1):
            self.floor -= 1
        return self.floor < before

    def next_batch(self, is_known: Callable[[int], bool]) -> list[int]:
        """Pages to ask for; none once everything is known. Those that `is_known` need no asking."""
        batch: list[int] = []
        while self.floor > self._bottom and len(batch) < self._next_batch:
            self.floor -= 1
            if not is_known(self.floor):
                batch.append(self.floor)
        self._next_batch = min(self._max_batch, 2 * self._next_batch)
        return batch
