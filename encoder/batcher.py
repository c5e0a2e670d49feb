"""Jobs into batches: first come, first served within a lane, by budget and longest wait. Pure: no I/O, no clock.

There are two lanes because two kinds of tower never share a pass: vision (images and videos, counted in patches) and
audio (counted in mel frames). A batch is the longest prefix of a lane that fits the budget, and always at least one
job, so a job larger than the budget runs alone and nothing starves behind smaller ones.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

JobT = TypeVar("JobT")


class Lane(StrEnum):
    VISION = "vision"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class LaneBudget:
    """Limits of one batch: `max_cost` in patches or mel frames; the oldest job waits `max_wait_s` for company."""

    max_cost: int
    max_jobs: int
    max_wait_s: float


@dataclass(frozen=True, slots=True)
class Batch(Generic[JobT]):
    lane: Lane
    jobs: tuple[JobT, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class _Queued(Generic[JobT]):
    job: JobT
    cost: int
    since_s: float


class Batcher(Generic[JobT]):
    """Queues of jobs that wait for a tower pass. Times are seconds on any one clock."""

    def __init__(self, budgets: dict[Lane, LaneBudget]) -> None:
        self._budgets = budgets
        self._lanes: dict[Lane, deque[_Queued[JobT]]] = {lane: deque() for lane in budgets}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._lanes.values())

    def waiting_cost(self, lane: Lane) -> int:
        """Patches or mel frames queued in a lane."""
        return sum(queued.cost for queued in self._lanes[lane])

    def add(self, job: JobT, *, lane: Lane, cost: int, now_s: float) -> None:
        """Queue a job. Raises ValueError for a cost below one."""
        if cost < 1:
            raise ValueError(f"cost is {cost}, must be at least 1")
        self._lanes[lane].append(_Queued(job, cost, now_s))

    def discard(self, job: JobT) -> bool:
        """Take a job back out; False if it is not queued (any more)."""
        for queue in self._lanes.values():
            for queued in queue:
                if queued.job is job:
                    queue.remove(queued)
                    return True
        return False

    def pop(self, now_s: float) -> Batch[JobT] | None:
        """The next batch: of the lanes that are due, the one whose head has waited longest; None when none is due."""
        due = [lane for lane in self._lanes if self._is_due(lane, now_s)]
        if not due:
            return None
        lane = min(due, key=lambda lane: self._lanes[lane][0].since_s)
        taken = [self._lanes[lane].popleft() for _ in range(self._prefix(lane)[0])]
        return Batch(lane, tuple(queued.job for queued in taken), sum(queued.cost for queued in taken))

    def next_due_s(self, now_s: float) -> float | None:
        """When `pop` will have a batch if nothing is added: at once (`now_s`), later, or None for empty queues."""
        times = [due_s for lane in self._lanes if (due_s := self._due_s(lane, now_s)) is not None]
        return min(times, default=None)

    def _is_due(self, lane: Lane, now_s: float) -> bool:
        due_s = self._due_s(lane, now_s)
        return due_s is not None and due_s <= now_s

    def _due_s(self, lane: Lane, now_s: float) -> float | None:
        queue = self._lanes[lane]
        if not queue:
            return None
        _, is_full = self._prefix(lane)
        return now_s if is_full else max(now_s, queue[0].since_s + self._budgets[lane].max_wait_s)

    def _prefix(self, lane: Lane) -> tuple[int, bool]:
        """How many jobs of the lane fit one batch, and whether waiting could not add another."""
        budget, cost = self._budgets[lane], 0
        for count, queued in enumerate(self._lanes[lane]):
            cost += queued.cost
            if count == budget.max_jobs or (count and cost > budget.max_cost):
                return count, True
        count = len(self._lanes[lane])
        return count, count == budget.max_jobs or cost >= budget.max_cost
