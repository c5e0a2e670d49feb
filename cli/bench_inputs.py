"""Inputs of the benches: made once, kept in the cache directory, found again by name.

Names hold everything that decides the content, so a file with the right name is the right file. Files are written
beside their place and moved there, so that an interrupted run leaves no half one.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cli.bench_case import Bars

_VERSION = 1
_RATE = 25


@dataclass(frozen=True, slots=True)
class Clip:
    """H.264 as common encoders make it: x264 veryfast, three B-frames, 25 frames/s, yuv420p, no sound."""

    duration_s: int
    width: int
    height: int
    gop: int
    crf: int = 25
    last_frames_off: int = 0
    """Frames by which the clip is shorter than it says."""

    @property
    def name(self) -> str:
        length = f"{self.duration_s}s" + (f"-{self.last_frames_off}" if self.last_frames_off else "")
        return f"clip{_VERSION}-{self.width}x{self.height}-{length}-gop{self.gop}-crf{self.crf}.mp4"

    @property
    def rate_fps(self) -> float:
        return float(_RATE)

    @property
    def num_frames(self) -> int:
        return self.duration_s * _RATE - self.last_frames_off

    def path(self, cache_dir: Path, bars: Bars) -> Path:
        """The file, made if it is not there. Takes minutes for ten minutes of 720p."""
        return _kept(cache_dir / self.name, partial(_write_clip, self, bars=bars))


@dataclass(frozen=True, slots=True)
class LongClip:
    """A clip played several times over, its packets copied: hours cost seconds to make."""

    clip: Clip
    num_times: int

    @property
    def duration_s(self) -> int:
        return self.clip.duration_s * self.num_times

    def path(self, cache_dir: Path, bars: Bars) -> Path:
        source = self.clip.path(cache_dir, bars)
        target = cache_dir / f"{source.stem}-x{self.num_times}.mp4"
        return _kept(target, partial(_repeat_clip, source, num_times=self.num_times, bars=bars))


def pictures(
    cache_dir: Path, bars: Bars, *, kind: str, num_files: int, width: int, height: int, **options: Any
) -> list[bytes]:
    """Encoded pictures, all different. `options` are Pillow's, and part of the name."""
    from PIL import Image

    words = "-".join(f"{name}{value}" for name, value in sorted(options.items()))
    stem = f"picture{_VERSION}-{width}x{height}-{words}"
    paths = [cache_dir / f"{stem}-{index}.{kind.lower()}" for index in range(num_files)]
    bars.begin(f"{num_files} {kind} pictures", num_files)
    canvas: NDArray[np.uint8] | None = None
    for index, path in enumerate(paths):
        if not path.exists():
            if canvas is None:
                canvas = _colour_canvas(height + 64, width + 64)
            pixels = np.ascontiguousarray(canvas[index : index + height, 3 * index : 3 * index + width])
            image = Image.fromarray(pixels)
            _kept(path, partial(image.save, format=kind, **options))
        bars.advance()
    return [path.read_bytes() for path in paths]


def song(cache_dir: Path, bars: Bars, *, duration_s: int, kind: str) -> Path:
    """Chords and noise in stereo at 48 kHz; `kind` is mp3, or m4a for AAC in MP4."""
    path = cache_dir / f"song{_VERSION}-{duration_s}s.{kind}"
    return _kept(path, partial(_write_song, duration_s=duration_s, kind=kind, bars=bars))


def _kept(path: Path, make: Callable[[Path], object]) -> Path:
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Its ending tells the container.
    unfinished = path.with_name(f".{os.getpid()}.partial.{path.name}")
    try:
        make(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


# Clips


def _write_clip(clip: Clip, path: Path, *, bars: Bars) -> None:
    import av

    num_frames = clip.num_frames
    bars.begin(f"making {clip.name}", num_frames)
    with av.open(str(path), mode="w", format="mp4") as output:
        options = {
            "preset": "veryfast",
            "crf": str(clip.crf),
            "bf": "3",
            "g": str(clip.gop),
            "keyint_min": str(clip.gop),
        }
        stream: Any = output.add_stream("libx264", rate=_RATE, options=options | {"sc_threshold": "0"})
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        for index, planes in enumerate(_scenes(clip, num_frames)):
            frame: Any = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            frame.pts, frame.time_base = index, Fraction(1, _RATE)
            output.mux(stream.encode(frame))
            bars.advance()
        output.mux(stream.encode(None))


def _scenes(clip: Clip, num_frames: int) -> Iterator[NDArray[np.uint8]]:
    """[height * 3 / 2, width] planes: a camera over a landscape seen through water, a test card crossing it, grain.

    At 720p about 2.7 Mb/s, which is what talks and screen recordings of that size have.
    """
    height, width = clip.height, clip.width
    pan, ripple = 96, 8
    margin = 2 * pan + 2 * ripple
    chance = np.random.default_rng(7)
    luma = _landscape(height + margin, width + margin, chance, 40, 200)
    # [height + margin, offset, width]: a row begins anywhere, without a copy.
    begun = np.lib.stride_tricks.sliding_window_view(luma, width, axis=1)
    chroma = [_landscape((height + margin) // 2, (width + margin) // 2, chance, 90, 160) for _ in range(2)]
    grain = chance.integers(0, 18, (height + 64, width + 64), dtype=np.uint8)
    side = height // 4
    squares = (np.indices((8, 8)).sum(0) % 2 * 180 + 40).astype(np.uint8)
    card = squares.repeat(side // 8, axis=0).repeat(side // 8, axis=1)
    rows = np.arange(height)
    planes = np.empty((height * 3 // 2, width), dtype=np.uint8)
    colours = planes[height:].reshape(2, height // 2, width // 2)
    for index in range(num_frames):
        x, y = round(pan * (1 + math.sin(index / 90))), round(pan * (1 + math.cos(index / 130)))
        waves = np.rint(x + ripple * (1 + np.sin(rows / 40 + index / 9))).astype(np.intp)
        noise_y, noise_x = chance.integers(0, 64, 2)
        specks = grain[noise_y : noise_y + height, noise_x : noise_x + width]
        np.add(begun[y + rows, waves], specks, out=planes[:height])
        left, top = index * 7 % (width - side), index * 3 % (height - side)
        planes[top : top + card.shape[0], left : left + card.shape[1]] = card
        for target, plane in zip(colours, chroma, strict=True):
            target[:] = plane[y // 2 : y // 2 + height // 2, x // 2 : x // 2 + width // 2]
        yield planes


def _landscape(height: int, width: int, chance: np.random.Generator, low: int, high: int) -> NDArray[np.uint8]:
    """[height, width] with structure at every scale, as pictures of the world have."""
    total = np.zeros((height, width), dtype=np.float32)
    for cell, weight in ((128, 4.0), (32, 2.0), (8, 1.0), (3, 0.4)):
        coarse = chance.random((height // cell + 2, width // cell + 2), dtype=np.float32)
        total += weight * np.repeat(np.repeat(coarse, cell, axis=0), cell, axis=1)[:height, :width]
    total = (total - total.min()) / (total.max() - total.min())
    scaled: NDArray[np.uint8] = (low + (high - low) * total).astype(np.uint8)
    return scaled


def _colour_canvas(height: int, width: int) -> NDArray[np.uint8]:
    """[height, width, 3] with grain: at quality 90 a JPEG of it has about 1.5 bits a pixel, as photographs do."""
    chance = np.random.default_rng(11)
    planes = [_landscape(height, width, chance, 20, 230) for _ in range(3)]
    grain = chance.integers(0, 7, (height, width), dtype=np.uint8)
    canvas: NDArray[np.uint8] = np.stack([plane + grain for plane in planes], axis=2)
    return canvas


def _repeat_clip(source: Path, path: Path, *, num_times: int, bars: Bars) -> None:
    import av

    bars.begin(f"making {path.name}", num_times)
    with av.open(str(path), mode="w", format="mp4") as output:
        target: Any = None
        offset = 0
        for _ in range(num_times):
            with av.open(str(source)) as container:
                stream: Any = container.streams.video[0]
                if target is None:
                    target = output.add_stream_from_template(stream)
                # One frame beyond the last: packets come in decoding order, which starts before the first picture.
                end = stream.duration
                for packet in container.demux(stream):
                    if packet.dts is None:
                        continue
                    packet.pts += offset
                    packet.dts += offset
                    packet.stream = target
                    output.mux(packet)
            offset += end
            bars.advance()


# Sound


def _write_song(path: Path, *, duration_s: int, kind: str, bars: Bars) -> None:
    import av

    rate_hz = 48_000
    codec = {"mp3": "libmp3lame", "m4a": "aac"}[kind]
    chance = np.random.default_rng(5)
    bars.begin(f"making {duration_s} s of {kind}", duration_s)
    with av.open(str(path), mode="w", format="mp3" if kind == "mp3" else "mp4") as output:
        stream: Any = output.add_stream(codec, rate=rate_hz, layout="stereo")
        stream.bit_rate = 128_000
        for second in range(duration_s):
            time_s = second + np.arange(rate_hz) / rate_hz
            root_hz = 220 * 2 ** (second % 12 / 12)
            chord = sum(np.sin(2 * np.pi * root_hz * step * time_s) for step in (1, 1.25, 1.5, 4))
            left = 0.15 * chord + 0.02 * chance.standard_normal(rate_hz)
            packed = np.stack([left, 0.8 * left[::-1]], axis=1).astype(np.float32).reshape(1, -1)
            frame: Any = av.AudioFrame.from_ndarray(packed, format="flt", layout="stereo")
            frame.sample_rate, frame.pts = rate_hz, second * rate_hz
            output.mux(stream.encode(frame))
            bars.advance()
        output.mux(stream.encode(None))
