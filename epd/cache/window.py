"""The usable-prefix rule and the release frontier: pure arithmetic on page indices.

Convention. `window_tokens` (W) is how many tokens *before* position p the token at p may read in a window layer, the
largest over the window layers (a layer with `window_left` 127 reads 127 earlier tokens). A prefix of p tokens, p a
multiple of the page size, is usable iff every full page of [0, p) and every window page covering [max(0, p - W), p) is
live. W = 0 means a model without window layers.

    W = 5, P = 4, p = 12:   pages  | 0 | 1 | 2 |      tokens [7, 12) are needed: pages 1 and 2
                                         ^^^^^
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["longest_usable", "num_window_pages", "release_frontier", "window_floor"]


def num_window_pages(window_tokens: int, page_size: int) -> int:
    """Window pages a page-aligned boundary needs live, counted back from it."""
    return -(-window_tokens // page_size)


def window_floor(num_pages: int, window_pages: int) -> int:
    """First page whose window must be live for the boundary after `num_pages` pages."""
    return max(0, num_pages - window_pages)


def longest_usable(window_live: Sequence[bool], window_pages: int, max_pages: int) -> int:
    """Pages of the longest usable prefix of a chain whose full pages are all live, at most `max_pages`.

    `window_live[i]` tells whether page i's window is live. One pass: the boundary p holds iff no dead page lies in
    [p - window_pages, p), that is, iff the last dead page below p is below the floor.
    """
    usable, after_dead = 0, 0
    for page in range(min(max_pages, len(window_live))):
        if not window_live[page]:
            after_dead = page + 1
        if window_floor(page + 1, window_pages) >= after_dead or window_pages == 0:
            usable = page + 1
    return usable


def release_frontier(
    num_committed_tokens: int, *, window_tokens: int, page_size: int, tail_pages: int, interval_tokens: int = 1
) -> int:
    """First page whose window a running sequence must keep; windows below it may go.

    Derived from the boundary the next publish will use (committed tokens rounded down to pages), so that the window
    at that boundary and at the `tail_pages` boundaries before it is whole: an identical prompt computes at least one
    token and is therefore looked up one boundary earlier. Only committed tokens count, so rejected drafts never move
    it. `interval_tokens` makes it move in steps, so that decode releases several pages at a time. Monotone in
    `num_committed_tokens`, never above `num_committed_tokens - window_tokens`.
    """
    boundary = num_committed_tokens // interval_tokens * interval_tokens // page_size
    return max(0, boundary - num_window_pages(window_tokens, page_size) - tail_pages)
