"""Pictures that carry their number: burnt in as big black and white cells, readable after lossy coding and resizing.

The picture is cut into 8 columns and 5 rows, whatever its size in pixels:

    row 0      four colour marks of two cells: red, green, blue, yellow; they tell which way up the picture is
    rows 1, 2  the number, 16 bits, most significant first; white is 1
    row 3      CRC-8 of the number, so that a torn or mixed picture is not taken for another one
    row 4      grey noise that scrolls with the number, so that comparing pixels means something

numpy alone, and no code of the package under test.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_NUMBER: Final = 0xFFFF
MARKS: Final = ((220, 30, 30), (30, 200, 30), (30, 30, 220), (220, 220, 30))
"""RGB of the colour marks, left to right."""
MARK_PLACES: Final = ((0.1, 0.125), (0.1, 0.375), (0.1, 0.625), (0.1, 0.875))
"""(y, x) of the middle of each mark, as fractions of height and width."""
_NUM_COLUMNS: Final = 8
_NUM_ROWS: Final = 5
_BLACK: Final = 16
_WHITE: Final = 235
# Between these a cell is neither: the picture is a mixture of two, or damaged.
_LIGHTEST_BLACK: Final = 100
_DARKEST_WHITE: Final = 156


class BarcodeUnreadable(AssertionError):
    """The picture carries no number: damaged, mixed with another one, or the wrong way up."""


def barcode_picture(number: int, *, height: int = 96, width: int = 160) -> NDArray[np.uint8]:
    """[height, width, 3] RGB carrying `number`, 0 to 65535. 10 x 16 pixels at least; lossy codecs want 40 x 64."""
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"number is {number}, allowed is 0 to {MAX_NUMBER}")
    rows, columns = _edges(height, _NUM_ROWS), _edges(width, _NUM_COLUMNS)
    picture = np.empty((height, width, 3), dtype=np.uint8)
    for mark, colour in enumerate(MARKS):
        picture[rows[0] : rows[1], columns[2 * mark] : columns[2 * mark + 2]] = colour
    for cell, bit in enumerate(_bits(number)):
        row, column = divmod(cell, _NUM_COLUMNS)
        shade = _WHITE if bit else _BLACK
        picture[rows[row + 1] : rows[row + 2], columns[column] : columns[column + 1]] = shade
    picture[rows[4] :] = _noise(height - rows[4], width, number)[:, :, None]
    return picture


def read_barcode(picture: NDArray[Any]) -> int:
    """The number of a picture, [H, W, 3] (or [H, W] grey) on the scale 0 to 255, of any size.

    Raises BarcodeUnreadable saying what is wrong.
    """
    grey = picture.astype(np.float64)
    if grey.ndim == 3:
        grey = grey[:, :, :3].mean(axis=2)
    bits = []
    for cell in range(3 * _NUM_COLUMNS):
        row, column = divmod(cell, _NUM_COLUMNS)
        shade = float(_middle(grey, row + 1, column).mean())
        if _LIGHTEST_BLACK < shade < _DARKEST_WHITE:
            raise BarcodeUnreadable(f"cell {column} of row {row + 1} is grey ({shade:.0f}), neither black nor white")
        bits.append(shade >= _DARKEST_WHITE)
    number, check = (int("".join("01"[bit] for bit in part), 2) for part in (bits[:16], bits[16:]))
    if check != _crc8(number):
        raise BarcodeUnreadable(f"the cells say {number} with check {check}, right would be {_crc8(number)}")
    return number


def read_marks(picture: NDArray[Any]) -> NDArray[np.float64]:
    """[4, 3] mean RGB in the middle of the four colour marks, to compare with `MARKS`."""
    values = picture.astype(np.float64)
    height, width = values.shape[:2]
    found = []
    for y, x in MARK_PLACES:
        top, bottom = _span(y * height, height / _NUM_ROWS / 2)
        left, right = _span(x * width, width / _NUM_COLUMNS)
        found.append(values[top:bottom, left:right].reshape(-1, 3).mean(axis=0))
    return np.array(found)


def _bits(number: int) -> list[int]:
    """The 24 cells of rows 1 to 3."""
    return [int(digit) for digit in f"{number:016b}{_crc8(number):08b}"]


def _crc8(number: int) -> int:
    """Polynomial x^8 + x^2 + x + 1 over the two bytes, starting from 0xA5: all black or all white is never valid."""
    register = 0xA5
    for byte in number.to_bytes(2, "big"):
        register ^= byte
        for _ in range(8):
            register = (register << 1 ^ (0x07 if register & 0x80 else 0)) & 0xFF
    return register


def _edges(size: int, num_parts: int) -> list[int]:
    return [round(size * part / num_parts) for part in range(num_parts + 1)]


def _middle(grey: NDArray[np.float64], row: int, column: int) -> NDArray[np.float64]:
    """The inner part of one cell, away from blurred edges."""
    height, width = grey.shape
    cell_height, cell_width = height / _NUM_ROWS, width / _NUM_COLUMNS
    top, bottom = _span((row + 0.5) * cell_height, cell_height / 2)
    left, right = _span((column + 0.5) * cell_width, cell_width / 2)
    return grey[top:bottom, left:right]


def _span(centre: float, length: float) -> tuple[int, int]:
    """About `length` pixels around `centre`, at least one."""
    start = min(round(centre - length / 2), int(centre))
    return start, max(round(centre + length / 2), start + 1)


def _noise(height: int, width: int, number: int) -> NDArray[np.uint8]:
    """[height, width] smooth enough for codecs: random shades in blocks of 4, moved by 3 pixels per number."""
    shades = np.random.default_rng(7).integers(60, 200, (-(-height // 4), -(-width // 4)))
    full = shades.repeat(4, axis=0).repeat(4, axis=1)[:height, :width]
    return np.roll(full, 3 * number, axis=1).astype(np.uint8)
