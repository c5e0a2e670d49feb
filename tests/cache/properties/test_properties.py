"""Every invariant of the cache over 2,000 random schedules each with MIMO_TEST_EFFORT=3, a third of them usually;
`scripts/prove_kv` runs as many as wanted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.cache.properties.invariants import INVARIANTS
from tests.cache.properties.schedule import setting_of, size_of, steps_of
from tests.cache.properties.toy import run_toy
from tests.cache.properties.twins import drafts_leave_no_trace, splits_are_unobservable
from tests.cache.properties.world import run_schedule
from tests.oracles.effort import scaled

NUM_SCHEDULES = scaled(2000)

# How often an invariant must have met what it is about in 2,000 schedules; the others look at every step.
LEAST_CASES = {
    "a hit reads what its tokens wrote": 5000,
    "a hit is sound": 3000,
    "a hit is the brute-force hit": 500,
    "an insert lowers no hit": 200,
    "namespaces and media never mix": 5000,
    "a hit is joint": 500,
    "a narrower window hits no less": 1000,
    "what was committed is found": 2000,
    "room in both pools or in neither": 200,
    "a lease is undone exactly": 200,
    "eviction frees what was asked": 200,
    "dead windows carry no hit": 30,
    "a lookup keeps no ancestor young": 50,
}


def over_schedules(num_steps: int, body: Callable[[bytes], None]) -> None:
    """Run `body` for NUM_SCHEDULES schedules of `num_steps`, the same ones each time; a failure is shrunk and told."""

    @settings(
        max_examples=NUM_SCHEDULES,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=size_of(num_steps), max_size=size_of(num_steps)))
    def holds(schedule: bytes) -> None:
        note(f"{setting_of(schedule)}")
        for step in steps_of(schedule):
            note(f"{step}")
        body(schedule)

    holds()


@pytest.mark.parametrize("name", INVARIANTS)
def test_any_schedule_keeps(name: str) -> None:
    num_cases = 0

    def body(schedule: bytes) -> None:
        nonlocal num_cases
        invariant = INVARIANTS[name]()
        run_schedule(schedule, [invariant])
        num_cases += invariant.num_cases

    over_schedules(10, body)
    assert num_cases >= LEAST_CASES.get(name, 0) * NUM_SCHEDULES / 2000, f"the schedules met {num_cases} cases"


@pytest.mark.parametrize(
    ("property_holds", "num_steps", "least"),
    [(drafts_leave_no_trace, 8, 1200), (splits_are_unobservable, 8, 5000), (run_toy, 10, 15_000)],
    ids=["rejected drafts leave no trace", "splits are unobservable", "greedy output is that without a cache"],
)
def test_any_schedule_keeps_too(property_holds: Callable[[bytes], int], num_steps: int, least: int) -> None:
    """What is seen only beside a second world, or by a model that runs through the pages."""
    num_cases = 0

    def body(schedule: bytes) -> None:
        nonlocal num_cases
        num_cases += property_holds(schedule)

    over_schedules(num_steps, body)
    assert num_cases >= least * NUM_SCHEDULES / 2000, f"the schedules met {num_cases} cases"
