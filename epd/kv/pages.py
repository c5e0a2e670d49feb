"""One pool of pages: a free list and one owner byte per page.

The owner byte makes a double free, or a free by a non-owner, an error at once instead of silent corruption much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from epd.kv.errors import NoPages, PageStateError
from epd.kv.numbers import require_at_least

__all__ = ["PageOwner", "PagePool"]


class PageOwner(IntEnum):
    """Who may write, hand over or free a page."""

    FREE = 0
    SEQUENCE = 1
    TREE = 2


_OWNERS = tuple(PageOwner)
"""By value: an index is quicker than a call of the class, and this is asked once per page."""


class PagePool:
    """`num_pages` pages with ids `[0, num_pages)`; every operation is O(pages touched)."""

    __slots__ = ("_counts", "_free", "_owners", "name")

    def __init__(self, name: str, num_pages: int) -> None:
        require_at_least(0, num_pages=num_pages)
        self.name = name
        self._owners = bytearray(num_pages)
        # A stack that hands out low ids first, and the most recently freed page before a colder one.
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [num_pages, 0, 0]

    @property
    def num_pages(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, owner: PageOwner) -> int:
        """Pages now held by `owner`."""
        return self._counts[owner]

    def owner(self, page: int) -> PageOwner:
        return _OWNERS[self._owners[page]]

    def allocate(self, num_pages: int) -> list[int]:
        """Take `num_pages` free pages for a sequence, ascending. Raises NoPages, changing nothing, if there are
        fewer."""
        if num_pages < 0:
            raise ValueError(f"{self.name} pool: cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            raise NoPages(pool=self.name, needed=num_pages, free=len(self._free))
        if num_pages == 0:
            return []
        # Pages that lie together are copied together, so they are handed out in their own order.
        taken = sorted(self._free[-num_pages:])
        del self._free[-num_pages:]
        for page in taken:
            self._owners[page] = PageOwner.SEQUENCE
        self._move(PageOwner.FREE, PageOwner.SEQUENCE, num_pages)
        return taken

    def free(self, pages: Sequence[int], owner: PageOwner) -> None:
        """Give back pages held by `owner`. Raises PageStateError, changing nothing, if one of them is not."""
        self._require(pages, owner)
        for page in pages:
            self._owners[page] = PageOwner.FREE
        self._free.extend(pages)
        self._move(owner, PageOwner.FREE, len(pages))

    def hand_over(self, pages: Sequence[int], source: PageOwner, target: PageOwner) -> None:
        """Move ownership of live pages. Raises PageStateError, changing nothing, if `source` does not own one."""
        if target is PageOwner.FREE:
            raise PageStateError(f"{self.name} pool: pages become free through free(), not hand_over()")
        self._require(pages, source)
        for page in pages:
            self._owners[page] = target
        self._move(source, target, len(pages))

    def check(self) -> None:
        """Raise PageStateError unless the free list and the owner bytes tell the same story."""
        if len(set(self._free)) != len(self._free):
            raise PageStateError(f"{self.name} pool: a page is twice in the free list")
        wrong = [page for page in self._free if self._owners[page] != PageOwner.FREE]
        if wrong:
            raise PageStateError(f"{self.name} pool: pages {wrong[:8]} are in the free list but owned")
        found = [self._owners.count(owner) for owner in PageOwner]
        if found != self._counts or found[PageOwner.FREE] != len(self._free):
            raise PageStateError(f"{self.name} pool: counted {found}, booked {self._counts}, free {len(self._free)}")

    def _require(self, pages: Sequence[int], owner: PageOwner) -> None:
        if owner is PageOwner.FREE:
            raise PageStateError(f"{self.name} pool: free pages have no owner to act for them")
        # Most calls are right: told without a loop in Python.
        distinct = set(pages)
        if len(distinct) == len(pages) and (not pages or 0 <= min(pages) <= max(pages) < len(self._owners)):
            held = bytes(map(self._owners.__getitem__, pages))
            if held.count(owner) == len(pages):
                return
        seen: set[int] = set()
        for page in pages:
            if not 0 <= page < len(self._owners):
                raise PageStateError(f"{self.name} pool: no page {page} in {len(self._owners)}")
            if self._owners[page] != owner or page in seen:
                fault = "named twice" if page in seen else f"held by {self.owner(page).name}"
                raise PageStateError(f"{self.name} pool: page {page} is {fault}, not by {owner.name}")
            seen.add(page)

    def _move(self, source: PageOwner, target: PageOwner, num_pages: int) -> None:
        self._counts[source] -= num_pages
        self._counts[target] += num_pages
