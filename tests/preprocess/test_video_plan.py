"""Planned decoding gives the frames that a scan gives, byte for byte, and decodes no more than it must."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import DecodeLimits
from preprocess.crew import NO_CREW, Crew, Teamwork
from preprocess.video.index import VideoIndex, read_index
from preprocess.video.plan import plan
from preprocess.video.planned import decode_planned
from tests.oracles.video_scan import all_frames

LIMITS = DecodeLimits()


def go_on() -> None:
    pass


@dataclass(frozen=True)
class Clip:
    codec: str = "libx264"
    container: str = "mp4"
    num_frames: int = 40
    gop: int = 12
    num_b_frames: int = 2
    rate: Fraction = Fraction(25)
    options: tuple[tuple[str, str], ...] = ()
    seed: int = 0


OPEN_H264 = (("x264-params", "open-gop=1:b-pyramid=normal:scenecut=0:threads=1"),)
CLOSED_H264 = (("x264-params", "scenecut=0:threads=1"),)
OPEN_HEVC = (("preset", "ultrafast"), ("x265-params", "open-gop=1:bframes=3:b-adapt=0:log-level=none:pools=none"))
LAYERED_HEVC = (
    ("preset", "ultrafast"),
    ("x265-params", "temporal-layers=3:bframes=3:b-pyramid=1:b-adapt=0:log-level=none:pools=none"),
)
VP9 = (("deadline", "realtime"), ("cpu-used", "8"), ("auto-alt-ref", "1"), ("lag-in-frames", "10"))
VP8 = (("deadline", "realtime"), ("cpu-used", "8"), ("auto-alt-ref", "1"), ("lag-in-frames", "10"))
CODECS: list[tuple[str, tuple[tuple[str, str], ...]]] = [
    ("libx264", CLOSED_H264),
    ("libx264", OPEN_H264),
    ("libx265", OPEN_HEVC),
    ("libx265", LAYERED_HEVC),
    ("libvpx-vp9", VP9),
    ("libvpx", VP8),
    ("mpeg4", ()),
    ("mjpeg", ()),
]


def encode(clip: Clip) -> bytes:
    """A textured picture that moves, so that a wrong reference shows in every frame after it."""
    rng = np.random.default_rng(clip.seed)
    world = rng.integers(0, 256, (12, 24, 3), dtype=np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    file = io.BytesIO()
    with av.open(file, mode="w", format=clip.container) as output:
        stream: Any = output.add_stream(clip.codec, rate=clip.rate, options=dict(clip.options))
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if clip.codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = clip.gop
        stream.codec_context.max_b_frames = clip.num_b_frames if clip.codec in ("libx264", "mpeg4") else 0
        stream.codec_context.bit_rate = 400_000
        for number in range(clip.num_frames):
            left = (5 * number) % 120
            pixels = world[number % 40 : number % 40 + 48, left : left + 64].copy()
            pixels[:8] = (number * 37) % 256
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, 1 / clip.rate
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def planned(content: bytes, index: VideoIndex, numbers: list[int], crew: Crew) -> list[NDArray[np.uint8]]:
    found: dict[int, NDArray[np.uint8]] = {}
    decode_planned(
        content,
        index,
        list(enumerate(numbers)),
        found.__setitem__,
        limits=LIMITS,
        crew=crew,
        team=Teamwork(),
        check_deadline=go_on,
    )
    return [found[place] for place in range(len(numbers))]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


def compare(clip: Clip, numbers: list[int], crew: Crew) -> None:
    content = encode(clip)
    index = read_index(content, LIMITS, go_on)
    assert index.scan_reason is None
    truth = all_frames(content)
    assert index.num_frames == len(truth)
    for number, pixels in zip(numbers, planned(content, index, numbers, crew), strict=True):
        assert np.array_equal(pixels, truth[number]), f"{clip}: frame {number} of {numbers}"


CLIPS = st.builds(
    lambda codec, container, num_frames, gop, num_b_frames, rate, seed: Clip(
        codec[0],
        "matroska" if codec[0] == "libvpx" else container,
        num_frames,
        gop,
        num_b_frames,
        rate,
        codec[1],
        seed,
    ),
    st.sampled_from(CODECS),
    st.sampled_from(["mp4", "matroska"]),
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(0, 4),
    st.sampled_from([Fraction(25), Fraction(30000, 1001), Fraction(10)]),
    st.integers(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(clip=CLIPS, data=st.data())
def test_planned_frames_are_the_scan_s(clip: Clip, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, clip.num_frames - 1), min_size=1, max_size=12, unique=True).map(sorted))
    crew = Crew(data.draw(st.integers(0, 2)))
    try:
        compare(clip, numbers, crew)
    finally:
        crew.close()
