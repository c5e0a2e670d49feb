"""Refusing numbers that mean nothing, where a caller hands them over: each named with its value and what is allowed."""

from __future__ import annotations

__all__ = ["require_at_least"]


def require_at_least(least: int, /, **values: int) -> None:
    """Raise ValueError naming the first of `values`, by keyword, that is no whole number or is below `least`.

    True and False are no numbers here.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; allowed: whole numbers, {least:,} or more")
        if value < least:
            raise ValueError(f"{name} is {value:,}; allowed: {least:,} or more")
