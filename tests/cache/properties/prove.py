"""`scripts/prove_kv`: the invariants of the KV cache over any number of random schedules, outside hypothesis.

One run of a schedule checks all invariants of `INVARIANTS` at once; two worlds and the toy model follow. Schedule n of
seed S is always the same, so a failure is told by its number and run again with `--seed S --first n --schedules 1`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.cache.properties.invariants import INVARIANTS
from tests.cache.properties.schedule import HEADER_BYTES, STEP_BYTES, setting_of, size_of, steps_of
from tests.cache.properties.toy import run_toy
from tests.cache.properties.twins import drafts_leave_no_trace, splits_are_unobservable
from tests.cache.properties.world import Invariant, run_schedule

BATCH = 200
_NOTED_EVERY = 10_000
NUM_STEPS = 12
NUM_TWIN_STEPS = 8

BESIDE: dict[str, Callable[[bytes], int]] = {
    "rejected drafts leave no trace": drafts_leave_no_trace,
    "splits are unobservable": splits_are_unobservable,
    "greedy output is that without a cache": run_toy,
}
# Its lookups are steps of their own, which other invariants would take for the schedule's.
DISTURBING = "a lookup keeps no ancestor young"


@dataclass
class Tally:
    """What a batch found. `cases` counts where an invariant met what it is about, for those that count."""

    num_schedules: int = 0
    num_steps: int = 0
    cases: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.num_schedules += other.num_schedules
        self.num_steps += other.num_steps
        self.cases.update(other.cases)
        self.failures.update(other.failures)
        self.stories += other.stories


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/prove_kv", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=2000, help="schedules for each invariant")
    parser.add_argument("--seed", type=int, default=1, help="which schedules")
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="also write the summary, and every failure, to this file")
    options = parser.parse_args()
    if min(options.schedules, options.jobs) < 1 or options.first < 0:
        parser.error("--schedules and --jobs must be at least 1, --first at least 0")
    sys.exit(prove(options.seed, options.first, options.schedules, options.jobs, options.out))


def prove(seed: int, first: int, num_schedules: int, num_jobs: int, out: Path | None) -> int:
    """Run, show progress, print a line per invariant. Returns the exit status: 1 if any failed."""
    started_s, total = time.monotonic(), Tally()
    stop = first + num_schedules
    batches = [(seed, at, min(at + BATCH, stop)) for at in range(first, stop, BATCH)]
    with _progress() as progress, multiprocessing.Pool(num_jobs) as pool:
        task = progress.add_task("schedules", total=num_schedules)
        for tally in pool.imap_unordered(try_batch, batches):
            total.add(tally)
            progress.advance(task, tally.num_schedules)
            if out is not None and total.num_schedules % _NOTED_EVERY < tally.num_schedules:
                with out.open("a") as log:
                    print(_so_far(total, seed, first, time.monotonic() - started_s), file=log)
    lines = list(_summary(total, seed, first, time.monotonic() - started_s))
    for file in _outputs(out):
        print("\n".join(lines), file=file, flush=True)
    return 1 if total.failures else 0


def try_batch(batch: tuple[int, int, int]) -> Tally:
    """All properties over schedules [first, stop) of a seed."""
    seed, first, stop = batch
    tally = Tally()
    for number in range(first, stop):
        draw = random.Random(f"{seed}/{number}")
        try_schedule(draw.randbytes(size_of(NUM_STEPS)), number, tally)
    return tally


def try_schedule(schedule: bytes, number: int, tally: Tally) -> None:
    """All properties over one schedule; those of two worlds see its first steps."""
    tally.num_schedules += 1
    tally.num_steps += sum(1 for _ in steps_of(schedule))
    invariants = {name: one() for name, one in INVARIANTS.items() if name != DISTURBING}
    try:
        run_schedule(schedule, list(invariants.values()))
    except Exception:  # noqa: BLE001  (whatever goes wrong is what we are here to find)
        _blame(schedule, number, tally)
    for name, invariant in invariants.items():
        tally.cases[name] += invariant.num_cases
    _try_one(DISTURBING, partial(_alone, INVARIANTS[DISTURBING]), schedule, number, tally)
    for name, holds in BESIDE.items():
        part = schedule if holds is run_toy else schedule[: HEADER_BYTES + NUM_TWIN_STEPS * STEP_BYTES]
        _try_one(name, holds, part, number, tally)


def _alone(kind: type[Invariant], schedule: bytes) -> int:
    invariant = kind()
    run_schedule(schedule, [invariant])
    return invariant.num_cases


def _blame(schedule: bytes, number: int, tally: Tally) -> None:
    """Something failed with all invariants on: find out which ones fail alone."""
    before = sum(tally.failures.values())
    for name, kind in INVARIANTS.items():
        if name != DISTURBING:
            _try_one(name, partial(_alone, kind), schedule, number, tally)
    if sum(tally.failures.values()) == before:
        tally.failures["all at once"] += 1
        tally.stories.append(f"schedule {number}: fails with all invariants at once, with none alone")


def _try_one(name: str, holds: Callable[[bytes], int], schedule: bytes, number: int, tally: Tally) -> None:
    try:
        tally.cases[name] += holds(schedule)
    except Exception:  # noqa: BLE001
        if tally.failures[name] == 0:
            tally.stories.append(_story(name, schedule, number))
        tally.failures[name] += 1


def _story(name: str, schedule: bytes, number: int) -> str:
    told = "\n".join(f"    {step}" for step in steps_of(schedule))
    error = "".join(traceback.format_exc(limit=-3))
    return f"schedule {number}: {name}\n    {schedule.hex()}\n    {setting_of(schedule)}\n{told}\n{error}"


def _summary(total: Tally, seed: int, first: int, seconds: float) -> Iterator[str]:
    yield from total.stories[:20]
    yield _so_far(total, seed, first, seconds)
    for name in [*INVARIANTS, *BESIDE, *(name for name in total.failures if name == "all at once")]:
        failed = total.failures[name]
        cases = f", {total.cases[name]:,} cases" if total.cases[name] else ""
        verdict = f"FAILED {failed}" if failed else "holds"
        yield f"{verdict:<10} {total.num_schedules:>9,} schedules{cases:<20} {name}"


def _so_far(total: Tally, seed: int, first: int, seconds: float) -> str:
    return (
        f"{total.num_schedules:,} schedules from {first} of seed {seed}, {total.num_steps:,} steps, {seconds:,.0f} s, "
        f"{sum(total.failures.values())} failures"
    )


def _outputs(out: Path | None) -> Iterator[TextIO]:
    yield sys.stdout
    if out is not None:
        with out.open("a") as file:
            yield file


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


if __name__ == "__main__":
    main()
