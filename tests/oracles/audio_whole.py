"""The sound front end computed on the whole file at once, as published: one convolution, one transform.

What `preprocess.audio` does piece by piece must equal this up to the rounding of float32 sums.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray


def resampled(samples_CN: NDArray[np.float32], from_hz: int, to_hz: int) -> torch.Tensor:
    """[channels, ceil(N * to / from)]: the windowed sinc (Hann, 6 zero crossings, rolloff 0.99) as one convolution."""
    samples = torch.from_numpy(samples_CN)
    if from_hz == to_hz:
        return samples
    divisor = math.gcd(from_hz, to_hz)
    old, new = from_hz // divisor, to_hz // divisor
    base = min(old, new) * 0.99
    width = math.ceil(6 * old / base)
    place = torch.arange(-width, width + old, dtype=torch.float64)[None, None] / old
    t = ((torch.arange(0, -new, -1, dtype=torch.float64)[:, None, None] / new + place) * base).clamp(-6, 6)
    kernels = torch.cos(t * math.pi / 12) ** 2 * torch.sinc(t) * base / old
    padded = torch.nn.functional.pad(samples, (width, width + old))
    out = torch.nn.functional.conv1d(padded[:, None], kernels.float(), stride=old)
    return out.transpose(1, 2).reshape(len(samples), -1)[:, : math.ceil(samples.shape[1] * new / old)]


def mel_magnitudes(samples_CN: NDArray[np.float32], rate_hz: int) -> NDArray[np.float32]:
    """[n // 240 + 1, 128] before the logarithm and its floor, of sound longer than 20 ms."""
    mono = resampled(samples_CN, rate_hz, 24_000).mean(dim=0)
    window = torch.hann_window(960)
    spectrum = torch.stft(mono, 960, 240, 960, window, center=True, pad_mode="reflect", return_complex=True)
    top = 2595 * math.log10(1 + 12_000 / 700)
    corner = 700 * (10 ** (torch.linspace(0, top, 130) / 2595) - 1)
    slope = corner[None] - torch.linspace(0, 12_000, 481)[:, None]
    width = corner[1:] - corner[:-1]
    bank = torch.minimum(-slope[:, :-2] / width[:-1], slope[:, 2:] / width[1:]).clamp(min=0)
    return np.asarray(spectrum.abs().T @ bank)
