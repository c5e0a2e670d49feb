"""The tower's queue with a runner that finishes when told to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from encoder import tower_queue
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.runner import MediumRows, TowerJob
from encoder.tower_queue import MAX_WAITING_BATCHES, Ticket, TowerQueue
from preprocess.types import MediaKey, MediaLayout, MediaPart, Modality, Patches

CONFIG = EncoderConfig(max_batch_patches=100, max_batch_jobs=4)


class HeldRunner:
    """Holds every batch until `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.batches: list[int] = []

    async def run(self, jobs: Sequence[TowerJob]) -> list[TowerFailed | None]:
        self.batches.append(len(jobs))
        await self.go.wait()
        return [TowerFailed("every second") if number % 2 else None for number in range(len(jobs))]


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def job_of(num_patches: int) -> TowerJob:
    grid = (1, 2, num_patches // 2)
    layout = MediaLayout(modality=Modality.IMAGE, grid_thw=grid)
    patches = Patches(np.zeros((num_patches, 1), np.float32), grid)
    return TowerJob.of_part(MediumRows(MediaKey("k"), layout, memoryview(b"")), MediaPart(0, patches))


@asynccontextmanager
async def running() -> AsyncIterator[tuple[TowerQueue, HeldRunner, FakeClock]]:
    runner, clock = HeldRunner(), FakeClock()
    queue = TowerQueue(CONFIG, runner, clock)  # type: ignore[arg-type]
    task = asyncio.create_task(queue.run())
    yield queue, runner, clock
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_arrives_while_the_tower_works_is_one_batch() -> None:
    async with running() as (queue, runner, clock):
        first = queue.submit(job_of(10))
        await settle()
        rest = [queue.submit(job_of(10)) for _ in range(3)]
        clock.now_s = 2.0
        assert (first.in_tower, rest[0].in_tower) == (True, False)
        runner.go.set()
        assert await first.done is None
        assert [type(await ticket.done) for ticket in rest] == [type(None), TowerFailed, type(None)]
        assert [ticket.batch for ticket in (first, *rest)] == [1, 2, 2, 2]
        assert all(ticket.job is None for ticket in (first, *rest)), "decoded pictures are not kept"
        assert runner.batches == [1, 3]
        assert (queue.num_batches, queue.num_jobs) == (2, 4)
        assert (rest[0].batch_wait_s, first.tower_s) == (2.0, 2.0)


async def test_a_withdrawn_job_never_runs() -> None:
    async with running() as (queue, runner, _):
        queue.submit(job_of(10))
        await settle()
        waiting = queue.submit(job_of(10))
        queue.withdraw(waiting)
        runner.go.set()
        await settle()
        assert runner.batches == [1]
        assert not waiting.done.done()


async def test_decoding_pauses_while_too_much_waits() -> None:
    async with running() as (queue, runner, _):
        queue.submit(job_of(10))
        await settle()
        tickets = [queue.submit(job_of(100)) for _ in range(MAX_WAITING_BATCHES)]
        paused = asyncio.create_task(queue.wait_for_room())
        await settle()
        assert not paused.done()
        queue.withdraw(tickets[-1])
        await settle()
        assert paused.done()
        runner.go.set()
        assert await tickets[0].done is None


async def test_of_many_who_wait_for_room_only_as_many_go_on_as_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_queue, "MAX_HELD_BYTES", 120)
    async with running() as (queue, runner, _):
        submitted: list[Ticket] = []

        async def put() -> None:
            await queue.wait_for_room()
            submitted.append(queue.submit(job_of(16)))  # 64 bytes

        puts = [asyncio.create_task(put()) for _ in range(12)]
        await settle()
        # What is in the tower counts as well; what is withdrawn does not.
        assert (len(submitted), runner.batches) == (2, [2])
        another = queue.submit(job_of(16))
        queue.withdraw(another)
        queue.withdraw(another)
        await settle()
        assert len(submitted) == 2
        runner.go.set()
        await asyncio.gather(*puts)
        await asyncio.gather(*(ticket.done for ticket in submitted))
        assert runner.batches == [2] * 6
