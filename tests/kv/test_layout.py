"""Bytes per page against the published arithmetic, and the budget split."""

from __future__ import annotations

import re

import pytest

from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.kernels.base import AttentionSpec
from epd.kv.dual import DualPool
from epd.kv.errors import PoolTooSmall
from epd.kv.layout import KvLayout, PoolPlan, plan_pools


def layers(start: int, count: int, window_left: int | None, num_kv_heads: int) -> list[AttentionSpec]:
    return [
        AttentionSpec(
            index=start + offset,
            window_left=window_left,
            num_heads=64,
            num_kv_heads=num_kv_heads,
            qk_dim=192,
            v_dim=128,
            scale=192**-0.5,
        )
        for offset in range(count)
    ]


def layout(
    num_full: int, num_window: int, full_heads: int, *, dtype_bytes: int = 2, window_left: int = 127
) -> KvLayout:
    return KvLayout.from_specs(
        layers(0, num_full, None, full_heads), layers(num_full, num_window, window_left, 8), 16, dtype_bytes
    )


@pytest.mark.parametrize(
    ("model", "growing", "windowed", "constant", "at_128k", "at_1m"),
    [
        (layout(9, 39, 4), 23_040, 199_680, 25_559_040, 3_019_898_880, 24_159_191_040),
        (layout(10, 60, 8), 51_200, 307_200, 39_321_600, 6_710_886_400, 53_687_091_200),
        (layout(9, 39, 4, dtype_bytes=1), 11_520, 99_840, 12_779_520, 1_509_949_440, 12_079_595_520),
    ],
    ids=["v2.5", "v2.5-pro", "v2.5-fp8"],
)
def test_bytes_equal_the_published_arithmetic(
    model: KvLayout, growing: int, windowed: int, constant: int, at_128k: int, at_1m: int
) -> None:
    assert model.full_bytes_per_token == growing
    assert model.window_bytes_per_token == windowed
    assert model.full_page_bytes == growing * 16
    assert model.window_page_bytes == windowed * 16
    assert model.window_bytes_per_token * 128 == constant
    assert model.full_bytes_per_token * 131_072 == at_128k
    assert model.full_bytes_per_token * 1_048_576 == at_1m


def test_draft_heads_cost_15360_bytes_per_windowed_token() -> None:
    trunk = layers(0, 9, None, 4), layers(9, 39, 127, 8)
    with_drafts = KvLayout.from_specs(trunk[0], [*trunk[1], *layers(48, 3, 127, 8)], 16, 2)
    assert with_drafts.window_bytes_per_token - layout(9, 39, 4).window_bytes_per_token == 15_360
    assert with_drafts.full_bytes_per_token == 23_040


def test_keeping_everything_would_cost_what_the_specification_says() -> None:
    for model, per_token in ((layout(9, 39, 4), 222_720), (layout(10, 60, 8), 358_400)):
        assert model.full_bytes_per_token + model.window_bytes_per_token == per_token


def test_window_is_the_widest_layer() -> None:
    mixed = [*layers(0, 1, 127, 8), *layers(1, 1, 128, 8)]
    assert KvLayout.from_specs([], mixed, 16, 2).window_tokens == 128
    assert KvLayout.from_specs(layers(0, 2, None, 4), [], 16, 2).window_tokens == 0


def test_identity_follows_everything_that_changes_bytes() -> None:
    names = {layout(9, 39, 4).identity, layout(10, 38, 4).identity, layout(9, 39, 8).identity}
    names |= {layout(9, 39, 4, dtype_bytes=1).identity, layout(9, 39, 4, window_left=128).identity}
    assert len(names) == 5
    assert layout(9, 39, 4).identity == layout(9, 39, 4).identity


def test_misplaced_and_repeated_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="wrong pool"):
        KvLayout.from_specs(layers(0, 1, 127, 8), [], 16, 2)
    with pytest.raises(ValueError, match="wrong pool"):
        KvLayout.from_specs([], layers(0, 1, None, 8), 16, 2)
    with pytest.raises(ValueError, match="not unique"):
        KvLayout.from_specs(layers(0, 2, None, 8), layers(1, 1, 127, 8), 16, 2)


def test_plan_spends_the_budget_and_never_more() -> None:
    for budget_gib in (2, 3, 7, 40):
        budget = budget_gib << 30
        model = layout(9, 39, 4)
        plan = plan_pools(model, budget, expected_sequence_tokens=8192, max_running=16, chunk_tokens=2048)
        size = plan.num_full_pages * model.full_page_bytes + plan.num_window_pages * model.window_page_bytes
        assert size == plan.size_bytes <= budget
        assert budget - size < model.full_page_bytes + model.window_page_bytes
        assert plan.num_full_pages >= 8192 // 16 + 16
        assert plan.num_window_pages >= 16 * (8 + 1 + 2) + 2048 // 16


def test_longer_sequences_shift_the_budget_to_full_pages() -> None:
    def share(expected: int) -> float:
        plan = plan_pools(
            layout(10, 60, 8), 80 << 30, expected_sequence_tokens=expected, max_running=8, chunk_tokens=2048
        )
        return plan.num_full_pages / plan.num_window_pages

    assert share(1024) < share(8192) < share(131_072)


def test_what_the_floor_leaves_is_split_as_a_sequence_is_worth() -> None:
    """32K tokens with a stride of 4K: 2,048 full pages against windows at two ends and two more, and a page of tail."""
    model = layout(10, 60, 8)

    def pages(budget_gib: int) -> tuple[int, int]:
        plan = plan_pools(
            model, budget_gib << 30, expected_sequence_tokens=32_768, max_running=8, chunk_tokens=2048,
            retention_stride_tokens=4096,
        )  # fmt: skip
        return plan.num_full_pages, plan.num_window_pages

    (less_full, less_window), (more_full, more_window) = pages(100), pages(200)
    assert (more_window - less_window) / (more_full - less_full) == pytest.approx((4 * 8 + 1) / 2048, rel=1e-3)


def test_too_small_a_budget_is_refused_by_name() -> None:
    numbers = r"1,048,576 bytes is below the [\d,]+ that are the least: 528 full pages .* and 304 window pages"
    with pytest.raises(PoolTooSmall, match=numbers):
        plan_pools(layout(9, 39, 4), 1 << 20, expected_sequence_tokens=8192, max_running=16, chunk_tokens=2048)


def test_a_model_without_window_layers_gets_no_window_pages() -> None:
    model = KvLayout.from_specs(layers(0, 4, None, 4), [], 16, 2)
    plan = plan_pools(model, 1 << 28, expected_sequence_tokens=1024, max_running=2, chunk_tokens=256)
    assert plan.num_window_pages == 0
    assert plan.num_full_pages == (1 << 28) // model.full_page_bytes


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("budget_bytes", -1, 0),
        ("budget_bytes", 2.5e9, 0),
        ("expected_sequence_tokens", -8192, 1),
        ("max_running", 0, 1),
        ("chunk_tokens", -5, 1),
        ("retention_stride_tokens", -1, 0),
        ("tail_pages", -20, 1),
        ("release_interval_tokens", 0, 1),
    ],
)
def test_a_plan_of_nonsense_is_refused_by_name(name: str, value: int, least: int) -> None:
    numbers = {"budget_bytes": 1 << 34, "expected_sequence_tokens": 8192, "max_running": 4, "chunk_tokens": 2048}
    with pytest.raises(ValueError, match=rf"{name} is {value:,}; allowed: .*{least} or more|{name} is {value}"):
        plan_pools(layout(9, 39, 4), **(numbers | {name: value}))


def test_a_layout_of_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="page_size is 0; allowed: 1 or more"):
        KvLayout.from_specs(layers(0, 1, None, 4), [], 0, 2)
    with pytest.raises(ValueError, match="dtype_bytes is -2; allowed: 1 or more"):
        KvLayout.from_specs(layers(0, 1, None, 4), [], 16, -2)
    with pytest.raises(ValueError, match="num_kv_heads of layer 3 is -4; allowed: 1 or more"):
        KvLayout.from_specs(layers(3, 1, None, -4), [], 16, 2)
    with pytest.raises(ValueError, match="window_left of layer 3 is -1; allowed: 0 or more"):
        KvLayout.from_specs([], layers(3, 1, -1, 4), 16, 2)
    with pytest.raises(ValueError, match="empty; allowed: 1 layer or more"):
        plan_pools(KvLayout((), (), 16, 2), 1 << 20, expected_sequence_tokens=64, max_running=1, chunk_tokens=16)


def test_the_floor_has_room_for_what_is_written_between_two_releases() -> None:
    """As many rows as may run, each just before it lets go of windows, next to a step's chunk."""
    model, max_running, interval = layout(9, 39, 4), 3, 128
    size = model.page_size

    def plan(budget_bytes: int) -> PoolPlan:
        return plan_pools(
            model, budget_bytes, expected_sequence_tokens=1024, max_running=max_running, chunk_tokens=256,
            release_interval_tokens=interval,
        )  # fmt: skip

    with pytest.raises(PoolTooSmall) as refusal:
        plan(0)
    (floor,) = re.findall(r"below the ([\d,]+)", str(refusal.value))
    pools = plan(int(floor.replace(",", "")))
    pool = DualPool(num_full_pages=2000, num_window_pages=pools.num_window_pages)
    retention = RetentionPolicy(retention_stride_tokens=0, at_chunk_ends=False, release_interval_tokens=interval)
    cache = PrefixCache(pool, page_size=size, window_tokens=model.window_tokens, retention=retention, enabled=False)
    rows = [cache.begin([], 1024) for _ in range(max_running)]
    num_tokens = 8 * interval
    for row in rows:
        for stop in range(256, num_tokens + 1, 256):
            row.extend(stop)
            row.commit(stop, [])
    most = 0
    for stop in range(num_tokens + 1, num_tokens + 2 * interval):
        for row in rows:
            row.extend(stop)
        most = max(most, sum(len(row.window_pages) for row in rows))
        for row in rows:
            row.commit(stop, [])
    assert most + 256 // size <= pools.num_window_pages
    plain = max_running * (model.window_tokens // size + 1 + 1 + 2) + 256 // size
    assert most + 256 // size > plain, "a floor without the interval would have done"
