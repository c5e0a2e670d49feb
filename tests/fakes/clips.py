"""Media generated at test time: small clips, sounds and pictures whose content is known exactly."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image


def blocks(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """[height, width, 3]: random colours in blocks of 8 x 8 pixels."""
    cells = np.random.RandomState(seed).randint(0, 256, (-(-height // 8), -(-width // 8), 3))
    return cells.repeat(8, axis=0).repeat(8, axis=1)[:height, :width].astype(np.uint8)


def grey_of_frame(index: int) -> int:
    """The grey level that frame `index` of `make_video` is filled with: 8 levels apart, so lossy codecs keep it."""
    return 16 + 8 * (index % 28)


def make_video(
    num_frames: int,
    *,
    rate: int | Fraction = 10,
    size: tuple[int, int] = (48, 64),
    container: str = "mp4",
    codec: str = "libx264",
    gop: int = 12,
    sound: NDArray[np.float32] | None = None,
    sound_layout: str = "mono",
    corner: bool = False,
    pts: list[int] | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """A clip whose frame i is grey level `grey_of_frame(i)`; `corner` paints the top left quarter red.

    `sound` is [N] at 24 kHz, the same for all channels of `sound_layout`; `pts` gives frame times in units of
    1 / rate instead of 0, 1, 2...; `options` are the container's.
    """
    file = io.BytesIO()
    height, width = size
    with av.open(file, mode="w", format=container, options=options or {}) as output:
        video: Any = output.add_stream(codec, rate=rate)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        video.codec_context.gop_size = gop
        video.codec_context.bit_rate = 4_000_000
        audio: Any = output.add_stream("aac", rate=24_000, layout=sound_layout) if sound is not None else None
        for index in range(num_frames):
            pixels = np.full((height, width, 3), grey_of_frame(index), dtype=np.uint8)
            if corner:
                pixels[: height // 2, : width // 2] = (255, 0, 0)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index if pts is None else pts[index]
            frame.time_base = 1 / Fraction(rate)
            output.mux(video.encode(frame))
        output.mux(video.encode(None))
        if audio is not None and sound is not None:
            _encode_sound(output, audio, sound)
    return file.getvalue()


def _encode_sound(output: Any, stream: Any, sound: NDArray[np.float32]) -> None:
    layout = stream.codec_context.layout
    for start in range(0, len(sound), 1024):
        packed = np.repeat(sound[start : start + 1024], layout.nb_channels)[None]
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate = 24_000
        frame.pts = start
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def rotated(clip: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """The mp4 with (a, b, c, d) written into its track header, as phones do."""
    at = clip.index(b"tkhd") - 4
    version = clip[at + 8]
    start = at + 8 + 4 + (32 if version else 20) + 16
    values = (matrix[0] << 16, matrix[1] << 16, 0, matrix[2] << 16, matrix[3] << 16, 0, 0, 0, 1 << 30)
    return clip[:start] + struct.pack(">9i", *values) + clip[start + 36 :]


def sine(duration_s: float, *, rate_hz: int = 24_000, channels: int = 1, tone_hz: float = 440.0) -> NDArray[np.float32]:
    """[N, channels] float32 at half scale."""
    time_s = np.arange(round(duration_s * rate_hz)) / rate_hz
    return np.repeat(0.5 * np.sin(2 * np.pi * tone_hz * time_s)[:, None], channels, axis=1).astype(np.float32)


def sound_file(samples: NDArray[Any], rate_hz: int = 24_000, *, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """[N, channels] samples as a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype)
    return file.getvalue()


def picture_file(pixels: NDArray[Any] | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An array or a Pillow picture as a file."""
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def index_first(clip: bytes) -> bytes:
    """The mp4 with its index moved to the front, so that cutting the file off loses pictures and not the index."""
    start = clip.index(b"moov") - 4
    data = clip.index(b"mdat") - 4
    moov = bytearray(clip[start : start + int.from_bytes(clip[start : start + 4], "big")])
    at = moov.index(b"stco") + 8
    num_chunks = int.from_bytes(moov[at : at + 4], "big")
    for entry in range(at + 4, at + 4 + 4 * num_chunks, 4):
        offset = int.from_bytes(moov[entry : entry + 4], "big") + len(moov)
        moov[entry : entry + 4] = offset.to_bytes(4, "big")
    return clip[:data] + bytes(moov) + clip[data:start] + clip[start + len(moov) :]


def with_cover(song: bytes, cover: bytes) -> bytes:
    """The mp3 with a PNG as its cover picture, in an ID3 tag in front."""
    picture = b"\0image/png\0\3\0" + cover
    frame = b"APIC" + struct.pack(">I", len(picture)) + b"\0\0" + picture
    size = bytes(len(frame) >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\3\0\0" + size + frame + song


def damaged(clip: bytes, packets: range) -> bytes:
    """The mp4 with the payload of these packets of its video overwritten, so that they do not decode."""
    data = bytearray(clip)
    with av.open(io.BytesIO(clip), mode="r") as container:
        found = [packet for packet in container.demux(video=0) if packet.size]
    for number in packets:
        packet = found[number]
        assert packet.pos is not None
        data[packet.pos + 4 : packet.pos + packet.size] = b"\xff" * (packet.size - 4)
    return bytes(data)
