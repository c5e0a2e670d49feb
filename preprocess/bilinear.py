"""Bilinear resize with normalisation folded in: 8-bit pictures in, bands of float32 rows out.

The published rule: four neighbours per output pixel, no antialias, edges clamped, nothing rounded, then CLIP's mean and
standard deviation. Two passes over rows that fit a core's cache:

    pack    three bytes of a pixel and one of the next as one integer, so that a pixel is gathered in one load
    across  gather both neighbours, split channels by mask, weight, add; mean and deviation are in these weights
    down    weight and add two rows

Only source rows that an output row needs are read, and the picture never exists as floats. All arithmetic is single
products and sums, each rounded once: results are the same bit for bit whatever the thread, the machine's vector width,
or the place of the picture in memory. NumPy runs each call on the calling thread and releases the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

# CLIP's constants, on the scale 0..255.
_MEAN: Final = (255 * np.array([0.48145466, 0.4578275, 0.40821073])).astype(np.float32)
_STD: Final = (255 * np.array([0.26862954, 0.26130258, 0.27577711])).astype(np.float32)

# Bytes of the packed pixel, low to high: red, green, blue, red of the next pixel. Masked and not shifted, since a
# power of two costs nothing in the weight.
_MASKS: Final = (0x0000FF, 0x00FF00, 0xFF0000)
_UNITS: Final = (1.0, 1 / 256, 1 / 65536)
_ROWS_ACROSS: Final = 8
"""Rows per step of the pass across: its six arrays of 8 x 3328 values together fill half of a 1 MiB cache."""
_WIDE: Final = 768
"""Output pixels from which a call per row costs less than gathering all rows."""


@dataclass(frozen=True, slots=True)
class Axis:
    """How one side of a picture is resampled: first_weight * source[first] + second_weight * source[second].

    All arrays are [outputs]; the two weights of an output add up to one.
    """

    first: NDArray[np.intp]
    second: NDArray[np.intp]
    first_weight: NDArray[np.float32]
    second_weight: NDArray[np.float32]
    is_copy: bool
    """The sides are equal: output i is source i."""


@lru_cache(maxsize=64)
def axis(num_source: int, num_target: int) -> Axis:
    """Neighbours and weights as PyTorch's `interpolate` has them, bit for bit: positions in single precision.

    At thousands of pixels, more precise weights would differ by more than the tolerance of results. PyTorch's compiled
    code rounds `scale * (i + 0.5) - 0.5` once, as one instruction; in double precision the expression is exact.
    """
    first = np.arange(num_target, dtype=np.intp)
    if num_source == num_target:
        ones = np.ones(num_target, dtype=np.float32)
        return _shared(Axis(first, first, ones, np.zeros_like(ones), is_copy=True))
    scale = float(np.float32(num_source) / np.float32(num_target))
    position = np.maximum(scale * (first + 0.5) - 0.5, 0.0).astype(np.float32)
    first = np.minimum(position.astype(np.intp), num_source - 1)
    second_weight = np.clip(position - first.astype(np.float32), np.float32(0), np.float32(1))
    second = np.minimum(first + 1, num_source - 1)
    return _shared(Axis(first, second, np.float32(1) - second_weight, second_weight, is_copy=False))


def _shared(side: Axis) -> Axis:
    for array in (side.first, side.second, side.first_weight, side.second_weight):
        array.setflags(write=False)
    return side


def normalising(side: Axis) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Both weights [3, outputs] and an addend [3], so that first * source + second * source + addend is normalised."""
    scale_C1 = np.float32(1) / _STD[:, None]
    return side.first_weight * scale_C1, side.second_weight * scale_C1, -_MEAN / _STD


def bands(pixels_HWC: NDArray[np.uint8], *, height: int, width: int, rows: int) -> Iterator[NDArray[np.float32]]:
    """Resized and normalised, top to bottom, `rows` rows at a time (`height` is a multiple).

    Takes [H, W, 3] RGB of any size and any memory order. Yields [rows, 3, width]; the array is reused, so it holds a
    band until the next one is asked for.
    """
    across = _Across(pixels_HWC, width)
    down = axis(pixels_HWC.shape[0], height)
    band = np.empty((rows, 3, width), dtype=np.float32)
    spare = np.empty((3, width), dtype=np.float32)
    for top in range(0, height, rows):
        part = slice(top, top + rows)
        if down.is_copy:
            across.into(band, down.first[part])
        else:
            _down(across, down, part, band, spare)
        yield band


def _down(across: _Across, down: Axis, part: slice, band: NDArray[np.float32], spare: NDArray[np.float32]) -> None:
    first, second = down.first[part], down.second[part]
    # Neighbours of consecutive outputs overlap: every source row goes through the pass across once per band.
    wanted, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    lines = np.empty((len(wanted), *band.shape[1:]), dtype=np.float32)
    across.into(lines, wanted)
    upper, lower = places[: len(first)], places[len(first) :]
    upper_weight, lower_weight = down.first_weight[part], down.second_weight[part]
    if band.shape[2] < _WIDE:
        np.multiply(lines[upper], upper_weight[:, None, None], out=band)
        lines = lines[lower]
        lines *= lower_weight[:, None, None]
        band += lines
        return
    for row in range(len(first)):
        np.multiply(lines[upper[row]], upper_weight[row], out=band[row])
        np.multiply(lines[lower[row]], lower_weight[row], out=spare)
        band[row] += spare


class _Across:
    """The pass along the rows of one picture."""

    # R rows, W source pixels, X output pixels

    def __init__(self, pixels_HWC: NDArray[np.uint8], width: int) -> None:
        if pixels_HWC.strides[1:] != (3, 1):
            pixels_HWC = np.ascontiguousarray(pixels_HWC)
        self._pixels_HWC = pixels_HWC
        num_source = pixels_HWC.shape[1]
        self._axis = axis(num_source, width)
        units_C1 = np.array(_UNITS, dtype=np.float32)[:, None]
        first_CX, second_CX, self._bias_C = normalising(self._axis)
        self._first_CX = first_CX * units_C1
        self._second_CX = second_CX * units_C1
        self._packed_RW = np.empty((_ROWS_ACROSS, num_source), dtype=np.uint32)
        self._first_RX = np.empty((_ROWS_ACROSS, width), dtype=np.uint32)
        self._second_RX = np.empty_like(self._first_RX)
        self._masked_RX = np.empty((_ROWS_ACROSS, width), dtype=np.int32)
        self._spare_RX = np.empty((_ROWS_ACROSS, width), dtype=np.float32)
        self._sum_RX = np.empty_like(self._spare_RX)

    def into(self, out_RCX: NDArray[np.float32], rows: NDArray[np.intp]) -> None:
        """Writes the given source rows, resampled along their length and normalised."""
        for start in range(0, len(rows), _ROWS_ACROSS):
            self._step(out_RCX[start : start + _ROWS_ACROSS], rows[start : start + _ROWS_ACROSS])

    def _step(self, out_RCX: NDArray[np.float32], rows: NDArray[np.intp]) -> None:
        num = len(rows)
        packed_RW = self._packed_RW[:num]
        self._pack(packed_RW, rows)
        masked_RX, spare_RX, sum_RX = self._masked_RX[:num], self._spare_RX[:num], self._sum_RX[:num]
        if self._axis.is_copy:
            first_RX = packed_RW
            second_RX = None
        else:
            # Every index is inside; "wrap" is the mode that writes to `out` without a copy, fastest.
            first_RX, second_RX = self._first_RX[:num], self._second_RX[:num]
            np.take(packed_RW, self._axis.first, axis=1, out=first_RX, mode="wrap")
            np.take(packed_RW, self._axis.second, axis=1, out=second_RX, mode="wrap")
        for channel, mask in enumerate(_MASKS):
            np.bitwise_and(first_RX.view(np.int32), mask, out=masked_RX)
            np.copyto(sum_RX, masked_RX)
            sum_RX *= self._first_CX[channel]
            if second_RX is not None:
                np.bitwise_and(second_RX.view(np.int32), mask, out=masked_RX)
                np.copyto(spare_RX, masked_RX)
                spare_RX *= self._second_CX[channel]
                sum_RX += spare_RX
            np.add(sum_RX, self._bias_C[channel], out=out_RCX[:, channel])

    def _pack(self, packed_RW: NDArray[np.uint32], rows: NDArray[np.intp]) -> None:
        pixels_HWC = self._pixels_HWC
        top, bottom = int(rows[0]), int(rows[-1]) + 1
        if bottom - top == len(rows):
            lines_RWC = pixels_HWC[top:bottom]
        else:
            lines_RWC = pixels_HWC[rows]
        # Four bytes from each pixel's first on; the last pixel has no fourth.
        num_whole = lines_RWC.shape[1] - 1
        if num_whole:
            overlapping_RW4 = np.lib.stride_tricks.as_strided(
                lines_RWC, (len(rows), num_whole, 4), (lines_RWC.strides[0], 3, 1), writeable=False
            )
            np.copyto(packed_RW[:, :num_whole], overlapping_RW4.view("<u4")[:, :, 0])
        last_RC = lines_RWC[:, -1].astype(np.uint32)
        packed_RW[:, -1] = last_RC[:, 0] | last_RC[:, 1] << 8 | last_RC[:, 2] << 16
