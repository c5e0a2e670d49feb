"""Generated video files: displayed size, the right frames at the right times, sound, or the expected error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from preprocess import MediaKey, MediaOptions, MediaUnsupported, ProcessorConfig
from preprocess.config import VideoBackend
from preprocess.crew import Crew
from preprocess.pipeline import LayoutChanged, open_media, prepare
from preprocess.types import MediaPart, MelFrames, Modality, Pixels, PreparedMedia
from tests.fakes.media.animation_cases import animation_cases
from tests.fakes.media.barcode import MARKS, BarcodeUnreadable, read_barcode, read_marks
from tests.fakes.media.case import Cartoon, Case, Clip, DamagedClip, Mark, Refusal, Tone
from tests.fakes.media.video_cases import video_cases
from tests.fakes.media.video_fault_cases import video_fault_cases
from tests.oracles import processor_oracle
from tests.oracles.unpatchify import unpatchify

CASES = video_cases() + animation_cases() + video_fault_cases()
KEY = MediaKey("0" * 32)


def cases_of(kind: type) -> list[Case]:
    return [case for case in CASES if isinstance(case.expect, kind)]


def options_of(case: Case) -> MediaOptions:
    if case.modality != Modality.VIDEO:
        return MediaOptions()
    return MediaOptions(num_frames=case.num_frames) if case.fps is None else MediaOptions(fps=case.fps)


def prepared(case: Case, content: bytes, config: ProcessorConfig) -> PreparedMedia:
    return prepare(content, modality=case.modality, options=options_of(case), config=config, key=KEY)


def pictures_of(media: PreparedMedia) -> NDArray[np.float64]:
    """[T, H, W, 3] as the tower gets them, T even."""
    assert media.patches is not None
    assert media.layout.grid_thw == media.patches.grid_thw
    return unpatchify(media.patches.pixel_values, media.patches.grid_thw)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    helpers = Crew(2)
    yield helpers
    helpers.close()


def raw_frames(case: Case, content: bytes, config: ProcessorConfig, crew: Crew) -> list[NDArray[np.uint8]]:
    """Decoded and upright, not resized; in parts of one pair, by three threads."""
    opened = open_media(content, modality=case.modality, options=options_of(case), config=config, key=KEY, crew=crew)
    while True:
        parts: list[MediaPart] = []
        try:
            opened.decode(parts.append, patches_per_part=1, raw=True)
        except LayoutChanged as change:
            opened = change.opened
        else:
            break
    assert [part.first_pair for part in sorted(parts, key=lambda part: part.first_pair)] == list(range(len(parts)))
    frames: list[NDArray[np.uint8]] = []
    for part in sorted(parts, key=lambda part: part.first_pair):
        assert isinstance(part.pictures, Pixels)
        frames.extend(part.pictures.frames)
    return frames


def even(values: tuple[int, ...]) -> list[int]:
    """With the last one repeated to make pairs."""
    return [*values, *values[-1:] * (len(values) % 2)]


def number_or_none(picture: NDArray[np.generic]) -> int | None:
    try:
        return read_barcode(picture)
    except BarcodeUnreadable:
        return None


def check_times(media: PreparedMedia, times_s: tuple[float, ...]) -> None:
    np.testing.assert_allclose(media.layout.timestamps_s, times_s[::2], rtol=1e-6, atol=1e-6)


def check_warnings(warnings: tuple[str, ...], pattern: str | None) -> None:
    if pattern is None:
        assert warnings == ()
    else:
        assert any(re.search(pattern, warning) for warning in warnings), warnings


def mel_bin(tone_hz: float) -> float:
    """Of 128 triangles that are evenly spaced on the HTK scale from 0 to 12 kHz, the one that peaks at the tone."""
    return float(np.log1p(tone_hz / 700) / np.log1p(12_000 / 700) * 129 - 1)


def check_tone(mel: MelFrames | None, tone: Tone) -> None:
    assert mel is not None
    assert mel.duration_s == pytest.approx(tone.duration_s, abs=tone.tolerance_s)
    loudest = mel.log_mel[5:-5].argmax(axis=1)
    assert abs(float(np.median(loudest)) - mel_bin(tone.tone_hz)) <= 1


def check_marks(picture: NDArray[np.generic], marks: tuple[Mark, ...], tolerance: float) -> None:
    height, width = picture.shape[:2]
    seen = np.array([picture[int(y * height), int(x * width)] for y, x, _ in marks], dtype=np.float64)
    wanted = np.array([colour for _, _, colour in marks], dtype=np.float64)
    np.testing.assert_allclose(seen, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", cases_of(Clip), ids=lambda case: case.name)
def test_clips(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig, crew: Crew) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, Clip)
    media = prepared(case, content, config)
    pictures = pictures_of(media)
    assert [number_or_none(picture) for picture in pictures] == even(expect.numbers)
    check_times(media, expect.times_s)
    check_warnings(media.warnings, expect.warning)
    if expect.colour_tolerance is not None:
        np.testing.assert_allclose(read_marks(pictures[0]), MARKS, atol=expect.colour_tolerance)
    if expect.tone is None:
        assert media.mel is None
        assert media.layout.audio_slices == ()
        assert media.layout.num_audio_rows == 0
    else:
        check_tone(media.mel, expect.tone)
        assert media.mel is not None
        times_s = [np.float32(time_s) for time_s in expect.times_s]
        shares = processor_oracle.audio_shares(times_s, media.mel.num_tokens)
        assert list(media.layout.audio_slices) == shares
        assert media.layout.num_audio_rows == sum(length for _, length in shares)

    frames = raw_frames(case, content, config, crew)
    assert frames[0].shape == (expect.height, expect.width, 3)
    assert [number_or_none(frame) for frame in frames] == even(expect.numbers)


@pytest.mark.parametrize("case", cases_of(DamagedClip), ids=lambda case: case.name)
def test_damaged_clips(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig, crew: Crew) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, DamagedClip)
    media = prepared(case, content, config)
    if expect.warning is not None:
        check_warnings(media.warnings, expect.warning)
    numbers = [number_or_none(picture) for picture in pictures_of(media)]
    assert len({number for number in numbers if number is not None}) >= expect.num_readable, numbers
    # Times are known of the first of each pair. A frame that had to be replaced shows an earlier one.
    for number, time_s in zip(numbers[::2], media.layout.timestamps_s, strict=True):
        if expect.first + round(time_s * expect.rate_fps) not in expect.lost:
            assert number is not None, numbers
            assert (number - expect.first) / expect.rate_fps == pytest.approx(time_s, abs=1e-5), numbers
    readable = [number for number in numbers if number is not None]
    assert readable == sorted(readable)
    frames = raw_frames(case, content, config, crew)
    assert frames[0].shape == (expect.height, expect.width, 3)
    assert [number_or_none(frame) for frame in frames] == numbers


@pytest.mark.parametrize("case", cases_of(Cartoon), ids=lambda case: case.name)
def test_animations(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig, crew: Crew) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, Cartoon)
    media = prepared(case, content, config)
    frames = raw_frames(case, content, config, crew)
    assert frames[0].shape == (expect.height, expect.width, 3)
    wanted = [*expect.frames, *expect.frames[-1:] * (len(expect.frames) % 2)]
    for picture, frame, marks in zip(pictures_of(media), frames, wanted, strict=True):
        check_marks(frame, marks, expect.tolerance)
        check_marks(picture, marks, expect.tolerance + 1)
    check_times(media, expect.times_s)
    assert media.warnings == ()


@pytest.mark.parametrize("case", cases_of(Refusal), ids=lambda case: case.name)
def test_refusals(case: Case, file_of: Callable[[Case], bytes], config: ProcessorConfig) -> None:
    expect, content = case.expect, file_of(case)
    assert isinstance(expect, Refusal)
    with pytest.raises(expect.error, match=f"(?s){expect.words}") as caught:
        prepared(case, content, config)
    assert type(caught.value) is expect.error


@pytest.mark.parametrize("backend", ["torchcodec", "decord"])
def test_other_backends_are_right_or_refuse(
    backend: VideoBackend, file_of: Callable[[Case], bytes], config: ProcessorConfig
) -> None:
    pytest.importorskip(backend)
    other = replace(config, video_backend=backend)
    num_right = 0
    refusals: list[str] = []
    for case in cases_of(Clip):
        expect = case.expect
        assert isinstance(expect, Clip)
        try:
            media = prepared(case, file_of(case), other)
        except MediaUnsupported as error:
            refusals.append(error.message)
            continue
        numbers = [number_or_none(picture) for picture in pictures_of(media)]
        assert numbers == even(expect.numbers), case.name
        check_times(media, expect.times_s)
        num_right += 1
    assert all(backend in message for message in refusals)
    # Most files are plain; a backend that refused all of them would be right, too.
    assert num_right >= len(cases_of(Clip)) // 2
