"""What of a prompt the device has, as a prefetch needs to know it."""

from __future__ import annotations

from collections.abc import Sequence

from epd.cache.prefix import PrefixCache
from epd.cache.tiers.reach import Above

__all__ = ["device_has"]


def device_has(cache: PrefixCache, keys: Sequence[bytes], num_tokens: int) -> Above:
    """A snapshot: what is evicted later makes the hit shorter, and no more. Changes nothing."""
    walk = cache.walk(keys, num_tokens)
    windows: set[int] = set()
    for node in cache.ledger.tree.upwards(walk.node):
        windows.update(range(node.window_start, min(node.stop, walk.num_pages)))
    return Above(walk.num_pages, frozenset(windows))
