"""The joint hit: the longest prefix that device and host have between them.

A prefix of p pages is usable iff each full page of [0, p) is on the device or in the host, and so is each window page
of [p - window_pages, p). That is more than the better of two answers: full pages may be on the device and the window
at their end in the host, or a window half here and half there.

The tree has a run of full pages from the root; the host continues it as far as it goes. The boundary is looked for from
that end downwards. A window page that is missing at j rules out every boundary of (j, j + window_pages], so the next
candidate is the lowest missing page of the window: few looks per window that is not there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from epd.cache.prefix import PrefixCache
from epd.cache.radix import Node, Walk
from epd.cache.tiers.host import HostTier
from epd.cache.window import window_floor

__all__ = ["JointHit", "LiveWindows", "joint_hit"]


@dataclass(frozen=True, slots=True)
class JointHit:
    """In pages. `walk` is the device's own answer; nothing of it is above the joint one."""

    walk: Walk
    num_pages: int
    """The longest usable prefix."""
    num_reached_pages: int
    """How far full pages reach; at least `num_pages`."""


class LiveWindows:
    """Which pages of a path have their window on the device, as the tree is now."""

    __slots__ = ("_nodes", "_starts", "_stops")

    def __init__(self, cache: PrefixCache, walk: Walk) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._nodes: list[Node] = []
        for node in cache.ledger.tree.upwards(walk.node):
            if node.window_pages and node.window_start < walk.num_pages:
                self._starts.append(node.window_start)
                self._stops.append(min(node.stop, walk.num_pages))
                self._nodes.append(node)
        self._starts.reverse()
        self._stops.reverse()
        self._nodes.reverse()

    def __contains__(self, page_index: int) -> bool:
        at = bisect_right(self._starts, page_index) - 1
        return at >= 0 and page_index < self._stops[at]

    def page(self, page_index: int) -> int | None:
        """The device's window page of path page `page_index`."""
        at = bisect_right(self._starts, page_index) - 1
        if at < 0 or page_index >= self._stops[at]:
            return None
        return self._nodes[at].window_page(page_index)


def joint_hit(cache: PrefixCache, host: HostTier, keys: Sequence[bytes], num_tokens: int) -> JointHit:
    """As PrefixCache.walk(), over both tiers. Changes nothing."""
    walk = cache.walk(keys, num_tokens)
    stop = min(len(keys), max(0, num_tokens - 1) // cache.page_size) if cache.enabled else 0
    reached = host.full.num_leading(keys, walk.num_pages, stop)
    if reached == walk.usable_pages or (reached == walk.num_pages and host.window.num_ready == 0):
        return JointHit(walk, walk.usable_pages, reached)
    live, is_ready, window_pages = LiveWindows(cache, walk), host.window.get, cache.window_pages
    boundary, page = reached, window_floor(reached, window_pages)
    while boundary > walk.usable_pages and page < boundary:
        if is_ready(keys[page]) is None and page not in live:
            boundary = page
            page = window_floor(boundary, window_pages)
        else:
            page += 1
    return JointHit(walk, max(boundary, walk.usable_pages), reached)
