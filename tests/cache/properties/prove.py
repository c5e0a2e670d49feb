"""`scripts/prove_kv`: the invariants of the KV cache over any number of random schedules, outside hypothesis.

One run of a schedule checks all invariants of `INVARIANTS` at once; two worlds and the toy model follow. Schedule n of
seed S is always the same. A failure is told with the command that runs its schedule once more.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.cache.properties.invariants import INVARIANTS
from tests.cache.properties.schedule import HEADER_BYTES, STEP_BYTES, setting_of, size_of, steps_of
from tests.cache.properties.toy import run_toy
from tests.cache.properties.twins import drafts_leave_no_trace, splits_are_unobservable
from tests.cache.properties.world import Invariant, run_schedule

PROGRAM = "scripts/prove_kv"
BATCH = 50
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.5
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 0, 1 if anything failed, 2 for wrong arguments, 128 and the signal's number if it was stopped."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.partition("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=2000, help="schedules for each invariant (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which schedules (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--schedule", metavar="HEX", help="only this schedule, as a failure names it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also append the summary, and every failure, to FILE")
    options = parser.parse_args(arguments)
    if min(options.schedules, options.jobs) < 1 or options.first < 0:
        parser.error("--schedules and --jobs must be at least 1, --first at least 0")
    schedule = None if options.schedule is None else _parsed(parser, options.schedule)
    if options.out is not None:
        try:
            options.out.open("a").close()
        except OSError as error:
            parser.error(f"--out {options.out}: {error.strerror}")
    if schedule is not None:
        sys.exit(prove_one(schedule, options.out))
    sys.exit(prove(options.seed, options.first, options.schedules, options.jobs, options.out))


def _parsed(parser: argparse.ArgumentParser, schedule_hex: str) -> bytes:
    try:
        schedule = bytes.fromhex(schedule_hex)
    except ValueError as error:
        parser.error(f"--schedule: {error}")
    if len(schedule) < HEADER_BYTES:
        parser.error(f"--schedule: {len(schedule)} bytes; a schedule has at least {HEADER_BYTES}")
    return schedule


def prove_one(schedule: bytes, out: Path | None) -> int:
    """All properties over one schedule. Returns the exit status: 1 if any failed."""
    started_s, total = time.monotonic(), Tally()
    try_schedule(schedule, "as given", total)
    _tell(_summary(total, "as given", time.monotonic() - started_s), out)
    return 1 if total.failures else 0


def prove(seed: int, first: int, num_schedules: int, num_jobs: int, out: Path | None) -> int:
    """Run, show progress, print a line per invariant. Returns the exit status: 1 if any failed.

    On SIGINT or SIGTERM what is being tried is finished, which takes about a second, and what was proved is told.
    """
    started_s, total, origin = time.monotonic(), Tally(), f"from {first} of seed {seed}"
    stop = first + num_schedules
    batches = iter([(seed, at, min(at + BATCH, stop)) for at in range(first, stop, BATCH)])
    signals: list[int] = []
    previous = {number: signal.signal(number, lambda got, _: signals.append(got)) for number in _STOPPING}
    try:
        if out is not None:
            _note(out, f"{_counted(num_schedules, 'schedule')} {origin}: started")
        with _progress() as progress, ProcessPoolExecutor(num_jobs, initializer=_in_worker) as executor:
            task = progress.add_task("schedules", total=num_schedules)
            for tally in _tried(executor, batches, num_jobs, signals):
                total.add(tally)
                progress.advance(task, tally.num_schedules)
                if out is not None and total.num_schedules % _NOTED_EVERY < tally.num_schedules:
                    _note(out, _so_far(total, origin, time.monotonic() - started_s))
    except BrokenProcessPool:
        # A signal may reach the whole group: then the workers are gone first.
        reason = "" if signals else "a worker process died, "
    else:
        reason = ""
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    lines = list(_summary(total, origin, time.monotonic() - started_s))
    if signals or reason:
        by = f"stopped by {signal.Signals(signals[0]).name}, " if signals else reason
        lines.append(f"{by}{total.num_schedules:,} of {_counted(num_schedules, 'schedule')} tried")
    _tell(lines, out)
    return 1 if total.failures or reason else 128 + signals[0] if signals else 0


def _tried(
    executor: ProcessPoolExecutor, batches: Iterator[tuple[int, int, int]], num_jobs: int, signals: Sequence[int]
) -> Iterator[Tally]:
    """What the batches found, as they end; after a signal no further one is begun."""
    pending = {executor.submit(try_batch, batch) for batch in islice(batches, 2 * num_jobs)}
    while pending:
        done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()
        if signals:
            pending = {future for future in pending if not future.cancel()}
        else:
            pending |= {executor.submit(try_batch, batch) for batch in islice(batches, len(done))}


def _in_worker() -> None:
    # Ctrl-C reaches the whole group; when to stop is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def try_batch(batch: tuple[int, int, int]) -> Tally:
    """All properties over schedules [first, stop) of a seed."""
    seed, first, stop = batch
    tally = Tally()
    for number in range(first, stop):
        draw = random.Random(f"{seed}/{number}")
        try_schedule(draw.randbytes(size_of(NUM_STEPS)), f"{number} of seed {seed}", tally)
    return tally


def try_schedule(schedule: bytes, label: str, tally: Tally) -> None:
    """All properties over one schedule; those of two worlds see its first steps."""
    tally.num_schedules += 1
    tally.num_steps += sum(1 for _ in steps_of(schedule))
    invariants = {name: one() for name, one in INVARIANTS.items() if name != DISTURBING}
    try:
        run_schedule(schedule, list(invariants.values()))
    except Exception:  # noqa: BLE001  (whatever goes wrong is what we are here to find)
        _blame(schedule, label, tally)
    for name, invariant in invariants.items():
        tally.cases[name] += invariant.num_cases
    _try_one(DISTURBING, partial(_alone, INVARIANTS[DISTURBING]), schedule, label, tally)
    for name, holds in BESIDE.items():
        part = schedule if holds is run_toy else schedule[: HEADER_BYTES + NUM_TWIN_STEPS * STEP_BYTES]
        _try_one(name, holds, part, label, tally)


def _alone(kind: type[Invariant], schedule: bytes) -> int:
    invariant = kind()
    run_schedule(schedule, [invariant])
    return invariant.num_cases


def _blame(schedule: bytes, label: str, tally: Tally) -> None:
    """Something failed with all invariants on: find out which ones fail alone."""
    before = sum(tally.failures.values())
    for name, kind in INVARIANTS.items():
        if name != DISTURBING:
            _try_one(name, partial(_alone, kind), schedule, label, tally)
    if sum(tally.failures.values()) == before:
        tally.failures["all at once"] += 1
        tally.stories.append(
            f"schedule {label}: fails with all invariants at once, with none alone\n{_again(schedule)}"
        )


def _try_one(name: str, holds: Callable[[bytes], int], schedule: bytes, label: str, tally: Tally) -> None:
    try:
        tally.cases[name] += holds(schedule)
    except Exception:  # noqa: BLE001
        if tally.failures[name] == 0:
            tally.stories.append(_story(name, schedule, label))
        tally.failures[name] += 1


def _story(name: str, schedule: bytes, label: str) -> str:
    told = "\n".join(f"    {step}" for step in steps_of(schedule))
    error = "".join(traceback.format_exc(limit=-3))
    return f"schedule {label}: {name}\n{_again(schedule)}\n    {setting_of(schedule)}\n{told}\n{error}"


def _again(schedule: bytes) -> str:
    return f"    once more: {PROGRAM} --schedule {schedule.hex()}"


def _summary(total: Tally, origin: str, seconds: float) -> Iterator[str]:
    yield from total.stories[:20]
    yield _so_far(total, origin, seconds)
    for name in [*INVARIANTS, *BESIDE, *(name for name in total.failures if name == "all at once")]:
        failed = total.failures[name]
        cases = f", {_counted(total.cases[name], 'case')}" if total.cases[name] else ""
        verdict = f"FAILED {failed}" if failed else "holds" if total.num_schedules else "untried"
        yield f"{verdict:<10} {_counted(total.num_schedules, 'schedule'):>19}{cases:<20} {name}"


def _so_far(total: Tally, origin: str, seconds: float) -> str:
    return (
        f"{_counted(total.num_schedules, 'schedule')} {origin}, {_counted(total.num_steps, 'step')}, {seconds:,.0f} s, "
        f"{_counted(sum(total.failures.values()), 'failure')}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _tell(lines: Iterable[str], out: Path | None) -> None:
    text = "\n".join(lines)
    print(text, flush=True)
    if out is not None:
        _note(out, text)


def _note(out: Path, text: str) -> None:
    with out.open("a") as file:
        print(text, file=file)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


if __name__ == "__main__":
    main()
