"""Patches back to pictures, written from the published layout and not from the code under test.

Row of a patch: pair, then row and column of its 2 x 2 group, then row and column inside the group. Column: channel,
frame of the pair, pixel row, pixel column. Values are (value of 0 to 255 - mean) / std with CLIP's constants times 255.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def unpatchify(pixel_values: NDArray[Any], grid_thw: tuple[int, int, int]) -> NDArray[np.float64]:
    """[2 * t, 16 * h, 16 * w, 3] on the scale 0 to 255, of [t * h * w, 1536]."""
    t, h, w = grid_thw
    assert pixel_values.shape == (t * h * w, 1536), (pixel_values.shape, grid_thw)
    pictures = np.full((2 * t, 16 * h, 16 * w, 3), np.nan)
    row = 0
    for pair in range(t):
        for group_y in range(h // 2):
            for group_x in range(w // 2):
                for patch_y, patch_x in ((0, 0), (0, 1), (1, 0), (1, 1)):
                    top, left = 16 * (2 * group_y + patch_y), 16 * (2 * group_x + patch_x)
                    cell = pixel_values[row].reshape(3, 2, 16, 16)
                    for side in (0, 1):
                        picture = pictures[2 * pair + side]
                        picture[top : top + 16, left : left + 16] = cell[:, side].transpose(1, 2, 0)
                    row += 1
    scaled: NDArray[np.float64] = pictures * (255 * np.array(_STD)) + 255 * np.array(_MEAN)
    return scaled
