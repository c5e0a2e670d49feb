"""Geometry of resizing: sizes and frame counts in, sizes and frame indices out. No pixels.

Follows the published processor step for step, Python's half-to-even `round` included.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from preprocess.config import VideoBudget
from preprocess.errors import MediaInvalid, MediaUndecodable
from preprocess.types import MERGE_SIZE, PATCH_SIZE

UNIT: Final = PATCH_SIZE * MERGE_SIZE
"""Side of a merged patch in pixels; both sides of a resized picture are multiples of it."""
_MAX_ASPECT_RATIO: Final = 200
# One frame, and a little for the rounding of times in the container.
_MAX_FRAMES_OFF: Final = 1.001
# Rates come from durations that may leave the last frame out, or be a little wrong: over a long file of few pictures
# that makes seconds.
_MAX_TIMESTAMP_OFF: Final = 0.5


def smart_resize(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in pixels, both positive multiples of 32, area at most `max_pixels` (which is 1024 or more).

    Growing to `min_pixels` rounds both sides up. Where that passes `max_pixels` (the published processor lets it), the
    upper bound holds and the lower one gives way.

    Three steps, in this order:

        either side below 32   scale both so that the shorter is 32 (then no aspect check)
        round both to 32s      half to even: 80 -> 64, 48 -> 64
        area out of bounds     scale from the original by the square root, rounding towards the allowed side

    Raises MediaInvalid for a picture over 200 times as long as wide, MediaUndecodable for an empty one.
    """
    if height < 1 or width < 1:
        raise MediaUndecodable(f"picture of {width} x {height} pixels")
    if min(height, width) < UNIT:
        scale = UNIT / min(height, width)
        height, width = round(height * scale), round(width * scale)
    elif max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise MediaInvalid(f"picture of {width} x {height} pixels: aspect ratio is over {_MAX_ASPECT_RATIO}")
    resized_h, resized_w = round(height / UNIT) * UNIT, round(width / UNIT) * UNIT
    if resized_h * resized_w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        resized_h = math.ceil(height * grow / UNIT) * UNIT
        resized_w = math.ceil(width * grow / UNIT) * UNIT
    if resized_h * resized_w > max_pixels:
        return _largest_within(height, width, max_pixels)
    return resized_h, resized_w


def _largest_within(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    shrink = math.sqrt(height * width / max_pixels)
    resized_h = math.floor(height / shrink / UNIT) * UNIT
    resized_w = math.floor(width / shrink / UNIT) * UNIT
    # Of a long thin picture the short side comes to nothing here, and the published processor fails. It gets one
    # unit, and the long side what the area leaves: a strip of a few bytes must not unfold to gigabytes.
    longest = max(max_pixels // UNIT // UNIT, 1) * UNIT
    if not resized_h:
        return UNIT, min(max(resized_w, UNIT), longest)
    if not resized_w:
        return min(resized_h, longest), UNIT
    return resized_h, resized_w


def num_sampled_frames(num_frames: int, rate_fps: float, budget: VideoBudget) -> int:
    """How many of a file's frames are wanted: even, at least 2, at most all; 1 for a file of one frame.

    Raises MediaUndecodable for a video without frames.
    """
    if num_frames < 1:
        raise MediaUndecodable("the video has no frames")
    if num_frames == 1:
        # The published processor refuses these. One frame, repeated to make a pair, is the honest reading.
        return 1
    if budget.num_frames is not None:
        wanted = min(round(budget.num_frames / 2) * 2, num_frames)
    else:
        lowest = math.ceil(budget.min_frames / 2) * 2
        highest = math.floor(budget.max_frames / 2) * 2
        wanted_by_rate = num_frames / rate_fps * budget.fps
        wanted = int(min(max(wanted_by_rate, lowest), highest, num_frames))
    return max(wanted // 2 * 2, 2)


def frame_indices(num_frames: int, num_sampled: int) -> NDArray[np.int64]:
    """Evenly spread indices, first and last frame included, truncated to whole numbers, each once."""
    return np.unique(np.linspace(0, num_frames - 1, num_sampled).astype(np.int64))


def choose_frames(
    num_frames: int, rate_fps: float, times_s: NDArray[np.float64] | None, budget: VideoBudget
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Which frames of a file are taken, ascending, and their timestamps in seconds.

    `times_s` [num_frames] is when each frame is shown, ascending from 0, or None if that is not known. Where frames
    come at an even rate (no time is off its place by more than a frame's length), or nothing is known, the published
    rule: evenly spread indices, timestamps index / rate; but the frames' own where one is off by more than half a
    frame's length. Elsewhere evenly spread times, of each the frame that is
    shown then; where several fall on one frame, others make up the number. Timestamps are the frames' own.
    """
    numbers = np.arange(num_frames)
    frames_off = 0.0 if times_s is None else float(np.abs(times_s * rate_fps - numbers).max(initial=0.0))
    if times_s is None or frames_off <= _MAX_FRAMES_OFF:
        indices = frame_indices(num_frames, num_sampled_frames(num_frames, rate_fps, budget))
        if times_s is None or frames_off <= _MAX_TIMESTAMP_OFF:
            return indices, indices.astype(np.float32) / np.float32(rate_fps)
        return indices, times_s[indices].astype(np.float32)
    # The last frame is taken to be shown as long as the average one before it.
    real_rate_fps = (num_frames - 1) / float(times_s[-1])
    num_wanted = num_sampled_frames(num_frames, real_rate_fps, budget)
    moments_s = np.linspace(0.0, float(times_s[-1]), num_wanted)
    indices = np.unique(np.searchsorted(times_s, moments_s, side="right") - 1).astype(np.int64)
    indices = _made_up(indices, times_s, num_wanted)
    return indices, times_s[indices].astype(np.float32)


def _made_up(indices: NDArray[np.int64], times_s: NDArray[np.float64], num_wanted: int) -> NDArray[np.int64]:
    """`num_wanted` indices, ascending: those given, the first and the last frame among them, and others between them.

    Each new one is the frame furthest in time from all that are chosen, of equals the earliest.
    """
    chosen = indices.tolist()
    gaps: list[tuple[int, int, int, int]] = []
    for before, after in itertools.pairwise(chosen):
        _note_gap(gaps, times_s, before, after)
    while len(chosen) < num_wanted:
        _, middle, before, after = heapq.heappop(gaps)
        chosen.append(middle)
        _note_gap(gaps, times_s, before, middle)
        _note_gap(gaps, times_s, middle, after)
    return np.array(sorted(chosen), dtype=np.int64)


def _note_gap(gaps: list[tuple[int, int, int, int]], times_s: NDArray[np.float64], before: int, after: int) -> None:
    """Puts the frame furthest from both ends on the heap, by its distance; nothing where no frame lies between."""
    if after - before < 2:
        return
    start_s, end_s = float(times_s[before]), float(times_s[after])
    above = int(np.searchsorted(times_s, (start_s + end_s) / 2))
    candidates = {min(max(frame, before + 1), after - 1) for frame in (above - 1, above)}
    # Whole microseconds: what is equally far must not be told apart by the rounding of floats.
    distance_us, middle = max(
        (round(min(float(times_s[frame]) - start_s, end_s - float(times_s[frame])) * 1e6), -frame)
        for frame in candidates
    )
    heapq.heappush(gaps, (-distance_us, -middle, before, after))


def frame_max_pixels(num_frames: int, budget: VideoBudget) -> int:
    """Pixels allowed per frame when `num_frames` (before padding to pairs) share the video's total."""
    share = budget.total_max_pixels * 2 // num_frames
    return max(budget.min_pixels, min(share, budget.max_pixels))
