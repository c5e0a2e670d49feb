"""A paged cache without policy: hands out shuffled pages, drops window pages as soon as no later query sees them.

Pages that hold nothing are NaN, before first use and again after release, so a wrong read cannot go unseen.
"""

import torch
from torch import Tensor

from epd.kernels.base import PagedSequence
from epd.kernels.reference import PagedAttention
from epd.model.config import LayerConfig


class PagedCache:
    """Key and value pages of the given layers, and the page tables of any number of sequences."""

    def __init__(
        self, layers: list[LayerConfig], *, page_size: int, num_pages: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.page_size = page_size
        # What released pages hold.
        self.junk = torch.nan
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        for layer in layers:
            shape = num_pages, page_size, layer.num_kv_heads
            self._keys[layer.index] = torch.full((*shape, layer.qk_dim), torch.nan, dtype=dtype)
            self._values[layer.index] = torch.full((*shape, layer.v_dim), torch.nan, dtype=dtype)
        self._window_layers = [layer.index for layer in layers if layer.is_window]
        self._reach = max((layer.window_left for layer in layers if layer.window_left is not None), default=0)
        generator = torch.Generator().manual_seed(0)
        self._free_full = torch.randperm(num_pages, generator=generator).tolist()
        self._free_window = torch.randperm(num_pages, generator=generator).tolist()
        self.num_tokens: dict[str, int] = {}
        self._full: dict[str, list[int]] = {}
        self._window: dict[str, dict[int, int]] = {}

    def keys(self, layer_index: int) -> Tensor:
        return self._keys[layer_index]

    def values(self, layer_index: int) -> Tensor:
        return self._values[layer_index]

    def admit(self, name: str) -> None:
        self.num_tokens[name] = 0
        self._full[name] = []
        self._window[name] = {}

    def extend(self, name: str, num_new: int) -> PagedSequence:
        """Reserve pages for `num_new` tokens and count them as held."""
        context = self.num_tokens[name]
        full, window = self._full[name], self._window[name]
        while len(full) * self.page_size < context + num_new:
            window[len(full)] = self._free_window.pop()
            full.append(self._free_full.pop())
        self._drop_window_before(name, max(0, context - self._reach) // self.page_size)
        self.num_tokens[name] = context + num_new
        return self.sequence(name, num_new=num_new, num_context=context)

    def sequence(self, name: str, *, num_new: int, num_context: int, write_full: bool = True) -> PagedSequence:
        window = self._window[name]
        return PagedSequence(
            num_new=num_new,
            num_context=num_context,
            full_pages=torch.tensor(self._full[name]),
            window_pages=torch.tensor([window[page] for page in sorted(window)]),
            window_start_page=min(window),
            write_full=write_full,
        )

    def drop_window(self, name: str, *, fresh_from_page: int) -> None:
        """Forget all window content of a sequence, and give it empty window pages from a logical page on."""
        self._drop_window_before(name, len(self._full[name]))
        fresh = range(fresh_from_page, len(self._full[name]))
        self._window[name] = {page: self._free_window.pop() for page in fresh}

    def spare_page(self) -> int:
        """A page of both pools that no sequence will get."""
        page = next(page for page in self._free_full if page in self._free_window)
        self._free_full.remove(page)
        self._free_window.remove(page)
        return page

    def attention(self, *sequences: PagedSequence) -> PagedAttention:
        return PagedAttention(sequences, self, page_size=self.page_size)

    def _drop_window_before(self, name: str, first_page: int) -> None:
        for logical in [page for page in self._window[name] if page < first_page]:
            page = self._window[name].pop(logical)
            self._free_window.insert(0, page)
            for layer in self._window_layers:
                self._keys[layer][page] = self.junk
                self._values[layer][page] = self.junk
