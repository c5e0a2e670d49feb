"""Small files that unfold to more than they cost to send: refused by their headers, or bounded in time and memory."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import sys
import threading
import time

import numpy as np
import pytest

from preprocess import (
    DecodeLimits,
    DecodeSettings,
    MediaDecodeTimeout,
    MediaKey,
    MediaOptions,
    MediaTooLarge,
    MediaUndecodable,
    Modality,
    PreparedMedia,
    ProcessorConfig,
    prepare,
)
from preprocess.crew import NO_CREW, Crew
from preprocess.pool import DecodePool
from preprocess.types import MediaPart, Pixels
from preprocess.video import OpenVideo, open_video, opened
from preprocess.video.stream import check_total, pixels_allowed
from tests.fakes.clips import blocks, make_video, picture_file
from tests.fakes.media.images import apng, gif, webp_animation

KEY = MediaKey("0" * 32)
LIMITS = DecodeLimits()
UNBOUND = dataclasses.replace(LIMITS, max_free_pixels=10**13)


def giant(side: int, num_frames: int) -> bytes:
    """A GIF of 23 bytes a frame."""
    dot = np.zeros((1, 1), dtype=np.uint8)
    return gif((side, side), [(0, 0, 0), (255, 0, 0)], [(0, 0, 0, dot)] * num_frames)


def small_animations(num_frames: int) -> dict[str, bytes]:
    """64 x 48, whose first frame is whole and whose others are a few pixels."""
    whole, dot = np.full((48, 64, 4), 255, dtype=np.uint8), np.full((2, 2, 4), 255, dtype=np.uint8)
    whole_gif, dot_gif = np.zeros((48, 64), dtype=np.uint8), np.zeros((2, 2), dtype=np.uint8)
    rest = num_frames - 1
    return {
        "gif": gif((64, 48), [(0, 0, 0), (9, 9, 9)], [(0, 0, 0, whole_gif), *[(0, 0, 0, dot_gif)] * rest]),
        "apng": apng((64, 48), [(0, 0, 0, 0, whole), *[(0, 0, 0, 0, dot)] * rest], hidden=False),
        "webp": webp_animation((64, 48), [(0, 0, 0, whole), *[(0, 0, 0, dot)] * rest]),
        "ffv1": make_video(num_frames, container="matroska", codec="ffv1"),
        "h264": make_video(num_frames),
        "mpeg2 in ts": make_video(num_frames, container="mpegts", codec="mpeg2video", rate=25),
    }


def shown(content: bytes, config: ProcessorConfig, limits: DecodeLimits) -> PreparedMedia:
    config = dataclasses.replace(config, limits=limits)
    return prepare(content, modality=Modality.VIDEO, options=MediaOptions(), config=config, key=KEY)


@pytest.mark.parametrize("num_frames", [30, 200])
def test_a_giant_canvas_in_a_small_file_is_refused_at_once(tiny: ProcessorConfig, num_frames: int) -> None:
    content = giant(6000, num_frames)
    start_s = time.monotonic()
    with pytest.raises(MediaTooLarge) as caught:
        shown(content, tiny, LIMITS)
    assert time.monotonic() - start_s < 5
    for number in (num_frames, num_frames * 36_000_000, LIMITS.max_free_pixels + len(content) * 10_000):
        assert str(number) in str(caught.value)
    assert "6000 x 6000" in str(caught.value)


@pytest.mark.parametrize("kind", ["gif", "apng", "webp", "ffv1", "h264", "mpeg2 in ts"])
def test_pixels_are_bounded_by_bytes(tiny: ProcessorConfig, kind: str) -> None:
    content = small_animations(30)[kind]
    num_pixels = 30 * 64 * 48
    free = dataclasses.replace(
        LIMITS, max_free_pixels=num_pixels, max_video_pixels_per_byte=0, max_animation_pixels_per_byte=0
    )
    assert shown(content, tiny, free).layout.grid_thw is not None
    free = dataclasses.replace(free, max_free_pixels=num_pixels - 1)
    with pytest.raises(MediaTooLarge, match=f"30 frames of 64 x 48, together {num_pixels} pixels"):
        shown(content, tiny, free)
    # Each byte allows more, those of real video much more.
    is_video = kind in ("h264", "mpeg2 in ts")
    one = "max_video_pixels_per_byte" if is_video else "max_animation_pixels_per_byte"
    shown(content, tiny, dataclasses.replace(free, **{one: 1}))
    other = "max_animation_pixels_per_byte" if is_video else "max_video_pixels_per_byte"
    with pytest.raises(MediaTooLarge):
        shown(content, tiny, dataclasses.replace(free, **{other: 1}))


def test_frames_that_grow_on_the_way_count_as_they_are(tiny: ProcessorConfig) -> None:
    first = make_video(20, container="mpegts", codec="mpeg2video", rate=25)
    content = first + make_video(20, container="mpegts", codec="mpeg2video", rate=25, size=(480, 640))
    limits = dataclasses.replace(LIMITS, max_video_pixels_per_byte=0)
    free = dataclasses.replace(limits, max_free_pixels=20 * 64 * 48 + 20 * 640 * 480)
    shown(content, tiny, free)
    with pytest.raises(MediaTooLarge, match="pixels together"):
        shown(content, tiny, dataclasses.replace(free, max_free_pixels=free.max_free_pixels // 2))


@pytest.mark.parametrize(
    ("codec", "num_frames", "size", "size_bytes"),
    [
        ("h264", 3600 * 30, (3840, 2160), 1_500_000_000),
        # A picture that stands still for an hour, black at that.
        ("h264", 3600 * 30, (3840, 2160), 4_000_000),
        ("av1", 10 * 30, (3840, 2160), 9_000),
        ("vp9", 2 * 3600 * 60, (1920, 1080), 20_000_000),
        ("gif", 80, (1280, 720), 40 * 80),
        # A terminal in which little happens for ten minutes.
        ("gif", 6000, (1200, 800), 6000 * 150),
        ("apng", 100, (1920, 1080), 30_000),
        ("webp", 50, (4000, 3000), 2_000_000),
        ("qtrle", 600, (1280, 720), 200_000),
    ],
)
def test_what_people_send_is_let_in(codec: str, num_frames: int, size: tuple[int, int], size_bytes: int) -> None:
    check_total(num_frames, *size, pixels_allowed(codec, size_bytes, LIMITS))


@pytest.mark.parametrize("width", [0, 65535])
@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_absurd_sizes_are_told_as_such(tiny: ProcessorConfig, kind: str, width: int) -> None:
    content = small_animations(2)["gif" if kind == "GIF" else "apng"]
    at, form = (6, "<HH") if kind == "GIF" else (16, ">II")
    content = content[:at] + struct.pack(form, width, 65535) + content[at + struct.calcsize(form) :]
    error = MediaTooLarge if width else MediaUndecodable
    with pytest.raises(error, match=f"{width} x 65535"):
        shown(content, tiny, LIMITS)


def video_of(content: bytes, config: ProcessorConfig, num_frames: int) -> OpenVideo:
    budget = config.video_budget(MediaOptions(num_frames=num_frames))
    return open_video(content, budget=budget, limits=LIMITS, backend="pyav", check_deadline=lambda: None)


def test_raw_parts_are_bounded_by_what_their_frames_take(
    tiny: ProcessorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make_video(40, corner=True, size=(480, 640))
    pair_bytes = 2 * 3 * 480 * 640
    monkeypatch.setattr(opened, "_RAW_PART_BYTES", 2 * pair_bytes + 1)
    monkeypatch.setattr(opened, "_OPEN_PARTS_BYTES", 6 * pair_bytes)
    video = video_of(content, tiny, 20)
    parts: list[MediaPart] = []
    video.decode(parts.append, patches_per_part=10**6, raw=True, crew=NO_CREW, check_deadline=lambda: None)
    frames = [part.pictures.frames for part in parts if isinstance(part.pictures, Pixels)]
    assert [len(pictures) for pictures in frames] == [4] * 5
    assert [part.first_pair for part in parts] == [0, 2, 4, 6, 8]
    assert video._parts_at_once(2, True) == 3
    # Resized here they are small, and stay together.
    parts = []
    video = video_of(content, tiny, 20)
    video.decode(parts.append, patches_per_part=10**6, raw=False, crew=NO_CREW, check_deadline=lambda: None)
    assert len(parts) == 1


def test_large_frames_are_decoded_by_fewer_at_a_time(tiny: ProcessorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    content = make_video(200, gop=10)
    crew = Crew(3)

    def workers() -> set[int]:
        seen: set[int] = set()
        video = video_of(content, tiny, 40)
        video.decode(
            lambda _: seen.add(threading.get_ident()),
            patches_per_part=1,
            raw=True,
            crew=crew,
            check_deadline=lambda: time.sleep(0.001),
        )
        return seen

    try:
        assert len(workers()) > 1
        monkeypatch.setattr(opened, "_DECODERS_BYTES", 16 * 64 * 48)
        assert workers() == {threading.get_ident()}
    finally:
        crew.close()


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes need memfd and pidfd")
async def test_giants_hold_up_nobody_and_end_in_time(tiny: ProcessorConfig) -> None:
    settings = DecodeSettings(num_threads=2, isolation="processes", max_worker_bytes=1024**3)
    pool = DecodePool(settings)
    try:
        await pool.warm_up()

        async def ask(content: bytes, modality: Modality, limits: DecodeLimits, timeout_s: float) -> PreparedMedia:
            config = dataclasses.replace(tiny, limits=limits)
            return await pool.prepare(
                content, modality=modality, options=MediaOptions(), config=config, key=KEY, timeout_s=timeout_s
            )

        with pytest.raises(MediaTooLarge, match="6000 x 6000"):
            await ask(giant(6000, 200), Modality.VIDEO, LIMITS, 60.0)
        # With the limit raised, it takes some of the decoder's frames and one of ours.
        assert (await ask(giant(6000, 8), Modality.VIDEO, UNBOUND, 60.0)).patches is not None
        start_s = time.monotonic()
        long = asyncio.create_task(ask(giant(4000, 5000), Modality.VIDEO, UNBOUND, 2.0))
        small = picture_file(blocks(64, 64, 0))
        for _ in range(5):
            assert (await ask(small, Modality.IMAGE, LIMITS, 20.0)).patches is not None
        with pytest.raises(MediaDecodeTimeout):
            await long
        assert time.monotonic() - start_s < 10
    finally:
        pool.close()
