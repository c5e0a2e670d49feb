"""The tensors behind the pools: one key and one value tensor per layer.

Shape letters: M pages of the layer's pool; P tokens per page; K KV heads; H key width; V value width; n pages moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epd.kv.layout import KvLayout, LayerGeometry
from epd.kv.numbers import require_at_least

__all__ = ["KvStorage", "LayerPages"]

LayerPages = tuple[Tensor, Tensor]
"""Keys [n, P, K, H] and values [n, P, K, V] of some pages of one layer, contiguous."""


class KvStorage:
    """Paged keys and values of every layer; full layers have full-pool pages, window layers window-pool pages."""

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_full_pages: int,
        num_window_pages: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates everything at once and writes nothing: pages hold anything until they are written.

        `dtype` must be `layout.dtype_bytes` wide. Raises ValueError for another, or a negative number of pages.
        """
        require_at_least(0, num_full_pages=num_full_pages, num_window_pages=num_window_pages)
        if dtype.itemsize != layout.dtype_bytes:
            raise ValueError(f"{dtype} has {dtype.itemsize} bytes, the layout was made for {layout.dtype_bytes}")
        self.layout = layout
        self.device = torch.device(device)
        self.dtype = dtype
        self.num_full_pages = num_full_pages
        self.num_window_pages = num_window_pages
        self.full_layer_indices = tuple(spec.index for spec in layout.full_layers)
        self.window_layer_indices = tuple(spec.index for spec in layout.window_layers)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        for layers, num_pages in ((layout.full_layers, num_full_pages), (layout.window_layers, num_window_pages)):
            for spec in layers:
                self._add_layer(spec, num_pages)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in (self._keys, self._values) for tensor in tensors.values())

    def keys(self, layer_index: int) -> Tensor:
        """[M, P, K, H] of one layer; a view of the storage, writes are kept. Raises ValueError for an unknown layer."""
        self._require_layer(layer_index)
        return self._keys[layer_index]

    def values(self, layer_index: int) -> Tensor:
        """[M, P, K, V] of one layer; a view of the storage, writes are kept. Raises ValueError for an unknown layer."""
        self._require_layer(layer_index)
        return self._values[layer_index]

    def read_layer(self, layer_index: int, pages: Sequence[int]) -> LayerPages:
        """Copies of the given pages of one layer's own pool, in the order asked for, on the storage's device."""
        index = self._page_index(layer_index, pages)
        return self._keys[layer_index][index], self._values[layer_index][index]

    def write_layer(self, layer_index: int, pages: Sequence[int], data: LayerPages) -> None:
        """Fill the given pages of one layer. Raises ValueError, writing nothing, on a wrong shape or dtype."""
        index = self._page_index(layer_index, pages)
        for target, source in zip((self._keys[layer_index], self._values[layer_index]), data, strict=True):
            expected = (len(pages), *target.shape[1:])
            if tuple(source.shape) != expected or source.dtype != self.dtype:
                raise ValueError(
                    f"layer {layer_index}: pages of shape {expected} {self.dtype} expected, "
                    f"got {tuple(source.shape)} {source.dtype}"
                )
        self._keys[layer_index][index] = data[0].to(self.device)
        self._values[layer_index][index] = data[1].to(self.device)

    def _add_layer(self, spec: LayerGeometry, num_pages: int) -> None:
        shape = (num_pages, self.layout.page_size, spec.num_kv_heads)
        self._keys[spec.index] = torch.empty(*shape, spec.qk_dim, dtype=self.dtype, device=self.device)
        self._values[spec.index] = torch.empty(*shape, spec.v_dim, dtype=self.dtype, device=self.device)

    def _require_layer(self, layer_index: int) -> None:
        if layer_index not in self._keys:
            raise ValueError(f"layer_index is {layer_index!r}; allowed: {', '.join(map(str, sorted(self._keys)))}")

    def _page_index(self, layer_index: int, pages: Sequence[int]) -> Tensor:
        self._require_layer(layer_index)
        num_pages = self._keys[layer_index].shape[0]
        outside = [page for page in pages if not 0 <= page < num_pages]
        if outside:
            raise IndexError(f"layer {layer_index}: pages {outside[:8]} are outside [0, {num_pages})")
        return torch.tensor(list(pages), dtype=torch.int64, device=self.device)
