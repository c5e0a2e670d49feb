"""Sound bytes to log-mel frames.

Decode, resample every channel, then average the channels: in that order, as the model was trained. The resampler is
the windowed sinc torchaudio uses by default (Hann window, 6 zero crossings, rolloff 0.99); better ones exist, and would
show the model other spectra than it knows.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from typing import Any, Final

import av
import av.error
import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from preprocess.config import AudioBudget, DecodeLimits
from preprocess.container import FrameReader, open_container
from preprocess.errors import MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.sniff import describe, sniff
from preprocess.truncation import lacks_end_mark, num_declared_samples, num_missing_bytes
from preprocess.types import MelFrames, Waveform

# Opus goes to FFmpeg although libsndfile reads it: three times faster there.
_SOUNDFILE_KINDS: Final = frozenset({"WAV", "FLAC", "MP3", "AIFF", "AU", "CAF"})
_NUM_ZERO_CROSSINGS: Final = 6
_ROLLOFF: Final = 0.99
_LOG_FLOOR: Final = 1e-7
_BLOCK_FRAMES: Final = 8192
# A damaged header may claim 1 Hz, which resampling would turn into gigabytes.
_MIN_RATE_HZ: Final = 1000
_MAX_RATE_HZ: Final = 768_000
_MP3_FRAME_SAMPLES: Final = 1152
_ENDLESS_FRAMES: Final = 2**63 - 1
# Above this many taps the strided filter would hold mostly zeros; see `resample`.
_MAX_DENSE_TAPS: Final = 1 << 20


def no_deadline() -> None:
    """The deadline check of a call without a deadline."""


def decode_audio(
    content: bytes, limits: DecodeLimits, *, check_deadline: Callable[[], None] = no_deadline
) -> tuple[Waveform, tuple[str, ...]]:
    """All samples of a sound file, or of the audio track of a video file, and warnings of what was left out.

    `check_deadline` may raise to give up. Raises MediaUndecodable for sound that is empty, has no samples, is damaged,
    cut short or not finite, MediaUnsupported for other kinds of file, MediaTooLarge for one that lasts too long.
    """
    waveform: Waveform | None = None
    warnings: tuple[str, ...] = ()
    if sniff(content) in _SOUNDFILE_KINDS or (sniff(content) == "Ogg" and b"vorbis" in content[:256]):
        waveform, warnings = _decode_with_soundfile(content, limits)
    if waveform is None:
        waveform, warnings = _decode_with_ffmpeg(content, limits, check_deadline)
    if waveform is None:
        raise MediaUndecodable(f"no decodable audio in the file ({describe(content)})")
    _check_whole(waveform, content)
    if lacks_end_mark(content):
        warnings = (*warnings, "the sound ends without its end mark; it may be cut short")
    return _checked(waveform, content), warnings


def decode_track(
    content: bytes, limits: DecodeLimits, *, check_deadline: Callable[[], None] = no_deadline
) -> tuple[Waveform | None, tuple[str, ...]]:
    """The audio track of a video and warnings; None when there is no track, or nothing of it decodes."""
    waveform, warnings = _decode_with_ffmpeg(content, limits, check_deadline)
    if waveform is None:
        return None, warnings
    if not np.isfinite(waveform.samples).all():
        return None, (*warnings, "the audio track holds values that are not finite; left out")
    return waveform, warnings


def _checked(waveform: Waveform, content: bytes) -> Waveform:
    if not np.isfinite(waveform.samples).all():
        raise MediaUndecodable(f"the audio holds values that are not finite ({describe(content)})")
    return waveform


def _check_whole(waveform: Waveform, content: bytes) -> None:
    num_missing = num_missing_bytes(content)
    if num_missing:
        raise MediaUndecodable(
            f"truncated audio ({describe(content)}): its header declares {num_missing} bytes more than there are"
        )
    num_samples, num_declared = waveform.samples.shape[1], num_declared_samples(content)
    if num_declared is not None and num_samples < num_declared:
        raise MediaUndecodable(
            f"damaged or truncated audio ({describe(content)}): its header declares {num_declared} samples, "
            f"{num_samples} decode"
        )


def _check_duration(num_samples: int, rate_hz: int, limits: DecodeLimits) -> None:
    if not _MIN_RATE_HZ <= rate_hz <= _MAX_RATE_HZ:
        raise MediaUnsupported(f"audio at {rate_hz} Hz; allowed are {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
    if num_samples > limits.max_duration_s * rate_hz:
        raise MediaTooLarge(f"audio lasts over {limits.max_duration_s:.0f} s, which is the limit")


class _SoundBytes(io.BytesIO):
    """Bytes for libsndfile, which seeks before the start of damaged files and cannot take an exception for it."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return super().seek(0)


def _decode_with_soundfile(content: bytes, limits: DecodeLimits) -> tuple[Waveform | None, tuple[str, ...]]:
    """The sound and warnings; no sound for files libsndfile does not take, which FFmpeg then judges."""
    try:
        with soundfile.SoundFile(_SoundBytes(content)) as file:
            # Recorders that write to a pipe leave the length out. libsndfile takes that for none or for endless.
            if file.frames in (0, _ENDLESS_FRAMES):
                return None, ()
            _check_duration(file.frames, file.samplerate, limits)
            samples_NC = file.read(dtype="float32", always_2d=True)
            waveform = Waveform(samples=np.ascontiguousarray(samples_NC.T), rate_hz=file.samplerate)
            num_missing = file.frames - len(samples_NC)
    except (soundfile.SoundFileError, ValueError):
        return None, ()
    # MP3 headers are often a little off, so a shortfall is told and not refused.
    if num_missing > _MP3_FRAME_SAMPLES:
        return waveform, (f"the file announces {num_missing} samples more than it holds",)
    return waveform, ()


def _decode_with_ffmpeg(
    content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]
) -> tuple[Waveform | None, tuple[str, ...]]:
    pieces: list[NDArray[np.float32]] = []
    num_samples = 0
    form: tuple[int, int] | None = None
    # Interleaved floats whatever the codec gives. PyAV cannot be asked for the planes of a frame: it counts them up to
    # a null pointer, which eight channels and more do not have, and reads whatever lies behind.
    packer = av.AudioResampler(format="flt")
    with open_container(content, "audio") as container:
        stream = next((stream for stream in container.streams.audio if stream.codec_context is not None), None)
        if stream is None:
            return None, ()
        reader = FrameReader(container, stream)
        for frame in reader:
            check_deadline()
            found = (frame.layout.nb_channels, frame.sample_rate)
            if form is not None and found != form:
                raise MediaUnsupported(f"the audio changes on the way, from {_words(form)} to {_words(found)}")
            form = found
            num_samples += frame.samples
            _check_duration(num_samples, frame.sample_rate, limits)
            pieces.extend(_packed_samples(packer, frame, found))
        warnings = tuple(f"audio: {warning}" for warning in reader.warnings)
    if form is None or not num_samples:
        return None, (*warnings, "audio: nothing of the track decodes; left out")
    return Waveform(samples=np.concatenate(pieces, axis=1), rate_hz=form[1]), warnings


def _packed_samples(packer: av.AudioResampler, frame: Any, form: tuple[int, int]) -> list[NDArray[np.float32]]:
    """[channels, N] pieces of one decoded frame, full scale 1.0."""
    try:
        packed = packer.resample(frame)
    except av.error.FFmpegError as error:
        raise MediaUndecodable(f"the audio track is damaged: it claims {_words(form)}") from error
    return [np.asarray(piece.to_ndarray(), dtype=np.float32).reshape(-1, form[0]).T for piece in packed]


def _words(form: tuple[int, int]) -> str:
    return f"{form[0]} channels at {form[1]} Hz"


def log_mel(waveform: Waveform, budget: AudioBudget) -> MelFrames:
    """[n // hop + 1, num_mels] natural logs of mel magnitudes, n the samples at the model's rate.

    Clips of half a window or less (20 ms), which reflection cannot pad, are lengthened with zeros to one sample more.
    """
    resampled_CN = resample(waveform.samples, waveform.rate_hz, budget.rate_hz)
    mono_N = torch.from_numpy(resampled_CN).mean(dim=0)
    half = budget.num_fft // 2
    if mono_N.shape[0] <= half:
        mono_N = torch.nn.functional.pad(mono_N, (0, half + 1 - mono_N.shape[0]))
    padded_N = torch.nn.functional.pad(mono_N[None], (half, half), mode="reflect")[0]
    frames_TW = padded_N.unfold(0, budget.num_fft, budget.hop_length)
    window_W = _window(budget.window_size, budget.num_fft)
    bank_FM = mel_filter_bank(budget)
    out_TM = torch.empty((frames_TW.shape[0], budget.num_mels), dtype=torch.float32)
    # In blocks: the spectrum of an hour would be over a gigabyte.
    for start in range(0, frames_TW.shape[0], _BLOCK_FRAMES):
        block = slice(start, start + _BLOCK_FRAMES)
        magnitude_TF = torch.fft.rfft(frames_TW[block] * window_W).abs()
        out_TM[block] = (magnitude_TF @ bank_FM).clamp_(min=_LOG_FLOOR).log_()
    return MelFrames(log_mel=out_TM.numpy(), duration_s=waveform.duration_s)


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
    bin_hz_F = torch.linspace(0, budget.rate_hz // 2, num_bins)
    lowest, highest = (2595.0 * math.log10(1.0 + hz / 700.0) for hz in (budget.fmin_hz, top_hz))
    corner_hz = 700.0 * (10.0 ** (torch.linspace(lowest, highest, budget.num_mels + 2) / 2595.0) - 1.0)
    width_hz = corner_hz[1:] - corner_hz[:-1]
    slope_FK = corner_hz[None, :] - bin_hz_F[:, None]
    rising = -slope_FK[:, :-2] / width_hz[:-1]
    falling = slope_FK[:, 2:] / width_hz[1:]
    return torch.minimum(rising, falling).clamp_(min=0.0)


def resample(samples_CN: NDArray[np.float32], from_hz: int, to_hz: int) -> NDArray[np.float32]:
    """[channels, ceil(N * to / from)]: a Hann-windowed sinc of 6 zero crossings, cut at 0.99 of the lower Nyquist.

    With the rates reduced to from : to = O : M, output m * M + k reads around input m * O + k * O / M, so there are
    M filters. They are run as one strided convolution where the filters are short, and by gathering the few taps that
    are not zero where a rate such as 44,101 Hz would make them enormous. Both give the same sums.
    """
    if from_hz == to_hz:
        return samples_CN
    common = math.gcd(from_hz, to_hz)
    step_in, step_out = from_hz // common, to_hz // common
    reach = math.ceil(_NUM_ZERO_CROSSINGS * step_in / (min(step_in, step_out) * _ROLLOFF))
    num_out = -(-samples_CN.shape[1] * step_out // step_in)
    if step_out * (2 * reach + step_in) <= _MAX_DENSE_TAPS:
        return _resample_dense(samples_CN, step_in, step_out, reach)[:, :num_out]
    return _resample_gather(samples_CN, step_in, step_out, reach, num_out)


def _sinc_taps(offset: NDArray[np.float64], step_in: int, step_out: int) -> NDArray[np.float64]:
    """Filter value at a distance of `offset` input samples over `step_in` from the output's place."""
    cutoff = min(step_in, step_out) * _ROLLOFF
    t = np.clip(offset * cutoff, -_NUM_ZERO_CROSSINGS, _NUM_ZERO_CROSSINGS)
    window = np.cos(t * np.pi / _NUM_ZERO_CROSSINGS / 2) ** 2
    return np.asarray(np.sinc(t) * window * (cutoff / step_in))


def _resample_dense(samples_CN: NDArray[np.float32], step_in: int, step_out: int, reach: int) -> NDArray[np.float32]:
    tap = np.arange(-reach, reach + step_in) / step_in
    place = -np.arange(step_out)[:, None] / step_out
    filters = torch.from_numpy(_sinc_taps(place + tap, step_in, step_out).astype(np.float32))[:, None]
    padded = torch.nn.functional.pad(torch.from_numpy(samples_CN), (reach, reach + step_in))
    phases_CMN = torch.nn.functional.conv1d(padded[:, None], filters, stride=step_in)
    return phases_CMN.transpose(1, 2).reshape(samples_CN.shape[0], -1).numpy()


def _resample_gather(
    samples_CN: NDArray[np.float32], step_in: int, step_out: int, reach: int, num_out: int
) -> NDArray[np.float32]:
    taps = np.arange(-reach, reach + 2)
    padded = np.pad(samples_CN, ((0, 0), (reach, reach + 2)))
    out = np.empty((samples_CN.shape[0], num_out), dtype=np.float32)
    for start in range(0, num_out, _BLOCK_FRAMES):
        numerator = np.arange(start, min(start + _BLOCK_FRAMES, num_out), dtype=np.int64) * step_in
        whole, phase = numerator // step_out, numerator % step_out
        offset = (taps[None, :] - phase[:, None] / step_out) / step_in
        filters = _sinc_taps(offset, step_in, step_out).astype(np.float32)
        # Clipped offsets sit on the window's zero, so taps beyond the reach add nothing.
        gathered = padded[:, whole[:, None] + (taps + reach)[None, :]]
        out[:, start : start + len(whole)] = np.einsum("cnt,nt->cn", gathered, filters)
    return out
