"""What a bench is made of: cases, each a contest of ours against the plain way and against a limit, in rounds.

One round runs every contender once, in an order that turns from round to round, so that what else the machine does
falls on all of them. Ratios are taken within a round; the result is their median.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from cli.bench_machine import Busyness

Unit = Literal["s", "B", "MB", "req/s", "GFLOP/s", "tok/MiB", "hits"]
"""Of a contender's figure. `hits` is the share of requests, or of their tokens, that a cache answered, 0 to 1."""
MORE_IS_BETTER: frozenset[Unit] = frozenset({"req/s", "GFLOP/s", "tok/MiB", "hits"})
"""Of seconds and bytes less is better."""
Contender = Callable[[], float]
"""Runs once; its figure."""


class BenchFailed(Exception):
    """A contender could not do its work; the message says which and why."""


class Bars(Protocol):
    """Progress as a case reports it."""

    def begin(self, what: str, total: int) -> None:
        """A step of so many units; the one before is over."""
        ...

    def advance(self, amount: int = 1) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cases of one bench run share."""

    cache_dir: Path
    """Where inputs are kept that take long to make."""
    num_threads: int
    """For ours and, where it can use them, for the others."""
    quick: bool
    """Small inputs: shows that everything works, says little about speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves that a plot shows beside the ratios, over a logarithmic axis. Those of several cases that have the same
    title, labels and axis are one panel."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    """(x, y) by who."""
    y_is_logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a case tells besides the one figure of each contender."""

    lines: tuple[str, ...] = ()
    """For the reader of the table."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for the JSON."""
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Who runs. `limit` may be a figure known beforehand; None for what there is not."""

    detail: str
    """The input in words, as made for this run."""
    ours: Contender
    baseline: Contender | float | None = None
    limit: Contender | float | None = None
    findings: Callable[[], Findings] | None = None
    """Asked once, after the last round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the result. Names are stable: files from different days are compared by them."""

    name: str
    unit: Unit
    ours: str
    baseline: str
    limit: str
    """What each contender is, in a few words."""
    open: Callable[[Setting, Bars], AbstractContextManager[Contest]]
    """Makes or finds the inputs, and sees to it that no contender's first run pays for loading libraries."""
    max_runs: int | None = None
    """For figures that hardly differ between rounds."""
    is_counted: bool = False
    """The figures are counts, which come out the same however busy the machine is."""
    check: Callable[[], None] | None = None
    """Asked before any case runs. Raises ConfigError when what the user wrote for this case cannot be used."""
    needs: str | None = None
    """A package that comes with no plain installation. Without it the case is left out, or refused if asked for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A case without a result."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a case found: figures by contender, one per round."""

    case: Case
    detail: str
    samples: Mapping[str, Sequence[float]]
    others_share: float | None = None
    """Share of the machine's CPU time that went to others meanwhile; None where the system does not tell."""
    findings: Findings = field(default_factory=Findings)

    @property
    def ours(self) -> float:
        return median(self.samples["ours"])

    @property
    def baseline(self) -> float | None:
        return self._median("baseline")

    @property
    def limit(self) -> float | None:
        return self._median("limit")

    @property
    def ratio(self) -> float | None:
        """Above 1: ours is better than the plain way by that factor."""
        return self._median_ratio("baseline")

    @property
    def of_limit(self) -> float | None:
        """Share of the limit that is reached; 1 at the limit, above 1 where ours avoids work that the limit does."""
        return self._median_ratio("limit")

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.case.name,
            "ours": _rounded(self.ours),
            "baseline": _rounded(self.baseline),
            "unit": self.case.unit,
            "ratio": _rounded(self.ratio),
            "limit": _rounded(self.limit),
            "of_limit": _rounded(self.of_limit),
            "runs": len(self.samples["ours"]),
            "samples": {who: [_rounded(value) for value in values] for who, values in self.samples.items()},
            "input": self.detail,
            "against": {"baseline": self.case.baseline, "limit": self.case.limit},
            "others_cpu_share": _rounded(self.others_share),
            **({"figures": self.findings.figures} if self.findings.figures else {}),
        }

    def _median(self, who: str) -> float | None:
        values = self.samples.get(who)
        return median(values) if values else None

    def _median_ratio(self, who: str) -> float | None:
        values = self.samples.get(who)
        if not values:
            return None
        unit = self.case.unit
        return median(times_better(ours, other, unit) for ours, other in zip(self.samples["ours"], values, strict=True))


def times_better(ours: float, other: float, unit: Unit) -> float:
    """Above 1: ours is better by that factor, whichever way the unit goes. Infinite where the worse figure is 0."""
    better, worse = (ours, other) if unit in MORE_IS_BETTER else (other, ours)
    if worse == 0:
        return 1.0 if better == 0 else math.inf
    return better / worse


def run_case(case: Case, setting: Setting, *, runs: int, bars: Bars) -> Result:
    """Opens the case and runs its rounds. Raises BenchFailed."""
    with case.open(setting, bars) as contest:
        contenders = {"ours": contest.ours, "baseline": contest.baseline, "limit": contest.limit}
        active = {who: contender for who, contender in contenders.items() if callable(contender)}
        samples: dict[str, list[float]] = {who: [] for who in contenders}
        busyness = Busyness()
        runs = min(runs, case.max_runs or runs)
        bars.begin(f"{case.name}: running", runs * len(active))
        for index in range(runs):
            for who in _rotated(list(active), index):
                samples[who].append(active[who]())
                bars.advance()
            for who, contender in contenders.items():
                if isinstance(contender, int | float):
                    samples[who].append(float(contender))
        return Result(
            case=case,
            detail=contest.detail,
            samples={who: values for who, values in samples.items() if values},
            others_share=busyness.others_share(),
            findings=contest.findings() if contest.findings is not None else Findings(),
        )


@dataclass(slots=True)
class Stopwatch:
    """`with Stopwatch() as watch: ...; watch.elapsed_s`."""

    elapsed_s: float = 0.0
    _started_s: float = field(default=0.0, repr=False)

    def __enter__(self) -> "Stopwatch":
        self._started_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed_s = time.perf_counter() - self._started_s


def timed(work: Callable[[], object]) -> Contender:
    """A contender whose figure is the time that `work` takes."""

    def run() -> float:
        with Stopwatch() as watch:
            work()
        return watch.elapsed_s

    return run


def _rotated(names: list[str], index: int) -> list[str]:
    start = index % len(names)
    return names[start:] + names[:start]


def _rounded(value: float | None) -> float | None:
    """Five digits that count; JSON knows no infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
