"""Draws of a workload: counts, lengths and pauses of the shapes that serving traces have. All are seeded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from cli.bench_kv_bounds import Factor, Log, Share, Span

__all__ = ["Draws", "LogNormal", "Mixture", "Pareto"]


@dataclass(frozen=True, slots=True)
class LogNormal:
    """By mean and standard deviation of the logarithm."""

    mean: Log
    sd: Annotated[float, Span(0, 4)]


@dataclass(frozen=True, slots=True)
class Pareto:
    """Bounded: low <= x <= high, the share above x falling like x ** -exponent."""

    low: Factor
    high: Factor
    exponent: Annotated[float, Span(0.01, 20)]

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(f"high is {self.high:,}; allowed: low, which is {self.low:,}, or more")


@dataclass(frozen=True, slots=True)
class Mixture:
    """The first with `share`, otherwise the second."""

    share: Share
    first: LogNormal
    second: LogNormal


class Draws:
    """One stream of random numbers and the numbers of contents that nobody has seen before."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_contents = 0

    def content(self) -> int:
        self._num_contents += 1
        return self._num_contents

    def chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def below(self, limit: int) -> int:
        """Of [0, limit), all alike."""
        return int(self._rng.integers(limit))

    def between(self, low: float, high: float) -> float:
        return float(self._rng.uniform(low, high))

    def value(self, shape: LogNormal | Mixture | Pareto) -> float:
        if isinstance(shape, Mixture):
            shape = shape.first if self.chance(shape.share) else shape.second
        if isinstance(shape, LogNormal):
            return math.exp(float(self._rng.normal(shape.mean, shape.sd)))
        # The inverse of the distribution function, cut off at `high`.
        missing = (shape.low / shape.high) ** shape.exponent
        uniform = float(self._rng.random()) * (1 - missing)
        return float(min(shape.high, shape.low * (1 - uniform) ** (-1 / shape.exponent)))

    def length(self, shape: LogNormal | Mixture | Pareto, most: int) -> int:
        """Tokens, at least one."""
        return min(most, max(1, round(self.value(shape))))

    def ranks(self, count: int, exponent: float) -> Sequence[float]:
        """Shares of `count` ranks by Zipf's law, adding up to one."""
        weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
        return list((weights / weights.sum()).tolist())

    def choice(self, shares: Sequence[float]) -> int:
        return int(self._rng.choice(len(shares), p=np.asarray(shares)))

    def geometric(self, p: float) -> int:
        """Trials up to the first success: at least 1."""
        return int(self._rng.geometric(p))

    def arrivals(self, rate_per_s: float, span_s: float, *, fano_per_minute: float = 1.0) -> list[float]:
        """Times within [0, span_s). Counts per minute vary `fano_per_minute` times as much as a Poisson process's."""
        times: list[float] = []
        mean = rate_per_s * 60
        for minute in range(math.ceil(span_s / 60)):
            scale = fano_per_minute - 1
            expected = float(self._rng.gamma(mean / scale, scale)) if scale > 0 else mean
            times += (60 * (minute + self._rng.random(int(self._rng.poisson(expected))))).tolist()
        return sorted(time for time in times if time < span_s)
