"""The prefix tree over page keys: structure and path locks, no policy and no pools.

A node is a run of pages: `keys[i]`, `full_pages[i]`, and a window that is present for a tail of the run only:

    node      start = 4, stop = 9
    keys         k4  k5  k6  k7  k8
    full         f4  f5  f6  f7  f8      always there: a node without full pages does not exist
    window        -   -   -  w7  w8      live from window_start = 7; empty when window_start == stop

Operations that would make another shape split the node, so "dead head, live tail" always describes it. Children are
keyed by their first page key. Keys are chained digests: if key i is equal, everything before it is, which is why a
common prefix is found by bisection and a whole node by one comparison.

Locks. A lock sits on one node and protects the path to the root. `holders` counts a node's own locks plus its protected
children, so locking stops at the first ancestor already protected. Full pages of unprotected nodes are evictable, from
the leaves inwards. Nothing here recurses: paths and subtrees are walked with loops.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

from epd.kv.errors import PageStateError

__all__ = ["Node", "RadixTree", "Walk"]

ItemT = TypeVar("ItemT")


class Node:
    """A run of pages on one path. Mutated only by RadixTree and the cache that owns it."""

    __slots__ = (
        "access",
        "children",
        "credit",
        "full_pages",
        "heat",
        "heat_at",
        "holders",
        "is_hidden",
        "keys",
        "node_id",
        "num_locks",
        "parent",
        "start",
        "window_access",
        "window_pages",
    )

    def __init__(self, node_id: int, parent: Node | None, start: int) -> None:
        self.node_id = node_id
        self.parent = parent
        self.start = start
        self.keys: list[bytes] = []
        self.full_pages: list[int] = []
        self.window_pages: list[int] = []
        self.children: dict[bytes, Node] = {}
        self.num_locks = 0
        self.holders = 0
        self.access = 0
        self.window_access = 0
        # How much its end is used, as of a time: a victim policy's (see victims.py).
        self.heat = 0.0
        self.heat_at = 0
        # Uses of the cache that its end may be older than others before its full pages go: the victim policy's too.
        self.credit = 0
        # Nobody may find it: it was condemned, or built on what was.
        self.is_hidden = False

    @property
    def num_pages(self) -> int:
        return len(self.keys)

    @property
    def stop(self) -> int:
        """Pages from the root to the end of this node."""
        return self.start + len(self.keys)

    @property
    def window_start(self) -> int:
        """First page of the live window tail; `stop` when there is none."""
        return self.start + len(self.keys) - len(self.window_pages)

    @property
    def is_protected(self) -> bool:
        return self.holders > 0

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def window_page(self, page_index: int) -> int | None:
        """The window page of path page `page_index`, None where it is dead."""
        offset = page_index - self.window_start
        return self.window_pages[offset] if offset >= 0 else None


class Walk:
    """Where a walk down the tree ended: `node` is the last node entered, matched up to `num_pages` of the path."""

    __slots__ = ("node", "num_pages", "usable_pages")

    def __init__(self, node: Node, num_pages: int, usable_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages
        self.usable_pages = usable_pages


class RadixTree:
    """Nodes under one empty root."""

    __slots__ = ("_next_id", "nodes", "num_protected_pages", "root")

    def __init__(self) -> None:
        self._next_id = 0
        self.nodes: dict[int, Node] = {}
        self.root = self._new_node(None, 0)
        self.num_protected_pages = 0

    def walk(self, keys: Sequence[bytes], *, stop: int, window_pages: int) -> Walk:
        """Longest path along `keys[:stop]`, and the longest usable boundary on it. Changes nothing.

        `window_pages` live windows are wanted before a boundary. Within a node the windows are dead, then live, so the
        best boundary of a node is its end or the end of the match: O(nodes on the path x log pages).
        """
        node, matched, usable, after_dead = self.root, 0, 0, 0
        while matched < stop:
            child = node.children.get(keys[matched])
            if child is None:
                break
            node = child
            matched += common_pages(node.keys, keys, matched, stop)
            if node.window_start > node.start:
                after_dead = min(node.window_start, matched)
            if window_pages == 0 or max(0, matched - window_pages) >= after_dead:
                usable = matched
            if matched < node.stop:
                break
        return Walk(node, matched, usable)

    def path_nodes(self, keys: Sequence[bytes], stop: int) -> Iterator[Node]:
        """The nodes along `keys[:stop]`, which the tree must hold; the last may reach beyond `stop`."""
        node, matched = self.root, 0
        while matched < stop:
            node = node.children[keys[matched]]
            matched = node.stop
            yield node

    def add_child(self, parent: Node, keys: list[bytes], full_pages: list[int], window_pages: list[int]) -> Node:
        """Hang a new run below `parent`; `window_pages` are those of its last pages."""
        child = self._new_node(parent, parent.stop)
        child.keys, child.full_pages, child.window_pages = keys, full_pages, window_pages
        child.is_hidden = parent.is_hidden
        parent.children[keys[0]] = child
        return child

    def append(self, node: Node, keys: list[bytes], full_pages: list[int]) -> None:
        """Grow a leaf at its end. Its windows must be made to fit by the caller."""
        node.keys += keys
        node.full_pages += full_pages
        if node.is_protected:
            self.num_protected_pages += len(keys)

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages` pages; returns the new upper part. `node` stays the lower one, locks, heat and
        all."""
        upper = self._new_node(node.parent, node.start)
        upper.access, upper.window_access, upper.heat_at = node.access, node.window_access, node.heat_at
        upper.holders = 1 if node.is_protected else 0
        upper.is_hidden = node.is_hidden
        upper_window = max(0, len(node.window_pages) - (node.num_pages - num_pages))
        upper.keys, node.keys = node.keys[:num_pages], node.keys[num_pages:]
        upper.full_pages, node.full_pages = node.full_pages[:num_pages], node.full_pages[num_pages:]
        upper.window_pages, node.window_pages = node.window_pages[:upper_window], node.window_pages[upper_window:]
        upper.children[node.keys[0]] = node
        assert upper.parent is not None
        upper.parent.children[upper.keys[0]] = upper
        node.parent, node.start = upper, upper.stop
        return upper

    def merge_down(self, node: Node) -> Node | None:
        """Join `node` with its only child where nothing can tell: no lock ends here and the windows stay a tail.

        Returns the joined node (the child, grown at its front), None when the two must stay apart.
        """
        if node is self.root or node.num_locks or len(node.children) != 1:
            return None
        (child,) = node.children.values()
        if node.window_pages and child.window_start > child.start:
            return None
        assert node.parent is not None
        child.start, child.parent = node.start, node.parent
        child.keys = _joined(node.keys, child.keys)
        child.full_pages = _joined(node.full_pages, child.full_pages)
        child.window_pages = _joined(node.window_pages, child.window_pages)
        child.access = max(node.access, child.access)
        child.window_access = max(node.window_access, child.window_access)
        node.parent.children[child.keys[0]] = child
        del self.nodes[node.node_id]
        return child

    def truncate(self, node: Node, num_pages: int) -> tuple[list[int], list[int]]:
        """Cut the last `num_pages` off an unprotected leaf; returns the full and window pages set free.

        A node left empty is removed. The parent inherits the access time: whoever touched the leaf touched its path.
        """
        assert node.parent is not None
        if node.children or node.is_protected:
            raise PageStateError("only an unprotected leaf can be cut")
        kept = node.num_pages - num_pages
        first_window = max(0, len(node.window_pages) - num_pages)
        full_pages, window_pages = node.full_pages[kept:], node.window_pages[first_window:]
        first_key = node.keys[0]
        del node.keys[kept:], node.full_pages[kept:], node.window_pages[first_window:]
        node.parent.access = max(node.parent.access, node.access)
        if not node.keys:
            del node.parent.children[first_key]
            del self.nodes[node.node_id]
        return full_pages, window_pages

    def hide(self, node: Node) -> list[Node]:
        """Give every page of the subtree a key nobody can look up; returns its nodes, parents first.

        Locks, windows and rows are not touched. Rows that end here may go on: what they publish hangs below a hidden
        node, where no lookup comes.
        """
        assert node.parent is not None
        del node.parent.children[node.keys[0]]
        hidden = [node]
        for above in hidden:
            hidden += above.children.values()
        for one in hidden:
            one.keys = [os.urandom(len(key)) for key in one.keys]
            one.children = {}
            one.is_hidden = True
        for one in hidden:
            assert one.parent is not None
            one.parent.children[one.keys[0]] = one
        return hidden

    def lock(self, node: Node) -> None:
        """Protect the path from the root to the end of `node`."""
        node.num_locks += 1
        current: Node | None = node
        while current is not None:
            current.holders += 1
            if current.holders > 1:
                return
            self.num_protected_pages += current.num_pages
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one lock(). Raises PageStateError where there is none."""
        if node.num_locks == 0:
            raise PageStateError(f"node [{node.start}, {node.stop}) holds no lock")
        node.num_locks -= 1
        current: Node | None = node
        while current is not None:
            current.holders -= 1
            if current.holders > 0:
                return
            self.num_protected_pages -= current.num_pages
            current = current.parent

    def upwards(self, node: Node) -> Iterator[Node]:
        """`node` and its ancestors, without the root. Nodes split during the walk are met in their new form."""
        current: Node | None = node
        while current is not None and current is not self.root:
            yield current
            current = current.parent

    def check(self) -> None:
        """Raise PageStateError unless shape, links and lock counts hold."""
        protected, reached, stack = 0, 0, [self.root]
        while stack:
            node = stack.pop()
            reached += 1
            protected += node.num_pages if node.is_protected else 0
            if self.nodes.get(node.node_id) is not node:
                raise PageStateError(f"node {node.node_id} is reachable but not registered")
            if len(node.full_pages) != node.num_pages or len(node.window_pages) > node.num_pages:
                raise PageStateError(f"node {node.node_id}: page lists do not match {node.num_pages} keys")
            if node is not self.root and not node.keys:
                raise PageStateError(f"node {node.node_id} is empty")
            if node.holders != node.num_locks + sum(child.is_protected for child in node.children.values()):
                raise PageStateError(f"node {node.node_id}: {node.holders} holders do not add up")
            for key, child in node.children.items():
                if child.parent is not node or child.start != node.stop or child.keys[0] != key:
                    raise PageStateError(f"node {child.node_id} does not continue node {node.node_id}")
            stack += node.children.values()
        if reached != len(self.nodes) or protected != self.num_protected_pages:
            raise PageStateError(
                f"{reached} of {len(self.nodes)} nodes reached, {protected} pages locked of {self.num_protected_pages}"
            )

    def _new_node(self, parent: Node | None, start: int) -> Node:
        node = Node(self._next_id, parent, start)
        self._next_id += 1
        self.nodes[node.node_id] = node
        return node


def _joined(upper: list[ItemT], lower: list[ItemT]) -> list[ItemT]:
    """Both in one list, the longer of them, which is changed: a run that grows by joins is not copied at each."""
    if len(upper) < len(lower):
        lower[:0] = upper
        return lower
    upper += lower
    return upper


def common_pages(run: Sequence[bytes], keys: Sequence[bytes], start: int, stop: int) -> int:
    """How many pages of `run` equal `keys[start:stop]`, both chained: one comparison when all do, else bisection."""
    low, high = 0, min(len(run), stop - start)
    if high and run[high - 1] == keys[start + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if run[middle] == keys[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
