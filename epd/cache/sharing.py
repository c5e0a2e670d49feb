"""Where a sequence and the tree hold the same page: one of the two is kept, the other freed."""

from __future__ import annotations

from epd.cache.ledger import TreeLedger
from epd.cache.radix import Node
from epd.kv.pages import PageOwner

__all__ = ["share_pages"]


def share_pages(
    ledger: TreeLedger, node: Node, full_pages: list[int], window_pages: list[int], window_start: int
) -> None:
    """A row's pages under `node` are in the tree: the row takes the node's, its duplicates are freed, and it lends the
    node the windows it lacks.

    `full_pages` and `window_pages` are the row's own lists and are changed; `window_pages` begin at row page
    `window_start`.
    """
    ours = full_pages[node.start : node.stop]
    duplicates = [page for page, kept in zip(ours, node.full_pages, strict=True) if page != kept]
    full_pages[node.start : node.stop] = node.full_pages
    ledger.pool.full.free(duplicates, PageOwner.SEQUENCE)
    first, node_start = max(node.start, window_start), node.window_start
    adopted, spare, taken = [], [], []
    for index in range(first, node.stop if ledger.window_pages else first):
        page = window_pages[index - window_start]
        if ledger.pool.window.owner(page) is PageOwner.TREE:
            continue
        if index < node_start:
            adopted.append(page)
            continue
        kept_page = node.window_pages[index - node_start]
        window_pages[index - window_start] = kept_page
        spare.append(page)
        taken.append(kept_page)
    ledger.pool.window.free(spare, PageOwner.SEQUENCE)
    ledger.pool.window.hand_over(adopted, PageOwner.SEQUENCE, PageOwner.TREE)
    ledger.hold_windows(adopted)
    ledger.hold_windows(taken)
    node.window_pages = adopted + node.window_pages
    if adopted:
        ledger.windows_changed(node)
    ledger.refresh(node)
