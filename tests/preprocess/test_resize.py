"""Geometry: what must hold for any size."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import MediaInvalid, MediaUndecodable
from preprocess.config import VideoBudget
from preprocess.resize import UNIT, choose_frames, frame_indices, num_sampled_frames, smart_resize

SIDES = st.integers(1, 20_000)


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


def budget_of(fps: float, *, max_frames: int = 1000) -> VideoBudget:
    return VideoBudget(1024, 65536, 1048576, fps, min_frames=2, max_frames=max_frames, num_frames=None, use_audio=None)


@settings(max_examples=100)
@given(
    num_frames=st.integers(1, 500),
    rate_fps=st.floats(1, 60),
    jitter=st.floats(0, 0.99),
    fps=st.floats(0.1, 10),
    seed=st.integers(0, 3),
)
def test_even_frames_are_chosen_by_index(
    num_frames: int, rate_fps: float, jitter: float, fps: float, seed: int
) -> None:
    budget = budget_of(fps)
    offsets = np.random.default_rng(seed).uniform(-jitter, jitter, num_frames)
    offsets[0] = 0
    times_s = (np.arange(num_frames) + offsets) / rate_fps
    plain = choose_frames(num_frames, rate_fps, None, budget)
    timed = choose_frames(num_frames, rate_fps, np.sort(times_s), budget)
    np.testing.assert_array_equal(plain[0], frame_indices(num_frames, num_sampled_frames(num_frames, rate_fps, budget)))
    np.testing.assert_array_equal(plain[0], timed[0])
    frames_off = np.abs(np.sort(times_s) * rate_fps - np.arange(num_frames)).max()
    real = np.sort(times_s)[timed[0]].astype(np.float32)
    np.testing.assert_array_equal(timed[1], plain[1] if frames_off <= 0.5 else real)
    assert timed[1].dtype == np.float32


@pytest.mark.parametrize(
    ("num_frames", "interval_s", "share"), [(200, 5.28, 1.005), (1000, 1.0, 1.0009), (20, 0.1, 1.05)]
)
def test_even_frames_of_a_wrong_rate_have_their_own_times(num_frames: int, interval_s: float, share: float) -> None:
    times_s = np.arange(num_frames) * interval_s
    indices, chosen_s = choose_frames(num_frames, share / interval_s, times_s, budget_of(2.0))
    np.testing.assert_array_equal(chosen_s, times_s[indices].astype(np.float32))
    assert indices[-1] == num_frames - 1
    # A rate that is only rounded is the published one.
    rate_fps = round(1 / interval_s, 4)
    indices, chosen_s = choose_frames(num_frames, rate_fps, times_s, budget_of(2.0))
    np.testing.assert_array_equal(chosen_s, indices.astype(np.float32) / np.float32(rate_fps))


@settings(max_examples=100)
@given(gaps_s=st.lists(st.floats(0.001, 5), min_size=2, max_size=200), fps=st.floats(0.2, 10))
def test_uneven_frames_are_chosen_by_time(gaps_s: list[float], fps: float) -> None:
    times_s = np.concatenate([[0.0], np.cumsum(gaps_s)])
    num_frames = len(times_s)
    rate_fps = 4 * num_frames / times_s[-1]
    indices, chosen_s = choose_frames(num_frames, rate_fps, times_s, budget_of(fps))
    np.testing.assert_array_equal(chosen_s, times_s[indices].astype(np.float32))
    assert (np.diff(indices) > 0).all()
    assert indices[0] == 0
    assert indices[-1] == num_frames - 1
    # As many moments as the length asks for, evenly spread; of each the last frame that is not after it.
    num_moments = num_sampled_frames(num_frames, (num_frames - 1) / times_s[-1], budget_of(fps))
    shown = {max(i for i in range(num_frames) if times_s[i] <= t) for t in np.linspace(0, times_s[-1], num_moments)}
    assert len(indices) == num_moments
    assert indices.tolist() == spread_out(times_s, shown, num_moments)


def spread_out(times_s: NDArray[np.float64], chosen: set[int], num_wanted: int) -> list[int]:
    """With the frame added that is furthest in time from those chosen, the earliest of several, until enough are."""
    chosen = set(chosen)
    while len(chosen) < num_wanted:

        def distance_us(frame: int) -> int:
            return min(round(abs(float(times_s[frame] - times_s[other])) * 1e6) for other in chosen)

        chosen.add(max(sorted(set(range(len(times_s))) - chosen), key=distance_us))
    return sorted(chosen)


# Two frames a second for ten, then thirty a second for two, as a screen recorder writes.
RECORDED_S = np.array([*np.arange(20) * 0.5, *(10 + np.arange(60) / 30)])


@pytest.mark.parametrize(
    ("asked", "num_wanted"),
    [
        ({"fps": 1.0}, 12),
        ({"fps": 2.0}, 24),
        ({"fps": 5.0}, 60),
        ({"fps": 10.0}, 80),
        ({"fps": 10.0, "max_frames": 40}, 40),
        ({"fps": 0.5, "min_frames": 60}, 60),
        ({"num_frames": 40}, 40),
        ({"num_frames": 78}, 78),
        ({"num_frames": 500}, 80),
    ],
)
def test_uneven_clips_give_as_many_frames_as_asked(asked: dict[str, Any], num_wanted: int) -> None:
    budget = replace(budget_of(1.0), **asked)
    indices, chosen_s = choose_frames(len(RECORDED_S), 30.0, RECORDED_S, budget)
    assert len(set(indices.tolist())) == len(indices) == num_wanted
    assert (np.diff(chosen_s) > 0).all()
    again, _ = choose_frames(len(RECORDED_S), 30.0, RECORDED_S, budget)
    np.testing.assert_array_equal(indices, again)


def test_a_frame_every_tenth_of_a_second_is_there_where_the_file_has_them() -> None:
    # Of 1,000 pictures in the last ten of twenty seconds, those asked for; the still before them has one each second.
    times_s = np.array([*np.arange(10), *(10 + np.arange(1000) / 100)])
    _, chosen_s = choose_frames(len(times_s), 100.0, times_s, replace(budget_of(1.0), fps=10.0))
    assert len(chosen_s) == 200
    assert float(np.diff(chosen_s[chosen_s >= 10]).max()) < 0.12


def test_many_frames_are_made_up_quickly() -> None:
    times_s = np.concatenate([[0.0], 7000 + np.arange(150_000) / 100])
    start_s = time.process_time()
    indices, _ = choose_frames(len(times_s), 30.0, times_s, replace(budget_of(1.0), num_frames=3600, max_frames=3600))
    assert len(indices) == 3600
    assert time.process_time() - start_s < 2


def test_a_long_pause_takes_no_moments_from_what_comes_after_it() -> None:
    # Ten frames in the first second, then one each ten seconds: by index, all but a few would be of the first second.
    times_s = np.array([*np.arange(10) / 10, 10, 20, 30, 40, 50])
    indices, chosen_s = choose_frames(15, 0.3, times_s, budget_of(0.2))
    # Ten moments fall on seven frames; three of the first second, as far apart as may be, make up for it.
    assert indices.tolist() == spread_out(times_s, {0, 9, 10, 11, 12, 13, 14}, 10)
    assert {0, 9, 10, 11, 12, 13, 14} < set(indices.tolist())
    assert chosen_s.tolist() == pytest.approx(times_s[indices].tolist())
