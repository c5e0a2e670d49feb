"""Changing the rate of sound, piece by piece.

A resampler is fed any pieces and computes in blocks that start at fixed places of the whole, so the result is the same,
bit for bit, however the sound was cut, and memory is that of one block.

The published processor's resampler is the windowed sinc torchaudio uses by default (Hann window, 6 zero crossings,
rolloff 0.99). With the rates reduced to from : to = O : M, output m * M + k reads around input m * O + k * O / M, so
there are M filters. Where they are short, several periods side by side make one matrix:

    in      [ S ][ S ][ S ][ S ] ...     rows of S = O * periods samples, the first `reach` of them zeros
    out         [ P ][ P ][ P ] ...      row f = sum over j of in[f + j] @ taps[j], P = M * periods

and where a rate such as 44,101 Hz would make that enormous, the few taps that are not zero are gathered instead.

Letters: C channels, N samples in, F rows of a block, S row of inputs, P row of outputs, T taps.
"""

from __future__ import annotations

import functools
import math
from typing import Final, Protocol

import numpy as np
import soxr
import torch
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_NUM_ZERO_CROSSINGS: Final = 6
_ROLLOFF: Final = 0.99
# Above this many taps the matrix would hold mostly zeros.
_MAX_DENSE_TAPS: Final = 1 << 20
# Matrix products with fewer columns than this leave most of the processor idle.
_LEAST_ROW_OUTPUTS: Final = 16
_BLOCK_OUTPUTS: Final = 1 << 15
_GATHER_BLOCK_OUTPUTS: Final = 2048


class Resampler(Protocol):
    """Takes [C, n] pieces of sound at one rate and gives [C, m] pieces at another, ceil(N * to / from) in all.

    Pieces are kept until they are read, so they may not be written to afterwards.
    """

    def feed(self, samples_CN: Samples) -> Samples: ...

    def finish(self) -> Samples: ...


def open_published(num_channels: int, from_hz: int, to_hz: int) -> Resampler:
    """The resampler the published models were trained behind."""
    if from_hz == to_hz:
        return _Unchanged(num_channels)
    common = math.gcd(from_hz, to_hz)
    step_in, step_out = from_hz // common, to_hz // common
    if step_out * (2 * _reach(step_in, step_out) + step_in) <= _MAX_DENSE_TAPS:
        return _MatrixResampler(num_channels, step_in, step_out)
    return _GatherResampler(num_channels, step_in, step_out)


def open_soxr_hq(num_channels: int, from_hz: int, to_hz: int) -> Resampler:
    """libsoxr's high quality: flat to 0.91 of the lower Nyquist, aliases below -120 dB."""
    return _Unchanged(num_channels) if from_hz == to_hz else _SoxrResampler(num_channels, from_hz, to_hz)


def resample(samples_CN: Samples, from_hz: int, to_hz: int) -> Samples:
    """[channels, ceil(N * to / from)] of a whole sound, by the published resampler; the input itself at equal rates."""
    if from_hz == to_hz:
        return samples_CN
    resampler = open_published(samples_CN.shape[0], from_hz, to_hz)
    return np.concatenate([resampler.feed(samples_CN), resampler.finish()], axis=1)


class Held:
    """Samples waiting until there are enough for a block."""

    def __init__(self, num_channels: int) -> None:
        self._pieces: list[Samples] = []
        self._num_channels = num_channels
        self.num_held = 0

    def put(self, samples_CN: Samples) -> None:
        self._pieces.append(samples_CN)
        self.num_held += samples_CN.shape[1]

    def joined(self) -> Samples:
        """[C, num_held], everything held."""
        if len(self._pieces) != 1:
            self._pieces = [np.concatenate([_nothing(self._num_channels), *self._pieces], axis=1)]
        return self._pieces[0]

    def drop(self, num_samples: int) -> None:
        """Forgets the oldest."""
        # A copy: a view would keep all of the piece alive.
        rest = self.joined()[:, num_samples:].copy()
        self._pieces, self.num_held = [rest], rest.shape[1]


def _nothing(num_channels: int) -> Samples:
    return np.zeros((num_channels, 0), dtype=np.float32)


class _Unchanged:
    def __init__(self, num_channels: int) -> None:
        self._num_channels = num_channels

    def feed(self, samples_CN: Samples) -> Samples:
        return samples_CN

    def finish(self) -> Samples:
        return _nothing(self._num_channels)


def _reach(step_in: int, step_out: int) -> int:
    """Input samples to either side of an output that its filter may read."""
    return math.ceil(_NUM_ZERO_CROSSINGS * step_in / (min(step_in, step_out) * _ROLLOFF))


def _sinc_taps(offset: NDArray[np.float64], step_in: int, step_out: int) -> NDArray[np.float64]:
    """Filter value at a distance of `offset` input samples over `step_in` from the output's place."""
    cutoff = min(step_in, step_out) * _ROLLOFF
    t = np.clip(offset * cutoff, -_NUM_ZERO_CROSSINGS, _NUM_ZERO_CROSSINGS)
    window = np.cos(t * np.pi / _NUM_ZERO_CROSSINGS / 2) ** 2
    return np.asarray(np.sinc(t) * window * (cutoff / step_in))


@functools.lru_cache(maxsize=16)
def _tap_rows(step_in: int, step_out: int, num_periods: int) -> tuple[torch.Tensor, ...]:
    """The filters of `num_periods` periods, [taps, P] cut along the taps into rows of S; the last may be shorter."""
    reach = _reach(step_in, step_out)
    tap = np.arange(-reach, reach + step_in) / step_in
    place = -np.arange(step_out)[:, None] / step_out
    period_TM = _sinc_taps(place + tap, step_in, step_out).astype(np.float32).T
    row_inputs, row_outputs = step_in * num_periods, step_out * num_periods
    taps_TP = np.zeros((2 * reach + row_inputs, row_outputs), dtype=np.float32)
    for period in range(num_periods):
        start = period * step_in
        taps_TP[start : start + len(tap), period * step_out : (period + 1) * step_out] = period_TM
    starts = range(0, len(taps_TP), row_inputs)
    return tuple(torch.from_numpy(np.ascontiguousarray(taps_TP[start : start + row_inputs])) for start in starts)


class _MatrixResampler:
    def __init__(self, num_channels: int, step_in: int, step_out: int) -> None:
        num_periods = 1
        if step_out < _LEAST_ROW_OUTPUTS:
            num_periods = _LEAST_ROW_OUTPUTS // math.gcd(step_out, _LEAST_ROW_OUTPUTS)
        self._step_in, self._step_out = step_in, step_out
        self._row_inputs, self._row_outputs = step_in * num_periods, step_out * num_periods
        self._taps = _tap_rows(step_in, step_out, num_periods)
        self._block_rows = max(1, _BLOCK_OUTPUTS // self._row_outputs)
        self._num_channels = num_channels
        self._held = Held(num_channels)
        self._held.put(np.zeros((num_channels, _reach(step_in, step_out)), dtype=np.float32))
        self._num_in = 0
        self._num_out = 0

    def feed(self, samples_CN: Samples) -> Samples:
        self._held.put(samples_CN)
        self._num_in += samples_CN.shape[1]
        size = self._num_read(self._block_rows)
        num_blocks = 0
        if self._held.num_held >= size:
            num_blocks = 1 + (self._held.num_held - size) // (self._block_rows * self._row_inputs)
        return self._run([self._block_rows] * num_blocks)

    def finish(self) -> Samples:
        num_out = -(-self._num_in * self._step_out // self._step_in)
        num_left = num_out - self._num_out
        num_rows = -(-num_left // self._row_outputs)
        full, rest = divmod(num_rows, self._block_rows)
        missing = max(0, self._num_read(num_rows) - self._held.num_held)
        self._held.put(np.zeros((self._num_channels, missing), dtype=np.float32))
        return self._run([self._block_rows] * full + [rest] * (rest > 0))[:, :num_left]

    def _num_read(self, num_rows: int) -> int:
        return (num_rows + len(self._taps) - 1) * self._row_inputs

    def _run(self, blocks: list[int]) -> Samples:
        """The outputs of the next blocks, given by their numbers of rows; their inputs are held."""
        if not blocks:
            return _nothing(self._num_channels)
        num_rows = sum(blocks)
        padded_CN = self._held.joined()
        out_CFP = torch.empty((self._num_channels, num_rows, self._row_outputs))
        for channel in range(self._num_channels):
            first = 0
            for block_rows in blocks:
                start, size = first * self._row_inputs, self._num_read(block_rows)
                # A copy, so that the sums see the same alignment wherever the block lies in what was fed.
                rows_FS = torch.from_numpy(padded_CN[channel, start : start + size]).clone().view(-1, self._row_inputs)
                out_FP = out_CFP[channel, first : first + block_rows]
                torch.mm(rows_FS[:block_rows, : len(self._taps[0])], self._taps[0], out=out_FP)
                for shift, taps_TP in enumerate(self._taps[1:], start=1):
                    out_FP.addmm_(rows_FS[shift : shift + block_rows, : len(taps_TP)], taps_TP)
                first += block_rows
        self._held.drop(num_rows * self._row_inputs)
        self._num_out += num_rows * self._row_outputs
        return out_CFP.view(self._num_channels, -1).numpy()


class _GatherResampler:
    def __init__(self, num_channels: int, step_in: int, step_out: int) -> None:
        self._step_in, self._step_out = step_in, step_out
        self._reach = _reach(step_in, step_out)
        self._taps = np.arange(-self._reach, self._reach + 2)
        # Filled as far as the sound reaches: phases come in another order than the rows, but each once per period.
        self._table_PT = np.empty((step_out, len(self._taps)), dtype=np.float32)
        self._num_channels = num_channels
        self._held = Held(num_channels)
        self._held.put(np.zeros((num_channels, self._reach), dtype=np.float32))
        self._num_in = 0
        self._num_out = 0
        self._num_dropped = 0

    def feed(self, samples_CN: Samples) -> Samples:
        self._held.put(samples_CN)
        self._num_in += samples_CN.shape[1]
        pieces = []
        while self._num_dropped + self._held.num_held >= self._end_read(self._num_out + _GATHER_BLOCK_OUTPUTS):
            pieces.append(self._block(_GATHER_BLOCK_OUTPUTS))
        return self._emptied(pieces)

    def finish(self) -> Samples:
        num_out = -(-self._num_in * self._step_out // self._step_in)
        missing = max(0, self._end_read(num_out) - self._num_dropped - self._held.num_held)
        self._held.put(np.zeros((self._num_channels, missing), dtype=np.float32))
        pieces = []
        while self._num_out < num_out:
            pieces.append(self._block(min(_GATHER_BLOCK_OUTPUTS, num_out - self._num_out)))
        return self._emptied(pieces)

    def _end_read(self, num_out: int) -> int:
        """How much of the padded input the first `num_out` outputs read."""
        return (num_out - 1) * self._step_in // self._step_out + len(self._taps)

    def _emptied(self, pieces: list[Samples]) -> Samples:
        if not pieces:
            return _nothing(self._num_channels)
        unread = self._num_out * self._step_in // self._step_out - self._num_dropped
        num_dropped = min(unread, self._held.num_held)
        self._held.drop(num_dropped)
        self._num_dropped += num_dropped
        return np.concatenate(pieces, axis=1)

    def _block(self, num_outputs: int) -> Samples:
        output = np.arange(self._num_out, self._num_out + num_outputs, dtype=np.int64)
        whole, phase = output * self._step_in // self._step_out, output * self._step_in % self._step_out
        new = phase[output < self._step_out]
        if len(new):
            offset = (self._taps[None, :] - new[:, None] / self._step_out) / self._step_in
            # Clipped offsets sit on the window's zero, so taps beyond the reach add nothing.
            self._table_PT[new] = _sinc_taps(offset, self._step_in, self._step_out)
        filters = self._table_PT[phase]
        at = (whole - self._num_dropped)[:, None] + np.arange(len(self._taps))[None, :]
        self._num_out += num_outputs
        return np.stack([np.einsum("nt,nt->n", channel[at], filters) for channel in self._held.joined()])


class _SoxrResampler:
    def __init__(self, num_channels: int, from_hz: int, to_hz: int) -> None:
        self._stream = soxr.ResampleStream(from_hz, to_hz, num_channels, dtype="float32", quality="HQ")
        self._num_channels = num_channels
        self._from_hz, self._to_hz = from_hz, to_hz
        self._num_in = 0
        self._num_out = 0

    def feed(self, samples_CN: Samples) -> Samples:
        self._num_in += samples_CN.shape[1]
        return self._taken(samples_CN, last=False)

    def finish(self) -> Samples:
        num_out = -(-self._num_in * self._to_hz // self._from_hz)
        # libsoxr rounds the length; ours is that of the published resampler, so that both count the same tokens.
        rest = self._taken(_nothing(self._num_channels), last=True)
        surplus = self._num_out - num_out
        return rest[:, : rest.shape[1] - surplus] if surplus >= 0 else np.pad(rest, ((0, 0), (0, -surplus)))

    def _taken(self, samples_CN: Samples, *, last: bool) -> Samples:
        packed_NC = np.ascontiguousarray(samples_CN.T)
        resampled_NC = self._stream.resample_chunk(packed_NC, last=last)
        self._num_out += len(resampled_NC)
        return np.ascontiguousarray(resampled_NC.T)
