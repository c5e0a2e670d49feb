"""Ranges of numbers of a JSON schema as ones that llguidance enforces exactly.

It reads bounds as floats of 64 bits, lets the bound itself through where an open range begins at an integer, and puts
no end to the digits of a fraction. So bounds are moved to the grid of the fractions that can be written, open ones past
themselves where they must be, and numbers keep to that grid; integers have bounds that a float holds. All of it allows
less than the schema, never more.
"""

import json
import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from typing import Any

from epd.gateway.grammar_faults import Unenforceable

NUM_DECIMALS = 10
"""Digits of a fraction. What llguidance counts them with, multiples of a float, goes no further."""
MAX_NUMBER = 10**15
MAX_INTEGER = 10**18
LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
NUMBER_WORDS = frozenset((*LIMITS, "multipleOf"))

_GRID = Decimal(1).scaleb(-NUM_DECIMALS)
_LEAST, _MOST = -(2**63), 2**63 - 1
# The largest float within 64 bits.
_LARGEST = 2**63 - 1024
# The library counts remainders one by one, 2 us each.
_MAX_COEFFICIENT = 100_000
_EXACT = Context(prec=60)


def narrow_numbers(schema: dict[str, Any], path: str, *, on_grid: bool) -> None:
    """Change the keywords of a schema that numbers may fit. `on_grid`: a fraction may be given an end. Raises
    Unenforceable."""
    for word in LIMITS:
        if word in schema and not _LEAST <= schema[word] <= _MOST:
            raise Unenforceable(
                f"{path}.{word}", f"it is {json.dumps(schema[word])}; allowed: {_LEAST} to {_MOST}, of 64 bits"
            )
    if "multipleOf" in schema:
        _check_multiple(schema["multipleOf"], f"{path}.multipleOf")
    named = schema.get("type", ())
    kinds = set(named) if isinstance(named, list) else {named} if named else set()
    if isinstance(named, list) and {"number", "integer"} <= kinds:
        schema["type"] = [kind for kind in named if kind != "integer"]
    limits: Mapping[str, float]
    if "integer" in kinds and "number" not in kinds:
        limits = _of_integers(schema, path)
    else:
        limits = _of_numbers(schema, path)
        if on_grid and "multipleOf" not in schema and len(set(limits.values())) > 1:
            schema["multipleOf"] = float(_GRID)
    for word in LIMITS:
        schema.pop(word, None)
    schema |= limits


def _of_integers(schema: Mapping[str, Any], path: str) -> dict[str, int]:
    low, high = _bounds(schema)
    least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    opened = _opened(least, most, MAX_INTEGER)
    first, last = int(_above(Decimal(opened[0]))), int(_below(Decimal(opened[1])))
    if (first > last and opened[0] <= opened[1]) or max(first, -last) > _LARGEST:
        raise Unenforceable(
            path, f"between {opened[0]} and {opened[1]} there is no integer that a float of 64 bits holds"
        )
    return {"minimum": first, "maximum": last}


def _of_numbers(schema: Mapping[str, Any], path: str) -> dict[str, float]:
    low, high = _bounds(schema)
    with localcontext(_EXACT):
        least, is_above = _on_grid(low)
        # The same, seen from the other side.
        most, is_below = _on_grid(None if high is None else (-high[0], high[1]))
        begin, end = _opened(least, None if most is None else -most, MAX_NUMBER)
        first, last = float(_above(Decimal(begin))), float(_below(Decimal(end)))
    if (first > last and low is not None and high is not None and low[0] < high[0]) or max(first, -last) > _LARGEST:
        raise Unenforceable(path, f"no number of at most {NUM_DECIMALS} decimal places is within its bounds")
    return {"exclusiveMinimum" if is_above else "minimum": first, "exclusiveMaximum" if is_below else "maximum": last}


def _on_grid(low: tuple[Decimal, bool] | None) -> tuple[Decimal | None, bool]:
    """A lower bound, and whether it is no value itself: of integers from 0 on llguidance takes that to be one."""
    if low is None:
        return None, False
    least = low[0].quantize(_GRID, ROUND_CEILING)
    if not low[1] or least != low[0]:
        return least, False
    return (least + _GRID, False) if least >= 0 and least % 1 == 0 else (least, True)


def _bounds(schema: Mapping[str, Any]) -> tuple[tuple[Decimal, bool] | None, tuple[Decimal, bool] | None]:
    """The larger lower one and the smaller upper one, each with whether it is no value itself."""
    low = [(_exact(schema[word]), word != "minimum") for word in LIMITS[:2] if word in schema]
    high = [(_exact(schema[word]), word != "maximum") for word in LIMITS[2:] if word in schema]
    return max(low, default=None), min(high, key=lambda bound: (bound[0], not bound[1]), default=None)


def _opened(least: Any, most: Any, largest: int) -> tuple[Any, Any]:
    """Both sides, where the schema leaves one open."""
    if least is None:
        least = -largest if most is None or most > -largest else -_LARGEST
    if most is None:
        most = largest if least < largest else _LARGEST
    return least, most


def _exact(value: int | float) -> Decimal:
    """As it was written."""
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def _above(value: Decimal) -> float:
    """The least float that is written as no less."""
    near = float(value) + 0.0
    return max(near if _exact(near) >= value else math.nextafter(near, math.inf), -_LARGEST)


def _below(value: Decimal) -> float:
    return -_above(-value) + 0.0


def _check_multiple(value: int | float, path: str) -> None:
    """llguidance moves the point of a float until nothing is behind it."""
    if value <= 0:
        raise Unenforceable(path, f"it is {json.dumps(value)}; allowed: more than 0")
    moved, num_moves = float(value), 0
    while not moved.is_integer() and num_moves < 2 * NUM_DECIMALS:
        moved, num_moves = moved * 10, num_moves + 1
    if moved >= _MAX_COEFFICIENT or Decimal(moved).scaleb(-num_moves) != _exact(value):
        raise Unenforceable(
            path,
            f"it is {json.dumps(value)}; allowed: one of at most {NUM_DECIMALS} decimal places, and "
            f"{_MAX_COEFFICIENT} without its point",
        )
