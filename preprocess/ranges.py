"""What the numbers of a checkpoint's configurations may be, and how a message shows text that came from its files.

A range is asked with `in`, which is false for whatever is no number at all: text, booleans, NaN.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Whole:
    """Integers from `low` to `high`, both included."""

    low: int
    high: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an integer from {self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True)
class Real:
    """Numbers from `low` to `high`, both included unless `above` leaves the lower one out. Never NaN or infinite."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return (
            f"a number {'above' if self.above else 'from'} {self.low:g} {'up ' if self.above else ''}to {self.high:g}"
        )


Range = Whole | Real

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown_value(value: object) -> str:
    """A value of a parsed file for a message: its repr, cut short, without control characters."""
    return _SHORT.repr(value)


def printable(text: str) -> str:
    """Text of a file with everything that a terminal would act on (colours, cursor, line ends) spelled out."""
    if text.isprintable():
        return text
    # Undecodable bytes of a file name are lone surrogates, which cannot be printed either.
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
