"""The slow truth about two tiers: which page keys each has, a hit looked for token by token, and what pages contain.

Nothing here knows of trees, runs or pins. A tier is two dictionaries from page key to page number; the shadow memory
has a tag for every page, which says whose KV was last written there and whether that was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd.cache.prefix import PrefixCache
from epd.cache.tiers.host import HostTier

__all__ = ["Held", "Memory", "Tag", "brute_force_joint_hit", "held_by_device", "held_by_host"]


@dataclass(frozen=True, slots=True)
class Tag:
    """The KV of the page of this key."""

    key: bytes
    is_wrong: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What lookups may find in one tier: page number by key, of each pool."""

    full: dict[bytes, int]
    window: dict[bytes, int]


class Memory:
    """The contents of one tier's pages; None: nothing sensible."""

    def __init__(self, num_full_pages: int, num_window_pages: int) -> None:
        self.full: list[Tag | None] = [None] * num_full_pages
        self.window: list[Tag | None] = [None] * num_window_pages


def held_by_device(cache: PrefixCache) -> Held:
    """Read off the tree; pages that are hidden from lookups are not among them."""
    held = Held({}, {})
    nodes = [cache.ledger.tree.root]
    for node in nodes:
        nodes += node.children.values()
        for offset, key in enumerate(node.keys):
            if node.is_hidden:
                continue
            assert key not in held.full, "a key is twice in the tree"
            held.full[key] = node.full_pages[offset]
            window_page = node.window_page(node.start + offset)
            if window_page is not None:
                held.window[key] = window_page
    return held


def held_by_host(host: HostTier, keys: Sequence[bytes]) -> Held:
    """Of these keys, those that are ready."""
    held = Held({}, {})
    for key in keys:
        if (page := host.full.get(key)) is not None:
            held.full[key] = page
        if (page := host.window.get(key)) is not None:
            held.window[key] = page
    return held


def brute_force_joint_hit(
    tiers: Sequence[Held], keys: Sequence[bytes], num_tokens: int, *, page_size: int, window_tokens: int
) -> tuple[int, int]:
    """(usable, full-only) tokens: the largest page multiples p < `num_tokens` with full KV of each token of [0, p) in
    some tier and, for the first, window KV of each token of [p - window, p) in some tier."""
    usable = reached = 0
    for p in range(page_size, num_tokens, page_size):
        if p // page_size > len(keys):
            break
        pages = {token // page_size for token in range(p)}
        if not all(any(keys[page] in tier.full for tier in tiers) for page in pages):
            break
        reached = p
        pages = {token // page_size for token in range(max(0, p - window_tokens), p)}
        if all(any(keys[page] in tier.window for tier in tiers) for page in pages):
            usable = p
    return usable, reached
