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
from epd.kv.numbers import require_at_least

__all__ = ["KvLayout", "LayerGeometry", "PoolPlan", "cached_sequence_bytes", "plan_host", "plan_pools"]

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
    """Page geometry of one model. Part of a page's identity: change it and cached KV must not be shared.

    Raises ValueError for no layer at all, a layer in the wrong list, an index used twice, and a size below 1.
    """

    full_layers: tuple[LayerGeometry, ...]
    window_layers: tuple[LayerGeometry, ...]
    page_size: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        require_at_least(1, page_size=self.page_size, dtype_bytes=self.dtype_bytes)
        for spec in (*self.full_layers, *self.window_layers):
            sizes = {"num_kv_heads": spec.num_kv_heads, "qk_dim": spec.qk_dim, "v_dim": spec.v_dim}
            require_at_least(1, **{f"{name} of layer {spec.index}": size for name, size in sizes.items()})
            require_at_least(0, **{f"window_left of layer {spec.index}": spec.window_left or 0})
        indices = [spec.index for spec in (*self.full_layers, *self.window_layers)]
        if len(set(indices)) != len(indices):
            raise ValueError(f"layer indices are not unique: {sorted(indices)}")
        misplaced = [spec.index for spec in self.full_layers if spec.window_left is not None]
        misplaced += [spec.index for spec in self.window_layers if spec.window_left is None]
        if misplaced:
            raise ValueError(f"layers {misplaced} are in the wrong pool for their window_left")

    @classmethod
    def from_specs(
        cls,
        full_layers: Sequence[LayerGeometry],
        window_layers: Sequence[LayerGeometry],
        page_size: int,
        dtype_bytes: int,
    ) -> KvLayout:
        """`full_layers` have `window_left` None, `window_layers` an integer (draft heads are window layers too)."""
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
    release_interval_tokens: int = 1,
) -> PoolPlan:
    """Split `budget_bytes` between the pools.

    The floor is what `max_running` sequences need to make progress: a window, its tail and a partial page each, what
    each writes before it lets go of windows (once per `release_interval_tokens`, as in RetentionPolicy), the step's
    chunk, and full pages for one sequence of the expected length plus one for each that runs. The rest is split
    in the proportion a cached sequence of the expected length is worth: all its full pages, windows at the ends of its
    prompt and of its answer, and one for every fourth that `retention_stride_tokens` (0: none) makes. Those between
    are offers that go first when memory is short, and what is lost with them can be healed (docs/kv.md has figures).
    Raises PoolTooSmall, naming both numbers, when the budget is below the floor, and ValueError for a number that
    means nothing.
    """
    if not layout.full_layers and not layout.window_layers:
        raise ValueError("full_layers and window_layers are empty; allowed: 1 layer or more")
    require_at_least(0, budget_bytes=budget_bytes, retention_stride_tokens=retention_stride_tokens)
    require_at_least(
        1,
        expected_sequence_tokens=expected_sequence_tokens,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        tail_pages=tail_pages,
        release_interval_tokens=release_interval_tokens,
    )
    page_size = layout.page_size
    chunk_pages = -(-chunk_tokens // page_size)
    sequence_pages = -(-expected_sequence_tokens // page_size)
    window_pages = -(-layout.window_tokens // page_size)
    min_full = sequence_pages + max_running
    # Its frontier moves in steps: up to a step less one token are kept beyond the window, the partial page aside.
    waiting_pages = -(-(release_interval_tokens - 1) // page_size)
    min_window = max_running * (window_pages + tail_pages + waiting_pages + 2) + chunk_pages if window_pages else 0
    floor_bytes = min_full * layout.full_page_bytes + min_window * layout.window_page_bytes
    if budget_bytes < floor_bytes:
        raise PoolTooSmall(
            f"KV budget of {budget_bytes:,} bytes is below the {floor_bytes:,} that are the least: {min_full:,} full "
            f"pages of {layout.full_page_bytes:,} bytes (one sequence of {expected_sequence_tokens:,} tokens, and a "
            f"page for each of {max_running} running) and {min_window:,} window pages of "
            f"{layout.window_page_bytes:,} bytes (a window for each, and a step of {chunk_tokens:,} tokens)"
        )
    per_sequence_bytes = cached_sequence_bytes(
        layout, expected_sequence_tokens, retention_stride_tokens=retention_stride_tokens, tail_pages=tail_pages
    )
    spare_bytes = budget_bytes - floor_bytes
    extra_full = spare_bytes * sequence_pages // max(1, per_sequence_bytes)
    left_bytes = spare_bytes - extra_full * layout.full_page_bytes
    extra_window = left_bytes // layout.window_page_bytes if window_pages else 0
    num_full, num_window = min_full + extra_full, min_window + extra_window
    size_bytes = num_full * layout.full_page_bytes + num_window * layout.window_page_bytes
    return PoolPlan(num_full_pages=num_full, num_window_pages=num_window, size_bytes=size_bytes)


def plan_host(
    layout: KvLayout,
    budget_bytes: int,
    *,
    expected_sequence_tokens: int,
    retention_stride_tokens: int = 4096,
    tail_pages: int = 1,
) -> PoolPlan:
    """Split `budget_bytes` of host memory, in which nothing runs, in the proportion a cached sequence is worth.

    As in plan_pools(), without its floor. Raises PoolTooSmall, naming both numbers, for less than a full page and one
    window, of which no hit can come, and ValueError for a number that means nothing.
    """
    if not layout.full_layers and not layout.window_layers:
        raise ValueError("full_layers and window_layers are empty; allowed: 1 layer or more")
    require_at_least(0, budget_bytes=budget_bytes, retention_stride_tokens=retention_stride_tokens)
    require_at_least(1, expected_sequence_tokens=expected_sequence_tokens, tail_pages=tail_pages)
    window_pages = -(-layout.window_tokens // layout.page_size)
    least_bytes = layout.full_page_bytes + window_pages * layout.window_page_bytes
    if budget_bytes < least_bytes:
        raise PoolTooSmall(
            f"host budget of {budget_bytes:,} bytes is below the {least_bytes:,} that are the least: a full page of "
            f"{layout.full_page_bytes:,} bytes and {window_pages:,} window pages of {layout.window_page_bytes:,} bytes"
        )
    sequence_pages = -(-expected_sequence_tokens // layout.page_size)
    per_sequence_bytes = cached_sequence_bytes(
        layout, expected_sequence_tokens, retention_stride_tokens=retention_stride_tokens, tail_pages=tail_pages
    )
    most_full = (budget_bytes - window_pages * layout.window_page_bytes) // max(1, layout.full_page_bytes)
    num_full = min(most_full, max(1, budget_bytes * sequence_pages // per_sequence_bytes))
    left_bytes = budget_bytes - num_full * layout.full_page_bytes
    num_window = left_bytes // layout.window_page_bytes if window_pages else 0
    return PoolPlan(num_full, num_window, num_full * layout.full_page_bytes + num_window * layout.window_page_bytes)


def cached_sequence_bytes(
    layout: KvLayout, sequence_tokens: int, *, retention_stride_tokens: int = 4096, tail_pages: int = 1
) -> int:
    """What a cached sequence of so many tokens is worth; see plan_pools()."""
    kept_pages = _kept_pages(layout, sequence_tokens, retention_stride_tokens, tail_pages)
    return -(-sequence_tokens // layout.page_size) * layout.full_page_bytes + kept_pages * layout.window_page_bytes


def _kept_pages(layout: KvLayout, sequence_tokens: int, retention_stride_tokens: int, tail_pages: int) -> int:
    """Window pages a cached sequence of `sequence_tokens` tokens is worth; see plan_pools()."""
    window_pages = -(-layout.window_tokens // layout.page_size)
    if window_pages == 0:
        return 0
    stride_tokens = _STRIDES_PER_WINDOW * retention_stride_tokens
    kept_windows = _WINDOWS_AT_ENDS + (sequence_tokens // stride_tokens if stride_tokens else 0)
    return min(-(-sequence_tokens // layout.page_size), kept_windows * window_pages + tail_pages)
