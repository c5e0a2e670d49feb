"""How long randomised tests run: a few seconds by default, MIMO_TEST_EFFORT times as many examples when set."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["effort"]


def effort(max_examples: int, *, num_steps: int = 50) -> settings:
    """Settings for one hypothesis test; `num_steps` only matters to state machines."""
    factor = float(os.environ.get("MIMO_TEST_EFFORT", "1"))
    return settings(
        max_examples=max(1, int(max_examples * factor)),
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
