"""What a cache holds, in bytes: pages of both pools that are not free; and what one pool for all layers would hold."""

from __future__ import annotations

from dataclasses import dataclass

from epd.kv.dual import DualPool
from epd.kv.layout import KvLayout

__all__ = ["HeldBytes", "held_bytes", "single_pool_bytes"]


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes of the pages somebody holds, sequences or the tree, whole pages counted."""

    full: int
    window: int

    @property
    def total(self) -> int:
        return self.full + self.window

    def per_token(self, num_tokens: int) -> float:
        """Bytes per token when these pages are all there is of `num_tokens` cached tokens."""
        return self.total / num_tokens


def held_bytes(layout: KvLayout, pool: DualPool) -> HeldBytes:
    """Bytes the two pools hold now; `layout` is the one they were planned for."""
    return HeldBytes(
        full=(pool.full.num_pages - pool.full.num_free) * layout.full_page_bytes,
        window=(pool.window.num_pages - pool.window.num_free) * layout.window_page_bytes,
    )


def single_pool_bytes(layout: KvLayout, num_tokens: int) -> int:
    """Bytes of `num_tokens` tokens in a layout where every layer keeps every token, rounded up to pages."""
    num_pages = -(-num_tokens // layout.page_size)
    return num_pages * (layout.full_page_bytes + layout.window_page_bytes)
