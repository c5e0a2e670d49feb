"""The bytes behind the host's page pools, page by page: what belongs to one page lies side by side.

A page holds its layers in the order of `KvLayout.full_layers` or `KvLayout.window_layers`, of each layer the keys
[P, K, H] and then the values [P, K, V], with nothing between them. So a page is one run of bytes to a store or a
network, and the bytes of one layer can still be moved alone.

Shape letters: N host pages of the pool; B bytes of one layer's keys, or values, in a page; others as in storage.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from epd.kv.layout import KvLayout, LayerGeometry
from epd.kv.numbers import require_at_least

__all__ = ["HostStorage", "PageKind", "PagePart"]

PageKind = Literal["full", "window"]


class PagePart(NamedTuple):
    """Bytes `[start, start + size_bytes)` of a page: a layer's keys, or its values."""

    start: int
    size_bytes: int


class HostStorage:
    """Pages of both pools in host memory, allocated at once. Threads may touch different pages at the same time."""

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_full_pages: int,
        num_window_pages: int,
        pinned: bool = False,
    ) -> None:
        """Pages hold anything until they are written. `pinned` memory is what a CUDA device copies by itself.

        Raises ValueError for a negative number of pages, RuntimeError (torch's) when there is not so much memory.
        """
        require_at_least(0, num_full_pages=num_full_pages, num_window_pages=num_window_pages)
        self.layout = layout
        self.is_pinned = pinned
        self.num_full_pages = num_full_pages
        self.num_window_pages = num_window_pages
        self._pools: dict[PageKind, Tensor] = {
            "full": _bytes(num_full_pages, layout.full_page_bytes, pinned=pinned),
            "window": _bytes(num_window_pages, layout.window_page_bytes, pinned=pinned),
        }
        self._pages = {kind: pool.numpy() for kind, pool in self._pools.items()}
        self._parts: dict[int, tuple[PageKind, PagePart, PagePart]] = {}
        self._add_layers("full", layout.full_layers)
        self._add_layers("window", layout.window_layers)

    @property
    def size_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())

    def pool(self, kind: PageKind) -> Tensor:
        """uint8 [N, page bytes]: all pages of a pool; writes are kept."""
        return self._pools[kind]

    def page_view(self, kind: PageKind, page: int) -> memoryview:
        """The bytes of one page, writable and contiguous; writes are kept. Raises IndexError for no such page."""
        pages = self._pages[kind]
        if not 0 <= page < len(pages):
            raise IndexError(f"{kind} page {page} is outside [0, {len(pages)})")
        return memoryview(pages[page])

    def parts(self, layer_index: int) -> tuple[PageKind, PagePart, PagePart]:
        """Which pool has a layer, and where its keys and its values are in a page. Raises ValueError for no layer."""
        if layer_index not in self._parts:
            raise ValueError(f"layer_index is {layer_index!r}; allowed: {', '.join(map(str, sorted(self._parts)))}")
        return self._parts[layer_index]

    def layer_views(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """uint8 [N, B]: a layer's keys and values in every page, views with gaps between pages; writes are kept."""
        kind, *parts = self.parts(layer_index)
        keys, values = (self._pools[kind][:, part.start : part.start + part.size_bytes] for part in parts)
        return keys, values

    def _add_layers(self, kind: PageKind, layers: tuple[LayerGeometry, ...]) -> None:
        start = 0
        for spec in layers:
            rows_bytes = self.layout.page_size * spec.num_kv_heads * self.layout.dtype_bytes
            keys = PagePart(start, rows_bytes * spec.qk_dim)
            values = PagePart(start + keys.size_bytes, rows_bytes * spec.v_dim)
            self._parts[spec.index] = kind, keys, values
            start = values.start + values.size_bytes


def _bytes(num_pages: int, page_bytes: int, *, pinned: bool) -> Tensor:
    return torch.empty(num_pages, page_bytes, dtype=torch.uint8, pin_memory=pinned)
