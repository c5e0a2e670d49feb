"""How host memory is split between its pools."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from epd.kernels.base import AttentionSpec
from epd.kv.errors import PoolTooSmall
from epd.kv.layout import KvLayout, plan_host, plan_pools


def spec(index: int, window_left: int | None) -> AttentionSpec:
    return AttentionSpec(
        index=index, num_heads=4, num_kv_heads=2, qk_dim=24, v_dim=16, scale=1.0, window_left=window_left
    )


LAYOUT = KvLayout.from_specs([spec(0, None), spec(3, None)], [spec(1, 127), spec(2, 127)], page_size=16, dtype_bytes=2)


@pytest.mark.parametrize("budget", [200_000, 1 << 20, 37_123_457, 1 << 30])
def test_the_budget_is_spent_and_never_exceeded(budget: int) -> None:
    plan = plan_host(LAYOUT, budget, expected_sequence_tokens=4096)
    bytes_of = plan.num_full_pages * LAYOUT.full_page_bytes + plan.num_window_pages * LAYOUT.window_page_bytes
    assert plan.size_bytes == bytes_of <= budget < bytes_of + LAYOUT.full_page_bytes + LAYOUT.window_page_bytes


def test_it_is_split_as_the_device_is_beyond_its_floor() -> None:
    """Two windows and a tail page for a sequence of 4096 tokens: 256 full pages to 17 window pages."""
    plan = plan_host(LAYOUT, 1 << 30, expected_sequence_tokens=4096)
    assert plan.num_full_pages / plan.num_window_pages == pytest.approx(256 / 17, rel=1e-3)
    device = plan_pools(LAYOUT, 1 << 30, expected_sequence_tokens=4096, max_running=1, chunk_tokens=16)
    assert plan.num_full_pages == pytest.approx(device.num_full_pages, rel=1e-2)


def test_the_least_is_a_page_and_a_window_and_less_is_refused_by_name() -> None:
    least = LAYOUT.full_page_bytes + 8 * LAYOUT.window_page_bytes
    plan = plan_host(LAYOUT, least, expected_sequence_tokens=100_000)
    assert (plan.num_full_pages, plan.num_window_pages) == (1, 8)
    with pytest.raises(PoolTooSmall, match=re.escape(f"{least - 1:,} bytes is below the {least:,}")):
        plan_host(LAYOUT, least - 1, expected_sequence_tokens=100_000)


def test_without_window_layers_all_of_it_is_full_pages() -> None:
    plan = plan_host(replace(LAYOUT, window_layers=()), 1 << 20, expected_sequence_tokens=4096)
    assert plan.num_window_pages == 0
    assert plan.num_full_pages == (1 << 20) // LAYOUT.full_page_bytes


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="expected_sequence_tokens"):
        plan_host(LAYOUT, 1 << 20, expected_sequence_tokens=0)
    with pytest.raises(ValueError, match="full_layers and window_layers are empty"):
        plan_host(KvLayout((), (), 16, 2), 1 << 20, expected_sequence_tokens=1)
