"""Frames to patches: resize, normalise, cut, in one pass per frame.

Rows go in merge order: the four patches of a 2 x 2 group are neighbours, groups run left to right, top to bottom. A
picture of 32 x 64 pixels is 2 x 4 patches, two groups, rows

     0  1 | 4  5
     2  3 | 6  7

Columns of a row: channel, frame of the pair, pixel row, pixel column; column = ((c * 2 + frame) * 16 + y) * 16 + x.

Memory is the patches themselves plus one frame: a long video never exists as full-size pixels.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from preprocess.types import MERGE_SIZE, PATCH_SIZE, PATCH_WIDTH, TEMPORAL_PATCH_SIZE, Frames, Patches

# CLIP's constants, on the scale 0..255.
_MEAN: Final = 255 * np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float64)
_STD: Final = 255 * np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float64)


class PatchWriter:
    """Collects frames, one at a time and in any order, as the patches of one medium.

    `num_frames` must be even: the caller repeats the last frame of an odd count.
    """

    # G groups along height (h) or width (w), M = 2 patches of a group, C channels, F = 2 frames, Y X pixels of a patch

    def __init__(self, *, num_frames: int, height: int, width: int) -> None:
        if num_frames < 1 or num_frames % TEMPORAL_PATCH_SIZE:
            raise ValueError(f"num_frames is {num_frames}, allowed is a positive even number")
        unit = PATCH_SIZE * MERGE_SIZE
        if height < unit or width < unit or height % unit or width % unit:
            raise ValueError(f"picture is {width} x {height}, allowed are positive multiples of {unit}")
        self._size = (height, width)
        self.grid_thw = (num_frames // TEMPORAL_PATCH_SIZE, height // PATCH_SIZE, width // PATCH_SIZE)
        t, h, w = self.grid_thw
        self._rows_PD = torch.empty((t * h * w, PATCH_WIDTH), dtype=torch.float32)
        groups = (h // MERGE_SIZE, w // MERGE_SIZE, MERGE_SIZE, MERGE_SIZE)
        self._cells_TGhGwMhMwCFYX = self._rows_PD.view(t, *groups, 3, TEMPORAL_PATCH_SIZE, PATCH_SIZE, PATCH_SIZE)
        self._filled = [False] * num_frames

    def put(self, frame: int, pixels_HWC: NDArray[np.uint8]) -> None:
        """Resizes, normalises and stores one RGB frame, [H, W, 3] of any size, as frame number `frame`."""
        height, width = self._size
        picture_CHW = normalised(pixels_HWC, height=height, width=width)
        _, h, w = self.grid_thw
        cells = picture_CHW.view(3, h // MERGE_SIZE, MERGE_SIZE, PATCH_SIZE, w // MERGE_SIZE, MERGE_SIZE, PATCH_SIZE)
        self._target(frame).copy_(cells.permute(1, 4, 2, 5, 0, 3, 6))
        self._filled[frame] = True

    def repeat(self, frame: int) -> None:
        """Stores a copy of the frame before as frame number `frame`."""
        if not self._filled[frame - 1]:
            raise ValueError(f"frame {frame - 1} was not stored, so it cannot be repeated")
        self._target(frame).copy_(self._target(frame - 1))
        self._filled[frame] = True

    def patches(self) -> Patches:
        """The finished patches. Raises ValueError when a frame is missing."""
        if not all(self._filled):
            raise ValueError(f"frame {self._filled.index(False)} of {len(self._filled)} was not stored")
        return Patches(pixel_values=self._rows_PD.numpy(), grid_thw=self.grid_thw)

    def _target(self, frame: int) -> torch.Tensor:
        pair, side = divmod(frame, TEMPORAL_PATCH_SIZE)
        return self._cells_TGhGwMhMwCFYX[pair, :, :, :, :, :, side]


def normalised(pixels_HWC: NDArray[np.uint8], *, height: int, width: int) -> torch.Tensor:
    """[3, height, width] float32: bilinear without antialias, neither rounded nor clamped, then CLIP's mean and std."""
    # A copy when rows are reversed or rotated (negative strides), which torch does not take.
    source_HWC = torch.from_numpy(np.ascontiguousarray(pixels_HWC))
    # Left in the memory order it has: the resize is a third faster on interleaved channels, with the same result.
    picture_1CHW = source_HWC.permute(2, 0, 1).unsqueeze(0).to(torch.float32)
    if picture_1CHW.shape[-2:] != (height, width):
        picture_1CHW = torch.nn.functional.interpolate(
            picture_1CHW, size=(height, width), mode="bilinear", align_corners=False, antialias=False
        )
    mean = torch.tensor(_MEAN, dtype=torch.float32).view(3, 1, 1)
    std = torch.tensor(_STD, dtype=torch.float32).view(3, 1, 1)
    return picture_1CHW[0].sub_(mean).div_(std)


def patchify(frames: Frames, *, height: int, width: int) -> Patches:
    """All frames at once: [T, H, W, 3] resized to (height, width). An odd count has its last frame repeated."""
    num_frames = frames.pixels.shape[0]
    padded = num_frames + num_frames % TEMPORAL_PATCH_SIZE
    writer = PatchWriter(num_frames=padded, height=height, width=width)
    for frame in range(num_frames):
        writer.put(frame, frames.pixels[frame])
    if padded > num_frames:
        writer.repeat(num_frames)
    return writer.patches()
