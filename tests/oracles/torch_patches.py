"""Patches by PyTorch's own resize, one whole picture after another: what the published processor runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_MEAN = (122.7709383, 116.7460125, 104.09373615)
_STD = (68.5005327, 66.6321579, 70.32316305)


def normalised(picture_HWC: NDArray[np.uint8], height: int, width: int) -> torch.Tensor:
    """[3, height, width] float32: bilinear without antialias, neither rounded nor clamped, then mean and std."""
    picture_1CHW = torch.from_numpy(picture_HWC.copy()).permute(2, 0, 1).unsqueeze(0).float()
    resized_1CHW = torch.nn.functional.interpolate(
        picture_1CHW, size=(height, width), mode="bilinear", align_corners=False, antialias=False
    )
    return (resized_1CHW[0] - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_STD).view(3, 1, 1)


def torch_patches(frames: Sequence[NDArray[np.uint8]], height: int, width: int) -> NDArray[np.float32]:
    """[P, 1536] of an even number of frames."""
    pictures = torch.stack([normalised(frame, height, width) for frame in frames])
    h, w = height // 16, width // 16
    cells = pictures.view(len(frames) // 2, 2, 3, h // 2, 2, 16, w // 2, 2, 16).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    patches: NDArray[np.float32] = cells.reshape(-1, 1536).numpy()
    return patches
