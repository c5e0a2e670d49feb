"""Video decoding: the right frames, upright, from awkward and damaged files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from preprocess import (
    DecodeLimits,
    MediaDecodeTimeout,
    MediaError,
    MediaOptions,
    MediaTooLarge,
    MediaUndecodable,
    MediaUnsupported,
    ProcessorConfig,
)
from preprocess.audio import decode_audio
from preprocess.config import VideoBudget
from preprocess.crew import NO_CREW
from preprocess.patchify import PatchWriter
from preprocess.types import MediaPart, Patches, Pixels
from preprocess.video import OpenVideo, VideoChanged, VideoIndex, open_video, read_index, scan
from tests.fakes.clips import (
    grey_of_frame,
    index_first,
    make_video,
    picture_file,
    rotated,
    sine,
    sound_file,
    with_cover,
)

LIMITS = DecodeLimits()


@pytest.fixture
def budget(tiny: ProcessorConfig) -> VideoBudget:
    return tiny.video_budget(MediaOptions())


def go_on() -> None:
    pass


def index_of(content: bytes) -> VideoIndex:
    return read_index(content, LIMITS, go_on)


def frames_of(content: bytes, numbers: list[int]) -> list[NDArray[np.uint8]]:
    """The frames with these numbers, whole."""
    found: dict[int, NDArray[np.uint8]] = {}
    wanted = list(enumerate(numbers))
    scan(content, index_of(content), wanted, found.__setitem__, limits=LIMITS, num_threads=1, check_deadline=go_on)
    return [found[place] for place in range(len(numbers))]


def greys(content: bytes, numbers: list[int]) -> list[int]:
    return [round(float(pixels.mean())) for pixels in frames_of(content, numbers)]


@dataclass(frozen=True)
class Sampled:
    video: OpenVideo
    patches: Patches

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(self.video.indices.tolist())

    @property
    def timestamps_s(self) -> NDArray[np.float32]:
        return self.video.timestamps_s

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.video.warnings


def sample_video(
    content: bytes,
    *,
    budget: VideoBudget,
    limits: DecodeLimits,
    check_deadline: Callable[[], None] = go_on,
) -> Sampled:
    """Opens and decodes into one part, again if damage asks for it."""
    video = open_video(content, budget=budget, limits=limits, backend="pyav", check_deadline=check_deadline)
    while True:
        parts: list[MediaPart] = []
        try:
            video.decode(parts.append, patches_per_part=None, raw=False, crew=NO_CREW, check_deadline=check_deadline)
        except VideoChanged as change:
            video = change.video
            continue
        (part,) = parts
        assert isinstance(part.pictures, Patches)
        assert part.pictures.grid_thw == video.grid_thw
        return Sampled(video, part.pictures)


FILES = [
    ("mp4", "libx264"),
    ("matroska", "libx264"),
    ("mov", "mpeg4"),
    ("avi", "mpeg4"),
    ("mpegts", "libx264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("flv", "flv"),
]


@pytest.mark.parametrize(("container", "codec"), FILES)
def test_frames_are_found_by_index(container: str, codec: str) -> None:
    content = make_video(40, container=container, codec=codec)
    index = index_of(content)
    assert index.num_frames == 40
    assert index.rate_fps == pytest.approx(10, rel=0.01)
    assert index.warnings == ()
    indices = [0, 1, 7, 12, 23, 38, 39]
    np.testing.assert_allclose(greys(content, indices), [grey_of_frame(index) for index in indices], atol=3)


def test_sampled_patches_equal_frame_by_frame_arithmetic(budget: VideoBudget) -> None:
    content = make_video(37, corner=True)
    sampled = sample_video(content, budget=budget, limits=LIMITS)
    assert sampled.indices == (0, 5, 10, 15, 20, 25, 30, 36)
    np.testing.assert_array_equal(sampled.timestamps_s, np.asarray(sampled.indices, np.float32) / np.float32(10))
    assert sampled.patches.grid_thw == (4, 6, 8)
    frames = frames_of(content, list(sampled.indices))
    writer = PatchWriter(num_frames=2, height=96, width=128)
    writer.put(0, frames[2])
    writer.put(1, frames[3])
    np.testing.assert_array_equal(sampled.patches.pixel_values[48:96], writer.patches().pixel_values)


@pytest.mark.parametrize(
    ("matrix", "shape", "red_at"),
    [
        ((1, 0, 0, 1), (48, 64), (0, 0)),
        ((0, 1, -1, 0), (64, 48), (0, 1)),
        ((-1, 0, 0, -1), (48, 64), (1, 1)),
        ((0, -1, 1, 0), (64, 48), (1, 0)),
        ((-1, 0, 0, 1), (48, 64), (0, 1)),
        ((1, 0, 0, -1), (48, 64), (1, 0)),
    ],
)
def test_rotation_and_mirrors(
    matrix: tuple[int, int, int, int], shape: tuple[int, int], red_at: tuple[int, int]
) -> None:
    (pixels,) = frames_of(rotated(make_video(1, corner=True), matrix), [0])
    assert pixels.shape[:2] == shape
    assert red_quarter(pixels) == red_at


def red_quarter(pixels: NDArray[np.uint8]) -> tuple[int, int]:
    """(vertical, horizontal) half holding the red quarter."""
    height, width = pixels.shape[:2]
    redness = pixels[:, :, 0].astype(int) - pixels[:, :, 1]
    found = [
        (row, column)
        for row in (0, 1)
        for column in (0, 1)
        if redness[row * height // 2 :, column * width // 2 :][: height // 2, : width // 2].mean() > 100
    ]
    assert len(found) == 1
    return found[0]


def test_rotation_decides_the_grid(budget: VideoBudget) -> None:
    content = make_video(2, size=(64, 128))
    assert sample_video(content, budget=budget, limits=LIMITS).patches.grid_thw == (1, 4, 8)
    turned = rotated(content, (0, 1, -1, 0))
    assert sample_video(turned, budget=budget, limits=LIMITS).patches.grid_thw == (1, 8, 4)


@pytest.mark.parametrize("size", [(33, 47), (49, 64), (48, 65)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    content = make_video(3, size=size, codec="mpeg4", container="matroska")
    (pixels,) = frames_of(content, [2])
    assert pixels.shape[:2] == size
    np.testing.assert_allclose(pixels.mean(), grey_of_frame(2), atol=3)


def test_one_frame_becomes_a_pair(budget: VideoBudget) -> None:
    sampled = sample_video(make_video(1), budget=budget, limits=LIMITS)
    assert sampled.indices == (0,)
    cells = sampled.patches.pixel_values.reshape(-1, 3, 2, 256)
    np.testing.assert_array_equal(cells[:, :, 0], cells[:, :, 1])


def test_variable_frame_rate_is_sampled_by_time(budget: VideoBudget) -> None:
    content = make_video(12, container="matroska", pts=[0, 1, 2, 3, 4, 5, 60, 61, 62, 63, 64, 65])
    index = index_of(content)
    assert index.num_frames == 12
    np.testing.assert_allclose(greys(content, [0, 6, 11]), [grey_of_frame(index) for index in (0, 6, 11)], atol=3)
    sampled = sample_video(content, budget=budget, limits=LIMITS)
    # 8 moments from 0 to 6.5 s: 0.93 to 5.57 s show the frame of 0.5 s. Then the furthest from these: 6, 2, 8, 1, 3.
    assert sampled.indices == (0, 1, 2, 3, 5, 6, 8, 11)
    np.testing.assert_allclose(sampled.timestamps_s, [0.0, 0.1, 0.2, 0.3, 0.5, 6.0, 6.2, 6.5], rtol=1e-6)
    assert sampled.patches.grid_thw[0] == 4


def test_ntsc_rate(budget: VideoBudget) -> None:
    assert index_of(make_video(30, rate=Fraction(30000, 1001))).rate_fps == pytest.approx(29.97, abs=0.001)


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_animated_pictures_as_video(kind: str, budget: VideoBudget) -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0)]
    frames = [Image.new("RGB", (40, 30), colour) for colour in colours]
    content = picture_file(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
    assert index_of(content).num_frames == 4
    seen = [tuple(pixels[15, 20]) for pixels in frames_of(content, [0, 1, 2, 3])]
    np.testing.assert_allclose(seen, colours, atol=8)
    assert sample_video(content, budget=budget, limits=LIMITS).patches.grid_thw[0] == 2


def test_animated_webp(budget: VideoBudget) -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250)]
    frames = [Image.new("RGBA", (40, 30), (*colour, 255)) for colour in colours]
    frames[0].paste((0, 0, 0, 0), (0, 0, 40, 15))
    lengths = [100, 100, 2000, 100, 100]
    content = picture_file(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=lengths, lossless=True)
    video = open_video(content, budget=budget, limits=LIMITS, backend="pyav", check_deadline=go_on)
    assert video.frame_size == (30, 40)
    assert video.indices.tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(video.timestamps_s, [0, 0.1, 0.2, 2.3])
    parts: list[MediaPart] = []
    video.decode(parts.append, patches_per_part=None, raw=True, crew=NO_CREW, check_deadline=go_on)
    (pixels,) = [part.pictures for part in parts]
    assert isinstance(pixels, Pixels)
    assert [tuple(frame[20, 20]) for frame in pixels.frames] == [colours[frame] for frame in (0, 1, 2, 4)]
    assert tuple(pixels.frames[0][5, 5]) == (255, 255, 255)
    for cut in (60, len(content) // 2, len(content) - 30):
        try:
            assert sample_video(content[:cut], budget=budget, limits=LIMITS).indices[-1] < 4
        except MediaError:
            continue
    with pytest.raises(MediaTooLarge, match="40 x 30"):
        sample_video(content, budget=budget, limits=replace(LIMITS, max_frame_pixels=1000))


def test_transparent_animation_is_over_white() -> None:
    frames = [Image.new("RGBA", (16, 16), (0, 0, 0, 0)) for _ in range(2)]
    frames[1].putpixel((0, 0), (1, 2, 3, 255))
    content = picture_file(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100, disposal=2)
    (pixels,) = frames_of(content, [0])
    assert pixels[8, 8].tolist() == [255, 255, 255]


def test_sound_is_not_video() -> None:
    with pytest.raises(MediaUndecodable, match="no video stream in the file"):
        index_of(sound_file(sine(0.5)))


def test_cover_art_is_not_video() -> None:
    song = with_cover(sound_file(sine(0.5), kind="MP3"), picture_file(np.zeros((16, 16, 3), np.uint8)))
    with pytest.raises(MediaUndecodable, match="no video stream besides cover art"):
        index_of(song)
    assert decode_audio(song, LIMITS)[0].duration_s == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", MediaUndecodable, "empty file"),
        (b"just words", MediaUndecodable, "found text"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", MediaUnsupported, "HLS playlist"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", MediaUndecodable, "found text"),
        (b"<html></html>", MediaUnsupported, "HTML"),
        (b"\0" * 500, MediaUndecodable, "unknown data"),
    ],
)
def test_other_things_are_named(content: bytes, error: type[MediaError], words: str) -> None:
    with pytest.raises(error, match=words):
        index_of(content)


def test_a_still_picture_is_refused_by_name() -> None:
    with pytest.raises(MediaUnsupported, match="found JPEG"):
        index_of(picture_file(np.zeros((20, 20, 3), np.uint8), "JPEG"))


def test_a_playlist_in_disguise_opens_nothing() -> None:
    # Leading blanks hide the magic from our own look; FFmpeg's list of demuxers must still refuse it.
    with pytest.raises(MediaError):
        index_of(b"\x80\n#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")


def test_an_index_without_its_data_is_an_error(budget: VideoBudget) -> None:
    content = make_video(40)
    with pytest.raises(MediaUndecodable):
        sample_video(content[: len(content) // 3], budget=budget, limits=LIMITS)


@pytest.mark.parametrize("container", ["mp4", "avi", "matroska"])
def test_files_cut_off_after_their_index(container: str, budget: VideoBudget) -> None:
    content = make_video(60, container=container, codec="mpeg4", corner=True)
    content = index_first(content) if container == "mp4" else content
    sampled = sample_video(content[: len(content) * 7 // 10], budget=budget, limits=LIMITS)
    assert 20 < sampled.indices[-1] < 50
    assert any("announces 60 frames" in warning for warning in sampled.warnings) or container == "matroska"


def test_a_cut_file_is_sampled_over_what_is_left(budget: VideoBudget) -> None:
    content = make_video(60, container="mpegts", size=(96, 128), corner=True)
    sampled = sample_video(content[: len(content) * 6 // 10], budget=budget, limits=LIMITS)
    assert 0 < sampled.indices[-1] < 59


@pytest.mark.parametrize("seed", range(6))
def test_noise_in_the_middle_never_escapes_as_something_else(seed: int, budget: VideoBudget) -> None:
    rng = np.random.default_rng(seed)
    content = bytearray(make_video(60, container=("matroska", "mp4", "mpegts")[seed % 3], corner=True))
    at = int(rng.integers(200, len(content) - 400))
    content[at : at + 300] = rng.bytes(300)
    try:
        sampled = sample_video(bytes(content), budget=budget, limits=LIMITS)
    except MediaError:
        return
    assert np.isfinite(sampled.patches.pixel_values).all()


def test_packets_that_do_not_decode_are_skipped_with_a_warning(budget: VideoBudget) -> None:
    content = bytearray(make_video(40, container="avi", codec="mpeg4", gop=1))
    # Overwrite the payload of frame 5; every frame stands alone, so only that one is lost.
    at = -1
    for _ in range(6):
        at = content.index(b"00dc", at + 1)
    length = int.from_bytes(content[at + 4 : at + 8], "little")
    content[at + 8 : at + 8 + length] = b"\xff" * length
    sampled = sample_video(bytes(content), budget=budget, limits=LIMITS)
    assert sampled.indices[-1] in (38, 39)
    assert any("damaged" in warning or "decode" in warning for warning in sampled.warnings)


def test_limits(budget: VideoBudget) -> None:
    content = make_video(40)
    for limits, words in (
        (replace(LIMITS, max_video_frames=39), "40 frames"),
        (replace(LIMITS, max_duration_s=3.9), "4 s"),
        (replace(LIMITS, max_frame_pixels=3000), "64 x 48"),
    ):
        with pytest.raises(MediaTooLarge, match=words):
            sample_video(content, budget=budget, limits=limits)


def test_the_deadline_is_checked_while_decoding(budget: VideoBudget) -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise MediaDecodeTimeout("late")

    with pytest.raises(MediaDecodeTimeout):
        sample_video(make_video(40), budget=budget, limits=LIMITS, check_deadline=check)
    assert calls == 6


def test_opening_many_times_leaks_no_descriptors(budget: VideoBudget) -> None:
    content = make_video(4)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        sample_video(content, budget=budget, limits=LIMITS)
        with pytest.raises(MediaError):
            sample_video(content[:500], budget=budget, limits=LIMITS)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_picture_size_may_change_on_the_way(budget: VideoBudget) -> None:
    # Two transport streams with different sizes, one after the other.
    content = make_video(10, container="mpegts", size=(48, 64)) + make_video(10, container="mpegts", size=(64, 96))
    sampled = sample_video(content, budget=budget, limits=LIMITS)
    assert sampled.patches.grid_thw[1:] == (6, 8)
