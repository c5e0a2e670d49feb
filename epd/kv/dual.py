"""The full and the window pool, allocated together: all or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from epd.kv.errors import NoPages
from epd.kv.pages import PagePool

__all__ = ["DualPool", "PageGrant"]


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages taken in one joint allocation; owned by the sequence that asked."""

    full_pages: list[int]
    window_pages: list[int]


class DualPool:
    """Two page pools whose capacity is always judged at once."""

    __slots__ = ("full", "window")

    def __init__(self, *, num_full_pages: int, num_window_pages: int) -> None:
        self.full = PagePool("full", num_full_pages)
        self.window = PagePool("window", num_window_pages)

    def fits(self, num_full: int, num_window: int) -> bool:
        """Whether both counts are free now. Changes nothing."""
        return num_full <= self.full.num_free and num_window <= self.window.num_free

    def allocate(self, num_full: int, num_window: int) -> PageGrant:
        """Take from both pools, or from neither: NoPages names the first pool that is short."""
        for pool, needed in ((self.full, num_full), (self.window, num_window)):
            if needed < 0:
                raise ValueError(f"{pool.name} pool: cannot allocate {needed} pages")
            if needed > pool.num_free:
                raise NoPages(pool=pool.name, needed=needed, free=pool.num_free)
        return PageGrant(self.full.allocate(num_full), self.window.allocate(num_window))

    def check(self) -> None:
        """Raise PageStateError unless the books of both pools balance."""
        self.full.check()
        self.window.check()
