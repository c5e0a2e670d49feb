"""Sound bytes to a waveform, or straight to log-mel frames without ever holding the waveform.

    pieces of sound -> resample every channel -> average the channels -> log-mel

in that order, as the model was trained. All of it runs piece by piece: an hour of sound takes its log-mel frames
(184 MB) and a few megabytes more.

Several audio tracks: the one marked as default, else the first. A sound that changes its rate or number of channels on
the way, as broadcasts and joined files do, is one sound to the model; a waveform cannot hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeVar

import numpy as np

from preprocess.audio.flac import flac_links, num_chained_samples
from preprocess.audio.mel import MelWriter, NotFinite
from preprocess.audio.ogg import is_intact, ogg_links
from preprocess.audio.resample import Samples, open_published, open_soxr_hq
from preprocess.audio.sources import ChainSource, FfmpegSource, Meter, NotTaken, SoundfileSource, SoundForm, Source
from preprocess.config import AudioBudget, DecodeLimits
from preprocess.errors import MediaUndecodable, MediaUnsupported
from preprocess.joined import joined_warnings
from preprocess.sniff import describe, sniff
from preprocess.truncation import lacks_end_mark, may_be_cut, num_announced_samples, num_missing_bytes
from preprocess.types import MelFrames, Waveform

# Opus goes to FFmpeg although libsndfile reads it: three times faster there. So does MP3, where libsndfile believes the
# length that a header without one lets it guess, and leaves out the rest.
_SOUNDFILE_KINDS: Final = frozenset({"WAV", "Wave64", "AIFF", "AU", "CAF"})
_MP3_FRAME_SAMPLES: Final = 1152


def no_deadline() -> None:
    """The deadline check of a call without a deadline."""


class Sink(Protocol):
    """What pieces of sound are poured into."""

    warnings: tuple[str, ...]

    def put(self, form: SoundForm, samples_CN: Samples) -> None: ...


S = TypeVar("S", bound=Sink)


class WaveformSink:
    """All samples. Raises MediaUnsupported when the form changes."""

    def __init__(self) -> None:
        self.warnings: tuple[str, ...] = ()
        self._form: SoundForm | None = None
        self._pieces: list[Samples] = []

    def put(self, form: SoundForm, samples_CN: Samples) -> None:
        if self._form is not None and form != self._form:
            raise MediaUnsupported(f"the audio changes on the way, from {self._form} to {form}")
        self._form = form
        self._pieces.append(samples_CN)

    def waveform(self) -> Waveform:
        assert self._form is not None
        return Waveform(samples=np.concatenate(self._pieces, axis=1), rate_hz=self._form.rate_hz)


class MelSink:
    """Log-mel frames. A new form gets a resampler of its own."""

    def __init__(self, budget: AudioBudget) -> None:
        self.warnings: tuple[str, ...] = ()
        self._budget = budget
        self._writer = MelWriter(budget)
        self._form: SoundForm | None = None
        self._to_mono: _ToMono | None = None

    def put(self, form: SoundForm, samples_CN: Samples) -> None:
        if form != self._form:
            if self._form is not None and not self.warnings:
                self.warnings = (f"the sound changes on the way, from {self._form} to {form}",)
            self._end_form()
            self._form, self._to_mono = form, _ToMono(form, self._budget)
        assert self._to_mono is not None
        self._writer.feed(self._to_mono.feed(samples_CN))

    def mel(self, duration_s: float) -> MelFrames:
        self._end_form()
        return MelFrames(log_mel=self._writer.finish(), duration_s=duration_s)

    def _end_form(self) -> None:
        if self._to_mono is not None:
            self._writer.feed(self._to_mono.finish())
        self._to_mono = None


class _ToMono:
    """Sound of one form at the model's rate, one channel."""

    def __init__(self, form: SoundForm, budget: AudioBudget) -> None:
        # Both orders are the same sum. The published one decides the last bits, so it is kept for the published
        # resampler; the other is not bound to it, and is faster on what is already one channel.
        self._averages_first = budget.resampler == "soxr_hq"
        if self._averages_first:
            self._resampler = open_soxr_hq(1, form.rate_hz, budget.rate_hz)
        else:
            self._resampler = open_published(form.num_channels, form.rate_hz, budget.rate_hz)

    def feed(self, samples_CN: Samples) -> Samples:
        if self._averages_first:
            return _average(self._resampler.feed(_average(samples_CN)[None]))
        return _average(self._resampler.feed(samples_CN))

    def finish(self) -> Samples:
        return _average(self._resampler.finish())


def _average(samples_CN: Samples) -> Samples:
    """[N], summed channel by channel: library sums add in an order that depends on where a piece ends."""
    first_N: Samples = samples_CN[0]
    if len(samples_CN) == 1:
        return first_N
    total_N: Samples = first_N + samples_CN[1]
    for channel_N in samples_CN[2:]:
        total_N += channel_N
    total_N /= np.float32(len(samples_CN))
    return total_N


def decode_audio(
    content: bytes, limits: DecodeLimits, *, check_deadline: Callable[[], None] = no_deadline
) -> tuple[Waveform, tuple[str, ...]]:
    """All samples of a sound file, or of the audio track of a video file, and warnings of what was left out.

    `check_deadline` may raise to give up. Raises MediaUndecodable for sound that is empty, has no samples, is damaged,
    cut short or not finite, MediaUnsupported for other kinds of file and for sound that changes its form, MediaTooLarge
    for one that lasts too long.
    """
    sink, _, warnings = _read_file(content, limits, check_deadline, WaveformSink)
    return sink.waveform(), warnings


def audio_mel(
    content: bytes, budget: AudioBudget, limits: DecodeLimits, *, check_deadline: Callable[[], None] = no_deadline
) -> tuple[MelFrames, tuple[str, ...]]:
    """Log-mel frames of a sound file and warnings, as `log_mel` of `decode_audio` without the waveform in between."""
    sink, duration_s, warnings = _read_file(content, limits, check_deadline, lambda: MelSink(budget))
    return sink.mel(duration_s), warnings


def decode_track(
    content: bytes,
    limits: DecodeLimits,
    *,
    start_s: float | None = None,
    check_deadline: Callable[[], None] = no_deadline,
) -> tuple[Waveform | None, tuple[str, ...]]:
    """The audio track of a video and warnings; None when there is no track, or nothing of it decodes.

    `start_s` is when the first picture is shown by the container's clock, which the sound is made to begin with: cut,
    or behind silence. None: the sound begins with its first sample.
    """
    sink, duration_s, warnings = _read_track(content, limits, check_deadline, WaveformSink(), start_s)
    return (sink.waveform() if duration_s else None), warnings


def track_mel(
    content: bytes,
    budget: AudioBudget,
    limits: DecodeLimits,
    *,
    start_s: float | None = None,
    check_deadline: Callable[[], None] = no_deadline,
) -> tuple[MelFrames | None, tuple[str, ...]]:
    """Log-mel frames of a video's audio track and warnings, as `decode_track` without the waveform in between."""
    sink, duration_s, warnings = _read_track(content, limits, check_deadline, MelSink(budget), start_s)
    if not duration_s:
        return None, warnings
    try:
        return sink.mel(duration_s), warnings
    except NotFinite as error:
        return None, (*warnings, _left_out(error))


def log_mel(waveform: Waveform, budget: AudioBudget) -> MelFrames:
    """[n // hop + 1, num_mels] natural logs of mel magnitudes, n the samples at the model's rate.

    Clips of half a window or less (20 ms), which reflection cannot pad, are lengthened with zeros to one sample more.
    """
    sink = MelSink(budget)
    sink.put(SoundForm(waveform.samples.shape[0], waveform.rate_hz), waveform.samples)
    return sink.mel(waveform.duration_s)


def _read_file(
    content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None], new_sink: Callable[[], S]
) -> tuple[S, float, tuple[str, ...]]:
    """The filled sink, seconds and warnings."""
    # Before anything is decoded: it costs nothing.
    num_missing = num_missing_bytes(content)
    if num_missing and not may_be_cut(content):
        raise MediaUndecodable(
            f"truncated audio ({describe(content)}): its header declares {num_missing} bytes more than there are"
        )
    for source in _sources(content, limits, check_deadline):
        sink, meter = new_sink(), Meter(limits)
        try:
            _pour(source, sink, meter)
        except NotTaken:
            continue
        except NotFinite as error:
            raise MediaUndecodable(f"{error.message} ({describe(content)})") from error
        if meter.num_samples:
            _check_whole(content, meter)
            cut = (f"audio: the file is cut short, {num_missing} bytes of it are missing",) if num_missing else ()
            found = source.warnings + sink.warnings + _shortfalls(content, meter) + joined_warnings(content)
            return sink, meter.duration_s, cut + found
    why = f"; it is cut short, {num_missing} bytes of it are missing" if num_missing else ""
    raise MediaUndecodable(f"no decodable audio in the file ({describe(content)}){why}")


def _sources(content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]) -> Iterator[Source]:
    """The decoders that may take the file, best first."""
    kind = sniff(content)
    if kind == "FLAC":
        yield ChainSource(flac_links(content), lambda link: SoundfileSource(link, limits, check_deadline))
    elif kind in _SOUNDFILE_KINDS:
        yield SoundfileSource(content, limits, check_deadline)
    # RIFX is WAV with its numbers turned round, which FFmpeg plays as noise.
    if kind != "Ogg":
        if content[:4] != b"RIFX":
            yield FfmpegSource(content, limits, check_deadline)
        return

    def open_vorbis(link: bytes) -> Source:
        if is_intact(link):
            return SoundfileSource(link, limits, check_deadline)
        return FfmpegSource(link, limits, check_deadline)

    if b"vorbis" in content[:256]:
        yield ChainSource(ogg_links(content), open_vorbis)
    yield ChainSource(ogg_links(content), lambda link: FfmpegSource(link, limits, check_deadline))


def _read_track(
    content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None], sink: S, start_s: float | None
) -> tuple[S, float, tuple[str, ...]]:
    """The filled sink, seconds (0: there is no sound) and warnings."""
    source, meter = FfmpegSource(content, limits, check_deadline, start_s=start_s), Meter(limits)
    try:
        _pour(source, sink, meter)
    except NotFinite as error:
        return sink, 0.0, (*source.warnings, _left_out(error))
    return sink, meter.duration_s, source.warnings + tuple(f"audio: {warning}" for warning in sink.warnings)


def _left_out(error: NotFinite) -> str:
    return f"audio: {error.message}; left out"


def _pour(source: Source, sink: Sink, meter: Meter) -> None:
    for form, samples_CN in source.pieces():
        meter.count(samples_CN.shape[1], form)
        if not _is_finite(samples_CN):
            raise NotFinite("the audio holds values that are not finite")
        sink.put(form, samples_CN)


def _is_finite(samples_CN: Samples) -> bool:
    # The sum is finite unless something is not, or is huge: one pass without a mask, nearly always.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(samples_CN.sum())) or bool(np.isfinite(samples_CN).all())


def _check_whole(content: bytes, meter: Meter) -> None:
    num_declared = num_chained_samples(content)
    if num_declared is not None and meter.num_samples < num_declared:
        raise MediaUndecodable(
            f"damaged or truncated audio ({describe(content)}): its header declares {num_declared} samples, "
            f"{meter.num_samples} decode"
        )


def _shortfalls(content: bytes, meter: Meter) -> tuple[str, ...]:
    """What headers promise that are too often wrong to refuse the sound for it."""
    num_announced = num_announced_samples(content)
    num_missing = 0 if num_announced is None else num_announced - meter.num_samples
    if num_missing > _MP3_FRAME_SAMPLES:
        return (f"the file announces {num_missing} samples more than it holds",)
    if lacks_end_mark(content):
        return ("the sound ends without its end mark; it may be cut short",)
    return ()
