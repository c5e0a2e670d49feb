"""Geometry: the worked examples of the processor, and what must hold for any size."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess import MediaInvalid, MediaOptions, MediaUndecodable, ProcessorConfig
from preprocess.config import VideoBudget
from preprocess.resize import UNIT, frame_indices, frame_max_pixels, num_sampled_frames, smart_resize

IMAGES = [
    ((1024, 768), (1024, 768)),
    ((640, 480), (640, 480)),
    ((224, 224), (224, 224)),
    ((1920, 1080), (1920, 1088)),
    ((4000, 3000), (3328, 2496)),
    ((64, 64), (96, 96)),
    ((28, 100), (64, 192)),
    ((100, 20), (224, 64)),
]
# (frames, rate, width, height), frames used, (width, height), ids with labels of five tokens
VIDEOS = [
    ((250, 25.0, 640, 360), 10, (640, 352), 1_137),
    ((75, 25.0, 640, 360), 8, (640, 352), 910),
    ((1800, 30.0, 1920, 1080), 60, (1920, 1088), 61_412),
    ((108_000, 30.0, 1920, 1080), 3600, (512, 288), 271_802),
]
SIDES = st.integers(1, 20_000)


@pytest.mark.parametrize(("given_wh", "resized_wh"), IMAGES)
def test_image_examples(given_wh: tuple[int, int], resized_wh: tuple[int, int]) -> None:
    width, height = given_wh
    assert smart_resize(height, width, min_pixels=8192, max_pixels=8_388_608) == resized_wh[::-1]


@pytest.mark.parametrize(("video", "num_used", "resized_wh", "num_ids"), VIDEOS)
def test_video_examples(
    video: tuple[int, float, int, int],
    num_used: int,
    resized_wh: tuple[int, int],
    num_ids: int,
    configs: dict[str, ProcessorConfig],
) -> None:
    num_frames, rate_fps, width, height = video
    budget = configs["real"].video_budget(MediaOptions())
    indices = frame_indices(num_frames, num_sampled_frames(num_frames, rate_fps, budget))
    assert len(indices) == num_used
    max_pixels = frame_max_pixels(len(indices), budget)
    resized = smart_resize(height, width, min_pixels=budget.min_pixels, max_pixels=max_pixels)
    assert resized == resized_wh[::-1]
    pairs, pads = num_used // 2, resized[0] * resized[1] // UNIT**2
    assert 2 + pairs * (5 + 2 + pads) == num_ids


def test_the_budget_binds_from_66_frames_on(configs: dict[str, ProcessorConfig]) -> None:
    budget = configs["real"].video_budget(MediaOptions())
    assert frame_max_pixels(64, budget) == budget.max_pixels
    assert frame_max_pixels(66, budget) < budget.max_pixels
    assert frame_max_pixels(3600, budget) == 149_130


def test_half_rounds_to_even() -> None:
    assert smart_resize(80, 48, min_pixels=1, max_pixels=10**6) == (64, 64)


@given(height=SIDES, width=SIDES, min_pixels=st.integers(1, 20_000), spread=st.integers(4, 1000))
@settings(max_examples=300, deadline=None)
def test_resize_is_sound(height: int, width: int, min_pixels: int, spread: int) -> None:
    # Growing to the floor rounds both sides up: a ceiling right above the floor would be passed, as published.
    max_pixels = min_pixels * spread + 4 * UNIT * UNIT
    try:
        resized_h, resized_w = smart_resize(height, width, min_pixels=min_pixels, max_pixels=max_pixels)
    except MediaInvalid:
        assert max(height, width) / min(height, width) > 200
        return
    assert resized_h > 0
    assert resized_w > 0
    assert resized_h % UNIT == resized_w % UNIT == 0
    # Only a side that cannot shrink below one unit may push the area over the ceiling.
    if min(resized_h, resized_w) > UNIT:
        assert resized_h * resized_w <= max_pixels
    assert smart_resize(width, height, min_pixels=min_pixels, max_pixels=max_pixels) == (resized_w, resized_h)


@given(
    num_frames=st.integers(1, 200_000),
    rate_fps=st.floats(0.1, 240),
    fps=st.floats(0.01, 60),
    num_wanted=st.none() | st.integers(1, 5000),
)
@settings(max_examples=200, deadline=None)
def test_sampling_is_sound(num_frames: int, rate_fps: float, fps: float, num_wanted: int | None) -> None:
    budget = VideoBudget(8192, 65536, 1_048_576, fps, 8, 64, num_wanted, None)
    num_sampled = num_sampled_frames(num_frames, rate_fps, budget)
    indices = frame_indices(num_frames, num_sampled)
    assert 1 <= num_sampled <= num_frames
    assert indices[0] == 0
    assert indices[-1] == num_frames - 1 or num_frames == 1
    assert (np.diff(indices) > 0).all()
    assert num_sampled == 1 or num_sampled % 2 == 0
    if num_wanted is None:
        assert num_sampled <= 64


@pytest.mark.parametrize("num_frames", [1, 2, 3, 7])
def test_short_videos_keep_at_least_one_frame(num_frames: int) -> None:
    budget = VideoBudget(8192, 65536, 1_048_576, 1.0, 8, 64, None, None)
    expected = 1 if num_frames == 1 else num_frames // 2 * 2
    assert num_sampled_frames(num_frames, 25.0, budget) == expected


def test_what_cannot_be_resized() -> None:
    with pytest.raises(MediaInvalid, match="aspect ratio"):
        smart_resize(32, 32 * 201, min_pixels=1, max_pixels=10**9)
    with pytest.raises(MediaUndecodable):
        smart_resize(0, 10, min_pixels=1, max_pixels=10**9)
    with pytest.raises(MediaUndecodable, match="no frames"):
        num_sampled_frames(0, 25.0, VideoBudget(1, 1, 1, 1.0, 8, 64, None, None))


def test_a_thin_picture_skips_the_aspect_check() -> None:
    height, width = smart_resize(1, 1000, min_pixels=8192, max_pixels=8_388_608)
    assert height >= UNIT
    assert math.isclose(width / height, 1000, rel_tol=0.6)
