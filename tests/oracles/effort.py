"""How much randomised and repeating tests do. The numbers in the tests are those of MIMO_TEST_EFFORT=3, for whoever
changes what they test; by default, and in CI, it is a third of that. More is done for larger numbers."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["effort", "scaled"]

FULL = 3.0


def scaled(number: int, *, least: int = 1) -> int:
    """`number` at full effort, fewer or more otherwise; `least` is what the fault that is looked for needs."""
    return max(least, int(number * float(os.environ.get("MIMO_TEST_EFFORT", "1")) / FULL))


def effort(max_examples: int, *, num_steps: int = 50) -> settings:
    """Settings for one hypothesis test; `num_steps` only matters to state machines."""
    return settings(
        max_examples=scaled(max_examples),
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
