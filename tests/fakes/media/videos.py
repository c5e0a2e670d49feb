"""Writers of video files whose frames carry their number, and of the ways in which such files are odd or broken."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from tests.fakes.media.barcode import barcode_picture
from tests.fakes.media.priority import ordinary_priority

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Track:
    """A sine as an audio track."""

    duration_s: float
    tone_hz: float = 440.0
    codec: str = "aac"
    rate_hz: int = 24_000
    layout: str = "mono"


@dataclass(frozen=True)
class Shot:
    """How a clip is coded. `pts` are in units of `time_base`, which is 1 / rate unless given."""

    codec: str = "libx264"
    container: str = "mp4"
    rate: Fraction = Fraction(10)
    size: tuple[int, int] = (96, 160)
    """(height, width) as coded."""
    gop: int = 12
    pixel_format: str = "yuv420p"
    codec_options: dict[str, str] = field(default_factory=dict)
    container_options: dict[str, str] = field(default_factory=dict)
    b_frames: int | None = None
    pts: Sequence[int] | None = None
    time_base: Fraction | None = None
    turn: Callable[[Pixels], Pixels] | None = None
    """Made of every picture before it is coded."""
    tracks: tuple[Track, ...] = ()
    colour: tuple[int, int] | None = None
    """(colour space, range) to convert to and to tag with, in FFmpeg's numbers."""
    bit_rate: int | None = 2_000_000
    streamed: bool = False
    """Written to a pipe: nothing at the front can be filled in at the end."""


class _Pipe(io.RawIOBase):
    """Somewhere to write to that cannot go back."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        self.content += data
        return len(data)


def clip(numbers: Sequence[int], **fields: Any) -> bytes:
    """A video of the barcode pictures `numbers`; `fields` are those of `Shot`."""
    shot = Shot(**fields)
    file: Any = _Pipe() if shot.streamed else io.BytesIO()
    with (
        ordinary_priority(),
        av.open(file, mode="w", format=shot.container, options=dict(shot.container_options)) as output,
    ):
        video = add_video(output, shot)
        tracks = [(add_sound(output, track), track) for track in shot.tracks]
        for position, number in enumerate(numbers):
            output.mux(video.encode(_frame(number, position, shot)))
        output.mux(video.encode(None))
        for stream, track in tracks:
            write_sound(output, stream, track)
    return bytes(file.content) if shot.streamed else file.getvalue()


def add_video(output: Any, shot: Shot) -> Any:
    stream = output.add_stream(shot.codec, rate=shot.rate, options=dict(shot.codec_options))
    stream.height, stream.width = shot.size
    stream.pix_fmt = shot.pixel_format
    context = stream.codec_context
    context.gop_size = shot.gop
    if shot.time_base is not None:
        context.time_base = shot.time_base
    if shot.b_frames is not None:
        context.max_b_frames = shot.b_frames
    if shot.bit_rate is not None:
        context.bit_rate = shot.bit_rate
    if shot.colour is not None:
        context.colorspace, context.color_range = shot.colour
    return stream


def _frame(number: int, position: int, shot: Shot) -> Any:
    # Turned pictures are made standing, so that they fill the coded size lying.
    height, width = shot.size
    if shot.turn is not None and shot.turn(np.zeros((2, 4, 3), np.uint8)).shape[0] == 4:
        height, width = width, height
    pixels = barcode_picture(number, height=height, width=width)
    if shot.turn is not None:
        pixels = np.ascontiguousarray(shot.turn(pixels))
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
    if shot.colour is not None:
        space, colour_range = shot.colour
        frame = frame.reformat(format=shot.pixel_format, dst_colorspace=space, dst_color_range=colour_range)
    frame.pts = position if shot.pts is None else shot.pts[position]
    frame.time_base = shot.time_base or 1 / shot.rate
    return frame


def add_sound(output: Any, track: Track) -> Any:
    return output.add_stream(track.codec, rate=track.rate_hz, layout=track.layout)


def write_sound(output: Any, stream: Any, track: Track) -> None:
    """At half scale, the same in all channels."""
    time_s = np.arange(round(track.duration_s * track.rate_hz)) / track.rate_hz
    sound = (0.5 * np.sin(2 * np.pi * track.tone_hz * time_s)).astype(np.float32)
    layout = stream.codec_context.layout
    for start in range(0, len(sound), 960):
        packed = np.repeat(sound[start : start + 960], layout.nb_channels)[None]
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = track.rate_hz, start, Fraction(1, track.rate_hz)
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def sound_alone(track: Track, container: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, mode="w", format=container) as output:
        write_sound(output, add_sound(output, track), track)
    return file.getvalue()


def declared_but_empty(container: str, *, video_codec: str = "mpeg4") -> bytes:
    """A video track without a single frame, beside one second of sound."""
    options = {"movflags": "empty_moov+frag_keyframe+default_base_moof"} if container == "mp4" else {}
    file = io.BytesIO()
    track = Track(1.0)
    with av.open(file, mode="w", format=container, options=options) as output:
        add_video(output, Shot(codec=video_codec)).codec_context.open()
        write_sound(output, add_sound(output, track), track)
    return file.getvalue()


def without_head(content: bytes, container: str, num_packets: int) -> bytes:
    """The clip without its first packets, so that it begins with frames that need others: as recordings of a
    broadcast do."""
    file = io.BytesIO()
    source: Any
    with av.open(io.BytesIO(content)) as source, av.open(file, mode="w", format=container) as output:
        copy = output.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(source.streams.video[0]) if packet.size]
        for packet in packets[num_packets:]:
            packet.stream = copy
            output.mux(packet)
    return file.getvalue()


def copied_from(content: bytes, container: str, first_shown: int, *, options: dict[str, str] | None = None) -> bytes:
    """The clip cut without coding it again, as `ffmpeg -ss -c copy` does: it starts at the key frame before frame
    `first_shown` (in display order), and what lies before that frame gets negative times, which are not shown."""
    file = io.BytesIO()
    source: Any
    with av.open(io.BytesIO(content)) as source, av.open(file, "w", format=container, options=options or {}) as output:
        stream = source.streams.video[0]
        packets = [packet for packet in source.demux(stream) if packet.size]
        origin = sorted(packet.pts for packet in packets)[first_shown]
        start = max(at for at, packet in enumerate(packets) if packet.is_keyframe and packet.pts <= origin)
        copy = output.add_stream_from_template(stream)
        for packet in packets[start:]:
            packet.pts -= origin
            packet.dts -= origin
            packet.stream = copy
            output.mux(packet)
    return file.getvalue()


def spans_of_packets(content: bytes) -> list[tuple[int, int, int]]:
    """(pts, start, stop) of every video packet's payload in the file, in file order."""
    spans = []
    container: Any
    with av.open(io.BytesIO(content)) as container:
        for packet in container.demux(container.streams.video[0]):
            payload = bytes(packet)
            if payload:
                start = content.find(payload)
                spans.append((packet.pts or 0, start, start + len(payload)))
    return spans


def with_noise(content: bytes, first: int, last: int, *, seed: int = 0) -> bytes:
    """The file with the payloads of packets `first` to `last` (in file order) overwritten by random bytes."""
    damaged = bytearray(content)
    rng = np.random.default_rng(seed)
    for _, start, stop in spans_of_packets(content)[first : last + 1]:
        damaged[start:stop] = rng.bytes(stop - start)
    return bytes(damaged)


def cut_after(content: bytes, percent: int) -> bytes:
    return content[: len(content) * percent // 100]


def index_first(mp4: bytes) -> bytes:
    """The mp4 with its index before its data, as for the web; all chunk offsets moved along."""
    moov_at, mdat_at = mp4.index(b"moov") - 4, mp4.index(b"mdat") - 4
    size = int.from_bytes(mp4[moov_at : moov_at + 4], "big")
    moov = bytearray(mp4[moov_at : moov_at + size])
    at = moov.find(b"stco")
    while at >= 0:
        for entry in range(at + 12, at + 12 + 4 * int.from_bytes(moov[at + 8 : at + 12], "big"), 4):
            moved = int.from_bytes(moov[entry : entry + 4], "big") + size
            moov[entry : entry + 4] = moved.to_bytes(4, "big")
        at = moov.find(b"stco", at + 4)
    return mp4[:mdat_at] + bytes(moov) + mp4[mdat_at:moov_at] + mp4[moov_at + size :]


def with_matrix(mp4: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """The mp4 with the transform (a, b, c, d), x' = a x + c y, y' = b x + d y, in its first track's header."""
    at = mp4.index(b"tkhd") - 4
    start = at + 12 + (32 if mp4[at + 8] else 20) + 16
    a, b, c, d = matrix
    values = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return mp4[:start] + struct.pack(">9i", *values) + mp4[start + 36 :]


def with_cover_stream(numbers: Sequence[int], cover: bytes, *, cover_first: bool) -> bytes:
    """An mp4 whose video has a JPEG beside it, marked as attached picture."""
    file = io.BytesIO()
    shot = Shot()
    with av.open(file, mode="w", format="mp4") as output:
        streams = {}
        for kind in ("cover", "video") if cover_first else ("video", "cover"):
            streams[kind] = add_video(output, shot) if kind == "video" else output.add_stream("mjpeg", rate=1)
        still = streams["cover"]
        still.width, still.height, still.pix_fmt = 64, 64, "yuvj420p"
        still.disposition = av.stream.Disposition.attached_pic
        packet = av.Packet(cover)
        packet.pts = packet.dts = 0
        packet.stream = still
        output.mux(packet)
        for position, number in enumerate(numbers):
            output.mux(streams["video"].encode(_frame(number, position, shot)))
        output.mux(streams["video"].encode(None))
    return file.getvalue()


def clip_of_pictures(
    pictures: Sequence[bytes],
    container: str,
    codec: str = "mjpeg",
    *,
    alpha: bool = False,
    times: Sequence[int] | None = None,
) -> bytes:
    """JPEG (or PNG) files as the frames of a video, untouched, at `times` in tenths of a second, else 10 per second."""
    file = io.BytesIO()
    with av.open(file, mode="w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=10)
        stream.height, stream.width = Shot().size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "rgba" if alpha else "rgb24"
        for position, picture in enumerate(pictures):
            packet = av.Packet(picture)
            packet.pts = packet.dts = position if times is None else times[position]
            packet.time_base, packet.is_keyframe, packet.stream = Fraction(1, 10), True, stream
            output.mux(packet)
    return file.getvalue()


def song_with_cover(song: bytes, cover: bytes) -> bytes:
    """The mp3 with a picture in an ID3 tag in front."""
    picture = b"\0image/png\0\3\0" + cover
    frame = b"APIC" + struct.pack(">I", len(picture)) + b"\0\0" + picture
    size = bytes(len(frame) >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\3\0\0" + size + frame + song
