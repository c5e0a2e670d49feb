"""What an attention backend is given and what it must provide.

The model knows layers and the engine knows pages; they meet here. The model calls `AttentionContext.attend` once per
layer, and the context, built by the engine for one forward, decides where keys and values live.
This module does not import torch at run time.

Shape letters: T new tokens of the forward, flattened over its sequences; N query heads; K KV heads; H query/key width;
V value width; P tokens per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The geometry of one attention layer.

    `index` is the layer's number, and the key of its storage; draft heads come after the trunk's layers.
    `window_left` is how many tokens to the left of itself a query sees (self comes on top), None for all of them.
    `scale` multiplies the query-key products, never the sink.
    """

    index: int
    window_left: int | None
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float

    @property
    def is_window(self) -> bool:
        """Whether the layer keeps its keys and values in window pages."""
        return self.window_left is not None


class AttentionContext(Protocol):
    """One forward's view of keys and values: stores the new ones, attends over all visible ones."""

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V] in the dtype of `q_TNH`.

        Queries and keys are rotated and values are scaled by the caller. `sink_N` is one extra logit per query head; it
        takes part in the normalisation and has no value.
        """
        ...


class KvStorage(Protocol):
    """The pages of every layer, contiguous tensors. Window layers and full layers are separate pools with separate page
    numbers."""

    def keys(self, layer_index: int) -> Tensor:
        """Return the layer's key pages, [num_pages, P, K, H]; writes to it are kept."""
        ...

    def values(self, layer_index: int) -> Tensor:
        """Return the layer's value pages, [num_pages, P, K, V]; writes to it are kept."""
        ...


@dataclass(frozen=True, slots=True)
class PagedSequence:
    """Where one sequence's keys and values are, for one forward.

    The forward computes positions [num_context, num_context + num_new); logical page j holds positions
    [j * P, (j + 1) * P).

    `full_pages`: int64 [ceil((num_context + num_new) / P)], entry j is the full-pool page of logical page j.
    `window_pages`: int64, entry i is the window-pool page of logical page `window_start_page + i`; it reaches the same
    end as `full_pages`. Nothing before `window_start_page` is ever read; from its first position on, all positions
    before num_context must be held. Both tensors lie on the storage's device.
    `write_full` False leaves the full pages as they are: all of them must already hold [0, num_context + num_new), and
    window layers may then begin where earlier window pages are gone (their first tokens see a shorter window). Because
    whole pages are read, such a run begins at the first position of a page.
    """

    num_new: int
    num_context: int
    full_pages: Tensor
    window_pages: Tensor
    window_start_page: int = 0
    write_full: bool = True


def first_key(
    sequence: PagedSequence, window_left: int | None, *, page_size: int, query_start: int | None = None
) -> int:
    """Return the first position that the queries from `query_start` on (the first new token, unless given) see.

    Raises ValueError where a window layer would need pages that are gone; only a run that restores windows
    (`write_full` False) may begin without them.
    """
    if window_left is None:
        return 0
    start = sequence.num_context if query_start is None else query_start
    needed, held = max(0, start - window_left), sequence.window_start_page
    if needed // page_size < held and sequence.write_full:
        raise ValueError(
            f"position {start} sees window page {needed // page_size}, the sequence holds {held} and later"
        )
    return max(needed, held * page_size)


class AttentionBackend(Protocol):
    """One way of attending over paged keys and values; made once per worker by `epd.kernels.backends.make_backend`."""

    @property
    def name(self) -> str:
        """As in `engine.attention`."""
        ...

    def context(self, sequences: Sequence[PagedSequence]) -> AttentionContext:
        """One forward over these sequences, whose new tokens lie one sequence after the other."""
        ...
