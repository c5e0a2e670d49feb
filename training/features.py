"""Fast front end for training: pixels to patches, samples to log-mel. Tests compare it with `preprocess`."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray

PIXEL_MEAN = 255 * torch.tensor([0.48145466, 0.4578275, 0.40821073])
PIXEL_STD = 255 * torch.tensor([0.26862954, 0.26130258, 0.27577711])
FACTOR = 32


def smart_size(height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Target size on the grid of 32 for sides of 32 and more."""
    new_height, new_width = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if new_height * new_width > max_pixels:
        ratio = math.sqrt(height * width / max_pixels)
        return math.floor(height / ratio / FACTOR) * FACTOR, math.floor(width / ratio / FACTOR) * FACTOR
    if new_height * new_width < min_pixels:
        ratio = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * ratio / FACTOR) * FACTOR, math.ceil(width * ratio / FACTOR) * FACTOR
    return new_height, new_width


def frames_to_patches(frames_THWC: NDArray[np.uint8], max_pixels: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Even number of uint8 frames -> patches `[t*h*w, 1536]` float32 in merge order, and the grid (t, h, w)."""
    pixels_TCHW = torch.from_numpy(np.ascontiguousarray(frames_THWC)).permute(0, 3, 1, 2).float()
    height, width = smart_size(pixels_TCHW.shape[2], pixels_TCHW.shape[3], 8192, max_pixels)
    if (height, width) != tuple(pixels_TCHW.shape[2:]):
        pixels_TCHW = torch.nn.functional.interpolate(
            pixels_TCHW, (height, width), mode="bilinear", align_corners=False, antialias=False
        )
    pixels_TCHW = (pixels_TCHW - PIXEL_MEAN[:, None, None]) / PIXEL_STD[:, None, None]
    pairs, rows, columns = pixels_TCHW.shape[0] // 2, height // 16, width // 16
    view = pixels_TCHW.reshape(pairs, 2, 3, rows // 2, 2, 16, columns // 2, 2, 16)
    patches = view.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(pairs * rows * columns, 1536)
    return patches, (pairs, rows, columns)


@functools.cache
def mel_filters() -> torch.Tensor:
    """HTK triangles without area normalisation, `[481, 128]` float32."""
    frequencies = torch.linspace(0, 12000, 481)
    top = 2595.0 * math.log10(1.0 + 12000 / 700.0)
    points = 700.0 * (10.0 ** (torch.linspace(0.0, top, 130) / 2595.0) - 1.0)
    width = points[1:] - points[:-1]
    slopes = points.unsqueeze(0) - frequencies.unsqueeze(1)
    down, up = -slopes[:, :-2] / width[:-1], slopes[:, 2:] / width[1:]
    return torch.clamp(torch.minimum(down, up), min=0.0)


def log_mel(samples_N: NDArray[np.float32]) -> torch.Tensor:
    """24 kHz mono samples -> natural-log magnitude mel, `[N // 240 + 1, 128]` float32."""
    spectrum = torch.stft(
        torch.from_numpy(samples_N),
        960,
        240,
        960,
        torch.hann_window(960),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    ).abs()
    return torch.log(torch.clamp(spectrum.T @ mel_filters(), min=1e-7))
