"""What a field of a workload file may be, said beside its type: `seed: Annotated[int, Span(0, 100)]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

__all__ = ["Factor", "Log", "Rising", "Share", "Shares", "Span", "Tokens"]

_MOST_TOKENS = 1 << 20
"""Longest context that the models of configs/models have."""


@dataclass(frozen=True, slots=True)
class Span:
    """A number from `low` to `high`; `above`: not `low` itself."""

    low: float
    high: float
    above: bool = False

    @property
    def words(self) -> str:
        return f"above {self.low:,}, up to {self.high:,}" if self.above else f"from {self.low:,} to {self.high:,}"

    def holds(self, value: float) -> bool:
        """Infinities and what is no number are outside."""
        return self.low <= value <= self.high and not (self.above and value == self.low)


@dataclass(frozen=True, slots=True)
class Rising:
    """Numbers, `count` of them or any number from 1 up to 16, each within `span` and none below the one before."""

    span: Span
    count: int | None = None

    @property
    def words(self) -> str:
        how_many = "1 to 16" if self.count is None else str(self.count)
        return f"a list of {how_many}, none smaller than the one before, each {self.span.words}"

    def holds(self, values: tuple[float, ...]) -> bool:
        fits = 1 <= len(values) <= 16 if self.count is None else len(values) == self.count
        return fits and all(map(self.span.holds, values)) and list(values) == sorted(values)


Tokens = Annotated[int, Span(1, _MOST_TOKENS)]
Share = Annotated[float, Span(0, 1)]
Log = Annotated[float, Span(-14, 14)]
"""Mean of the logarithm of a length or of seconds: up to a million."""
Factor = Annotated[float, Span(0, 1_000_000, above=True)]
"""Seconds between things, things per second."""
Shares = Annotated[tuple[float, ...], Rising(Span(0.01, 100))]
"""Budgets: a hundredth of the working set holds no request, and a hundred times as much loses none."""
