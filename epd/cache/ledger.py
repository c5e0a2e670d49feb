"""What the tree holds, who is using it, and what may go: window references, anchors, victims.

Full pages are pinned by path locks (radix.py). Window pages are pinned one by one: `refs` counts the running sequences
whose row names the page. A page the tree holds is evictable when neither applies, so per pool

    total = free + leased (sequences' own pages, and tree pages in use) + evictable
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from epd.cache.lru import Rank, VictimQueue
from epd.cache.radix import Node, RadixTree
from epd.kv.dual import DualPool, PageGrant
from epd.kv.errors import NoPages, PageStateError
from epd.kv.pages import PageOwner

__all__ = ["TailKeepingLru", "TreeLedger", "VictimPolicy"]


class VictimPolicy(Protocol):
    """Orders victims; the smallest rank goes first. Ranks are read again whenever the node changes."""

    def full_rank(self, node: Node) -> Rank: ...

    def window_rank(self, node: Node) -> Rank: ...

    def num_spare_windows(self, node: Node) -> int:
        """Window pages at the front of the node's tail that may go under its present rank."""
        ...


class TailKeepingLru:
    """Least recently used, except that what nobody can use goes first and a branch's own end goes last.

    Full pages: a leaf whose end has lost its window (nothing can resume there) before any other leaf.
    Windows: an unusable remnant, then pages in front of a node's last window and its tail pages, then those: an
    identical prompt is looked up one boundary before its end, so the page before the window is part of the end.
    """

    def __init__(self, window_pages: int, *, tail_pages: int) -> None:
        self._window_pages = window_pages
        self._kept_pages = window_pages + tail_pages

    def full_rank(self, node: Node) -> Rank:
        return (1 if self._end_is_usable(node) else 0, node.access)

    def window_rank(self, node: Node) -> Rank:
        if node.is_leaf and not self._end_is_usable(node):
            return (0, node.window_access)
        return (1 if len(node.window_pages) > self._kept_pages else 2, node.window_access)

    def num_spare_windows(self, node: Node) -> int:
        spare = len(node.window_pages) - self._kept_pages
        return spare if spare > 0 else len(node.window_pages)

    def _end_is_usable(self, node: Node) -> bool:
        return len(node.window_pages) >= min(self._window_pages, node.num_pages)


class TreeLedger:
    """Books over one tree and its two pools; all eviction happens here."""

    __slots__ = (
        "_full_victims",
        "_policy",
        "_tick",
        "_window_victims",
        "anchored",
        "num_evicted_full",
        "num_evicted_window",
        "pool",
        "refs",
        "tree",
        "window_pages",
    )

    def __init__(self, pool: DualPool, *, window_pages: int, policy: VictimPolicy) -> None:
        """`window_pages`: pages a boundary needs live before it."""
        self.pool = pool
        self.tree = RadixTree()
        self.window_pages = window_pages
        self.refs: dict[int, int] = {}
        self.anchored: set[int] = set()
        self.num_evicted_full = 0
        self.num_evicted_window = 0
        self._policy = policy
        self._full_victims = VictimQueue()
        self._window_victims = VictimQueue()
        self._tick = 0

    @property
    def num_evictable_full(self) -> int:
        return self.pool.full.count(PageOwner.TREE) - self.tree.num_protected_pages

    @property
    def num_evictable_window(self) -> int:
        return self.pool.window.count(PageOwner.TREE) - len(self.refs)

    def allocate(self, num_full: int, num_window: int) -> PageGrant:
        """Take pages, evicting in whichever pool is short; NoPages, with nothing changed, if that cannot be enough."""
        short_full = num_full - self.pool.full.num_free
        short_window = num_window - self.pool.window.num_free
        if short_full > self.num_evictable_full:
            raise self._no_pages("full", num_full)
        if short_window > self.num_evictable_window:
            raise self._no_pages("window", num_window)
        if short_full > 0:
            self.evict_full(short_full)
            # Leaves take their windows along, so the other pool may be less short now.
            short_window = num_window - self.pool.window.num_free
        if short_window > 0:
            self.evict_window(short_window)
        return self.pool.allocate(num_full, num_window)

    def evict_full(self, num_pages: int) -> int:
        """Free up to `num_pages` full pages, from the ends of unused leaves inwards; returns how many were freed."""
        freed = 0
        while freed < num_pages and (victim := self._full_victims.first()) is not None:
            node = self.tree.nodes[victim]
            parent = node.parent
            assert parent is not None
            full_pages, window_pages = self.tree.truncate(node, min(num_pages - freed, node.num_pages))
            self.pool.full.free(full_pages, PageOwner.TREE)
            self._free_windows(window_pages)
            freed += len(full_pages)
            self.refresh(node)
            self.tidy(parent)
        self.num_evicted_full += freed
        return freed

    def evict_window(self, num_pages: int) -> int:
        """Free up to `num_pages` window pages, full pages staying; returns how many were freed."""
        freed = 0
        while freed < num_pages and (victim := self._window_victims.first()) is not None:
            node = self.tree.nodes[victim]
            limit = min(num_pages - freed, self._policy.num_spare_windows(node))
            count = 0
            while count < limit and node.window_pages[count] not in self.refs:
                count += 1
            self._free_windows(node.window_pages[:count])
            del node.window_pages[:count]
            freed += count
            self.tidy(node)
        self.num_evicted_window += freed
        return freed

    def condemn(self, first_key: bytes) -> None:
        """A path that begins with this page key holds something wrong, nobody knows on which page: no lookup may find
        it, or what was built on it. Pages in use stay with their users, the others are freed."""
        top = self.tree.root.children.get(first_key)
        for node in reversed(self.tree.hide(top)) if top is not None else ():
            if node.is_leaf and not node.is_protected:
                full_pages, window_pages = self.tree.truncate(node, node.num_pages)
                self.pool.full.free(full_pages, PageOwner.TREE)
                self._free_windows(window_pages)
            self.refresh(node)

    def hold_windows(self, pages: Sequence[int]) -> None:
        """Count one more running sequence for each tree-held window page."""
        for page in pages:
            self.refs[page] = self.refs.get(page, 0) + 1

    def release_windows(self, node: Node, start: int, pages: Sequence[int]) -> None:
        """Count one sequence less for the window pages of path pages [start, start + len(pages)) above `node`'s end.

        Pages nobody uses and no anchor keeps are freed at once; nodes are split where that leaves a hole.
        """
        stop = start + len(pages)
        dead = set()
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                del self.refs[page]
                if page not in self.anchored:
                    dead.add(page)
        touched = []
        for above in self.tree.upwards(node):
            if above.stop <= start:
                break
            if above.start < stop:
                touched.append(above)
        pieces = [piece for above in touched for piece in self._drop_windows(above, start, stop, dead)]
        for piece in pieces:
            if piece.node_id in self.tree.nodes:
                self.tidy(piece)

    def tidy(self, node: Node) -> None:
        """Join `node` with an only child if nothing can tell, and bring the victim queues up to date."""
        joined = self.tree.merge_down(node)
        self.refresh(node)
        if joined is not None:
            self.refresh(joined)

    def refresh(self, node: Node) -> None:
        """Bring the victim queues up to date after any change to `node`."""
        alive = self.tree.nodes.get(node.node_id) is node and node is not self.tree.root
        if alive and node.is_leaf and not node.is_protected:
            self._full_victims.put(node.node_id, self._policy.full_rank(node))
        else:
            self._full_victims.discard(node.node_id)
        if alive and node.window_pages and node.window_pages[0] not in self.refs:
            self._window_victims.put(node.node_id, self._policy.window_rank(node))
        else:
            self._window_victims.discard(node.node_id)

    def touch(self, node: Node) -> None:
        """Note a use of the path to `node`'s end. Windows are touched for the last window and page only, so that
        a busy branch does not keep its long-dead windows young."""
        self._tick += 1
        node.access = self._tick
        floor = node.stop - self.window_pages - 1
        for above in self.tree.upwards(node):
            if above.stop <= floor:
                break
            above.window_access = self._tick
            self.refresh(above)

    def check_victims(self) -> None:
        """Raise PageStateError unless exactly the evictable nodes are queued, under their present ranks."""
        for node in self.tree.nodes.values():
            inner = node is self.tree.root
            full = None if inner or node.children or node.is_protected else self._policy.full_rank(node)
            free_front = node.window_pages and node.window_pages[0] not in self.refs
            window = self._policy.window_rank(node) if free_front else None
            queued = (self._full_victims.rank(node.node_id), self._window_victims.rank(node.node_id))
            if queued != (full, window):
                raise PageStateError(f"node {node.node_id}: queued as {queued}, should be {(full, window)}")
        if max(len(self._full_victims), len(self._window_victims)) > len(self.tree.nodes):
            raise PageStateError("a removed node is still queued")

    def _drop_windows(self, node: Node, start: int, stop: int, dead: set[int]) -> list[Node]:
        first = node.window_start
        window = node.window_pages
        if not any(page in dead for page in window[max(0, start - first) : max(0, stop - first)]):
            self.refresh(node)
            return [node]
        cuts = [
            first + index for index in range(1, len(window)) if window[index] in dead and window[index - 1] not in dead
        ]
        self._free_windows([page for page in window if page in dead])
        node.window_pages = []
        pieces, left = [], node.start
        for cut in [*cuts, node.stop]:
            piece = self.tree.split(node, cut - node.start) if cut < node.stop else node
            piece.window_pages = [p for p in window[max(0, left - first) : cut - first] if p not in dead]
            pieces.append(piece)
            left = cut
        for piece in pieces:
            self.refresh(piece)
        return pieces

    def _free_windows(self, pages: Sequence[int]) -> None:
        self.anchored.difference_update(pages)
        self.pool.window.free(pages, PageOwner.TREE)

    def _no_pages(self, pool: str, needed: int) -> NoPages:
        free = self.pool.full.num_free if pool == "full" else self.pool.window.num_free
        evictable = self.num_evictable_full if pool == "full" else self.num_evictable_window
        return NoPages(pool=pool, needed=needed, free=free, evictable=evictable)
