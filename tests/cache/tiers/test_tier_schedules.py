"""Random schedules over the tiered cache, looked at after every step by the slow truth of tests/oracles."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.tier_world import OPS, Setting, TierWorld

SETTINGS = {
    "host larger": Setting(),
    "host smaller": Setting(num_host_full_pages=10, num_host_window_pages=8),
    "host tiny, windows wide": Setting(window_tokens=7, num_window_pages=26, num_host_full_pages=6),
    "no window layers": Setting(window_tokens=0, num_window_pages=0, num_host_window_pages=0),
    "instant": Setting(is_instant=True, num_host_full_pages=60, num_host_window_pages=60),
    "one token pages": Setting(page_size=1, window_tokens=3, num_full_pages=30, release_interval_tokens=3),
    "first hit": Setting(hit_threshold=1, page_size=3, window_tokens=4, tail_pages=2),
}

STEPS = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 11), st.integers(0, 60)), min_size=1, max_size=60)


@pytest.mark.parametrize("name", SETTINGS)
@settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_any_schedule(name: str, steps: list[tuple[str, int, int]]) -> None:
    world = TierWorld(SETTINGS[name])
    for step in steps:
        world.do(*step)
    world.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_long_schedules(name: str) -> None:
    """Long enough for evictions of every kind; seeds are fixed."""
    for seed in range(6):
        choose = random.Random(f"{name}/{seed}")
        world = TierWorld(SETTINGS[name])
        for _ in range(250):
            world.do(choose.choice(OPS), choose.randrange(12), choose.randrange(61))
        world.close()
