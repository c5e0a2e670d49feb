"""Sound at the model's rate to log-mel frames, piece by piece: memory is the result's and that of one block.

Letters: N samples, B frames of a block, W window, K spectrum bins, M mel bands.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from preprocess.audio.resample import Held, Samples
from preprocess.config import AudioBudget
from preprocess.errors import MediaUndecodable

_LOG_FLOOR: Final = 1e-7
# Spectra of so many frames stay in the processor's cache. It also fixes where blocks start; see `MelWriter`.
_BLOCK_FRAMES: Final = 512
# 32 MiB of 128 bands, which the allocator takes from the system and gives back: among its small pieces, results of
# blocks would each pin the room of the far larger temporaries around them.
_CHUNK_ROWS: Final = 1 << 16
# Low bands read few bins: products in groups of bands skip most of the zeros of the bank.
_NUM_GROUPS: Final = 4


class NotFinite(MediaUndecodable):
    """Samples, or what becomes of them, are not numbers."""


class MelWriter:
    """Log-mel frames of mono sound that is fed in any pieces.

    Frames are computed in blocks that start at fixed frames of the whole, so the result is the same, bit for bit,
    however the sound was cut. The transform is centred, and both ends are padded by reflection. Sound of half a window
    or less (20 ms), which reflection cannot pad, is lengthened with zeros to one sample more.
    """

    def __init__(self, budget: AudioBudget) -> None:
        self._budget = budget
        self._half = budget.num_fft // 2
        self._held = Held(1)
        self._is_padded = False
        self._rows = _Rows(budget.num_mels)
        # The end of the sound is reflected too, so as much of it stays.
        self._num_block_samples = max(
            (_BLOCK_FRAMES - 1) * budget.hop_length + budget.num_fft,
            _BLOCK_FRAMES * budget.hop_length + self._half + 1,
        )

    def feed(self, mono_N: Samples) -> None:
        self._held.put(mono_N[None])
        if not self._is_padded and self._held.num_held > self._half:
            self._pad_start()
        if self._is_padded and self._held.num_held >= self._num_block_samples:
            self._write_blocks()

    def finish(self) -> NDArray[np.float32]:
        """[n // hop + 1, num_mels] natural logs of mel magnitudes, n the samples fed. The writer is spent."""
        if not self._is_padded:
            self._held.put(np.zeros((1, self._half + 1 - self._held.num_held), dtype=np.float32))
            self._pad_start()
        samples_N = self._held.joined()[0]
        self._held.put(samples_N[-2 : -self._half - 2 : -1][None])
        frames_BW = self._frames()
        for start in range(0, frames_BW.shape[0], _BLOCK_FRAMES):
            self._rows.put(log_mel_of_frames(frames_BW[start : start + _BLOCK_FRAMES], self._budget))
        return self._rows.joined()

    def _pad_start(self) -> None:
        samples_N = self._held.joined()[0]
        head_N = samples_N[self._half : 0 : -1].copy()
        self._held = Held(1)
        self._held.put(head_N[None])
        self._held.put(samples_N[None])
        self._is_padded = True

    def _write_blocks(self) -> None:
        num_blocks = 1 + (self._held.num_held - self._num_block_samples) // (_BLOCK_FRAMES * self._budget.hop_length)
        frames_BW = self._frames()
        for start in range(0, num_blocks * _BLOCK_FRAMES, _BLOCK_FRAMES):
            self._rows.put(log_mel_of_frames(frames_BW[start : start + _BLOCK_FRAMES], self._budget))
        self._held.drop(num_blocks * _BLOCK_FRAMES * self._budget.hop_length)

    def _frames(self) -> torch.Tensor:
        """[frames, num_fft] of what is held, a view."""
        return torch.from_numpy(self._held.joined()[0]).unfold(0, self._budget.num_fft, self._budget.hop_length)


class _Rows:
    """Rows of a result whose length is not known yet."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._chunks: list[NDArray[np.float32]] = []
        self._num_rows = 0

    def put(self, rows: NDArray[np.float32]) -> None:
        """At most `_CHUNK_ROWS` rows."""
        start = self._num_rows % _CHUNK_ROWS
        if start == 0:
            self._chunks.append(np.empty((_CHUNK_ROWS, self._num_columns), dtype=np.float32))
        here = rows[: _CHUNK_ROWS - start]
        self._chunks[-1][start : start + len(here)] = here
        self._num_rows += len(here)
        if len(here) < len(rows):
            self.put(rows[len(here) :])

    def joined(self) -> NDArray[np.float32]:
        joined = np.empty((self._num_rows, self._num_columns), dtype=np.float32)
        # From the back, letting go of each chunk: never twice the whole in memory.
        while self._chunks:
            start = (len(self._chunks) - 1) * _CHUNK_ROWS
            joined[start : start + _CHUNK_ROWS] = self._chunks.pop()[: self._num_rows - start]
        return joined


def log_mel_of_frames(frames_BW: torch.Tensor, budget: AudioBudget) -> NDArray[np.float32]:
    """[B, num_mels] natural logs of mel magnitudes of [B, num_fft] stretches of sound."""
    magnitude_BK = torch.fft.rfft(frames_BW * _window(budget.window_size, budget.num_fft)).abs()
    mel_BM = torch.empty((frames_BW.shape[0], budget.num_mels), dtype=torch.float32)
    for bins, bands, bank_KM in _bank_groups(budget):
        mel_BM[:, bands] = magnitude_BK[:, bins] @ bank_KM
    mel_BM.clamp_(min=_LOG_FLOOR).log_()
    if not torch.isfinite(mel_BM).all():
        raise NotFinite("the audio holds values too large to compute with")
    return mel_BM.numpy()


@functools.lru_cache(maxsize=8)
def _window(size: int, num_fft: int) -> torch.Tensor:
    """[num_fft] periodic Hann, centred when it is shorter than the transform."""
    window = torch.hann_window(size, periodic=True, dtype=torch.float32)
    left = (num_fft - size) // 2
    return torch.nn.functional.pad(window, (left, num_fft - size - left))


@functools.lru_cache(maxsize=8)
def mel_filter_bank(budget: AudioBudget) -> torch.Tensor:
    """[num_fft / 2 + 1, num_mels] float32 triangles on the HTK scale, each with peak 1 (no area normalisation)."""
    num_bins = budget.num_fft // 2 + 1
    top_hz = budget.rate_hz / 2 if budget.fmax_hz is None else budget.fmax_hz
    bin_hz_K = torch.linspace(0, budget.rate_hz // 2, num_bins)
    lowest, highest = (2595.0 * math.log10(1.0 + hz / 700.0) for hz in (budget.fmin_hz, top_hz))
    corner_hz = 700.0 * (10.0 ** (torch.linspace(lowest, highest, budget.num_mels + 2) / 2595.0) - 1.0)
    width_hz = corner_hz[1:] - corner_hz[:-1]
    slope_KM = corner_hz[None, :] - bin_hz_K[:, None]
    rising = -slope_KM[:, :-2] / width_hz[:-1]
    falling = slope_KM[:, 2:] / width_hz[1:]
    return torch.minimum(rising, falling).clamp_(min=0.0)


@functools.lru_cache(maxsize=8)
def _bank_groups(budget: AudioBudget) -> tuple[tuple[slice, slice, torch.Tensor], ...]:
    """The bank in groups of bands: the bins they read, the bands, and that part of the bank."""
    bank_KM = mel_filter_bank(budget)
    groups = []
    size = -(-budget.num_mels // _NUM_GROUPS)
    for start in range(0, budget.num_mels, size):
        bands = slice(start, min(start + size, budget.num_mels))
        read = torch.nonzero(bank_KM[:, bands].any(dim=1)).flatten().tolist()
        bins = slice(read[0], read[-1] + 1) if read else slice(0, 1)
        groups.append((bins, bands, bank_KM[bins, bands].contiguous()))
    return tuple(groups)
