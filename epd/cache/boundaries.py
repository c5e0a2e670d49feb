"""Which ends of nodes can be resumed from, and what they need of each other: bounded looks around one node.

A boundary is usable when the windows of the `window_pages` pages before it are live. Within a node windows are dead,
then live, so the deepest usable boundary of a node, if it has one, is its end. Nothing here changes the tree, and
nothing looks at more than a fixed number of nodes beside those a single window spans.
"""

from __future__ import annotations

from epd.cache.radix import Node

__all__ = [
    "MAX_NODES_ABOVE",
    "MAX_NODES_BELOW",
    "end_is_usable",
    "ends_needing",
    "live_from",
    "next_usable",
    "nodes_looking_up",
]

MAX_NODES_ABOVE = 64
"""Nodes looked at for the next shallower usable boundary. Nodes without windows and with one child are joined to it, so
a path has that many only where it branches that often."""
MAX_NODES_BELOW = 32
"""Nodes looked at below one."""


def live_from(node: Node, floor: int) -> int:
    """First page of the run of live windows that ends with `node`; looks no further up than page `floor`."""
    current = node
    while current.window_pages and current.window_start == current.start > floor:
        if current.parent is None or not current.parent.window_pages:
            break
        current = current.parent
    return current.window_start


def end_is_usable(node: Node, window_pages: int) -> bool:
    """Whether a sequence can resume at `node`'s end."""
    floor = max(0, node.stop - window_pages)
    return live_from(node, floor) <= floor


def next_usable(node: Node, window_pages: int) -> tuple[Node | None, int]:
    """The nearest node above `node` with a usable end, and that end in pages; (None, 0) when there is none.

    One step per node: a run of live windows is carried upwards until it is long enough for the deepest end in it. When
    it stops short, no end in it is usable. After MAX_NODES_ABOVE nodes the answer is where the search stopped.
    """
    current, end = node.parent, None
    for _ in range(MAX_NODES_ABOVE):
        if current is None or current.parent is None:
            return None, 0
        if not current.window_pages:
            end = None
        else:
            end = current if end is None else end
            if current.window_start <= max(0, end.stop - window_pages):
                return end, end.stop
            if current.window_start > current.start:
                end = None
        current = current.parent
    return None, 0 if current is None else current.stop


def nodes_looking_up(node: Node, window_pages: int) -> tuple[list[Node], bool]:
    """Descendants for which `node`'s end may be the next usable one, and whether that is all of them: down to the
    first node on each branch that is usable whatever `node` has."""
    found: list[Node] = []
    num_seen, level = 0, [node]
    for above in level:
        for child in above.children.values():
            num_seen += 1
            if num_seen > MAX_NODES_BELOW:
                return found, False
            found.append(child)
            if child.stop - window_pages < node.stop or not end_is_usable(child, window_pages):
                level.append(child)
    return found, True


def ends_needing(node: Node, window_pages: int) -> tuple[list[Node], bool]:
    """Nodes with a usable end that needs a window page of `node`, itself first if it is one; and whether that is all.

    Children shorter than a window whose windows are all live lean on their parent's.
    """
    floor = node.stop - window_pages
    start = live_from(node, max(0, floor))
    ends = [node] if start <= max(0, floor) else []
    num_seen, level = 0, [node]
    for above in level:
        for child in above.children.values():
            num_seen += 1
            if num_seen > MAX_NODES_BELOW:
                return ends, False
            needs = child.stop - window_pages
            if needs >= node.stop or not child.window_pages or child.window_start > child.start:
                continue
            if start <= max(0, needs):
                ends.append(child)
            level.append(child)
    return ends, True
