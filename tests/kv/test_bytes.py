"""Bytes held per cached token at 100K tokens, on the real pools, against the published arithmetic.

The storage lies on the meta device: real tensors with real shapes and sizes, and no memory behind them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from epd.cache.keys import page_keys
from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.kv.capacity import HeldBytes, held_bytes, single_pool_bytes
from epd.kv.dual import DualPool
from epd.kv.layout import KvLayout, plan_pools
from epd.kv.storage import KvStorage
from epd.model.config import TextConfig

NUM_TOKENS = 100_000
PAGE_SIZE = 16
CHUNK_TOKENS = 2048
CONFIGS = Path(__file__).parents[2] / "configs" / "models"
AT_ENDS_ONLY = RetentionPolicy(retention_stride_tokens=0, long_stride_tokens=0, at_chunk_ends=False)


@dataclass(frozen=True)
class Published:
    """Bytes per token of the growing part, per windowed token, and the ratio to keeping everything, as published."""

    folder: str
    growing: int
    windowed: int
    ratio: float


PRO = Published("mimo-v2.5-pro", 51_200, 307_200, 1 / 7)
V25 = Published("mimo-v2.5", 23_040, 199_680, 23_040 / 222_720)


def layout_of(model: Published, *, with_drafts: bool = False) -> KvLayout:
    text = TextConfig.from_hf(json.loads((CONFIGS / model.folder / "config.json").read_text()))
    specs = [layer.attention for layer in text.layers]
    drafts = [text.mtp_layer(head).attention for head in range(3)] if with_drafts else []
    full = [spec for spec in specs if not spec.is_window]
    return KvLayout.from_specs(full, [*(spec for spec in specs if spec.is_window), *drafts], PAGE_SIZE, 2)


def cached(layout: KvLayout, retention: RetentionPolicy) -> tuple[DualPool, PrefixCache]:
    """Pools planned from a budget, and one finished sequence of NUM_TOKENS in the cache, prefilled in chunks."""
    plan = plan_pools(layout, 64 << 30, expected_sequence_tokens=NUM_TOKENS, max_running=2, chunk_tokens=CHUNK_TOKENS)
    storage = KvStorage(
        layout,
        num_full_pages=plan.num_full_pages,
        num_window_pages=plan.num_window_pages,
        dtype=torch.bfloat16,
        device="meta",
    )
    assert storage.size_bytes == plan.size_bytes <= 64 << 30
    pool = DualPool(num_full_pages=plan.num_full_pages, num_window_pages=plan.num_window_pages)
    cache = PrefixCache(pool, page_size=PAGE_SIZE, window_tokens=layout.window_tokens, retention=retention)
    keys = page_keys(range(NUM_TOKENS), [], page_size=PAGE_SIZE, seed=b"bytes")
    pages = cache.begin(keys, NUM_TOKENS)
    for stop in [*range(CHUNK_TOKENS, NUM_TOKENS, CHUNK_TOKENS), NUM_TOKENS]:
        pages.extend(stop)
        pages.commit(stop, keys)
    pages.finish()
    cache.check()
    assert cache.match(keys, NUM_TOKENS).num_tokens == NUM_TOKENS - PAGE_SIZE
    return pool, cache


def measured(layout: KvLayout, pool: DualPool) -> HeldBytes:
    """Bytes of the held pages, added up from the tensors of each layer instead of from the layout."""
    storage = KvStorage(layout, num_full_pages=1, num_window_pages=1, dtype=torch.bfloat16, device="meta")

    def page_bytes(layers: tuple[int, ...]) -> int:
        return sum(storage.keys(index).nbytes + storage.values(index).nbytes for index in layers)

    return HeldBytes(
        full=(pool.full.num_pages - pool.full.num_free) * page_bytes(storage.full_layer_indices),
        window=(pool.window.num_pages - pool.window.num_free) * page_bytes(storage.window_layer_indices),
    )


@pytest.mark.parametrize("model", [PRO, V25], ids=lambda model: model.folder)
def test_a_cached_token_takes_the_published_share_of_a_single_pool(model: Published) -> None:
    layout = layout_of(model)
    assert (layout.full_bytes_per_token, layout.window_bytes_per_token) == (model.growing, model.windowed)
    pool, _ = cached(layout, AT_ENDS_ONLY)
    held = held_bytes(layout, pool)
    assert held == measured(layout, pool)
    single = single_pool_bytes(layout, NUM_TOKENS)
    assert single == NUM_TOKENS * (model.growing + model.windowed)
    assert held.total / single == pytest.approx(model.ratio, rel=0.02)
    # Exactly: every token in full layers; in window layers one window in whole pages, and the tail page.
    assert held.full == NUM_TOKENS * model.growing
    assert held.window == (128 + PAGE_SIZE) * model.windowed
    assert held.per_token(NUM_TOKENS) == pytest.approx(model.growing + 128 * model.windowed / NUM_TOKENS, rel=0.002)


@pytest.mark.parametrize("model", [PRO, V25], ids=lambda model: model.folder)
@pytest.mark.parametrize(("stride", "num_kept"), [(4096, 24), (16_384, 6)])
def test_each_retained_window_costs_a_window_and_no_more(model: Published, stride: int, num_kept: int) -> None:
    """With retention a cached sequence holds a window per stride besides: 3 % to 18 % more at 100K tokens."""
    layout = layout_of(model)
    policy = RetentionPolicy(retention_stride_tokens=stride, long_stride_tokens=stride, at_chunk_ends=False)
    pool, _ = cached(layout, policy)
    held = held_bytes(layout, pool)
    assert held == measured(layout, pool)
    assert held.window == (128 * (1 + num_kept) + PAGE_SIZE) * model.windowed
    at_ends = NUM_TOKENS * model.growing + (128 + PAGE_SIZE) * model.windowed
    share = num_kept * 128 * model.windowed / at_ends
    assert held.total == pytest.approx(at_ends * (1 + share))
    assert share < (0.19 if model is PRO else 0.27) * 4096 / stride


@pytest.mark.parametrize("model", [PRO, V25], ids=lambda model: model.folder)
def test_retained_windows_are_offers_that_leave_when_room_is_needed(model: Published) -> None:
    """Evicting every window but the last leaves the published bytes, and the whole prefix can still be resumed."""
    layout = layout_of(model)
    pool, cache = cached(layout, RetentionPolicy(at_chunk_ends=True))
    keys = page_keys(range(NUM_TOKENS), [], page_size=PAGE_SIZE, seed=b"bytes")
    kept = 128 // PAGE_SIZE + 1
    cache._ledger.evict_window(pool.window.num_pages - pool.window.num_free - kept)
    assert held_bytes(layout, pool).total / single_pool_bytes(layout, NUM_TOKENS) == pytest.approx(
        model.ratio, rel=0.02
    )
    assert cache.match(keys, NUM_TOKENS + 1).num_tokens == NUM_TOKENS


def test_draft_heads_live_in_the_window_pool_and_change_nothing_in_the_growing_part() -> None:
    layout = layout_of(V25, with_drafts=True)
    assert [spec.index for spec in layout.window_layers[-3:]] == [48, 49, 50]
    pool, _ = cached(layout, AT_ENDS_ONLY)
    held = held_bytes(layout, pool)
    assert held == measured(layout, pool)
    assert held.full == NUM_TOKENS * V25.growing
    assert held.window == (128 + PAGE_SIZE) * (V25.windowed + 15_360)
