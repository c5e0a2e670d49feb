"""Pages of the tree that a copy reads: they stay where they are until it is over, whoever uses them or not.

A pin locks a path, as a row does, and counts as one more user of a run of windows at its end, no further: windows in
use must be the last ones of their node, which is why a node is cut where a pin ends. Nothing is touched: a copy is no
use of what it copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epd.cache.ledger import TreeLedger
from epd.cache.radix import Node

__all__ = ["PathPin"]


class PathPin:
    """Full pages [0, stop) of a path and its window pages [window_start, stop). Made by PrefixCache.pin()."""

    __slots__ = ("_ledger", "_on_release", "node", "window_pages", "window_start")

    def __init__(
        self,
        ledger: TreeLedger,
        keys: Sequence[bytes],
        stop: int,
        window_start: int,
        on_release: Callable[[PathPin], None],
    ) -> None:
        """The tree holds `keys[:stop]`, `stop` > 0, and the windows of [window_start, stop)."""
        self._ledger = ledger
        self._on_release = on_release
        self.node = _cut(ledger, keys, stop)
        self.window_start = window_start
        self.window_pages: list[int] = []
        """Of pages [window_start, stop), in order."""
        ledger.tree.lock(self.node)
        runs = []
        for node in self._nodes():
            runs.append(node.window_pages[max(0, window_start - node.window_start) :])
        self.window_pages = [page for run in reversed(runs) for page in run]
        ledger.hold_windows(self.window_pages)
        for node in self._nodes():
            ledger.refresh(node)
        ledger.refresh(self.node)

    def release(self) -> None:
        """Once."""
        ledger = self._ledger
        ledger.release_windows(self.node, self.window_start, self.window_pages)
        ledger.tree.unlock(self.node)
        ledger.tidy(self.node)
        self._on_release(self)

    def _nodes(self) -> list[Node]:
        """Nodes with pages of [window_start, stop), the last first."""
        found = []
        for node in self._ledger.tree.upwards(self.node):
            if node.stop <= self.window_start:
                break
            found.append(node)
        return found


def _cut(ledger: TreeLedger, keys: Sequence[bytes], stop: int) -> Node:
    """The node that ends at `stop`, cut to do so if need be."""
    *_, node = ledger.tree.path_nodes(keys, stop)
    if node.stop > stop:
        lower, node = node, ledger.tree.split(node, stop - node.start)
        ledger.refresh(lower)
    return node
