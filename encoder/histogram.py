"""Histograms that a process keeps for others to show: an observation is a search in a short tuple and two additions.

A process of the pipeline has no /metrics of its own; it tells its counts with everything else it says of itself, and
who knows it shows them (see `encoder.metrics`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

from encoder.types import HistogramCounts

STEP_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""For one step of a model or one pass of a tower."""
WAIT_SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""For what a request waits for or goes through."""
SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""For how many are in a batch."""
TOKENS: Final = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
"""For how many tokens are in a step or a request."""


class Histogram:
    """Counts by upper bound, as Prometheus has them: a value belongs to the first bound that it does not exceed."""

    __slots__ = ("_bounds", "_counts", "_labels", "_name", "_total")

    def __init__(self, name: str, bounds: tuple[float, ...], labels: Mapping[str, str] | None = None) -> None:
        """`name` ends with the unit; `bounds` rise."""
        self._name = name
        self._bounds = bounds
        self._labels = dict(labels or {})
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def told(self) -> HistogramCounts:
        return HistogramCounts(
            name=self._name,
            labels=self._labels,
            bounds=self._bounds,
            counts=tuple(self._counts),
            total=self._total,
        )


class Histograms:
    """Histograms of one name by one label, made when a value of the label is first seen; the values must be few."""

    def __init__(self, name: str, bounds: tuple[float, ...], label: str) -> None:
        self._name = name
        self._bounds = bounds
        self._label = label
        self._by_value: dict[str, Histogram] = {}

    def __getitem__(self, value: str) -> Histogram:
        found = self._by_value.get(value)
        if found is None:
            found = self._by_value[value] = Histogram(self._name, self._bounds, {self._label: value})
        return found

    def told(self) -> Iterator[HistogramCounts]:
        for histogram in self._by_value.values():
            yield histogram.told()
