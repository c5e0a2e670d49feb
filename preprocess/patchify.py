"""Frames to patches: resize, normalise, cut, in one pass per frame.

Rows go in merge order: the four patches of a 2 x 2 group are neighbours, groups run left to right, top to bottom. A
picture of 32 x 64 pixels is 2 x 4 patches, two groups, rows

     0  1 | 4  5
     2  3 | 6  7

Columns of a row: channel, frame of the pair, pixel row, pixel column; column = ((c * 2 + frame) * 16 + y) * 16 + x.

Memory is the patches themselves plus a band of 32 rows: a long video never exists as full-size pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from preprocess.bilinear import bands
from preprocess.scratch import Scratch, scratch
from preprocess.types import MERGE_SIZE, PATCH_SIZE, PATCH_WIDTH, TEMPORAL_PATCH_SIZE, Frames, Patches

_UNIT: Final = PATCH_SIZE * MERGE_SIZE
_HALF_LINE: Final = PATCH_SIZE // 2
"""Values moved at once. A line of a patch is 16 contiguous values; NumPy gathers items of 32 bytes fastest."""
_ITEM: Final = np.dtype(f"V{4 * _HALF_LINE}")


class PatchWriter:
    """Collects frames, one at a time and in any order, as the patches of one medium.

    `num_frames` must be even: the caller repeats the last frame of an odd count. Frames may be put from several threads
    at once. `rows`, [patches, 1536] float32 and contiguous, is memory to write to; new memory when None.
    """

    # G groups along height (h) or width (w), M = 2 patches of a group, C channels, F = 2 frames, Y X pixels of a patch

    def __init__(self, *, num_frames: int, height: int, width: int, rows: NDArray[np.float32] | None = None) -> None:
        if num_frames < 1 or num_frames % TEMPORAL_PATCH_SIZE:
            raise ValueError(f"num_frames is {num_frames}, allowed is a positive even number")
        if height < _UNIT or width < _UNIT or height % _UNIT or width % _UNIT:
            raise ValueError(f"picture is {width} x {height}, allowed are positive multiples of {_UNIT}")
        self._size = (height, width)
        self.grid_thw = (num_frames // TEMPORAL_PATCH_SIZE, height // PATCH_SIZE, width // PATCH_SIZE)
        t, h, w = self.grid_thw
        shape = (t * h * w, PATCH_WIDTH)
        if rows is None:
            rows = np.empty(shape, dtype=np.float32)
        elif rows.shape != shape or rows.dtype != np.float32 or not rows.flags.c_contiguous:
            raise ValueError(f"rows is {rows.dtype} {rows.shape}, wanted is contiguous float32 {shape}")
        self._rows_PD = rows
        patch = (3, TEMPORAL_PATCH_SIZE, PATCH_SIZE, PATCH_SIZE)
        self._cells_TGhGwMhMwCFYX = rows.reshape(t, h // MERGE_SIZE, w // MERGE_SIZE, MERGE_SIZE, MERGE_SIZE, *patch)
        self._filled = [False] * num_frames

    def put(self, frame: int, pixels_HWC: NDArray[np.uint8]) -> None:
        """Resizes, normalises and stores one RGB frame, [H, W, 3] of any size, as frame number `frame`."""
        pair, side = divmod(frame, TEMPORAL_PATCH_SIZE)
        order = _order(self._size[1], 1)
        with scratch() as memory:
            cut = memory.array("cut", (len(order) * _HALF_LINE,), np.float32).view(_ITEM)
            for group, halves in enumerate(self._groups(pixels_HWC, memory)):
                np.take(halves, order, out=cut, mode="wrap")
                target = self._cells_TGhGwMhMwCFYX[pair, group, :, :, :, :, side]
                target[...] = cut.view(np.float32).reshape(target.shape)
        self._filled[frame] = True

    def put_pair(self, pair: int, pixels_HWC: NDArray[np.uint8]) -> None:
        """The same picture as both frames of a pair, for hardly more than the price of one."""
        order = _order(self._size[1], TEMPORAL_PATCH_SIZE)
        with scratch() as memory:
            for group, halves in enumerate(self._groups(pixels_HWC, memory)):
                target = self._cells_TGhGwMhMwCFYX[pair, group].reshape(-1).view(_ITEM)
                np.take(halves, order, out=target, mode="wrap")
        for frame in range(pair * TEMPORAL_PATCH_SIZE, (pair + 1) * TEMPORAL_PATCH_SIZE):
            self._filled[frame] = True

    def _groups(self, pixels_HWC: NDArray[np.uint8], memory: Scratch) -> Iterator[NDArray[np.void]]:
        """Half lines of every row of groups, top to bottom."""
        height, width = self._size
        for band_YCX in bands(pixels_HWC, height=height, width=width, unit=_UNIT, memory=memory):
            yield from band_YCX.reshape(len(band_YCX) // _UNIT, -1).view(_ITEM)

    def repeat(self, frame: int) -> None:
        """Stores a copy of the frame before as frame number `frame`."""
        if not self._filled[frame - 1]:
            raise ValueError(f"frame {frame - 1} was not stored, so it cannot be repeated")
        self._side(frame)[...] = self._side(frame - 1)
        self._filled[frame] = True

    def patches(self) -> Patches:
        """The finished patches. Raises ValueError when a frame is missing."""
        if not all(self._filled):
            raise ValueError(f"frame {self._filled.index(False)} of {len(self._filled)} was not stored")
        return Patches(pixel_values=self._rows_PD, grid_thw=self.grid_thw)

    def _side(self, frame: int) -> NDArray[np.float32]:
        pair, side = divmod(frame, TEMPORAL_PATCH_SIZE)
        return self._cells_TGhGwMhMwCFYX[pair, :, :, :, :, :, side]


@lru_cache(maxsize=16)
def _order(width: int, num_sides: int) -> NDArray[np.intp]:
    """For every half line of a row of groups, in patch order, its place in a band of [32, 3, width] values.

    With two sides every half line is taken twice, once per frame.
    """
    halves = np.arange(_UNIT * 3 * width // _HALF_LINE, dtype=np.intp)
    cells_MhYCGwMwX = halves.reshape(MERGE_SIZE, PATCH_SIZE, 3, width // _UNIT, MERGE_SIZE, 2)
    cells_GwMhMwCFYX = cells_MhYCGwMwX.transpose(3, 0, 4, 2, 1, 5)[:, :, :, :, None]
    return np.repeat(cells_GwMhMwCFYX, num_sides, axis=4).reshape(-1)


def patchify(frames: Frames, *, height: int, width: int) -> Patches:
    """All frames at once: [T, H, W, 3] resized to (height, width). An odd count has its last frame repeated."""
    num_frames = frames.pixels.shape[0]
    writer = PatchWriter(num_frames=num_frames + num_frames % TEMPORAL_PATCH_SIZE, height=height, width=width)
    for frame in range(num_frames // TEMPORAL_PATCH_SIZE * TEMPORAL_PATCH_SIZE):
        writer.put(frame, frames.pixels[frame])
    if num_frames % TEMPORAL_PATCH_SIZE:
        writer.put_pair(num_frames // TEMPORAL_PATCH_SIZE, frames.pixels[-1])
    return writer.patches()
