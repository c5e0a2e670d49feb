"""A video and its sound need not last equally long: what is kept, what is left out, and that nothing fails for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder import LocalEncoder
from preprocess import MediaOptions, MediaTokenIds, MediaUndecodable, Modality, expand
from tests.fakes.clips import make_video, sine

IDS = MediaTokenIds(
    vision_start=1, vision_end=2, image_pad=3, video_pad=4, audio_pad=5,
    video_start=6, video_end=7, audio_start=8, audio_end=9,
)  # fmt: skip
FOUR_FRAMES = MediaOptions(num_frames=4)


@pytest.fixture(scope="module")
def local(tiny_model_dir: Path) -> Iterator[LocalEncoder]:
    encoder = LocalEncoder(tiny_model_dir, threads=1)
    yield encoder
    encoder.close()


def clip(num_frames: int, sound_s: float | None, **options: Any) -> bytes:
    """An MP4 with H.264 and, if there is sound, AAC."""
    sound = None if sound_s is None else sine(sound_s, tone_hz=600)[:, 0]
    return make_video(num_frames, sound=sound, **options)


# Four of forty frames at 10 fps: pairs start at 0 and 2.6 s, the last ends a step of 1.3 s after 3.9 s, at 5.2 s. At
# 6.25 rows a second that is rows 0 to 16 and 16 to 32. A codec frame of AAC is 43 ms, a row 160 ms.
@pytest.mark.parametrize(
    ("sound_s", "slices"),
    [
        (0.03, ((0, 1), (16, 0))),
        (1.0, ((0, 7), (16, 0))),
        (2.5, ((0, 16), (16, 0))),
        (2.6, ((0, 16), (16, 1))),
        (4.0, ((0, 16), (16, 10))),
        (5.1, ((0, 16), (16, 16))),
        (9.0, ((0, 16), (16, 16))),
    ],
)
def test_sound_shorter_as_long_and_longer(
    sound_s: float, slices: tuple[tuple[int, int], ...], local: LocalEncoder
) -> None:
    content = clip(40, sound_s)
    layout, rows, _, _ = local.encode(content, Modality.VIDEO, FOUR_FRAMES)
    assert layout.audio_slices == slices
    _, alone, _, _ = local.encode(content, Modality.AUDIO)
    kept = sum(length for _, length in slices)
    assert layout.num_audio_rows == kept
    assert len(alone) >= kept
    # What is kept is the sound's own rows from the first on, after all rows of the pictures.
    np.testing.assert_array_equal(rows[layout.num_vision_tokens :], alone[:kept])
    silent, pictures, _, _ = local.encode(content, Modality.VIDEO, MediaOptions(num_frames=4, use_audio=False))
    np.testing.assert_array_equal(rows[: layout.num_vision_tokens], pictures)
    assert silent.audio_slices == ()

    expansion = expand(layout, IDS, lambda text: [ord(character) for character in text])
    # Both pairs are there; audio delimiters only where there is sound.
    assert expansion.token_ids.count(IDS.vision_start) == 2
    assert expansion.token_ids.count(IDS.audio_start) == sum(length > 0 for _, length in slices)
    assert expansion.token_ids.count(IDS.audio_pad) == kept
    placed = [row for run in expansion.runs for row in range(run.row_start, run.row_start + run.length)]
    assert sorted(placed) == list(range(len(rows)))


def test_no_track(local: LocalEncoder) -> None:
    content = clip(40, None)
    for options in (FOUR_FRAMES, MediaOptions(num_frames=4, use_audio=False)):
        layout, rows, _, _ = local.encode(content, Modality.VIDEO, options)
        assert layout.audio_slices == ()
        assert len(rows) == layout.num_vision_tokens
    with pytest.raises(MediaUndecodable, match="use_audio is true, but the video has no audio track") as refused:
        local.encode(content, Modality.VIDEO, MediaOptions(num_frames=4, use_audio=True))
    assert refused.value.status == 422


def test_a_track_that_is_asked_for_and_there(local: LocalEncoder) -> None:
    content = clip(40, 4.0)
    asked = local.encode(content, Modality.VIDEO, MediaOptions(num_frames=4, use_audio=True))
    by_itself = local.encode(content, Modality.VIDEO, FOUR_FRAMES)
    assert asked[0] == by_itself[0]
    np.testing.assert_array_equal(asked[1], by_itself[1])


def test_a_video_too_short_for_one_row_of_sound(local: LocalEncoder) -> None:
    # Two frames at 30 fps end at 67 ms: before the first row of sound is over.
    layout, rows, _, _ = local.encode(clip(2, 1.0, rate=30), Modality.VIDEO)
    assert layout.audio_slices == ((0, 0),)
    assert len(rows) == layout.num_vision_tokens
    expansion = expand(layout, IDS, lambda text: [])
    assert IDS.audio_start not in expansion.token_ids


def test_one_frame_with_sound(local: LocalEncoder) -> None:
    # A single frame is taken to last a second.
    layout, rows, _, _ = local.encode(clip(1, 3.0), Modality.VIDEO)
    assert layout.audio_slices == ((0, 6),)
    assert len(rows) == layout.num_vision_tokens + 6
