"""The batcher against a list that is re-read from the start at every step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.batcher import Batcher, Lane, LaneBudget

BUDGETS = {Lane.VISION: LaneBudget(100, 4, 0.5), Lane.AUDIO: LaneBudget(50, 3, 0.2)}

jobs = st.tuples(st.sampled_from(list(Lane)), st.integers(1, 130))
steps = st.lists(st.one_of(jobs, st.floats(0.01, 0.4), st.integers(0, 30)), max_size=60)


class Job:
    """Distinct even when equal jobs would be."""

    def __init__(self, lane: Lane, cost: int, since_s: float) -> None:
        self.lane, self.cost, self.since_s = lane, cost, since_s


def expected_batch(waiting: list[Job], now_s: float) -> list[Job] | None:
    candidates = []
    for lane, budget in BUDGETS.items():
        queue = [job for job in waiting if job.lane is lane]
        prefix: list[Job] = []
        for job in queue:
            too_much = sum(taken.cost for taken in prefix) + job.cost > budget.max_cost
            if prefix and (too_much or len(prefix) == budget.max_jobs):
                break
            prefix.append(job)
        full = len(prefix) < len(queue) or len(prefix) == budget.max_jobs
        full = full or sum(job.cost for job in prefix) >= budget.max_cost
        if prefix and (full or prefix[0].since_s + budget.max_wait_s <= now_s):
            candidates.append(prefix)
    return min(candidates, key=lambda prefix: prefix[0].since_s, default=None)


@settings(deadline=None)
@given(steps)
def test_equals_the_plain_list(actions: list[tuple[Lane, int] | float | int]) -> None:
    batcher: Batcher[Job] = Batcher(BUDGETS)
    waiting: list[Job] = []
    now_s = 0.0
    for action in actions:
        now_s += 0.001  # distinct arrival times: the order between lanes is then defined
        match action:
            case (lane, cost):
                job = Job(lane, cost, now_s)
                batcher.add(job, lane=lane, cost=cost, now_s=now_s)
                waiting.append(job)
            case float():
                now_s += action
            case int() if waiting:
                job = waiting.pop(action % len(waiting))
                assert batcher.discard(job)
                assert not batcher.discard(job)
        due_s = batcher.next_due_s(now_s)
        expected = expected_batch(waiting, now_s)
        batch = batcher.pop(now_s)
        assert (batch is None) == (expected is None)
        assert (due_s is not None and due_s <= now_s) == (expected is not None)
        if batch is not None and expected is not None:
            assert list(batch.jobs) == expected
            assert batch.cost == sum(job.cost for job in expected)
            waiting = [job for job in waiting if job not in expected]
        elif due_s is not None:
            # Nothing now, but at the announced time there is.
            assert expected_batch(waiting, due_s) is not None
        assert len(batcher) == len(waiting)


def test_a_job_over_budget_runs_alone() -> None:
    batcher: Batcher[str] = Batcher(BUDGETS)
    for name, cost in (("small", 10), ("huge", 900), ("after", 10)):
        batcher.add(name, lane=Lane.VISION, cost=cost, now_s=0.0)
    popped = [batcher.pop(1.0) for _ in range(3)]
    assert [batch.jobs for batch in popped if batch] == [("small",), ("huge",), ("after",)]


def test_a_cost_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Batcher(BUDGETS).add("job", lane=Lane.AUDIO, cost=0, now_s=0.0)
