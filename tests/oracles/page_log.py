"""A token-level log of what was inserted into a prefix cache less what was evicted, and brute force over it.

The log knows nothing of trees, nodes, locks or retention. Insertions are told by whoever commits; what goes is read off
the pools, which are watched: a page freed by the tree leaves the log, whatever the reason was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epd.kv.dual import DualPool
from epd.kv.pages import PageOwner, PagePool

__all__ = ["LogEntry", "PageLog", "WatchedPool", "watched_pools"]


class WatchedPool(PagePool):
    """A pool that remembers which pages the tree gave back, in order, until somebody asks."""

    __slots__ = ("freed_by_tree",)

    def __init__(self, name: str, num_pages: int) -> None:
        super().__init__(name, num_pages)
        self.freed_by_tree: list[int] = []

    def free(self, pages: Sequence[int], owner: PageOwner) -> None:
        super().free(pages, owner)
        if owner is PageOwner.TREE:
            self.freed_by_tree.extend(pages)


def watched_pools(num_full_pages: int, num_window_pages: int) -> tuple[DualPool, WatchedPool, WatchedPool]:
    """The real pair of pools, watched; and the two pools in it."""
    pool = DualPool(num_full_pages=0, num_window_pages=0)
    full, window = WatchedPool("full", num_full_pages), WatchedPool("window", num_window_pages)
    pool.full, pool.window = full, window
    return pool, full, window


class LogEntry:
    """One published page: its page in the full pool, its page in the window pool or None."""

    __slots__ = ("full", "key", "window")

    def __init__(self, key: bytes, full: int, window: int | None) -> None:
        self.key = key
        self.full = full
        self.window = window


class PageLog:
    """Which page keys are live, and on which pages."""

    def __init__(self, *, page_size: int, window_tokens: int) -> None:
        self.page_size = page_size
        self.window_tokens = window_tokens
        self.entries: dict[bytes, LogEntry] = {}
        self._by_full: dict[int, LogEntry] = {}
        self._by_window: dict[int, LogEntry] = {}
        self.num_gone = 0

    def insert(self, key: bytes, full: int, window: int | None) -> LogEntry:
        """A commit published this page. What was there before stays, and lacks at most the window."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = self._by_full[full] = LogEntry(key, full, window)
            if window is not None:
                self._by_window[window] = entry
        elif entry.window is None and window is not None:
            entry.window = window
            self._by_window[window] = entry
        return entry

    def free(self, full: Iterable[int], window: Iterable[int]) -> None:
        """The tree gave these pages back."""
        for page in window:
            entry = self._by_window.pop(page, None)
            if entry is not None:
                entry.window = None
                self.num_gone += 1
        for page in full:
            entry = self._by_full.pop(page, None)
            if entry is not None:
                del self.entries[entry.key]
                self.num_gone += 1

    def hide(self, keys: Iterable[bytes]) -> None:
        """These pages were condemned: nobody may find them again."""
        for key in keys:
            entry = self.entries.pop(key, None)
            if entry is not None:
                self._by_full.pop(entry.full, None)
                if entry.window is not None:
                    self._by_window.pop(entry.window, None)

    def key_of_window(self, window: int) -> bytes | None:
        """The key whose window is on this page, None where the log has none."""
        entry = self._by_window.get(window)
        return None if entry is None else entry.key

    def full_run(self, keys: Sequence[bytes]) -> int:
        """Pages from 0 on whose full KV is live."""
        return next((index for index, key in enumerate(keys) if key not in self.entries), len(keys))

    def window_run(self, keys: Sequence[bytes]) -> int:
        """Pages from 0 on whose window KV is live."""
        return next((i for i, key in enumerate(keys) if not self.has_window(key)), len(keys))

    def has_window(self, key: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.window is not None

    def is_sound(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        """Whether `num_tokens` tokens can be resumed from: full KV on [0, n), window KV on [max(0, n - W), n)."""
        page_size, window = self.page_size, self.window_tokens
        return all(keys[t // page_size] in self.entries for t in range(0, num_tokens, page_size)) and all(
            self.has_window(keys[t // page_size]) for t in range(max(0, num_tokens - window), num_tokens)
        )

    def longest(self, keys: Sequence[bytes], num_tokens: int) -> int:
        """The largest page-aligned n < `num_tokens` that is sound: every candidate is tried, the largest first."""
        page_size = self.page_size
        for num_pages in range(min(len(keys), max(0, num_tokens - 1) // page_size), 0, -1):
            if self.is_sound(keys, num_pages * page_size):
                return num_pages * page_size
        return 0
