"""Jobs that wait for the tower: batched, run one batch at a time, with a limit on what may wait in decoded form.

Decoded pictures are large (a 1080p one is 50 MB of patches), and decoding may be faster than the tower, so decoding
asks `wait_for_room` before it starts another medium and before it hands over another part of a video.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from encoder.batcher import Batcher, Lane, LaneBudget
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.histogram import SIZES, STEP_SECONDS, Histograms
from encoder.runner import TowerJob, TowerRunner
from encoder.types import HistogramCounts

# Batches' worth of decoded media that may wait in a lane before decoding pauses,
MAX_WAITING_BATCHES = 2
# and the memory of what waits or is in the tower: one full part of a video in it and one that waits keep it busy.
MAX_HELD_BYTES = 160 * 2**20


@dataclass(slots=True, eq=False)
class Ticket:
    """A queued job. `done` gives None or why it failed. Once `in_tower` it cannot be withdrawn."""

    job: TowerJob | None
    """None once it is done or withdrawn: its pictures are not kept."""
    since_s: float
    done: "asyncio.Future[TowerFailed | None]"
    in_tower: bool = False
    batch: int = 0
    """Jobs of one batch have the same number, and the same `tower_s`."""
    batch_wait_s: float = 0.0
    tower_s: float = 0.0


class TowerQueue:
    """Batcher and runner tied together on one event loop."""

    def __init__(self, config: EncoderConfig, runner: TowerRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        wait_s, max_jobs = config.max_batch_wait_s, config.max_batch_jobs
        self._budgets = {
            Lane.VISION: LaneBudget(config.max_batch_patches, max_jobs, wait_s),
            Lane.AUDIO: LaneBudget(config.max_batch_mel_frames, max_jobs, wait_s),
        }
        self._batcher: Batcher[Ticket] = Batcher(self._budgets)
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._held_bytes = 0
        self._busy_since_s: float | None = None
        self.num_batches = 0
        self.num_jobs = 0
        self._sizes = Histograms("batch_size_jobs", SIZES, "lane")
        self._durations = Histograms("batch_seconds", STEP_SECONDS, "lane")
        self.tower_s = 0.0

    @property
    def busy_s(self) -> float:
        """How long the batch that is in the tower has been there; zero for an idle tower."""
        return 0.0 if self._busy_since_s is None else max(0.0, self._clock() - self._busy_since_s)

    @property
    def runner_counters(self) -> dict[str, int]:
        """Passes of the tower, and whether media may not share them on this machine: 1 or 0."""
        return {"tower_passes": self._runner.num_passes, "packing_refused": self._runner.num_refused_packing}

    def told(self) -> Iterator[HistogramCounts]:
        """Sizes of batches, and how long they were in the tower."""
        yield from self._sizes.told()
        yield from self._durations.told()

    def submit(self, job: TowerJob) -> Ticket:
        """Queue a job for the next batch of its lane."""
        ticket = Ticket(job, self._clock(), asyncio.get_running_loop().create_future())
        self._batcher.add(ticket, lane=job.lane, cost=job.cost, now_s=ticket.since_s)
        self._held_bytes += job.size_bytes
        self._work.set()
        self._update_room()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take a job back out if it still waits."""
        if self._batcher.discard(ticket):
            self._let_go(ticket)

    async def wait_for_room(self) -> None:
        """Return once little enough waits in decoded form. Of many who waited, each sees what the others submitted."""
        while not self._room.is_set():
            await self._room.wait()

    async def run(self) -> None:
        """Run batches until cancelled. A batch in the tower at that moment is not waited for."""
        while True:
            now_s = self._clock()
            batch = self._batcher.pop(now_s)
            if batch is not None:
                await self._run_batch(batch.lane, batch.jobs, now_s)
                continue
            due_s = self._batcher.next_due_s(now_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), None if due_s is None else due_s - now_s)
            self._work.clear()

    async def _run_batch(self, lane: Lane, tickets: Sequence[Ticket], now_s: float) -> None:
        self.num_batches += 1
        for ticket in tickets:
            ticket.in_tower = True
            ticket.batch = self.num_batches
            ticket.batch_wait_s = now_s - ticket.since_s
        self._update_room()
        self._busy_since_s = now_s
        outcomes = await self._runner.run([ticket.job for ticket in tickets if ticket.job is not None])
        self._busy_since_s = None
        tower_s = self._clock() - now_s
        self.num_jobs += len(tickets)
        self.tower_s += tower_s
        self._sizes[lane].observe(len(tickets))
        self._durations[lane].observe(tower_s)
        for ticket, outcome in zip(tickets, outcomes, strict=True):
            self._let_go(ticket)
            ticket.tower_s = tower_s
            ticket.done.set_result(outcome)

    def _let_go(self, ticket: Ticket) -> None:
        assert ticket.job is not None, "a job ends once"
        self._held_bytes -= ticket.job.size_bytes
        ticket.job = None
        self._update_room()

    def _update_room(self) -> None:
        crowded = any(
            self._batcher.waiting_cost(lane) >= MAX_WAITING_BATCHES * budget.max_cost
            for lane, budget in self._budgets.items()
        )
        if crowded or self._held_bytes >= MAX_HELD_BYTES:
            self._room.clear()
        else:
            self._room.set()
