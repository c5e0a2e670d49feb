"""The whole path for each modality, from file bytes to tower input and layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import preprocess
from preprocess import (
    Crew,
    MediaDecodeTimeout,
    MediaError,
    MediaKey,
    MediaOptions,
    MediaPart,
    MediaUndecodable,
    Modality,
    Patches,
    Pixels,
    PreparedMedia,
    ProcessorConfig,
)
from preprocess.pipeline import LayoutChanged, OpenMedia, open_media, prepare
from tests.fakes.clips import blocks, damaged, make_video, picture_file, sine, sound_file

KEY = MediaKey("0" * 32)


def run(content: bytes, modality: Modality, config: ProcessorConfig, **options: Any) -> PreparedMedia:
    return prepare(content, modality=modality, options=MediaOptions(**options), config=config, key=KEY)


def test_image(tiny: ProcessorConfig) -> None:
    prepared = run(picture_file(blocks(100, 200, 0)), Modality.IMAGE, tiny)
    assert prepared.key == KEY
    assert prepared.patches is not None
    assert prepared.patches.grid_thw == prepared.layout.grid_thw == (1, 6, 12)
    assert prepared.patches.pixel_values.shape == (72, 1536)
    assert prepared.layout.num_rows == prepared.layout.num_vision_tokens == 18
    # Both frames of an image's pair are the picture.
    cells = prepared.patches.pixel_values.reshape(72, 3, 2, 256)
    np.testing.assert_array_equal(cells[:, :, 0], cells[:, :, 1])
    assert prepared.mel is None


def test_image_options(tiny: ProcessorConfig) -> None:
    small = run(picture_file(blocks(200, 200, 0)), Modality.IMAGE, tiny, max_pixels=10_000)
    assert small.layout.grid_thw == (1, 6, 6)


def test_audio(tiny: ProcessorConfig) -> None:
    prepared = run(sound_file(sine(3.2, channels=2)), Modality.AUDIO, tiny)
    assert prepared.layout.num_rows == prepared.layout.num_audio_rows == 21
    assert prepared.layout.num_vision_tokens == 0
    assert prepared.mel is not None
    assert prepared.mel.log_mel.shape == (321, 128)
    assert prepared.mel.duration_s == pytest.approx(3.2)
    assert prepared.patches is None


def test_video_with_sound(tiny: ProcessorConfig) -> None:
    prepared = run(make_video(30, sound=sine(3.0)[:, 0]), Modality.VIDEO, tiny)
    layout = prepared.layout
    assert prepared.mel is not None
    assert layout.grid_thw == (4, 6, 8)
    assert len(layout.timestamps_s) == len(layout.audio_slices) == 4
    assert all(time_s == float(np.float32(time_s)) for time_s in layout.timestamps_s)
    assert layout.num_audio_rows == sum(length for _, length in layout.audio_slices) > 0
    assert layout.num_rows == 48 + layout.num_audio_rows
    assert layout.num_audio_rows <= prepared.mel.num_tokens


def test_sound_that_ends_early_keeps_every_pair(tiny: ProcessorConfig) -> None:
    prepared = run(make_video(60, sound=sine(1.0)[:, 0]), Modality.VIDEO, tiny)
    lengths = [length for _, length in prepared.layout.audio_slices]
    assert lengths[0] > 0
    assert lengths[-1] == 0
    assert len(lengths) == len(prepared.layout.timestamps_s)


def test_use_audio(tiny: ProcessorConfig) -> None:
    loud, silent = make_video(20, sound=sine(2.0)[:, 0]), make_video(20)
    assert run(loud, Modality.VIDEO, tiny, use_audio=False).mel is None
    assert run(loud, Modality.VIDEO, tiny, use_audio=True).mel is not None
    assert run(silent, Modality.VIDEO, tiny).layout.audio_slices == ()
    with pytest.raises(MediaUndecodable, match="use_audio is true"):
        run(silent, Modality.VIDEO, tiny, use_audio=True)


@pytest.mark.parametrize(
    ("options", "num_pairs"), [({}, 4), ({"fps": 3.0}, 6), ({"num_frames": 6}, 3), ({"max_frames": 4}, 2)]
)
def test_video_options(tiny: ProcessorConfig, options: dict[str, Any], num_pairs: int) -> None:
    assert len(run(make_video(40), Modality.VIDEO, tiny, **options).layout.timestamps_s) == num_pairs


@pytest.mark.parametrize("modality", list(Modality))
def test_random_bytes_and_flipped_bits_are_media_errors_or_media(modality: Modality, tiny: ProcessorConfig) -> None:
    rng = np.random.default_rng(0)
    whole = {
        Modality.IMAGE: picture_file(blocks(64, 64, 1), "JPEG"),
        Modality.VIDEO: make_video(20, container="matroska", sound=sine(2.0)[:, 0]),
        Modality.AUDIO: sound_file(sine(0.3), kind="FLAC"),
    }[modality]
    for round_number in range(25):
        damaged = np.frombuffer(whole, np.uint8).copy()
        at = rng.integers(0, len(damaged), size=1 + round_number)
        damaged[at] = rng.integers(0, 256, size=len(at))
        for content in (damaged.tobytes(), whole[: int(rng.integers(0, len(whole)))], rng.bytes(500)):
            try:
                prepared = run(content, modality, tiny)
            except MediaError:
                continue
            assert prepared.layout.num_rows > 0


def test_the_public_names_exist() -> None:
    assert all(hasattr(preprocess, name) for name in preprocess.__all__)
    assert preprocess.prepare is prepare
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        preprocess.nonsense  # noqa: B018


def test_the_package_and_its_light_modules_do_not_load_torch() -> None:
    code = (
        "import preprocess, preprocess.fetch, preprocess.tokens, preprocess.keys, sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


def opened(content: bytes, modality: Modality, config: ProcessorConfig, crew: Crew | None = None) -> OpenMedia:
    return open_media(content, modality=modality, options=MediaOptions(), config=config, key=KEY, crew=crew)


def test_media_opened_and_decoded_in_parts_are_what_prepare_makes(tiny: ProcessorConfig, crew: Crew) -> None:
    contents = {
        Modality.IMAGE: picture_file(blocks(100, 200, 0)),
        Modality.VIDEO: make_video(90, gop=10, sound=sine(9.0)[:, 0]),
        Modality.AUDIO: sound_file(sine(1.0)),
    }
    for modality, content in contents.items():
        whole = run(content, modality, tiny)
        media = opened(content, modality, tiny, crew)
        assert media.key == KEY
        assert media.layout == whole.layout
        parts: list[MediaPart] = []
        media.decode(parts.append, patches_per_part=150)
        parts.sort(key=lambda part: part.first_pair)
        values = [part.pictures.pixel_values for part in parts if isinstance(part.pictures, Patches)]
        if whole.patches is None:
            assert not parts
        else:
            np.testing.assert_array_equal(np.concatenate(values), whole.patches.pixel_values)
        assert (media.mel is None) == (whole.mel is None)
        if media.mel is not None and whole.mel is not None:
            np.testing.assert_array_equal(media.mel.log_mel, whole.mel.log_mel)
        assert media.warnings == whole.warnings


def test_raw_pictures_come_with_the_size_they_are_to_have(tiny: ProcessorConfig) -> None:
    picture = blocks(100, 200, 0)
    media = opened(picture_file(picture), Modality.IMAGE, tiny)
    parts: list[MediaPart] = []
    media.decode(parts.append, raw=True)
    (part,) = parts
    assert isinstance(part.pictures, Pixels)
    first, second = part.pictures.frames
    assert first is second
    np.testing.assert_array_equal(first, picture)
    assert part.pictures.grid_thw == media.layout.grid_thw
    assert (part.pictures.height, part.pictures.width) == (96, 192)


def test_a_layout_that_changes_says_so(tiny: ProcessorConfig, crew: Crew) -> None:
    content = damaged(make_video(40, corner=True), range(20, 40))
    media = opened(content, Modality.VIDEO, tiny, crew)
    first_layout = media.layout
    with pytest.raises(LayoutChanged) as change:
        media.decode(lambda part: None, patches_per_part=1)
    again = change.value.opened
    assert again.key == KEY
    assert again.layout.timestamps_s[-1] < 2.0 < first_layout.timestamps_s[-1]
    parts: list[MediaPart] = []
    again.decode(parts.append)
    assert [part.pictures.grid_thw for part in parts] == [again.layout.grid_thw]
    whole = run(content, Modality.VIDEO, tiny)
    assert whole.layout == again.layout
    assert any("decode; sampled over those" in warning for warning in whole.warnings)


def test_a_missing_track_that_was_asked_for_is_an_error_whoever_looks(tiny: ProcessorConfig, crew: Crew) -> None:
    media = open_media(
        make_video(20),
        modality=Modality.VIDEO,
        options=MediaOptions(use_audio=True),
        config=tiny,
        key=KEY,
        crew=crew,
    )
    for _ in range(2):
        with pytest.raises(MediaUndecodable, match="use_audio is true"):
            _ = media.layout


@pytest.mark.parametrize("num_threads", [0, 2])
def test_the_deadline_holds_in_every_thread(tiny: ProcessorConfig, num_threads: int) -> None:
    team = Crew(num_threads)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise MediaDecodeTimeout("late")

    with pytest.raises(MediaDecodeTimeout):
        prepare(
            make_video(200, gop=10, sound=sine(20.0)[:, 0]),
            modality=Modality.VIDEO,
            options=MediaOptions(fps=5.0),
            config=tiny,
            key=KEY,
            crew=team,
            check_deadline=check,
        )
    team.close()
