"""What the tree holds, who is using it, and what may go: window references, anchors, victims.

Full pages are pinned by path locks (radix.py). Window pages are pinned one by one: `refs` counts the running sequences
whose row names the page. A page the tree holds is evictable when neither applies, so per pool

    total = free + leased (sequences' own pages, and tree pages in use) + evictable
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from epd.cache.boundaries import nodes_looking_up
from epd.cache.lru import Rank, VictimQueue
from epd.cache.radix import Node, RadixTree
from epd.cache.victims import VictimPolicy
from epd.kv.dual import DualPool, PageGrant
from epd.kv.errors import NoPages, PageStateError
from epd.kv.pages import PageOwner

__all__ = ["EvictionWitness", "TreeLedger"]


_MAX_SECOND_LOOKS = 32
"""Queued ranks that are looked up again before one victim is taken as it stands."""


class EvictionWitness(Protocol):
    """Who keeps pages elsewhere as well, and is told before they go; see tiers/backup.py."""

    def leaving_end(self, node: Node, num_pages: int) -> None:
        """The last pages of this leaf are about to go, windows and all. Their bytes stay until saved()."""
        ...

    def leaving_windows(self, node: Node, num_pages: int) -> None:
        """The first window pages of this node are about to go. Their bytes stay until saved()."""
        ...

    def save(self) -> None:
        """What was named since the last call is freed on return."""
        ...

    def settle(self) -> bool:
        """Pages are short: wait for a copy that keeps some. False when there is none."""
        ...

    def learned(self, keys: Sequence[bytes], num_pages: int) -> None:
        """A boundary is kept since others will leave the path there too. May pin and cut nodes."""
        ...


class TreeLedger:
    """Books over one tree and its two pools; all eviction happens here."""

    __slots__ = (
        "_full_victims",
        "_policy",
        "_tick",
        "_window_victims",
        "anchored",
        "num_cut_short",
        "num_evicted_full",
        "num_evicted_window",
        "num_lookups",
        "pool",
        "refs",
        "tree",
        "window_pages",
        "witness",
    )

    def __init__(self, pool: DualPool, *, window_pages: int, policy: VictimPolicy) -> None:
        """`window_pages`: pages a boundary needs live before it."""
        self.pool = pool
        self.tree = RadixTree()
        self.window_pages = window_pages
        self.witness: EvictionWitness | None = None
        self.refs: dict[int, int] = {}
        self.anchored: set[int] = set()
        self.num_evicted_full = 0
        self.num_evicted_window = 0
        self.num_lookups = 0
        self.num_cut_short = 0
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
        """Take pages, evicting in whichever pool is short; NoPages, with nothing changed, if that cannot be enough.

        Pages that a copy keeps are waited for before it is said that there are too few.
        """
        while (refusal := self._refusal(num_full, num_window)) is not None:
            if self.witness is None or not self.witness.settle():
                raise refusal
        short_full = num_full - self.pool.full.num_free
        short_window = num_window - self.pool.window.num_free
        if short_full > 0:
            self.evict_full(short_full)
            # Leaves take their windows along, so the other pool may be less short now.
            short_window = num_window - self.pool.window.num_free
        if short_window > 0:
            self.evict_window(short_window)
        return self.pool.allocate(num_full, num_window)

    def evict_full(self, num_pages: int) -> int:
        """Free up to `num_pages` full pages, from the ends of unused leaves inwards; returns how many were freed.

        Only what decides the next victim is kept up to date meanwhile. Joining nodes and ranking windows anew waits
        for the end, when most of the nodes it would be done for are gone: a request may evict thousands of leaves.
        """
        gone_full: list[int] = []
        gone_windows: list[int] = []
        touched: dict[int, Node] = {}
        if num_pages > 0 and (node := self._first(self._full_victims, self._policy.full_rank)) is not None:
            self._policy.ran_short(self._full_victims.rank(node.node_id) or (0, 0), self._tick)
        while (left := num_pages - len(gone_full)) > 0:
            node = self._first(self._full_victims, self._policy.full_rank)
            if node is None:
                break
            parent = node.parent
            assert parent is not None
            count = min(left, node.num_pages)
            if self.witness is not None:
                self.witness.leaving_end(node, count)
            full_pages, window_pages = self.tree.truncate(node, count)
            gone_full += full_pages
            gone_windows += window_pages
            self._policy.leaf_lost(node)
            for one in (node, parent):
                touched[one.node_id] = one
                self._refresh_full(one)
        if self.witness is not None:
            self.witness.save()
        self.pool.full.free(gone_full, PageOwner.TREE)
        self._free_windows(gone_windows)
        self._settle(touched.values())
        self.num_evicted_full += len(gone_full)
        return len(gone_full)

    def evict_window(self, num_pages: int) -> int:
        """Free up to `num_pages` window pages, full pages staying; returns how many were freed."""
        gone: list[int] = []
        while (
            len(gone) < num_pages and (node := self._first(self._window_victims, self._policy.window_rank)) is not None
        ):
            limit = min(num_pages - len(gone), self._policy.num_spare_windows(node))
            count = 0
            while count < limit and node.window_pages[count] not in self.refs:
                count += 1
            if self.witness is not None:
                self.witness.leaving_windows(node, count)
            self._policy.ends_lost(node, count)
            gone += node.window_pages[:count]
            del node.window_pages[:count]
            self.windows_changed(node)
            self.tidy(node)
        if self.witness is not None:
            self.witness.save()
        self._free_windows(gone)
        self.num_evicted_window += len(gone)
        return len(gone)

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
        if joined is None:
            self.refresh(node)
            return
        self._policy.overtaken(node, joined)
        self.refresh(node)
        self.refresh(joined)
        self._refresh_above(joined)

    def windows_changed(self, node: Node) -> None:
        """Windows of `node` came or went: bring the ranks up to date that may have become smaller by it.

        They belong to nodes above that shared a window with it, and to nodes below that fall back on its end. At most
        MAX_NODES_BELOW of these are looked at; `num_cut_short` counts the times when there were more.
        """
        self.refresh(node)
        if not self._policy.looks_around:
            return
        self._refresh_above(node)
        below, is_all = nodes_looking_up(node, self.window_pages)
        for one in below:
            self.refresh(one)
        self.num_cut_short += not is_all

    def refresh(self, node: Node) -> None:
        """Bring the victim queues up to date after any change to `node`."""
        self._refresh_full(node)
        if self._is_alive(node) and node.window_pages and node.window_pages[0] not in self.refs:
            self._window_victims.put(node.node_id, self._policy.window_rank(node))
        else:
            self._window_victims.discard(node.node_id)

    def _refresh_full(self, node: Node) -> None:
        if self._is_alive(node) and node.is_leaf and not node.is_protected:
            self._full_victims.put(node.node_id, self._policy.full_rank(node))
        else:
            self._full_victims.discard(node.node_id)

    def _is_alive(self, node: Node) -> bool:
        return self.tree.nodes.get(node.node_id) is node and node is not self.tree.root

    def _settle(self, touched: Iterable[Node]) -> None:
        """Leaves went from these nodes, or they are gone themselves: join what is left, and rank it and what is above.

        From the top down, so that a row of nodes grows at its end. What a lost leaf leant on is above its lost place,
        which is below the nearest node that is left of its path.
        """
        for node in sorted(touched, key=lambda one: one.start):
            if not self._is_alive(node):
                self.refresh(node)
                continue
            last = node
            while (joined := self.tree.merge_down(last)) is not None:
                self._policy.overtaken(last, joined)
                self.refresh(last)
                last = joined
            self.refresh(last)
            self._refresh_above(last)

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
            self._policy.touched(above, self.num_lookups)
            self.refresh(above)

    def note_use(self, node: Node) -> None:
        """A lookup ended at `node`'s end, or the next one probably will."""
        self._policy.used(node, self.num_lookups)
        self.refresh(node)
        # A leaf used again may be worth less than it was: so are the windows above that its end needs.
        self._refresh_above(node)

    def note_resumption(self, node: Node) -> None:
        """A lookup ended at `node`'s end, whose sequence goes on from there. `node` is in use, so in no full queue."""
        if node.is_leaf and node is not self.tree.root:
            self._policy.resumed(node)

    def note_continuation(self, node: Node, child: Node) -> None:
        """`node` was a leaf until `child` continued it."""
        self._policy.overtaken(node, child)
        self.refresh(node)
        self.refresh(child)
        self._refresh_above(node)

    def check_victims(self) -> None:
        """Raise PageStateError unless exactly the evictable nodes are queued, under their present ranks (or, where
        ranks depend on other nodes, smaller ones)."""
        for node in self.tree.nodes.values():
            inner = node is self.tree.root
            full = None if inner or node.children or node.is_protected else self._policy.full_rank(node)
            free_front = node.window_pages and node.window_pages[0] not in self.refs
            window = self._policy.window_rank(node) if free_front else None
            queued = (self._full_victims.rank(node.node_id), self._window_victims.rank(node.node_id))
            if any(not self._is_good(was, now) for was, now in zip(queued, (full, window), strict=True)):
                raise PageStateError(f"node {node.node_id}: queued as {queued}, should be {(full, window)}")
        if max(len(self._full_victims), len(self._window_victims)) > len(self.tree.nodes):
            raise PageStateError("a removed node is still queued")

    def _is_good(self, queued: Rank | None, present: Rank | None) -> bool:
        if queued is None or present is None or not self._policy.looks_around:
            return queued == present
        return queued <= present or self.num_cut_short > 0

    def _first(self, victims: VictimQueue, rank: Callable[[Node], Rank]) -> Node | None:
        """The node with the smallest rank. Queued ranks may be too small: the first ones are looked up again."""
        for _ in range(_MAX_SECOND_LOOKS if self._policy.looks_around else 0):
            item = victims.first()
            if item is None:
                return None
            node = self.tree.nodes[item]
            queued, present = victims.rank(item), rank(node)
            if queued is not None and present <= queued:
                return node
            victims.put(item, present)
        item = victims.first()
        return None if item is None else self.tree.nodes[item]

    def _refresh_above(self, node: Node) -> None:
        """Ranks of the nodes above whose windows ends at or below `node` may need."""
        if not self._policy.looks_around:
            return
        floor = node.start - self.window_pages
        for above in self.tree.upwards(node):
            if above.stop <= floor:
                break
            self.refresh(above)

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
            self.windows_changed(piece)
        return pieces

    def _free_windows(self, pages: Sequence[int]) -> None:
        self.anchored.difference_update(pages)
        self.pool.window.free(pages, PageOwner.TREE)

    def _refusal(self, num_full: int, num_window: int) -> NoPages | None:
        """Why so many pages cannot be had now, evicting if need be."""
        for pool, needed, evictable in (
            (self.pool.full, num_full, self.num_evictable_full),
            (self.pool.window, num_window, self.num_evictable_window),
        ):
            if needed - pool.num_free > evictable:
                return NoPages(pool=pool.name, needed=needed, free=pool.num_free, evictable=evictable)
        return None
