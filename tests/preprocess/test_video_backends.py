"""Every backend gives the frame that was asked for, or says that it does not. Frames carry their number.
Long, because most of it is the list of clips and what each backend makes of them.

torchcodec tests are left out, with the reason, where the library or the FFmpeg it needs is missing.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import (
    Crew,
    DecodeLimits,
    MediaDecodeTimeout,
    MediaError,
    MediaOptions,
    MediaUnsupported,
    Modality,
    ProcessorConfig,
    media_key,
)
from preprocess.config import VideoBackend, check_video_backend
from preprocess.crew import NO_CREW, Teamwork
from preprocess.errors import BackendUnavailable
from preprocess.pipeline import prepare
from preprocess.types import MediaPart, Pixels
from preprocess.video import OpenVideo, open_video, read_index, scan
from preprocess.video.backends import load_video_backend
from preprocess.video.decord import decode_with_decord
from preprocess.video.guests import Guest, admit
from preprocess.video.look import FirstLook, mean_colours
from preprocess.video.planned import Unproven
from preprocess.video.torchcodec import decode_with_torchcodec
from tests.fakes.media.barcode import read_barcode
from tests.fakes.media.videos import (
    clip,
    copied_from,
    cut_after,
    index_first,
    with_cover_stream,
    with_matrix,
    with_noise,
    without_head,
)

LIMITS = DecodeLimits()
NUM = 40
X264 = {"preset": "ultrafast", "x264-params": "scenecut=0:threads=1"}
OPEN_X264 = {"x264-params": "open-gop=1:b-pyramid=normal:scenecut=0:threads=1"}
OPEN_X265 = {"preset": "ultrafast", "x265-params": "open-gop=1:bframes=3:b-adapt=0:log-level=none:pools=none"}
VPX = {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": "10"}
AV1: dict[str, Any] = {
    "codec": "libsvtav1",
    "codec_options": {"preset": "12", "svtav1-params": "lp=1"},
    "bit_rate": None,
    "gop": 16,
}
UNEVEN_MS = [40 * number + 13 * (number % 3) + (200 if number > 20 else 0) for number in range(NUM)]


def go_on() -> None:
    pass


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    """decord prints what it thinks of damaged files."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)


@pytest.fixture(scope="session")
def torchcodec() -> None:
    try:
        load_video_backend("torchcodec")
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


@dataclass(frozen=True)
class Close:
    """Not equal: the two libraries carry scalers of different versions, which differ near sharp edges of colour."""

    max_levels: int
    mean_levels: float


EQUAL: Final = Close(0, 0.0)
TEN_BITS: Final = Close(100, 0.7)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], bytes]
    torchcodec: Close | str = EQUAL
    """How close to the scan; or why the default way does the work, which gives what the scan gives."""
    decord: Close | str = EQUAL
    """How close; or why it refuses."""
    first: int = 0
    """Number on the first frame."""
    num_frames: int = NUM


def turned(matrix: tuple[int, int, int, int], turn: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> bytes:
    size = (160, 96) if matrix[0] == 0 else (96, 160)
    return with_matrix(clip(range(NUM), size=size, turn=turn, codec_options=X264), matrix)


def two_streams() -> bytes:
    from PIL import Image

    from tests.fakes.media.images import saved

    return with_cover_stream(range(NUM), saved(np.asarray(Image.new("RGB", (64, 64))), "JPEG"), cover_first=False)


def case(name: str, outcome: Close | str = EQUAL, decord: Close | str | None = None, **shot: Any) -> Case:
    """`outcome` is torchcodec's, and decord's unless that is given."""
    return Case(name, partial(clip, range(NUM), **shot), outcome, outcome if decord is None else decord)


NO_TABLE = "neither MP4 nor Matroska"
CASES = [
    case("h264", codec_options=X264),
    case("h264-open", codec_options=OPEN_X264, b_frames=3),
    case("h264-open-mkv", codec_options=OPEN_X264, b_frames=3, container="matroska"),
    case("h264-gop-1", codec_options=X264, gop=1),
    case("h264-gop-2", codec_options=OPEN_X264, gop=2, b_frames=3),
    case("h264-mov", codec_options=X264, container="mov"),
    case("h264-fragmented", codec_options=X264, container_options={"movflags": "frag_keyframe+empty_moov"}),
    case("hevc-open", codec="libx265", codec_options=OPEN_X265),
    case("hevc-open-mkv", codec="libx265", codec_options=OPEN_X265, container="matroska"),
    case("vp8-hidden-frames", codec="libvpx", codec_options=VPX, container="webm"),
    case("vp8-live", decord="cannot open", codec="libvpx", codec_options=VPX, container="webm", streamed=True),
    case("vp9", codec="libvpx-vp9", codec_options=VPX, container="webm"),
    case("vp9-mp4", codec="libvpx-vp9", codec_options=VPX),
    case("av1", decord="no decoder for AV1", **AV1),
    case("av1-mkv", decord="no decoder for AV1", container="matroska", **AV1),
    case("mpeg4-b-frames", codec="mpeg4", b_frames=2),
    case("mjpeg", codec="mjpeg", container="mov", pixel_format="yuvj420p"),
    case("uneven-mkv", container="matroska", codec_options=X264, pts=UNEVEN_MS, time_base=Fraction(1, 1000)),
    case("uneven-mp4", codec_options=X264, b_frames=2, pts=UNEVEN_MS, time_base=Fraction(1, 1000)),
    case("ntsc", codec_options=X264, rate=Fraction(30000, 1001)),
    case(
        "late-start",
        codec_options=X264,
        container="matroska",
        pts=[3000 + 40 * number for number in range(NUM)],
        time_base=Fraction(1, 1000),
    ),
    case("4:4:4-odd", size=(97, 161), pixel_format="yuv444p"),
    case("odd", Close(30, 0.5), Close(45, 0.7), size=(97, 161), codec="libvpx-vp9", codec_options=VPX),
    case("10-bit", TEN_BITS, codec="libx265", codec_options=OPEN_X265, pixel_format="yuv420p10le"),
    case("full-range-709", codec_options=X264, colour=(1, 2)),
    case("bt2020-10-bit", TEN_BITS, pixel_format="yuv420p10le", colour=(9, 1)),
    Case("turned-90", partial(turned, (0, 1, -1, 0), np.rot90)),
    Case("turned-180", partial(turned, (-1, 0, 0, -1), partial(np.rot90, k=2))),
    Case("turned-270", partial(turned, (0, -1, 1, 0), partial(np.rot90, k=3))),
    Case("mirrored", partial(turned, (-1, 0, 0, 1), np.fliplr), "mirrored", "mirrored"),
    Case("upside-down", partial(turned, (1, 0, 0, -1), np.flipud), "mirrored", "mirrored"),
    Case("one-frame", partial(clip, range(7, 8)), first=7, num_frames=1),
    # decord misses the start time of such files, and counts all times from a number that means none.
    Case(
        "short-mkv",
        partial(clip, range(4), container="matroska", codec_options=X264),
        EQUAL,
        "other times",
        num_frames=4,
    ),
    Case("cover", two_streams, EQUAL, "2 video streams"),
    Case(
        "edit-list",
        lambda: copied_from(clip(range(NUM)), "mp4", 17),
        "an edit list",
        "an edit list",
        first=17,
        num_frames=NUM - 17,
    ),
    case("transparent", "transparent", codec="prores_ks", container="mov", pixel_format="yuva444p10le"),
    case("transport-stream", NO_TABLE, container="mpegts"),
    case("avi", NO_TABLE, codec="mpeg4", container="avi"),
    Case(
        "without-head",
        lambda: without_head(clip(range(NUM), container="matroska"), "matroska", 3),
        "does not begin with a start",
        "does not begin with a start",
    ),
]


@lru_cache(maxsize=2)
def content_of(name: str) -> bytes:
    return next(case for case in CASES if case.name == name).make()


@lru_cache(maxsize=2)
def all_frames(content: bytes) -> list[NDArray[np.uint8]]:
    """By a scan. Frames that do not decode have their neighbour in their place."""
    index = read_index(content, LIMITS, go_on)
    found: dict[int, NDArray[np.uint8]] = {}
    wanted = [(number, number) for number in range(index.num_frames)]
    scan(content, index, wanted, found.__setitem__, limits=LIMITS, num_threads=1, check_deadline=go_on, fill_end=True)
    return [found[number] for number in range(index.num_frames)]


def opened(content: bytes, backend: VideoBackend, numbers: Sequence[int] | None = None) -> OpenVideo:
    budget = ProcessorConfig.from_hf({"processor_config": {}}).video_budget(MediaOptions())
    video = open_video(content, budget=budget, limits=LIMITS, backend=backend, check_deadline=go_on)
    if numbers is not None:
        video.indices = np.array(numbers)
    return video


def decoded(video: OpenVideo, crew: Crew = NO_CREW, *, patches_per_part: int | None = None) -> list[NDArray[np.uint8]]:
    """The frames of a video, in display order, without the repeated last one."""
    parts: list[MediaPart] = []
    video.decode(parts.append, patches_per_part=patches_per_part, raw=True, crew=crew, check_deadline=go_on)
    frames: list[NDArray[np.uint8]] = []
    for part in sorted(parts, key=lambda part: part.first_pair):
        assert isinstance(part.pictures, Pixels)
        frames.extend(part.pictures.frames)
    return frames[: len(video.indices)]


def some_numbers(num_frames: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, min(num_frames, 12) + 1))
    return sorted(int(number) for number in rng.choice(num_frames, count, replace=False))


def assert_close(found: Sequence[NDArray[np.uint8]], truth: Sequence[NDArray[np.uint8]], allowed: Close) -> None:
    for left, right in zip(found, truth, strict=True):
        assert left.shape == right.shape
        difference = np.abs(left.astype(np.int16) - right)
        assert difference.max() <= allowed.max_levels
        assert difference.mean() <= allowed.mean_levels


def assert_numbers(case: Case, frames: Sequence[NDArray[np.uint8]], numbers: Sequence[int]) -> None:
    if case.name != "without-head":
        assert [read_barcode(frame) for frame in frames] == [case.first + number for number in numbers]


@pytest.mark.usefixtures("torchcodec")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torchcodec_gives_the_frames_asked_for_or_says_who_did(case: Case, crew: Crew) -> None:
    content = content_of(case.name)
    truth = all_frames(content)
    for seed in range(3):
        numbers = some_numbers(case.num_frames, seed)
        video = opened(content, "torchcodec", numbers)
        frames = decoded(video, crew if seed else NO_CREW, patches_per_part=200 if seed == 2 else None)
        assert_numbers(case, frames, numbers)
        if isinstance(case.torchcodec, str):
            assert_close(frames, [truth[number] for number in numbers], EQUAL)
            assert any("torchcodec" in warning and case.torchcodec in warning for warning in video.warnings)
        else:
            assert_close(frames, [truth[number] for number in numbers], case.torchcodec)
            assert video.warnings == ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decord_gives_the_frames_asked_for_or_refuses(case: Case, crew: Crew) -> None:
    content = content_of(case.name)
    for seed in range(3):
        numbers = some_numbers(case.num_frames, seed)
        video = opened(content, "decord", numbers)
        if isinstance(case.decord, str):
            with pytest.raises(MediaUnsupported, match=f"{case.decord}.*send it as MP4 with H.264") as caught:
                decoded(video)
            assert "video_backend" not in caught.value.message
            assert "video_backend 'pyav'" in caught.value.hint
            continue
        truth = all_frames(content)
        frames = decoded(video, crew if seed else NO_CREW)
        assert_numbers(case, frames, numbers)
        assert_close(frames, [truth[number] for number in numbers], case.decord)
        assert video.warnings == ()


CODINGS: list[dict[str, Any]] = [
    {"codec_options": X264},
    {"codec_options": OPEN_X264},
    {"codec": "libx265", "codec_options": OPEN_X265},
    {"codec": "mpeg4"},
    {"codec": "libvpx-vp9", "codec_options": VPX},
]


@pytest.mark.usefixtures("torchcodec")
@settings(max_examples=25, deadline=None)
@given(
    coding=st.sampled_from(CODINGS),
    container=st.sampled_from(["mp4", "matroska"]),
    num_frames=st.integers(8, 45),
    gop=st.integers(1, 20),
    b_frames=st.integers(0, 3),
    data=st.data(),
)
def test_any_group_and_any_targets(
    coding: dict[str, Any], container: str, num_frames: int, gop: int, b_frames: int, data: st.DataObject
) -> None:
    b_frames = b_frames if coding.get("codec", "mpeg4") == "mpeg4" else 0
    content = clip(range(num_frames), container=container, gop=gop, b_frames=b_frames, **coding)
    numbers = data.draw(st.lists(st.integers(0, num_frames - 1), min_size=1, max_size=10, unique=True).map(sorted))
    expected = decoded(opened(content, "pyav", numbers))
    assert [read_barcode(frame) for frame in expected] == numbers
    backends: tuple[VideoBackend, ...] = ("torchcodec", "decord")
    for backend in backends:
        video = opened(content, backend, numbers)
        assert_close(decoded(video), expected, EQUAL)
        # FFmpeg 5 gives up on the odd open group; then the planner's frames stand in, and it says so.
        assert all(warning.startswith("not decoded by torchcodec") for warning in video.warnings)


@pytest.mark.usefixtures("torchcodec")
def test_what_comes_of_it_is_the_same_and_the_keys_are_not(tiny: ProcessorConfig) -> None:
    content = clip(range(NUM), codec_options=X264)
    backends: tuple[VideoBackend, ...] = ("pyav", "torchcodec", "decord")
    made = []
    for backend in backends:
        config = replace(tiny, video_backend=backend)
        settings: dict[str, Any] = {"modality": Modality.VIDEO, "options": MediaOptions()}
        key = media_key(content, processor=config, tower_fingerprint="", **settings)
        made.append(prepare(content, config=config, key=key, **settings))
    assert len({medium.key for medium in made}) == len(made)
    for medium in made[1:]:
        assert medium.layout == made[0].layout
        assert medium.patches is not None
        assert made[0].patches is not None
        np.testing.assert_array_equal(medium.patches.pixel_values, made[0].patches.pixel_values)


DAMAGED: dict[str, Callable[[], bytes]] = {
    "noise": lambda: with_noise(clip(range(NUM), codec="mpeg4"), 20, 21),
    "cut": lambda: cut_after(index_first(clip(range(NUM), codec_options=X264)), 60),
}


@pytest.mark.usefixtures("torchcodec")
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_left_to_the_default_backend_or_refused(name: str) -> None:
    content = DAMAGED[name]()
    numbers = [0, 10, 20, 21, 22]
    ours, theirs = opened(content, "pyav", numbers), opened(content, "torchcodec", numbers)
    assert_close(decoded(theirs), decoded(ours), EQUAL)
    assert set(theirs.warnings) > set(ours.warnings)
    with pytest.raises(MediaUnsupported, match="by decord"):
        decoded(opened(content, "decord", numbers))


def guest_of(content: bytes, **changes: Any) -> Guest:
    video = opened(content, "torchcodec")
    assert video.look is not None
    guest = admit(content, video.index, video.look)
    assert isinstance(guest, Guest)
    return replace(guest, **changes)


def with_torchcodec(guest: Guest, emit: Callable[[int, NDArray[np.uint8]], None], **changes: Any) -> None:
    arguments: dict[str, Any] = {"crew": NO_CREW, "team": Teamwork(), "check_deadline": go_on} | changes
    decode_with_torchcodec(
        guest, [(0, 3), (1, 30)], emit, limits=LIMITS, max_frames_ahead=100, max_decoders=16, **arguments
    )


def with_decord(guest: Guest, emit: Callable[[int, NDArray[np.uint8]], None], **changes: Any) -> None:
    arguments: dict[str, Any] = {"num_threads": 1, "check_deadline": go_on} | changes
    decode_with_decord(guest, [(0, 3), (1, 30)], emit, **arguments)


def wrong_guests() -> Iterator[tuple[str, Guest]]:
    """One that expects something else than the file holds."""
    guest = guest_of(clip(range(NUM), codec_options=X264))
    index, other = guest.index, guest_of(clip(range(500, 500 + NUM), codec_options=X264))
    assert index.times_s is not None
    yield "frames", replace(guest, index=index.cut_to(NUM - 1, "shorter"))
    yield "first frame", replace(guest, look=replace(guest.look, cells=other.look.cells[::-1]))
    yield "first frame|another size", replace(guest, look=replace(guest.look, size=(96, 161)))
    pts, times_s = index.pts.copy(), index.times_s.copy()
    pts[index.shown[30]] += 1
    times_s[30] += 0.02
    yield "frame 30|times", replace(guest, index=replace(index, pts=pts, times_s=times_s))


@pytest.mark.usefixtures("torchcodec")
def test_torchcodec_is_not_believed() -> None:
    for words, guest in wrong_guests():
        found: dict[int, NDArray[np.uint8]] = {}
        with pytest.raises(Unproven, match=words):
            with_torchcodec(guest, found.__setitem__)
        assert [(place, read_barcode(found[place])) for place in found] in ([], [(0, 3)])


def test_decord_is_not_believed() -> None:
    for words, guest in wrong_guests():
        with pytest.raises(MediaUnsupported, match=words):
            with_decord(guest, lambda place, pixels: None)


def test_decord_may_not_repeat_frames() -> None:
    """Behind an edit list it runs out of frames, and gives the last one again for each that is missing.

    Found however early the last frame wanted is.
    """
    content = copied_from(clip(range(NUM), codec_options=X264), "mp4", 5)
    num_frames, first = as_decord_has_it(content)
    video = opened(content, "decord")
    assert video.look is not None
    cells = FirstLook((96, 160), mean_colours(first), None)
    # As if the edit list had not been noticed.
    index = replace(
        video.index,
        shown=np.arange(num_frames),
        times_s=np.arange(num_frames) / 10,
        scan_reason=None,
    )
    guest = admit(content, index, cells)
    assert isinstance(guest, Guest)
    for wanted in ([(0, 0)], [(0, num_frames - 1)]):
        with pytest.raises(MediaUnsupported, match="cannot decode frame"):
            decode_with_decord(guest, wanted, lambda place, pixels: None, num_threads=1, check_deadline=go_on)


def as_decord_has_it(content: bytes) -> tuple[int, NDArray[np.uint8]]:
    """How many frames it counts, and the first of them."""
    import decord

    reader = decord.VideoReader(io.BytesIO(content), num_threads=1)
    return len(reader), reader.next().asnumpy()


@pytest.mark.usefixtures("torchcodec")
@pytest.mark.parametrize("decode", [with_torchcodec, with_decord])
def test_deadlines_and_takers_errors_come_through(decode: Callable[..., None]) -> None:
    guest = guest_of(clip(range(NUM), codec_options=X264))

    def late() -> None:
        raise MediaDecodeTimeout("late")

    def takes_nothing(place: int, pixels: NDArray[np.uint8]) -> None:
        raise RuntimeError("full")

    with pytest.raises(MediaDecodeTimeout):
        decode(guest, lambda place, pixels: None, check_deadline=late)
    with pytest.raises(RuntimeError, match="full"):
        decode(guest, takes_nothing)


@pytest.mark.usefixtures("torchcodec")
def test_one_worker_s_doubts_stop_the_others(crew: Crew) -> None:
    content = clip(range(NUM), codec_options=X264, gop=4)
    guest = guest_of(content)
    pts = guest.index.pts.copy()
    pts[guest.index.shown[3]] += 1
    with pytest.raises(Unproven, match="frame 3"):
        with_torchcodec(replace(guest, index=replace(guest.index, pts=pts)), lambda place, pixels: None, crew=crew)


@pytest.mark.parametrize(
    "head",
    [b"#EXTM3U\n", b"ffconcat version 1.0\n", b"v=0\nc=IN IP4 127.0.0.1\n", b"<MPD>", b"\x1aE\xdf\xa3<MPD>"],
)
def test_nothing_that_names_other_files_is_given_away(head: bytes) -> None:
    guest = guest_of(clip(range(8)))
    assert isinstance(admit(guest.content, guest.index, guest.look), Guest)
    for content in (head + guest.content, head.ljust(16)[:4] + b"ftyp" + head + guest.content):
        assert admit(content, guest.index, guest.look) == "it is neither MP4 nor Matroska"


def test_backends_by_name() -> None:
    load_video_backend("pyav")
    load_video_backend("decord")
    for backend in ("pyav", "decord"):
        check_video_backend(backend)
    with pytest.raises(ValueError, match="video_backend is 'opencv', allowed is 'pyav', 'torchcodec', 'decord'"):
        check_video_backend("opencv")
    unknown: Any = "opencv"
    with pytest.raises(ValueError, match="video_backend is 'opencv'"):
        replace(ProcessorConfig.from_hf({"processor_config": {}}), video_backend=unknown)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"install mimo-epd\[torchcodec\]"):
        check_video_backend("torchcodec")
    with pytest.raises(BackendUnavailable, match=r"pip install 'mimo-epd\[torchcodec\]', from a checkout pip"):
        load_video_backend("torchcodec")


def test_a_library_without_its_ffmpeg_is_found_at_start_and_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ffmpeg(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Could not load libtorchcodec")

    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", SimpleNamespace(VideoDecoder=no_ffmpeg))
    with pytest.raises(BackendUnavailable, match="shared libraries of FFmpeg"):
        load_video_backend("torchcodec")
    content = clip(range(NUM), codec_options=X264)
    video = opened(content, "torchcodec", [5, 6])
    assert [read_barcode(frame) for frame in decoded(video)] == [5, 6]
    assert any("torchcodec" in warning for warning in video.warnings)


def test_bad_files_are_media_errors_for_all() -> None:
    backends: tuple[VideoBackend, ...] = ("pyav", "torchcodec", "decord")
    for backend in backends:
        with pytest.raises(MediaError):
            decoded(opened(b"\0\0\0\x18ftypisom" + bytes(200), backend))
