"""Memory and descriptors of a deployment's processes while it is soaked, from /proc."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.service import Service


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one process at one time. `memory_bytes` is its proportional share (PSS): shared memory is counted once."""

    at_s: float
    name: str
    pid: int
    age_s: float
    memory_bytes: int
    num_fds: int


@dataclass(slots=True)
class Watch:
    """Samples all stages and their supervisor every `period_s` until cancelled."""

    service: Service
    period_s: float = 5.0
    samples: list[Sample] = field(default_factory=list)

    async def run(self) -> None:
        started_s, born_s = time.monotonic(), dict[int, float]()
        while True:
            processes = {"supervisor": self.service.pid, **await asyncio.to_thread(self.service.stages)}
            now_s = time.monotonic()
            for name, pid in processes.items():
                born_s.setdefault(pid, now_s)
                try:
                    memory_bytes, num_fds = await asyncio.to_thread(_use, pid)
                except (FileNotFoundError, ProcessLookupError):
                    # Killed between the two looks.
                    continue
                age_s = now_s - born_s[pid]
                self.samples.append(Sample(now_s - started_s, name, pid, age_s, memory_bytes, num_fds))
            await asyncio.sleep(self.period_s)


def _use(pid: int) -> tuple[int, int]:
    """Memory and descriptors of a process."""
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10, num_fds
    raise ProcessLookupError(pid)


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one kind of process: last values against first ones, and the slopes of least squares."""

    name: str
    num_processes: int
    memory_bytes: float
    memory_bytes_per_minute: float
    num_fds: float
    fds_per_minute: float


def growth(samples: Sequence[Sample], *, settled_s: float = 60.0) -> list[Growth]:
    """By name. Each process counts from `settled_s` of its age on, when it has warmed up; slopes of processes that
    followed each other under a name are averaged by how long they were watched."""
    found = []
    for name in sorted({sample.name for sample in samples}):
        lives: dict[int, list[Sample]] = {}
        for sample in samples:
            if sample.name == name and sample.age_s >= settled_s:
                lives.setdefault(sample.pid, []).append(sample)
        watched = [life for life in lives.values() if len(life) >= 4]
        if not watched:
            continue
        weights = [life[-1].at_s - life[0].at_s for life in watched]
        memory = [_slope([(s.at_s, s.memory_bytes) for s in life]) for life in watched]
        fds = [_slope([(s.at_s, s.num_fds) for s in life]) for life in watched]
        found.append(
            Growth(
                name=name,
                num_processes=len(watched),
                memory_bytes=statistics.fmean(life[-1].memory_bytes for life in watched),
                memory_bytes_per_minute=60 * statistics.fmean(memory, weights),
                num_fds=statistics.fmean(life[-1].num_fds for life in watched),
                fds_per_minute=60 * statistics.fmean(fds, weights),
            )
        )
    return found


def total_slope(samples: Sequence[Sample], *, settled_s: float = 20.0) -> tuple[float, float]:
    """(bytes, descriptors) a minute of the whole deployment, over moments when all its processes had settled."""
    moments: dict[float, list[Sample]] = {}
    for sample in samples:
        moments.setdefault(sample.at_s, []).append(sample)
    num_names = len({sample.name for sample in samples})
    whole = [
        moment for moment in moments.values() if len(moment) == num_names and min(s.age_s for s in moment) >= settled_s
    ]
    if len(whole) < 4:
        return 0.0, 0.0
    memory = [(moment[0].at_s, sum(s.memory_bytes for s in moment)) for moment in whole]
    fds = [(moment[0].at_s, sum(s.num_fds for s in moment)) for moment in whole]
    return 60 * _slope(memory), 60 * _slope(fds)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
