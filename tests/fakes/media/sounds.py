"""Writers of sound files: sines of known frequency and level, one per channel."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray


def sines(tones_hz: Sequence[float], rate_hz: int, duration_s: float, amplitude: float = 0.5) -> NDArray[np.float64]:
    """[N, channels], one tone per channel; 0 Hz is silence."""
    time_s = np.arange(round(duration_s * rate_hz)) / rate_hz
    waves: NDArray[np.float64] = amplitude * np.sin(2 * np.pi * time_s[:, None] * np.array(tones_hz)[None])
    return waves


def sound_file(samples: NDArray[Any], rate_hz: int, kind: str, subtype: str | None = None) -> bytes:
    """[N, channels] through libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype)
    return file.getvalue()


_LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def encoded(samples: NDArray[np.float64], rate_hz: int, container: str, codec: str) -> bytes:
    """[N, channels] through FFmpeg."""
    file = io.BytesIO()
    layout = _LAYOUTS[samples.shape[1]]
    with av.open(file, mode="w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate_hz, layout=layout)
        stream.codec_context.bit_rate = 128_000 * samples.shape[1]
        packed = samples.astype(np.float32)
        for start in range(0, len(packed), 960):
            block = np.ascontiguousarray(packed[start : start + 960]).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(block, format="flt", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate_hz, start, Fraction(1, rate_hz)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def wav(
    data: bytes,
    *,
    rate_hz: int,
    channels: int,
    bits: int,
    form: int = 1,
    before: bytes = b"",
    after: bytes = b"",
    declared: int | None = None,
) -> bytes:
    """A WAV by hand. `form` 1 is integer, 3 is float; chunks may stand around the data, whose size may lie."""
    step = channels * bits // 8
    header = struct.pack("<HHIIHH", form, channels, rate_hz, rate_hz * step, step, bits)
    size = len(data) if declared is None else declared
    body = b"fmt " + struct.pack("<I", len(header)) + header + before
    body += b"data" + struct.pack("<I", size) + data + b"\0" * (len(data) % 2) + after
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body


def packed(samples: NDArray[np.float64], bits: int) -> bytes:
    """[N, channels] as little-endian integers of 8 (unsigned), 16, 24 or 32 bits."""
    scaled = np.rint(samples * ((1 << bits - 1) - 1)).astype("<i8")
    if bits == 8:
        return (scaled + 128).astype(np.uint8).tobytes()
    bytes_of_each = scaled.reshape(-1, 1).view(np.uint8)[:, : bits // 8]
    return bytes_of_each.tobytes()


def id3_tag(size: int) -> bytes:
    """A tag as long as a cover picture, full of what looks like the start of MP3 frames."""
    body = b"PRIV" + struct.pack(">I", size) + b"\0\0" + (b"\xff\xfb\x90\x64" * (size // 4 + 1))[:size]
    return b"ID3\3\0\0" + bytes(len(body) >> shift & 127 for shift in (21, 14, 7, 0)) + body
