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
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from preprocess.scratch import Scratch

# CLIP's constants, on the scale 0..255.
_MEAN: Final = (255 * np.array([0.48145466, 0.4578275, 0.40821073])).astype(np.float32)
_STD: Final = (255 * np.array([0.26862954, 0.26130258, 0.27577711])).astype(np.float32)

# Bytes of the packed pixel, low to high: red, green, blue, red of the next pixel. Masked and not shifted, since a
# power of two costs nothing in the weight.
_MASKS: Final = (0x0000FF, 0x00FF00, 0xFF0000)
_UNITS: Final = (1.0, 1 / 256, 1 / 65536)
_STEP_VALUES: Final = 32 * 1024
"""Pixels per step of the pass across: its dozen arrays of as many values fit a cache of 1 MiB, more or less."""
_MIN_ROWS: Final = 4
_BAND_VALUES: Final = 256 * 1024
"""Of a band. Larger ones leave the cache, smaller ones are more calls and do more rows twice."""
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


@dataclass(frozen=True, slots=True)
class _Band:
    """What one band of output rows is made of."""

    wanted: NDArray[np.intp]
    """Source rows, ascending, each once: neighbours of consecutive outputs overlap."""
    upper: NDArray[np.intp]
    lower: NDArray[np.intp]
    """Places in `wanted` of the two rows of each output."""
    upper_weight: NDArray[np.float32]
    lower_weight: NDArray[np.float32]
    """[outputs, 1, 1], each."""


@lru_cache(maxsize=64)
def _plan(num_source: int, height: int, rows: int) -> tuple[_Band, ...]:
    down = axis(num_source, height)
    found = []
    for top in range(0, height, rows):
        first, second = down.first[top : top + rows], down.second[top : top + rows]
        wanted, places = np.unique(np.concatenate([first, second]), return_inverse=True)
        upper_weight_Y11, lower_weight_Y11 = (
            weight[top : top + rows, None, None] for weight in (down.first_weight, down.second_weight)
        )
        found.append(_Band(wanted, places[: len(first)], places[len(first) :], upper_weight_Y11, lower_weight_Y11))
    return tuple(found)


def bands(
    pixels_HWC: NDArray[np.uint8], *, height: int, width: int, unit: int, memory: Scratch
) -> Iterator[NDArray[np.float32]]:
    """Resized and normalised, top to bottom, some multiple of `unit` rows at a time (`height` is a multiple).

    Takes [H, W, 3] RGB of any size and any memory order. Yields [rows, 3, width] in `memory`: a band holds until the
    next one is asked for.
    """
    across = _Across(pixels_HWC, width, memory)
    rows = min(unit * max(1, _BAND_VALUES // (3 * unit * width)), height)
    whole_YCX = memory.array("band", (rows, 3, width), np.float32)
    spare_YCX = memory.array("spare band", (1 if width >= _WIDE else rows, 3, width), np.float32)
    is_copy = pixels_HWC.shape[0] == height
    for band in _plan(pixels_HWC.shape[0], height, rows):
        band_YCX = whole_YCX[: len(band.upper)]
        if is_copy:
            across.into(band_YCX, band.wanted)
        else:
            lines_RCX = memory.array("lines", (len(band.wanted), 3, width), np.float32)
            across.into(lines_RCX, band.wanted)
            _down(lines_RCX, band, band_YCX, spare_YCX)
        yield band_YCX


def _down(
    lines_RCX: NDArray[np.float32], band: _Band, out_YCX: NDArray[np.float32], spare_YCX: NDArray[np.float32]
) -> None:
    """Weights and adds two lines for every output row."""
    if out_YCX.shape[2] >= _WIDE:
        spare_CX = spare_YCX[0]
        for row, (upper, lower) in enumerate(zip(band.upper, band.lower, strict=True)):
            np.multiply(lines_RCX[upper], band.upper_weight[row], out=out_YCX[row])
            np.multiply(lines_RCX[lower], band.lower_weight[row], out=spare_CX)
            out_YCX[row] += spare_CX
        return
    spare_YCX = spare_YCX[: len(out_YCX)]
    if len(lines_RCX) == 2 * len(out_YCX):
        # No row is shared: they alternate.
        upper_YCX, lower_YCX = lines_RCX[::2], lines_RCX[1::2]
    else:
        upper_YCX, lower_YCX = lines_RCX[band.upper], lines_RCX[band.lower]
    np.multiply(upper_YCX, band.upper_weight, out=out_YCX)
    np.multiply(lower_YCX, band.lower_weight, out=spare_YCX)
    out_YCX += spare_YCX


@lru_cache(maxsize=16)
def _step_weights(
    num_source: int, width: int, rows: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Both weights for masked samples, one copy per row of a step, and the addend [3]."""
    # Products of whole arrays are faster than broadcast ones.
    units_C11 = np.array(_UNITS, dtype=np.float32)[:, None, None]
    first_CX, second_CX, bias_C = normalising(axis(num_source, width))
    first_CRX, second_CRX = (
        np.ascontiguousarray(np.broadcast_to(weight_CX[:, None] * units_C11, (3, rows, width)))
        for weight_CX in (first_CX, second_CX)
    )
    return first_CRX, second_CRX, bias_C


class _Across:
    """The pass along the rows of one picture."""

    # R rows of a step, W source pixels, X output pixels

    def __init__(self, pixels_HWC: NDArray[np.uint8], width: int, memory: Scratch) -> None:
        if pixels_HWC.strides[1:] != (3, 1):
            pixels_HWC = np.ascontiguousarray(pixels_HWC)
        num_source = pixels_HWC.shape[1]
        # Four bytes from each pixel's first on; the last pixel of a row has no fourth.
        overlapping_HW4 = np.lib.stride_tricks.as_strided(
            pixels_HWC, (len(pixels_HWC), num_source - 1, 4), (pixels_HWC.strides[0], 3, 1), writeable=False
        )
        self._overlapping_HW = overlapping_HW4.view("<u4")[:, :, 0]
        last_HC = pixels_HWC[:, -1].astype(np.uint32)
        self._last_H = last_HC[:, 0] | last_HC[:, 1] << 8 | last_HC[:, 2] << 16
        self._axis = axis(num_source, width)
        self._num_rows = max(_MIN_ROWS, _STEP_VALUES // max(width, num_source))
        self._first_CRX, self._second_CRX, self._bias_C = _step_weights(num_source, width, self._num_rows)
        self._packed_RW = memory.array("packed", (self._num_rows, num_source), np.uint32)
        shape = (self._num_rows, width)
        self._first_RX = memory.array("first", shape, np.uint32)
        self._second_RX = memory.array("second", shape, np.uint32)
        self._masked_RX = memory.array("masked", shape, np.int32)
        self._spare_RX = memory.array("spare", shape, np.float32)
        self._sum_RX = memory.array("sum", shape, np.float32)

    def into(self, out_RCX: NDArray[np.float32], rows: NDArray[np.intp]) -> None:
        """Writes the given source rows, resampled along their length and normalised."""
        for start in range(0, len(rows), self._num_rows):
            part = slice(start, start + self._num_rows)
            self._step(out_RCX[part], rows[part])

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
            sum_RX *= self._first_CRX[channel, :num]
            if second_RX is not None:
                np.bitwise_and(second_RX.view(np.int32), mask, out=masked_RX)
                np.copyto(spare_RX, masked_RX)
                spare_RX *= self._second_CRX[channel, :num]
                sum_RX += spare_RX
            np.add(sum_RX, self._bias_C[channel], out=out_RCX[:, channel])

    def _pack(self, packed_RW: NDArray[np.uint32], rows: NDArray[np.intp]) -> None:
        borders = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for start, stop in pairwise(borders):
            top = rows[start]
            np.copyto(packed_RW[start:stop, :-1], self._overlapping_HW[top : top + stop - start])
        packed_RW[:, -1] = self._last_H[rows]
