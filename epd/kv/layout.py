"""KV geometry: bytes per page of each pool, and how a memory budget is split between them.

K and V rows differ in width, and full and window layers may differ in KV heads, so every number is a sum over layers:
bytes per token and layer = num_kv_heads * (qk_dim + v_dim) * dtype_bytes. Full layers keep every token; window layers
(sliding-attention layers of the trunk, and the draft heads) keep the window of each live boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.kv.errors import PoolTooSmall

__all__ = ["KvLayout", "LayerGeometry", "PoolPlan", "plan_pools"]

_WINDOWS_AT_ENDS = 2
_STRIDES_PER_WINDOW = 4


class LayerGeometry(Protocol):
    """What the pools need to know of a layer; `epd.kernels.base.AttentionSpec` has it."""

    @property
    def index(self) -> int: ...
    @property
    def window_left(self) -> int | None: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def qk_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Page geometry of one model. Part of a page's identity: change it and cached KV must not be shared."""

    full_layers: tuple[LayerGeometry, ...]
    window_layers: tuple[LayerGeometry, ...]
    page_size: int
    dtype_bytes: int

    @classmethod
    def from_specs(
        cls,
        full_layers: Sequence[LayerGeometry],
        window_layers: Sequence[LayerGeometry],
        page_size: int,
        dtype_bytes: int,
    ) -> KvLayout:
        """`full_layers` have `window_left` None, `window_layers` an integer (draft heads are window layers too).

        Raises ValueError for a layer in the wrong list or an index used twice.
        """
        if page_size < 1 or dtype_bytes < 1:
            raise ValueError(f"page_size {page_size} and dtype_bytes {dtype_bytes} must be positive")
        indices = [spec.index for spec in (*full_layers, *window_layers)]
        if len(set(indices)) != len(indices):
            raise ValueError(f"layer indices are not unique: {sorted(indices)}")
        misplaced = [spec.index for spec in full_layers if spec.window_left is not None]
        misplaced += [spec.index for spec in window_layers if spec.window_left is None]
        if misplaced:
            raise ValueError(f"layers {misplaced} are in the wrong pool for their window_left")
        return cls(tuple(full_layers), tuple(window_layers), page_size, dtype_bytes)

    @property
    def window_tokens(self) -> int:
        """Earlier tokens the widest window layer reads; 0 without window layers."""
        return max((max(1, spec.window_left or 0) for spec in self.window_layers), default=0)

    @property
    def full_bytes_per_token(self) -> int:
        """What every further token costs: the growing part."""
        return sum(self._token_bytes(spec) for spec in self.full_layers)

    @property
    def window_bytes_per_token(self) -> int:
        """What every token inside a kept window costs."""
        return sum(self._token_bytes(spec) for spec in self.window_layers)

    @property
    def full_page_bytes(self) -> int:
        return self.full_bytes_per_token * self.page_size

    @property
    def window_page_bytes(self) -> int:
        return self.window_bytes_per_token * self.page_size

    @property
    def identity(self) -> str:
        """A short text naming everything that changes the bytes of a page; for the seed of page keys."""
        layers = ";".join(
            f"{spec.index}:{spec.window_left}:{spec.num_kv_heads}x{spec.qk_dim}+{spec.v_dim}"
            for spec in (*self.full_layers, *self.window_layers)
        )
        return f"kv1/page{self.page_size}/bytes{self.dtype_bytes}/{layers}"

    def _token_bytes(self, spec: LayerGeometry) -> int:
        return spec.num_kv_heads * (spec.qk_dim + spec.v_dim) * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Pages of each pool, and the bytes they take together."""

    num_full_pages: int
    num_window_pages: int
    size_bytes: int


def plan_pools(
    layout: KvLayout,
    budget_bytes: int,
    *,
    expected_sequence_tokens: int,
    max_running: int,
    chunk_tokens: int,
    retention_stride_tokens: int = 4096,
    tail_pages: int = 1,
) -> PoolPlan:
    """Split `budget_bytes` between the pools.

    The floor is what `max_running` sequences need to make progress: a window, its tail and a partial page each, the
    step's chunk, and full pages for one sequence of the expected length plus one for each that runs. The rest is split
    in the proportion a cached sequence of the expected length is worth: all its full pages, windows at the ends of its
    prompt and of its answer, and one for every fourth that `retention_stride_tokens` (0: none) makes. Those between
    are offers that go first when memory is short, and what is lost with them can be healed (docs/kv.md has figures).
    Raises PoolTooSmall, naming both numbers, when the budget is below the floor.
    """
    page_size = layout.page_size
    chunk_pages = -(-chunk_tokens // page_size)
    sequence_pages = -(-expected_sequence_tokens // page_size)
    window_pages = -(-layout.window_tokens // page_size)
    min_full = sequence_pages + max_running
    min_window = max_running * (window_pages + tail_pages + 2) + chunk_pages if window_pages else 0
    floor_bytes = min_full * layout.full_page_bytes + min_window * layout.window_page_bytes
    if budget_bytes < floor_bytes:
        raise PoolTooSmall(
            f"KV budget of {budget_bytes:,} bytes is below the {floor_bytes:,} that are the least: {min_full:,} full "
            f"pages of {layout.full_page_bytes:,} bytes (one sequence of {expected_sequence_tokens:,} tokens, and a "
            f"page for each of {max_running} running) and {min_window:,} window pages of "
            f"{layout.window_page_bytes:,} bytes (a window for each, and a step of {chunk_tokens:,} tokens)"
        )
    stride_tokens = _STRIDES_PER_WINDOW * retention_stride_tokens
    kept_windows = _WINDOWS_AT_ENDS + (expected_sequence_tokens // stride_tokens if stride_tokens else 0)
    kept_pages = min(sequence_pages, kept_windows * window_pages + tail_pages) if window_pages else 0
    per_sequence_bytes = sequence_pages * layout.full_page_bytes + kept_pages * layout.window_page_bytes
    spare_bytes = budget_bytes - floor_bytes
    extra_full = spare_bytes * sequence_pages // max(1, per_sequence_bytes)
    left_bytes = spare_bytes - extra_full * layout.full_page_bytes
    extra_window = left_bytes // layout.window_page_bytes if window_pages else 0
    num_full, num_window = min_full + extra_full, min_window + extra_window
    size_bytes = num_full * layout.full_page_bytes + num_window * layout.window_page_bytes
    return PoolPlan(num_full_pages=num_full, num_window_pages=num_window, size_bytes=size_bytes)
