"""The audit behind PrefixCache.check(): counts everything again, from tree and rows, and compares with the books."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from epd.cache.ledger import TreeLedger
from epd.cache.pins import PathPin
from epd.cache.sequence_pages import SequencePages
from epd.kv.errors import PageStateError
from epd.kv.pages import PageOwner, PagePool

__all__ = ["audit"]


def audit(ledger: TreeLedger, sequences: Iterable[SequencePages], pins: Collection[PathPin] = ()) -> None:
    """Raise PageStateError at the first page, reference or count that does not add up."""
    rows = [row for row in sequences if row.is_open]
    ledger.pool.check()
    ledger.tree.check()
    nodes = list(ledger.tree.nodes.values())
    tree_full = [page for node in nodes for page in node.full_pages]
    tree_window = [page for node in nodes for page in node.window_pages]
    own_full = [page for row in rows for page in row.full_pages[row.num_published_pages :]]
    owner = ledger.pool.window.owner
    own_window = [page for row in rows for page in row.window_pages if owner(page) is not PageOwner.TREE]
    _require_partition(ledger.pool.full, tree_full, own_full)
    _require_partition(ledger.pool.window, tree_window, own_window)
    _require_rows_match_tree(ledger, rows)
    refs = Counter(page for row in rows for page in row.window_pages if owner(page) is PageOwner.TREE)
    refs.update(page for pin in pins for page in pin.window_pages)
    locks = Counter(row.node.node_id for row in rows)
    locks.update(pin.node.node_id for pin in pins)
    if any(node.num_locks != locks[node.node_id] for node in nodes):
        raise PageStateError(
            f"locks by node are {locks}, booked { ({node.node_id: node.num_locks for node in nodes}) }"
        )
    if dict(refs) != ledger.refs:
        raise PageStateError(f"window references {ledger.refs} are booked, rows hold {dict(refs)}")
    stray = ledger.anchored.difference(tree_window)
    if stray:
        raise PageStateError(f"anchored window pages {sorted(stray)[:8]} are not in the tree")
    if ledger.tree.root.window_pages or ledger.tree.root.full_pages:
        raise PageStateError("the root holds pages")
    for node in nodes:
        if not 0 <= node.heat < math.inf or node.heat_at > ledger.num_lookups:
            raise PageStateError(f"node {node.node_id}: heat {node.heat} as of lookup {node.heat_at}")
        held = [page in ledger.refs for page in node.window_pages]
        if held != sorted(held):
            raise PageStateError(f"node {node.node_id}: windows in use are not its last ones: {held}")
    ledger.check_victims()


def _require_partition(pool: PagePool, tree: list[int], own: list[int]) -> None:
    if len(set(tree)) != len(tree) or len(set(own)) != len(own) or set(tree) & set(own):
        raise PageStateError(f"{pool.name} pool: a page has two owners")
    for pages, owner in ((tree, PageOwner.TREE), (own, PageOwner.SEQUENCE)):
        wrong = [page for page in pages if pool.owner(page) is not owner]
        if wrong or len(pages) != pool.count(owner):
            raise PageStateError(
                f"{pool.name} pool: {owner.name} has {len(pages)} pages, {pool.count(owner)} booked, wrong {wrong[:8]}"
            )


def _require_rows_match_tree(ledger: TreeLedger, rows: list[SequencePages]) -> None:
    for row in rows:
        if ledger.window_pages and row.window_start + len(row.window_pages) != len(row.full_pages):
            raise PageStateError(f"row windows end at {row.window_start + len(row.window_pages)}, not at its last page")
        for node in ledger.tree.upwards(row.node):
            if row.full_pages[node.start : node.stop] != node.full_pages:
                raise PageStateError(f"row and node {node.node_id} disagree about full pages")
            for index in range(max(node.start, row.window_start), node.stop):
                page = row.window_page(index)
                if (
                    page is not None
                    and ledger.pool.window.owner(page) is PageOwner.TREE
                    and page != node.window_page(index)
                ):
                    raise PageStateError(f"row and node {node.node_id} disagree about the window of page {index}")
