"""One rank of a tensor-parallel prefill worker without a model: a `RankFeed` over gloo, steps that only take time."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.queues import Queue

import torch
import torch.distributed as dist

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from epd.engine.feed import Arrivals, Deliver, EmbeddingFeed
from epd.engine.ranks import GlooGroup, RankFeed, RankLost

LAST = "last"
STEP_S = 0.003


@dataclass(frozen=True)
class Plan:
    """What rank 0 is asked for, and what befalls rows on the way to each rank."""

    media: dict[str, tuple[int, ...]]
    """By request, the numbers of its media."""
    lost: dict[int, set[int]]
    """By rank, media that are lost there."""
    slow: dict[int, dict[int, float]]
    """By rank, seconds that media take there; others take a few milliseconds."""
    aborted: dict[str, int] = field(default_factory=dict)
    """Requests and the step of rank 0 in which they are aborted."""
    seed: int = 0


@dataclass
class Report:
    """What one rank saw: in every step that brought something, the requests it could run and those it could not."""

    rank: int
    ran: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, str, str]] = field(default_factory=list)
    longest_collect_s: float = 0.0
    num_steps: int = 0
    held_bytes: int = 0
    notices_the_end_of_the_other: bool = False


def ref(number: int) -> EmbeddingRef:
    return EmbeddingRef(
        key=f"{number:032x}",  # type: ignore[arg-type]
        arena="arena",
        offset_bytes=0,
        num_rows=4,
        width=8,
        dtype="float32",
        checksum=number,
        lease_id=f"lease-{number}",
    )


class LateSource:
    """Rows filled with their number, after a while."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self._rank, self._plan = rank, plan
        self._random = random.Random(rank)

    def fetch(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        number = ref.checksum
        is_lost = number in self._plan.lost.get(self._rank, ())
        result = EmbeddingLost(f"lost on rank {self._rank}") if is_lost else torch.full((4, 8), float(number))
        delay_s = self._plan.slow.get(self._rank, {}).get(number, self._random.uniform(0.0, 0.02))
        timer = threading.Timer(delay_s, deliver, (result,))
        timer.daemon = True
        timer.start()
        return timer.cancel

    def close(self) -> None:
        pass


def run_rank(rank: int, store_path: str, plan: Plan, reports: "Queue[Report]") -> None:
    """The process: step until the request `LAST` can run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, 2), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    feed = EmbeddingFeed(LateSource(rank, plan), limit_bytes=1 << 20, wake=lambda: None)
    ranks = RankFeed(feed, GlooGroup(dist.group.WORLD, timeout_s=60.0))
    report = Report(rank)
    arrivals = Arrivals()
    driver = _Driver(ranks, plan) if rank == 0 else None
    while LAST not in arrivals.ready:
        if driver is not None:
            driver.step(report.num_steps, arrivals)
        begun_s = time.perf_counter()
        arrivals = ranks.collect()
        report.longest_collect_s = max(report.longest_collect_s, time.perf_counter() - begun_s)
        for request_id in arrivals.ready:
            report.ran.append((report.num_steps, request_id))
            # The forward reads the rows, on this rank's own thread; rank 0 plans none for what it has given up.
            if request_id not in plan.aborted:
                assert all(ranks.tensor(ref(number)).eq(number).all() for number in plan.media.get(request_id, ()))
        report.lost += [(report.num_steps, request_id, error.message) for request_id, error in arrivals.lost]
        time.sleep(STEP_S)
        report.num_steps += 1
    report.held_bytes = feed.held_bytes
    if rank == 0:
        report.notices_the_end_of_the_other = _notices_the_end_of_the_other(ranks)
    reports.put(report)
    ranks.close()
    dist.destroy_process_group()


def _notices_the_end_of_the_other(ranks: RankFeed) -> bool:
    try:
        # The first takes in what both had begun.
        for _ in range(2):
            ranks.collect()
    except RankLost:
        return True
    return False


class _Driver:
    """Rank 0's scheduler in small: asks in a random order, forgets what ran, failed or was aborted."""

    def __init__(self, ranks: RankFeed, plan: Plan) -> None:
        self._ranks, self._plan = ranks, plan
        self._random = random.Random(plan.seed)
        self._to_ask = list(plan.media)
        self._random.shuffle(self._to_ask)
        self._open = set(plan.media)
        self._is_last_asked = False

    def step(self, num_steps: int, arrivals: Arrivals) -> None:
        for request_id in (*arrivals.ready, *(request_id for request_id, _ in arrivals.lost)):
            self._end(request_id)
        for request_id, step in self._plan.aborted.items():
            if num_steps >= step and request_id not in self._to_ask:
                self._end(request_id)
        for _ in range(min(len(self._to_ask), self._random.randrange(4))):
            request_id = self._to_ask.pop()
            refs = [ref(number) for number in self._plan.media[request_id]]
            self._ranks.want(request_id, refs, time.time() + 60.0)
        if not self._open and not self._is_last_asked:
            self._is_last_asked = True
            self._ranks.want(LAST, [ref(0)], time.time() + 60.0)

    def _end(self, request_id: str) -> None:
        if request_id in self._open:
            self._open.remove(request_id)
            self._ranks.forget(request_id)
