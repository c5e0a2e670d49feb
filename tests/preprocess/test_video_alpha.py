"""Transparent frames over white: the arithmetic to the bit, and what it holds of large frames."""

from __future__ import annotations

import gc
import io
import sys
import tracemalloc
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from preprocess.video.alpha import over_white
from preprocess.video.stream import display_matrix, upright_rgb, upright_size
from tests.fakes.clips import make_video, rotated
from tests.fakes.media.images import gif

PACKED = {"rgba": [0, 1, 2, 3], "bgra": [2, 1, 0, 3], "argb": [3, 0, 1, 2], "abgr": [3, 2, 1, 0]}
"""The channel of RGBA that stands at each place."""


def veil(height: int, width: int) -> NDArray[np.uint8]:
    """[height, width, 4] of any colour: opaque above, of any alpha in the middle, opaque but for one pixel below."""
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 4), dtype=np.uint8)
    pixels[: height // 3, :, 3] = 255
    pixels[2 * height // 3 :, :, 3] = 255
    pixels[-1, -1, 3] = 254
    return pixels


def by_definition(rgba: NDArray[np.uint8]) -> NDArray[np.int64]:
    colour, alpha = rgba[:, :, :3].astype(np.int64), rgba[:, :, 3:].astype(np.int64)
    return (colour * alpha + 255 * (255 - alpha) + 127) // 255


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (300, 33), (97, 2001)])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_frames_are_over_white_to_the_bit(kind: str, size: tuple[int, int]) -> None:
    rgba = veil(*size)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgba[:, :, PACKED[kind]]), format=kind)
    np.testing.assert_array_equal(upright_rgb(frame), by_definition(rgba))


def test_frames_in_planes_are_over_white_to_the_bit() -> None:
    frame = av.VideoFrame.from_ndarray(veil(60, 32), format="rgba").reformat(format="yuva420p")
    np.testing.assert_array_equal(upright_rgb(frame), by_definition(frame.to_ndarray(format="rgba")))


def test_every_colour_under_every_alpha() -> None:
    colour, alpha = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    rgba = np.stack([colour, colour, 255 - colour, alpha], axis=2)
    np.testing.assert_array_equal(over_white(rgba), by_definition(rgba))


@pytest.mark.parametrize("opaque", [True, False])
def test_no_second_frame_in_between(opaque: bool) -> None:
    rgba = veil(2000, 1000)
    if opaque:
        rgba[:, :, 3] = 255
    tracemalloc.start()
    try:
        over = over_white(rgba)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < over.nbytes + 1024 * 1024


def first_frames(content: bytes) -> list[Any]:
    with av.open(io.BytesIO(content)) as container:
        return list(container.decode(container.streams.video[0]))


@pytest.mark.parametrize(
    "content",
    [
        gif((64, 48), [(0, 0, 0), (255, 0, 0)], [(0, 0, 0, np.ones((48, 64), dtype=np.uint8))] * 2),
        rotated(make_video(2), (0, 1, -1, 0)),
    ],
    ids=["gif", "turned"],
)
def test_a_frame_that_was_shown_is_let_go_of(content: bytes) -> None:
    # One more reference is a cycle: the pixels would stay until the interpreter looks for cycles, in a long video for
    # hundreds of frames.
    frames = first_frames(content)
    gc.disable()
    try:
        for frame in frames:
            before = sys.getrefcount(frame)
            upright_rgb(frame)
            display_matrix(frame)
            assert sys.getrefcount(frame) == before
    finally:
        gc.enable()


def test_the_size_upright_is_that_of_the_pixels() -> None:
    for matrix in ((1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0), (0, 1, 1, 0), (-1, 0, 0, 1)):
        for frame in first_frames(rotated(make_video(1, size=(48, 64)), matrix)):
            assert upright_size(frame) == upright_rgb(frame).shape[:2]


def test_pictures_of_pillow_take_the_same_way() -> None:
    rgba = veil(40, 50)
    np.testing.assert_array_equal(over_white(np.asarray(Image.fromarray(rgba))), by_definition(rgba))
