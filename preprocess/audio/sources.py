"""Sound bytes to pieces of samples: libsndfile where it is the better reader, FFmpeg for everything else.

A source gives [C, n] pieces of about a quarter of a million numbers, so memory does not grow with the sound.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Protocol

import av
import av.error
import numpy as np
import soundfile
from av.stream import Disposition

from preprocess.audio.resample import Samples
from preprocess.audio.timeline import Timeline
from preprocess.config import DecodeLimits
from preprocess.container import PacketReader, open_container, read_only
from preprocess.errors import MediaTooLarge, MediaUndecodable, MediaUnsupported

_PIECE_NUMBERS: Final = 1 << 18
# A damaged header may claim 1 Hz, which resampling would turn into gigabytes.
_MIN_RATE_HZ: Final = 1000
_MAX_RATE_HZ: Final = 768_000
_MAX_CHANNELS: Final = 64
_ENDLESS_FRAMES: Final = 2**63 - 1
# PyAV counts the planes of a frame up to a null pointer, which eight planes and more do not have.
_MAX_PLANES: Final = 7


@dataclass(frozen=True, slots=True)
class SoundForm:
    num_channels: int
    rate_hz: int

    def __str__(self) -> str:
        return f"{self.num_channels} channel{'s' * (self.num_channels != 1)} at {self.rate_hz} Hz"


class NotTaken(Exception):
    """This decoder does not take the file; the next one judges it."""


class Source(Protocol):
    """Pieces of a sound in order, each with its form; a form may differ from the one before."""

    def pieces(self) -> Iterator[tuple[SoundForm, Samples]]: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out, complete when the pieces are through."""
        ...


class Meter:
    """Counts how long a sound lasts while it is decoded, so that none is endless."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._num_samples: dict[int, int] = {}

    @property
    def duration_s(self) -> float:
        return sum(num_samples / rate_hz for rate_hz, num_samples in self._num_samples.items())

    @property
    def num_samples(self) -> int:
        """Per channel, at the sound's own rates."""
        return sum(self._num_samples.values())

    def count(self, num_samples: int, form: SoundForm) -> None:
        """Raises MediaTooLarge above the limit, MediaUnsupported for a form that is not sound."""
        check_form(form)
        self._num_samples[form.rate_hz] = self._num_samples.get(form.rate_hz, 0) + num_samples
        if self.duration_s > self._limits.max_duration_s:
            raise MediaTooLarge(f"audio lasts over {self._limits.max_duration_s:.0f} s, which is the limit")


def check_form(form: SoundForm) -> None:
    if not _MIN_RATE_HZ <= form.rate_hz <= _MAX_RATE_HZ:
        raise MediaUnsupported(f"audio at {form.rate_hz} Hz; allowed are {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
    if not 1 <= form.num_channels <= _MAX_CHANNELS:
        raise MediaUnsupported(f"audio of {form.num_channels} channels; allowed are 1 to {_MAX_CHANNELS}")


class _SoundBytes(io.BytesIO):
    """Bytes for libsndfile, which seeks before the start of damaged files and cannot take an exception for it."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return super().seek(0)


class SoundfileSource:
    """Raises NotTaken, at any piece, for files libsndfile does not take."""

    def __init__(self, content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]) -> None:
        self._content = content
        self._limits = limits
        self._check_deadline = check_deadline
        self.warnings: tuple[str, ...] = ()

    def pieces(self) -> Iterator[tuple[SoundForm, Samples]]:
        try:
            with soundfile.SoundFile(_SoundBytes(self._content)) as file:
                yield from self._read(file)
        except (soundfile.SoundFileError, ValueError) as error:
            raise NotTaken from error

    def _read(self, file: soundfile.SoundFile) -> Iterator[tuple[SoundForm, Samples]]:
        # Recorders that write to a pipe leave the length out. libsndfile takes that for none or for endless.
        if file.frames in (0, _ENDLESS_FRAMES):
            raise NotTaken
        form = SoundForm(file.channels, file.samplerate)
        # A header that declares too much is refused before anything is decoded.
        Meter(self._limits).count(file.frames, form)
        num_missing = file.frames
        while len(samples_NC := file.read(_PIECE_NUMBERS // form.num_channels, dtype="float32", always_2d=True)):
            num_missing -= len(samples_NC)
            yield form, np.ascontiguousarray(samples_NC.T)
            self._check_deadline()
        if num_missing > 0:
            self.warnings = (f"the file announces {num_missing} samples more than it holds",)


class ChainSource:
    """Files that follow each other in one, each with a source of its own."""

    def __init__(self, links: Iterator[bytes], open_source: Callable[[bytes], Source]) -> None:
        self._links = links
        self._open_source = open_source
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def pieces(self) -> Iterator[tuple[SoundForm, Samples]]:
        for link in self._links:
            source = self._open_source(link)
            yield from source.pieces()
            self._warnings.update(dict.fromkeys(source.warnings))


class FfmpegSource:
    """One audio track of a container: the one marked as default, else the first that has a decoder.

    Priming and padding are cut as far as the container declares them. Packets that do not decode are skipped; silence
    takes their place where the times of what follows tell. `start_s`: see Timeline.
    """

    def __init__(
        self,
        content: bytes,
        limits: DecodeLimits,
        check_deadline: Callable[[], None],
        *,
        start_s: float | None = None,
    ) -> None:
        self._content = content
        self._check_deadline = check_deadline
        self._timeline = Timeline(start_s, limits.max_duration_s)
        self._num_bad_packets = 0
        self._damage: str | None = None
        self._has_track = False
        self._has_sound = False

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [] if self._damage is None else [self._damage]
        if self._num_bad_packets:
            found.append(f"{self._num_bad_packets} damaged packets were skipped")
        if self._has_track and not self._has_sound:
            found.append("nothing of the track decodes; left out")
        return tuple(f"audio: {warning}" for warning in (*found, *self._timeline.warnings))

    def pieces(self) -> Iterator[tuple[SoundForm, Samples]]:
        with open_container(self._content, "audio") as container:
            stream = _chosen_track(container)
            if stream is None:
                return
            self._has_track = True
            read_only(container, stream)
            reader = PacketReader(container, stream)
            queue = _FrameQueue()
            surplus = _Surplus(container, stream)
            for packet in self._packets(reader):
                frames = self._decode(stream, packet)
                surplus.note(packet, frames)
                for frame in frames:
                    offset_s = self._timeline.offset_s(frame)
                    if offset_s > 0:
                        yield from queue.put_silence(frame, offset_s)
                    elif offset_s < 0:
                        queue.leave_out(round(-offset_s * frame.sample_rate))
                    self._has_sound = True
                    yield from queue.put(frame)
            yield from queue.finish(surplus.num_samples())
            self._damage = reader.damage

    def _packets(self, reader: PacketReader) -> Iterator[Any]:
        """Every packet, and None to drain the decoder where the file ends without it."""
        drained = False
        for packet in reader:
            self._check_deadline()
            drained = packet.size == 0
            yield packet
        if not drained:
            yield None

    def _decode(self, stream: Any, packet: Any) -> list[Any]:
        try:
            return list(stream.codec_context.decode(packet))
        except av.error.EOFError:
            return []
        except (av.error.FFmpegError, ValueError):
            self._num_bad_packets += 1
            return []


def _chosen_track(container: Any) -> Any:
    tracks = [stream for stream in container.streams.audio if stream.codec_context is not None]
    marked = [track for track in tracks if track.disposition & Disposition.default]
    return next(iter(marked + tracks), None)


class _Surplus:
    """How many samples at the end of an MP4 track lie behind its declared end.

    FFmpeg cuts the start of such a track, and whole packets at its end, but plays the last packet out although the
    sample table or the edit list ends it sooner. Edit lists may count in milliseconds: one is granted.
    """

    def __init__(self, container: Any, stream: Any) -> None:
        self._is_mp4 = "mp4" in container.format.name.split(",")
        self._time_base = stream.time_base
        self._edit_end = None
        if stream.duration:
            self._edit_end = ((stream.start_time or 0) + stream.duration) * self._time_base + Fraction(1, 1000)
        self._table_end: int | None = None
        self._last_frame: tuple[Fraction, int, int] | None = None

    def note(self, packet: Any, frames: list[Any]) -> None:
        if packet is not None and packet.size and packet.pts is not None and packet.duration:
            self._table_end = packet.pts + packet.duration
        if frames and frames[-1].pts is not None:
            last = frames[-1]
            self._last_frame = (last.pts * last.time_base, last.samples, last.sample_rate)

    def num_samples(self) -> int:
        if not self._is_mp4 or self._last_frame is None:
            return 0
        start_s, num_samples, rate_hz = self._last_frame
        ends = [] if self._table_end is None else [self._table_end * self._time_base]
        if self._edit_end is not None:
            ends.append(self._edit_end)
        kept = min((math.ceil((end - start_s) * rate_hz) for end in ends), default=num_samples)
        # An end before the last frame is a table at odds with the packets: then all is played.
        return num_samples - kept if 0 < kept < num_samples else 0


def _form_of(frame: Any) -> SoundForm:
    return SoundForm(frame.layout.nb_channels, frame.sample_rate)


class _FrameQueue:
    """Decoded frames joined to pieces: thousands of small frames cost more than their samples."""

    def __init__(self) -> None:
        self._fifo = av.AudioFifo()
        self._kind: tuple[str, str, SoundForm] | None = None
        self._num_left_out = 0

    def put_silence(self, frame: Any, length_s: float) -> Iterator[tuple[SoundForm, Samples]]:
        """What is in the queue, and silence of the form of `frame`, which comes next."""
        form = _form_of(frame)
        check_form(form)
        yield from self.finish(0)
        num_samples, size = round(length_s * form.rate_hz), _PIECE_NUMBERS // form.num_channels
        for start in range(0, num_samples, size):
            yield form, np.zeros((form.num_channels, min(size, num_samples - start)), dtype=np.float32)

    def leave_out(self, num_samples: int) -> None:
        """Of what comes next, the first `num_samples` are dropped."""
        self._num_left_out = num_samples

    def put(self, frame: Any) -> Iterator[tuple[SoundForm, Samples]]:
        form = _form_of(frame)
        kind = (frame.format.name, frame.layout.name, form)
        if kind != self._kind:
            yield from self.finish(0)
            check_form(form)
            self._fifo, self._kind = av.AudioFifo(), kind
            # Interleaved floats whatever the codec gives.
            self._packer = av.AudioResampler(format="flt")
        # The queue insists on times without gaps; what is left of those stays closed.
        frame.pts = None
        self._fifo.write(frame)
        if self._num_left_out and self._fifo.samples:
            num_dropped = min(self._num_left_out, self._fifo.samples)
            self._fifo.read(num_dropped)
            self._num_left_out -= num_dropped
        size = _PIECE_NUMBERS // form.num_channels
        # What stays is enough to cut padding from.
        while self._fifo.samples >= 2 * size:
            yield from self._read(size)

    def finish(self, num_surplus: int) -> Iterator[tuple[SoundForm, Samples]]:
        """What is left, without the last `num_surplus` samples."""
        if self._kind is not None and self._fifo.samples > num_surplus:
            # The queue cannot give less than there is at its end, so the surplus stays behind.
            yield from self._read(self._fifo.samples - num_surplus)

    def _read(self, num_samples: int) -> Iterator[tuple[SoundForm, Samples]]:
        assert self._kind is not None
        sample_format, _, form = self._kind
        frame: Any = self._fifo.read(num_samples)
        if sample_format == "fltp" and form.num_channels <= _MAX_PLANES:
            yield form, frame.to_ndarray()
            return
        try:
            packed = self._packer.resample(frame)
        except av.error.FFmpegError as error:
            raise MediaUndecodable(f"the audio track is damaged: it claims {form}") from error
        for piece in packed:
            samples_NC = np.asarray(piece.to_ndarray(), dtype=np.float32).reshape(-1, form.num_channels)
            yield form, np.ascontiguousarray(samples_NC.T)
