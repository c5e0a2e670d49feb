"""What every setting is checked with: ValueError names the setting, its value and what is allowed."""

import math


def positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{owner}.{name} is {value}; it must be greater than 0")


def seconds(owner: str, *, may_be_zero: bool, **values: float) -> None:
    """Finite ones."""
    for name, value in values.items():
        if not (math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
            allowed = "0 or more" if may_be_zero else "more than 0"
            raise ValueError(f"{owner}.{name} is {value}; allowed: {allowed} seconds")


def one_of(key: str, value: object, allowed: tuple[object, ...]) -> None:
    """None among `allowed` is a setting left out: files have no word for it."""
    if value not in allowed:
        listed = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise ValueError(f"{key} is {value!r}; allowed: {listed}{', or leave it out' if None in allowed else ''}")


def within(key: str, value: int | None, least: int, most: int | None = None) -> None:
    """None passes."""
    if value is None or (value >= least and (most is None or value <= most)):
        return
    raise ValueError(f"{key} is {value:,}; allowed: {least:,} {'or more' if most is None else f'to {most:,}'}")
