"""Token expansion: counts of the worked examples, and that every embedding row is placed exactly once, in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess import MediaLayout, MediaTokenIds, Modality, expand
from preprocess.tokens import label, slice_audio

IDS = MediaTokenIds(
    vision_start=1, vision_end=2, image_pad=3, video_pad=4, audio_pad=5,
    video_start=6, video_end=7, audio_start=8, audio_end=9,
)  # fmt: skip


def ascii_ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def video_layout(num_pairs: int, slices: tuple[tuple[int, int], ...] = ()) -> MediaLayout:
    times = tuple(float(np.float32(2.2 * pair)) for pair in range(num_pairs))
    return MediaLayout(Modality.VIDEO, (num_pairs, 2, 4), times, slices, sum(length for _, length in slices))


def test_image() -> None:
    expansion = expand(MediaLayout(Modality.IMAGE, (1, 2, 4)), IDS, ascii_ids)
    assert expansion.token_ids == [1, 3, 3, 2]
    assert [(run.offset, run.length, run.row_start) for run in expansion.runs] == [(1, 2, 0)]


def test_audio() -> None:
    expansion = expand(MediaLayout(Modality.AUDIO, num_audio_rows=3), IDS, ascii_ids)
    assert expansion.token_ids == [8, 5, 5, 5, 9]
    assert [(run.offset, run.length, run.row_start) for run in expansion.runs] == [(1, 3, 0)]


def test_video_without_audio() -> None:
    expansion = expand(video_layout(2), IDS, ascii_ids)
    assert expansion.token_ids == [
        6, *ascii_ids("00:00"), 1, 4, 4, 2,
        *ascii_ids("00:02"), 1, 4, 4, 2, 7,
    ]  # fmt: skip
    assert [(run.offset, run.length, run.row_start) for run in expansion.runs] == [(7, 2, 0), (16, 2, 2)]


def test_video_with_audio_pair_by_pair() -> None:
    expansion = expand(video_layout(2, ((0, 3), (3, 1))), IDS, ascii_ids)
    assert expansion.token_ids == [
        6, *ascii_ids("00:00"), 1, 4, 4, 2, 8, 5, 5, 5, 9,
        *ascii_ids("00:02"), 1, 4, 4, 2, 8, 5, 9, 7,
    ]  # fmt: skip
    assert [(run.length, run.row_start) for run in expansion.runs] == [(2, 0), (3, 4), (2, 2), (1, 7)]


def test_video_with_audio_as_one_group() -> None:
    expansion = expand(video_layout(2, ((0, 3), (3, 1))), IDS, ascii_ids, interleave_s=-1)
    assert expansion.token_ids == [6, *ascii_ids("00:00"), 1, 4, 4, 2, 1, 4, 4, 2, 8, 5, 5, 5, 5, 9, 7]
    assert [(run.length, run.row_start) for run in expansion.runs] == [(2, 0), (2, 2), (4, 4)]


def test_a_pair_after_the_end_of_the_sound_has_no_audio_delimiters() -> None:
    expansion = expand(video_layout(2, ((0, 3), (3, 0))), IDS, ascii_ids)
    assert expansion.token_ids.count(IDS.audio_start) == 1
    assert expansion.token_ids[-10:] == [*ascii_ids("00:02"), 1, 4, 4, 2, 7]


def test_without_audio_grouping_changes_nothing() -> None:
    layout = video_layout(4)
    assert expand(layout, IDS, ascii_ids, interleave_s=-1) == expand(layout, IDS, ascii_ids)


@given(data=st.data(), num_pairs=st.integers(1, 8), interleave_s=st.sampled_from([0.0, -1.0, 1.0, 4.0, 5.5]))
@settings(max_examples=100, deadline=None)
def test_every_row_is_placed_once(data: st.DataObject, num_pairs: int, interleave_s: float) -> None:
    lengths = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=num_pairs, max_size=num_pairs))
    starts = np.cumsum([0, *(lengths or [])]).tolist()
    slices = tuple(zip(starts, lengths, strict=False)) if lengths else ()
    layout = video_layout(num_pairs, slices)
    expansion = expand(layout, IDS, ascii_ids, interleave_s=interleave_s)
    placed: list[int] = []
    for run in expansion.runs:
        rows = range(run.row_start, run.row_start + run.length)
        pad = IDS.video_pad if run.row_start < layout.num_vision_tokens else IDS.audio_pad
        assert expansion.token_ids[run.offset : run.offset + run.length] == [pad] * run.length
        placed.extend(rows)
    assert sorted(placed) == list(range(layout.num_rows))
    assert sum(token in IDS.placeholders for token in expansion.token_ids) == layout.num_rows
    # Within a modality, rows appear in order.
    assert [row for row in placed if row < layout.num_vision_tokens] == list(range(layout.num_vision_tokens))


def test_labels() -> None:
    assert [label(time_s) for time_s in (0.0, 59.99, 60.0, 605.9, 3599.0, 6000.0)] == [
        "00:00", "00:59", "01:00", "10:05", "59:59", "100:00",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_frames", "rate", "num_audio_tokens", "expected"),
    [
        ([0, 27, 55, 83, 110, 138, 166, 193, 221, 249], 25.0, 63, [(0, 13), (13, 14), (27, 14), (41, 14), (55, 8)]),
        ([0, 10, 21, 31, 42, 52, 63, 74], 25.0, 19, [(0, 5), (5, 5), (10, 5), (15, 4)]),
    ],
)
def test_audio_slices_of_the_worked_examples(
    num_frames: list[int], rate: float, num_audio_tokens: int, expected: list[tuple[int, int]]
) -> None:
    timestamps_s = np.asarray(num_frames, dtype=np.float32) / np.float32(rate)
    assert slice_audio(timestamps_s, num_audio_tokens=num_audio_tokens, tokens_per_s=6.25) == tuple(expected)


def test_audio_slices_when_the_track_ends_early_or_late() -> None:
    timestamps_s = np.arange(6, dtype=np.float32)
    assert slice_audio(timestamps_s, num_audio_tokens=15, tokens_per_s=6.25) == ((0, 12), (12, 3), (25, 0))
    # Six frames a second apart last until 6 s: int(37.5) rows, whatever the track holds beyond.
    assert slice_audio(timestamps_s, num_audio_tokens=500, tokens_per_s=6.25) == ((0, 12), (12, 13), (25, 12))
    assert slice_audio(timestamps_s[:1], num_audio_tokens=500, tokens_per_s=6.25) == ((0, 6),)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="interleave_s is -3"):
        expand(video_layout(1), IDS, ascii_ids, interleave_s=-3)
    with pytest.raises(ValueError, match="2 timestamps"):
        expand(MediaLayout(Modality.VIDEO, (3, 2, 2), (0.0, 1.0)), IDS, ascii_ids)
    with pytest.raises(ValueError, match="rows"):
        expand(MediaLayout(Modality.IMAGE, (1, 2, 2), num_audio_rows=2), IDS, ascii_ids)


def test_ids_are_read_from_either_level_and_missing_ones_named() -> None:
    keys = ("vision_start", "vision_end", "image", "video", "audio", "video_start", "video_end", "audio_start")
    section = {f"{key}_token_id": position for position, key in enumerate(keys)}
    ids = MediaTokenIds.from_hf({"processor_config": section, "audio_end_token_id": 99})
    assert ids.audio_end == 99
    with pytest.raises(ValueError, match="audio_end_token_id is None"):
        MediaTokenIds.from_hf({"processor_config": section})
