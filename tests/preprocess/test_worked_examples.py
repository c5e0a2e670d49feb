"""The published processor's worked examples, by the full list of ids, and the corners of its rules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preprocess import (
    Frames,
    MediaInvalid,
    MediaKey,
    MediaLayout,
    MediaOptions,
    MediaTokenIds,
    Modality,
    ProcessorConfig,
    Waveform,
    expand,
)
from preprocess.audio import log_mel
from preprocess.config import VideoBudget
from preprocess.patchify import patchify
from preprocess.pipeline import prepare
from preprocess.resize import frame_indices, frame_max_pixels, num_sampled_frames, smart_resize
from preprocess.tokens import label, slice_audio
from preprocess.types import num_audio_tokens
from tests.fakes.clips import blocks, picture_file

# The published ids: vision 151652/3, image 55, video 56, audio pad 69, video 70/71, audio 73/74.
IDS = MediaTokenIds(
    vision_start=151652, vision_end=151653, image_pad=151655, video_pad=151656, audio_pad=151669,
    video_start=151670, video_end=151671, audio_start=151673, audio_end=151674,
)  # fmt: skip


def label_ids(text: str) -> list[int]:
    """Digits 15 to 24 and the colon 25, as in the published vocabulary."""
    return [25 if character == ":" else 15 + int(character) for character in text]


@pytest.fixture
def published(configs: dict[str, ProcessorConfig]) -> ProcessorConfig:
    return configs["real"]


IMAGES = [
    # given (w, h), resized (w, h), grid, patches, pads, ids
    ((1024, 768), (1024, 768), (1, 48, 64), 3072, 768, 770),
    ((640, 480), (640, 480), (1, 30, 40), 1200, 300, 302),
    ((224, 224), (224, 224), (1, 14, 14), 196, 49, 51),
    ((1920, 1080), (1920, 1088), (1, 68, 120), 8160, 2040, 2042),
    ((4000, 3000), (3328, 2496), (1, 156, 208), 32448, 8112, 8114),
    ((64, 64), (96, 96), (1, 6, 6), 36, 9, 11),
    ((28, 100), (64, 192), (1, 12, 4), 48, 12, 14),
    ((100, 20), (224, 64), (1, 4, 14), 56, 14, 16),
]


@pytest.mark.parametrize(("given", "resized", "grid", "num_patches", "num_pads", "num_ids"), IMAGES)
def test_images(
    given: tuple[int, int],
    resized: tuple[int, int],
    grid: tuple[int, int, int],
    num_patches: int,
    num_pads: int,
    num_ids: int,
    published: ProcessorConfig,
) -> None:
    budget = published.image_budget(MediaOptions())
    height, width = smart_resize(given[1], given[0], min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
    assert (width, height) == resized
    layout = MediaLayout(Modality.IMAGE, (1, height // 16, width // 16))
    if num_patches <= 1200:
        # The rest only differ in size, and their pixels are golden cases.
        content = picture_file(blocks(given[1], given[0], 1))
        key = MediaKey("0" * 32)
        prepared = prepare(content, modality=Modality.IMAGE, options=MediaOptions(), config=published, key=key)
        assert prepared.patches is not None
        assert prepared.patches.pixel_values.shape == (num_patches, 1536)
        layout = prepared.layout
    assert layout.grid_thw == grid
    assert np.prod(grid) == num_patches
    assert layout.num_rows == num_pads
    expansion = expand(layout, IDS, label_ids)
    assert expansion.token_ids == [151652] + [151655] * num_pads + [151653]
    assert len(expansion.token_ids) == num_ids


VIDEOS: dict[str, dict[str, Any]] = {
    "10 s": {
        "file": (250, 25.0, 640, 360),
        "indices": [0, 27, 55, 83, 110, 138, 166, 193, 221, 249],
        "resized": (640, 352),
        "grid": (5, 22, 40),
        "labels": ["00:00", "00:02", "00:04", "00:06", "00:08"],
        "pads": 220,
        "ids": 1137,
        "audio": (63, [0, 13, 27, 41, 55], [13, 14, 14, 14, 8], 1210),
    },
    "3 s": {
        "file": (75, 25.0, 640, 360),
        "indices": [0, 10, 21, 31, 42, 52, 63, 74],
        "resized": (640, 352),
        "grid": (4, 22, 40),
        "labels": ["00:00", "00:00", "00:01", "00:02"],
        "pads": 220,
        "ids": 910,
        "audio": (19, [0, 5, 10, 15], [5, 5, 5, 4], 937),
    },
    "60 s": {
        "file": (1800, 30.0, 1920, 1080),
        "num_frames": 60,
        "resized": (1920, 1088),
        "grid": (30, 68, 120),
        "pads": 2040,
        "ids": 61_412,
        "audio": (376, None, None, 61_848),
    },
    "3600 s": {
        "file": (108_000, 30.0, 1920, 1080),
        "num_frames": 3600,
        "resized": (512, 288),
        "grid": (1800, 18, 32),
        "pads": 144,
        "ids": 271_802,
    },
}


def video_layout(
    file: tuple[int, float, int, int], budget: VideoBudget, num_audio: int | None = None
) -> tuple[MediaLayout, NDArray[np.int64]]:
    num_frames, rate_fps, width, height = file
    indices = frame_indices(num_frames, num_sampled_frames(num_frames, rate_fps, budget))
    times_s = indices.astype(np.float32) / np.float32(rate_fps)
    most = frame_max_pixels(len(indices), budget)
    new_h, new_w = smart_resize(height, width, min_pixels=budget.min_pixels, max_pixels=most)
    slices: tuple[tuple[int, int], ...] = ()
    if num_audio is not None:
        slices = slice_audio(times_s, num_audio_tokens=num_audio, tokens_per_s=6.25)
    pair_times_s = tuple(times_s[::2].tolist())
    grid = (len(pair_times_s), new_h // 16, new_w // 16)
    return MediaLayout(Modality.VIDEO, grid, pair_times_s, slices, sum(length for _, length in slices)), indices


@pytest.mark.parametrize("name", VIDEOS)
def test_videos(name: str, published: ProcessorConfig) -> None:
    case = VIDEOS[name]
    layout, indices = video_layout(case["file"], published.video_budget(MediaOptions()))
    assert indices.tolist() == case.get("indices", indices.tolist())
    assert len(indices) == case.get("num_frames", len(indices))
    assert (indices[0], indices[-1]) == (0, case["file"][0] - 1)
    assert layout.grid_thw == case["grid"]
    assert layout.grid_thw == (len(indices) // 2, case["resized"][1] // 16, case["resized"][0] // 16)
    assert layout.num_vision_tokens == case["pads"] * case["grid"][0]
    labels = [label(time_s) for time_s in layout.timestamps_s]
    assert labels == case.get("labels", labels)
    expected = [151670]
    for text in labels:
        expected += [*label_ids(text), 151652, *[151656] * case["pads"], 151653]
    expected.append(151671)
    assert expand(layout, IDS, label_ids).token_ids == expected
    assert len(expected) == case["ids"]


@pytest.mark.parametrize("name", [name for name in VIDEOS if "audio" in VIDEOS[name]])
def test_videos_with_sound(name: str, published: ProcessorConfig) -> None:
    case = VIDEOS[name]
    num_audio, starts, lengths, num_ids = case["audio"]
    duration_s = case["file"][0] / case["file"][1]
    assert num_audio_tokens(int(duration_s * 24_000) // 240 + 1) == num_audio
    budget = published.video_budget(MediaOptions())
    layout, _ = video_layout(case["file"], budget, num_audio)
    if starts is not None:
        assert [start for start, _ in layout.audio_slices] == starts
        assert [length for _, length in layout.audio_slices] == lengths
    # Slices follow one another without a gap, and the sound of these three is used up.
    assert sum(length for _, length in layout.audio_slices) == num_audio
    expected = [151670]
    for time_s, (_, length) in zip(layout.timestamps_s, layout.audio_slices, strict=True):
        expected += [*label_ids(label(time_s)), 151652, *[151656] * case["pads"], 151653]
        expected += [151673, *[151669] * length, 151674]
    expected.append(151671)
    assert expand(layout, IDS, label_ids).token_ids == expected
    assert len(expected) == num_ids


@pytest.mark.parametrize(
    ("interleave_s", "groups"),
    [
        (0.0, [[0], [1], [2], [3], [4]]),
        (2.2, [[0], [1], [2], [3], [4]]),
        (4.0, [[0, 1], [2, 3], [4]]),
        (4.5, [[0, 1, 2], [3, 4]]),
        (100.0, [[0, 1, 2, 3, 4]]),
        (-1.0, [[0, 1, 2, 3, 4]]),
    ],
)
def test_interleaving(interleave_s: float, groups: list[list[int]], published: ProcessorConfig) -> None:
    # Pairs start at 0, 2.2, 4.4, 6.64 and 8.84 s.
    layout, _ = video_layout((250, 25.0, 640, 360), published.video_budget(MediaOptions()), 63)
    labels, lengths = VIDEOS["10 s"]["labels"], VIDEOS["10 s"]["audio"][2]
    expected = [151670]
    for group in groups:
        expected += label_ids(labels[group[0]])
        expected += [151652, *[151656] * 220, 151653] * len(group)
        expected += [151673, *[151669] * sum(lengths[pair] for pair in group), 151674]
    expected.append(151671)
    assert expand(layout, IDS, label_ids, interleave_s=interleave_s).token_ids == expected


@pytest.mark.parametrize(
    ("seconds", "mel_frames", "halved", "quartered", "num_rows"),
    [
        (0.1, 11, 6, 3, 1),
        (1, 101, 51, 26, 7),
        (3.2, 321, 161, 81, 21),
        (10, 1001, 501, 251, 63),
        (30, 3001, 1501, 751, 188),
        (60, 6001, 3001, 1501, 376),
        (120, 12_001, 6001, 3001, 751),
        (3600, 360_001, 180_001, 90_001, 22_501),
    ],
)
def test_sounds(
    seconds: float, mel_frames: int, halved: int, quartered: int, num_rows: int, published: ProcessorConfig
) -> None:
    num_samples = round(seconds * 24_000)
    if seconds <= 120:
        mel = log_mel(Waveform(np.zeros((1, num_samples), np.float32), 24_000), published.audio)
        assert mel.log_mel.shape == (mel_frames, 128)
        assert mel.num_tokens == num_rows
    assert num_samples // published.audio.hop_length + 1 == mel_frames
    # Cut into pieces of 6000 frames, as the tower does, or not: the counts are the same.
    pieces = [6000] * (mel_frames // 6000) + [mel_frames % 6000]
    assert sum(math.ceil(piece / 2) for piece in pieces) == halved
    assert sum(math.ceil(math.ceil(piece / 2) / 2) for piece in pieces) == quartered
    assert sum(num_audio_tokens(piece) for piece in pieces) == num_audio_tokens(mel_frames) == num_rows
    expansion = expand(MediaLayout(Modality.AUDIO, num_audio_rows=num_rows), IDS, label_ids)
    assert expansion.token_ids == [151673] + [151669] * num_rows + [151674]


def test_a_video_of_an_hour_with_its_sound(published: ProcessorConfig) -> None:
    layout, _ = video_layout((108_000, 30.0, 1920, 1080), published.video_budget(MediaOptions()), 22_501)
    assert layout.num_audio_rows == 22_501
    num_ids = len(expand(layout, IDS, label_ids).token_ids)
    assert num_ids == 271_802 + 2 * 1800 + 22_501


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "00:00"),
        (0.999, "00:00"),
        (59.9999, "00:59"),
        (60.0, "01:00"),
        (3599.99, "59:59"),
        (3600.0, "60:00"),
        (5999.5, "99:59"),
        (6000.0, "100:00"),
        (7199.75, "119:59"),
        # 24,000 frames at 24,000 / 1001 per second: 1001 s in float32, a little less in double precision.
        (float(np.float32(24_000) / np.float32(24_000 / 1001)), "16:41"),
    ],
)
def test_labels(time_s: float, text: str) -> None:
    assert label(time_s) == text
    layout = MediaLayout(Modality.VIDEO, (1, 2, 2), (time_s,))
    assert expand(layout, IDS, label_ids).token_ids == [151670, *label_ids(text), 151652, 151656, 151653, 151671]


@pytest.mark.parametrize(
    ("given", "resized"),
    [
        # Half to even: 1.5 and 2.5 units are both 2, 3.5 and 4.5 both 4, 5.5 is 6.
        ((48, 80), (64, 64)),
        ((112, 144), (128, 128)),
        ((176, 176), (192, 192)),
        # A side below a unit: both are scaled first, rounded and not cut off (80.5 is 81, which is three units).
        ((31, 78), (32, 96)),
        ((1, 1), (32, 32)),
        ((31, 31), (32, 32)),
        # Exactly 200 times as long as wide is allowed; below a unit there is no check.
        ((32, 6400), (32, 6400)),
        ((31, 31_000), (32, 32_000)),
    ],
)
def test_rounding(given: tuple[int, int], resized: tuple[int, int]) -> None:
    bounds = {"min_pixels": 1024, "max_pixels": 8_388_608}
    assert smart_resize(*given, **bounds) == resized
    assert smart_resize(*given[::-1], **bounds) == resized[::-1]


def test_more_than_two_hundred_times_as_long_as_wide() -> None:
    for size in ((32, 6401), (6401, 32), (40, 8001)):
        with pytest.raises(MediaInvalid, match="aspect ratio is over 200"):
            smart_resize(*size, min_pixels=8192, max_pixels=8_388_608)


@pytest.mark.parametrize("max_pixels", [1024, 5000, 262_144, 8_388_608])
def test_a_strip_stays_within_the_pixels_allowed(max_pixels: int) -> None:
    # A hundred million pixels in one row are a file of some kilobytes; scaled to a height of 32 they are gigabytes.
    for length in (1_000_000, 100_000_000):
        longest = max_pixels // 1024 * 32
        assert smart_resize(1, length, min_pixels=1024, max_pixels=max_pixels) == (32, longest)
        assert smart_resize(length, 1, min_pixels=1024, max_pixels=max_pixels) == (longest, 32)
    height, width = smart_resize(33, 6000, min_pixels=1024, max_pixels=max_pixels)
    assert height * width <= max_pixels


@pytest.mark.parametrize(
    ("file", "options", "indices"),
    [
        # min_frames is null in the published settings, which means eight.
        ((20, 10.0), {}, [0, 2, 5, 8, 10, 13, 16, 19]),
        ((9, 10.0), {}, [0, 1, 2, 3, 4, 5, 6, 8]),
        ((8, 10.0), {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        # Fewer than eight: all of them, or all but one, as an even number is taken.
        ((7, 10.0), {}, [0, 1, 2, 3, 4, 6]),
        ((3, 10.0), {}, [0, 2]),
        ((2, 10.0), {}, [0, 1]),
        ((1, 10.0), {}, [0]),
        # 11.9 frames by rate are 10, odd bounds go inwards.
        ((119, 10.0), {}, [0, 13, 26, 39, 52, 65, 78, 91, 104, 118]),
        ((119, 10.0), {"max_frames": 5}, [0, 39, 78, 118]),
        ((119, 10.0), {"min_frames": 11}, [0, 10, 21, 32, 42, 53, 64, 75, 85, 96, 107, 118]),
        ((119, 10.0), {"fps": 0.1, "min_frames": 1}, [0, 118]),
        ((119, 10.0), {"fps": 240.0, "max_frames": 4}, [0, 39, 78, 118]),
        # A count: even, half to even, never more than there are.
        ((119, 10.0), {"num_frames": 4}, [0, 39, 78, 118]),
        ((119, 10.0), {"num_frames": 5}, [0, 39, 78, 118]),
        ((119, 10.0), {"num_frames": 3}, [0, 39, 78, 118]),
        ((119, 10.0), {"num_frames": 7}, [0, 16, 33, 50, 67, 84, 101, 118]),
        ((119, 10.0), {"num_frames": 2}, [0, 118]),
        ((5, 10.0), {"num_frames": 8}, [0, 1, 2, 4]),
    ],
)
def test_frames_chosen(
    file: tuple[int, float], options: dict[str, Any], indices: list[int], published: ProcessorConfig
) -> None:
    budget = published.video_budget(MediaOptions(**options))
    assert frame_indices(file[0], num_sampled_frames(*file, budget)).tolist() == indices


def test_a_count_in_the_model_s_settings(published: ProcessorConfig) -> None:
    config = replace(published, video=replace(published.video, num_frames=9))

    def num_sampled(**options: Any) -> int:
        return num_sampled_frames(1000, 10.0, config.video_budget(MediaOptions(**options)))

    assert num_sampled() == 8
    assert num_sampled(fps=1.0) == 100
    assert num_sampled(num_frames=12) == 12
    # Bounds that a request sets hold for the configured count as well.
    assert num_sampled(max_frames=5) == 4
    assert num_sampled(min_frames=11) == 12


def test_pixels_per_frame(published: ProcessorConfig) -> None:
    budget = published.video_budget(MediaOptions())
    # Twice the total, shared by the frames before an odd count is filled up; binding from 66 on.
    assert [frame_max_pixels(num, budget) for num in (2, 63, 64, 65, 66, 3600)] == [
        8_388_608, 8_388_608, 8_388_608, 8_259_552, 8_134_407, 149_130,
    ]  # fmt: skip
    # The lower bound of a frame is kept even where the total has less.
    assert frame_max_pixels(200_000, budget) == 8192


def test_an_odd_count_repeats_its_last_frame() -> None:
    pixels = np.stack([blocks(32, 64, seed) for seed in range(3)])
    patches = patchify(Frames(pixels, np.arange(3, dtype=np.float32)), height=32, width=64)
    assert patches.grid_thw == (2, 2, 4)
    cells = patches.pixel_values.reshape(2, 8, 3, 2, 256)
    assert not np.array_equal(cells[0, :, :, 0], cells[0, :, :, 1])
    np.testing.assert_array_equal(cells[1, :, :, 0], cells[1, :, :, 1])


def test_the_sound_of_a_single_frame() -> None:
    # No step between frames: one second is assumed, which is six rows.
    assert slice_audio(np.zeros(1, np.float32), num_audio_tokens=63, tokens_per_s=6.25) == ((0, 6),)
    assert slice_audio(np.zeros(1, np.float32), num_audio_tokens=2, tokens_per_s=6.25) == ((0, 2),)
