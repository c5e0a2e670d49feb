"""The published processor written out slowly: sizes, frames, labels, ids, patches and log-mel, step by step.

Integers, Python floats, numpy's float32 scalars and loops; nothing of `preprocess` is used. Where the published
processor fails and the project goes on (one frame, a strip, sound shorter than its video), it follows the project's
documented rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT = 32
MEAN = (0.48145466 * 255, 0.4578275 * 255, 0.40821073 * 255)
STD = (0.26862954 * 255, 0.26130258 * 255, 0.27577711 * 255)


@dataclass(frozen=True)
class Rules:
    """What is in force for one medium after the request's options replaced the configured values."""

    min_pixels: int
    max_pixels: int
    total_pixels: int = 0
    fps: float = 1.0
    min_frames: int = 8
    max_frames: int = 3600
    num_frames: int | None = None
    asked_min_frames: int = 2
    """Also holds for a count of frames, which the configured bound does not."""


def image_rules(config: Mapping[str, Any], options: Mapping[str, Any]) -> Rules:
    """`config` is the processor section of a config.json."""
    most = options.get("max_pixels", config["image_max_pixels"])
    if options.get("detail") == "low":
        most = min(most, 512 * 512)
    return Rules(options.get("min_pixels", min(config["image_min_pixels"], most)), most)


def video_rules(config: Mapping[str, Any], options: Mapping[str, Any]) -> Rules:
    most = options.get("max_pixels", config["video_max_pixels"])
    most_frames = options.get("max_frames", config["max_frames"])
    # A null in the file means eight.
    fewest_frames = options.get("min_frames", 8 if config["min_frames"] is None else config["min_frames"])
    return Rules(
        min_pixels=options.get("min_pixels", min(config["video_min_pixels"], most)),
        max_pixels=most,
        total_pixels=config["video_total_max_pixels"],
        fps=options.get("fps", config["fps"]),
        min_frames=fewest_frames,
        max_frames=most_frames,
        num_frames=options.get("num_frames"),
        asked_min_frames=options.get("min_frames", 2),
    )


def half_even(numerator: int, denominator: int) -> int:
    whole, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and whole % 2 == 1):
        whole += 1
    return whole


def resized(height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int] | None:
    """(height, width); None for a picture that is refused."""
    short, long = min(height, width), max(height, width)
    if short < UNIT:
        height, width = round(height * (UNIT / short)), round(width * (UNIT / short))
    elif long > 200 * short:
        return None
    new = [half_even(height, UNIT) * UNIT, half_even(width, UNIT) * UNIT]
    if new[0] * new[1] < min_pixels:
        factor = math.sqrt(min_pixels / (height * width))
        new = [-int(-(side * factor) // UNIT) * UNIT for side in (height, width)]
    # The published processor stops where growing passes the upper bound; here that bound is the last word.
    if new[0] * new[1] > max_pixels:
        factor = math.sqrt(height * width / max_pixels)
        new = [int(side / factor // UNIT) * UNIT for side in (height, width)]
        if 0 in new:
            flat = new.index(0)
            new[1 - flat] = max(min(new[1 - flat], max_pixels // 1024 * UNIT), UNIT)
            new[flat] = UNIT
    return new[0], new[1]


def chosen_frames(num_frames: int, rate_fps: float, rules: Rules) -> list[int]:
    if num_frames == 1:
        return [0]
    if rules.num_frames is not None:
        count: float = max(half_even(rules.num_frames, 2) * 2, rules.asked_min_frames + rules.asked_min_frames % 2)
        count = min(count, rules.max_frames - rules.max_frames % 2)
    else:
        count = num_frames / rate_fps * rules.fps
        if count < rules.min_frames + rules.min_frames % 2:
            count = rules.min_frames + rules.min_frames % 2
        if count > rules.max_frames - rules.max_frames % 2:
            count = rules.max_frames - rules.max_frames % 2
    if count > num_frames:
        count = num_frames
    even = int(count)
    even -= even % 2
    if even < 2:
        even = 2
    step = (num_frames - 1) / (even - 1)
    found: list[int] = []
    for position in range(even):
        index = num_frames - 1 if position == even - 1 else int(position * step)
        if index not in found[-1:]:
            found.append(index)
    return found


def frame_pixels(num_frames: int, rules: Rules) -> int:
    """The most pixels of each frame."""
    share = rules.total_pixels * 2 // num_frames
    most = share if share < rules.max_pixels else rules.max_pixels
    return most if most > rules.min_pixels else rules.min_pixels


def times(indices: list[int], rate_fps: float) -> list[np.float32]:
    return [np.float32(index) / np.float32(rate_fps) for index in indices]


def clock(time_s: np.float32) -> str:
    seconds = math.floor(float(time_s))
    minutes = 0
    while seconds >= 60:
        minutes, seconds = minutes + 1, seconds - 60
    return str(minutes).rjust(2, "0") + ":" + str(seconds).rjust(2, "0")


def audio_shares(times_s: list[np.float32], num_audio_tokens: int) -> list[tuple[int, int]]:
    """(start, length) per pair; length 0 where the sound has ended."""
    rate = np.float32(25.0 / 4)
    step_s = np.float32(1) / (np.float32(1) / (times_s[1] - times_s[0])) if len(times_s) > 1 else np.float32(1)
    starts = [int(times_s[i] * rate) for i in range(0, len(times_s), 2)]
    ends = [*starts[1:], int((times_s[-1] + step_s) * rate)]
    shares = []
    for start, end in zip(starts, ends, strict=True):
        stop = num_audio_tokens if end > num_audio_tokens else end
        shares.append((start, stop - start if stop > start else 0))
    return shares


def video_ids(
    pair_times_s: list[np.float32],
    pads_per_pair: int,
    shares: list[tuple[int, int]] | None,
    interleave_s: float,
    ids: Mapping[str, int],
    encode: Callable[[str], list[int]],
) -> list[int]:
    """`ids` by the words of MediaTokenIds; `shares` None for a silent video."""
    groups: list[list[int]] = []
    window = None
    for pair, time_s in enumerate(pair_times_s):
        if shares is None or interleave_s == 0:
            here: int = pair
        elif interleave_s == -1:
            here = 0
        else:
            here = 0
            while float(time_s) >= (here + 1) * interleave_s:
                here += 1
        if here != window:
            groups.append([])
            window = here
        groups[-1].append(pair)
    found = [ids["video_start"]]
    for group in groups:
        found += encode(clock(pair_times_s[group[0]]))
        for _ in group:
            found += [ids["vision_start"], *[ids["video_pad"]] * pads_per_pair, ids["vision_end"]]
        num_audio = sum(shares[pair][1] for pair in group) if shares is not None else 0
        if num_audio:
            found += [ids["audio_start"], *[ids["audio_pad"]] * num_audio, ids["audio_end"]]
    return [*found, ids["video_end"]]


def audio_tokens(num_samples: int) -> int:
    """Of a clip at 24 kHz: mel frames, two convolutions of stride two, groups of four."""
    count = num_samples // 240 + 1
    for divisor in (2, 2, 4):
        count = (count + divisor - 1) // divisor
    return count


def bilinear(picture_HWC: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float64]:
    """[3, height, width], normalised. Corners not aligned, no antialiasing, nothing rounded."""
    source = picture_HWC.astype(np.float64)
    out = np.empty((3, height, width))
    for row in range(height):
        top, bottom, below = _neighbours(row, source.shape[0], height)
        for column in range(width):
            left, right, beside = _neighbours(column, source.shape[1], width)
            upper = source[top, left] * (1 - beside) + source[top, right] * beside
            lower = source[bottom, left] * (1 - beside) + source[bottom, right] * beside
            out[:, row, column] = ((upper * (1 - below) + lower * below) - MEAN) / STD
    return out


def _neighbours(position: int, size_in: int, size_out: int) -> tuple[int, int, float]:
    if size_in == size_out:
        return position, position, 0.0
    place = max((position + 0.5) * size_in / size_out - 0.5, 0.0)
    first = min(int(place), size_in - 1)
    return first, min(first + 1, size_in - 1), place - first


def patches(frames: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """[pairs * h * w, 1536] of an even number of [3, H, W] frames."""
    _, height, width = frames[0].shape
    h, w = height // 16, width // 16
    out = np.empty((len(frames) // 2 * h * w, 1536))
    for pair in range(len(frames) // 2):
        for i in range(h):
            for j in range(w):
                row = pair * h * w + ((i // 2) * (w // 2) + j // 2) * 4 + (i % 2) * 2 + j % 2
                for channel in range(3):
                    for side in range(2):
                        cell = frames[2 * pair + side][channel, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
                        first = (channel * 2 + side) * 256
                        out[row, first : first + 256] = cell.reshape(256)
    return out


def log_mel(samples_CN: NDArray[np.float32]) -> NDArray[np.float64]:
    """[n // 240 + 1, 128] of sound at 24 kHz longer than 20 ms."""
    mono = samples_CN.astype(np.float64).mean(axis=0)
    padded = np.concatenate([mono[480:0:-1], mono, mono[-2:-482:-1]])
    window = np.array([0.5 - 0.5 * math.cos(2 * math.pi * n / 960) for n in range(960)])
    turns = np.exp(-2j * np.pi * np.outer(np.arange(960), np.arange(481)) / 960)
    top = 2595 * math.log10(1 + 12_000 / 700)
    corners = [700 * (10 ** (top * k / 129 / 2595) - 1) for k in range(130)]
    out = np.empty((len(mono) // 240 + 1, 128))
    for frame in range(len(out)):
        magnitude = np.abs((padded[240 * frame : 240 * frame + 960] * window) @ turns)
        for band in range(128):
            low, peak, high = corners[band : band + 3]
            total = 0.0
            for k in range(math.ceil(low / 25), math.floor(high / 25) + 1):
                hz = 25.0 * k
                weight = (hz - low) / (peak - low) if hz <= peak else (high - hz) / (high - peak)
                total += weight * magnitude[k]
            out[frame, band] = math.log(max(total, 1e-7))
    return out
