"""Parts of a video: all frames once, early ones first, only a few at a time, from any number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preprocess import Crew, DecodeLimits, MediaDecodeTimeout, MediaOptions, MediaUndecodable, ProcessorConfig
from preprocess.config import VideoBudget
from preprocess.types import MediaPart, Patches, Pixels
from preprocess.video import OpenVideo, VideoChanged, open_video, read_index
from preprocess.video.parts import PartAssembly, Stopped
from tests.fakes.clips import blocks, damaged, grey_of_frame, make_video

LIMITS = DecodeLimits()
NUM_FRAMES = 90


def go_on() -> None:
    pass


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def clip() -> bytes:
    return make_video(NUM_FRAMES, gop=10, corner=True)


@pytest.fixture
def budget(tiny: ProcessorConfig) -> VideoBudget:
    return tiny.video_budget(MediaOptions(fps=4.0))


def opened(content: bytes, budget: VideoBudget, **changes: Any) -> OpenVideo:
    settings: dict[str, Any] = {"limits": LIMITS, "backend": "pyav", "check_deadline": go_on} | changes
    return open_video(content, budget=budget, **settings)


def decoded(video: OpenVideo, crew: Crew, *, patches_per_part: int | None = None, raw: bool = False) -> list[MediaPart]:
    parts: list[MediaPart] = []
    video.decode(parts.append, patches_per_part=patches_per_part, raw=raw, crew=crew, check_deadline=go_on)
    return sorted(parts, key=lambda part: part.first_pair)


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("patches_per_part", [1, 100, 150, 10_000, None])
def test_parts_put_together_are_the_whole(
    clip: bytes, budget: VideoBudget, patches_per_part: int | None, num_threads: int
) -> None:
    crew = Crew(num_threads)
    video = opened(clip, budget)
    (whole,) = decoded(opened(clip, budget), crew)
    parts = decoded(video, crew, patches_per_part=patches_per_part)
    crew.close()
    t, h, w = video.grid_thw
    pairs = t if patches_per_part is None else max(1, patches_per_part // (h * w))
    assert [part.first_pair for part in parts] == list(range(0, t, pairs))
    assert [part.pictures.grid_thw for part in parts] == [(min(pairs, t - part.first_pair), h, w) for part in parts]
    values = [part.pictures.pixel_values for part in parts if isinstance(part.pictures, Patches)]
    assert isinstance(whole.pictures, Patches)
    np.testing.assert_array_equal(np.concatenate(values), whole.pictures.pixel_values)


def test_raw_parts_hold_the_frames(clip: bytes, tiny: ProcessorConfig, crew: Crew) -> None:
    video = opened(make_video(37, corner=True, gop=10), tiny.video_budget(MediaOptions(num_frames=36)))
    assert len(video.indices) % 2 == 0
    odd = opened(make_video(1, corner=True), tiny.video_budget(MediaOptions()))
    for one in (video, odd):
        parts = decoded(one, crew, patches_per_part=100, raw=True)
        frames = [frame for part in parts if isinstance(part.pictures, Pixels) for frame in part.pictures.frames]
        assert len(frames) == 2 * one.grid_thw[0]
        expected = [grey_of_frame(int(number)) for number in one.indices]
        np.testing.assert_allclose([frame[-20:, -20:].mean() for frame in frames[: len(expected)]], expected, atol=4)
        assert all(frame.flags.c_contiguous and frame.dtype == np.uint8 for frame in frames)
        if len(one.indices) % 2:
            assert frames[-1] is frames[-2]
    assert len(odd.indices) == 1


def test_a_slow_consumer_holds_decoding_up(clip: bytes, budget: VideoBudget, crew: Crew) -> None:
    video = opened(clip, budget)
    num_patches = video.grid_thw[1] * video.grid_thw[2]
    assembly = assembly_of(12, max_open_parts=2)
    stop = threading.Event()
    assembly.wait_for_room(3, stop=stop, check_deadline=go_on)
    with pytest.raises(MediaDecodeTimeout):
        assembly.wait_for_room(4, stop=stop, check_deadline=late)
    stop.set()
    with pytest.raises(Stopped):
        assembly.wait_for_room(4, stop=stop, check_deadline=go_on)
    in_put = threading.Semaphore(0)
    seen: list[int] = []

    def put(part: MediaPart) -> None:
        seen.append(part.first_pair)
        assert in_put.acquire(timeout=10)

    video.max_open_parts = 3
    work = threading.Thread(
        target=video.decode,
        args=(put,),
        kwargs={"patches_per_part": num_patches, "raw": False, "crew": crew, "check_deadline": go_on},
    )
    work.start()
    time.sleep(0.3)
    # The first part is not taken yet, so nothing beyond the third may be there.
    assert seen
    assert max(seen) <= 2
    for _ in range(video.grid_thw[0]):
        in_put.release()
    work.join(10)
    assert not work.is_alive()
    assert sorted(seen) == list(range(video.grid_thw[0]))


def late() -> None:
    raise MediaDecodeTimeout("late")


def assembly_of(num_frames: int, *, max_open_parts: int, parts: list[MediaPart] | None = None) -> PartAssembly:
    return PartAssembly(
        num_frames=num_frames,
        height=32,
        width=32,
        put=(parts if parts is not None else []).append,
        pairs_per_part=1,
        raw=False,
        max_open_parts=max_open_parts,
    )


def test_room_appears_when_the_oldest_part_is_done() -> None:
    parts: list[MediaPart] = []
    assembly = assembly_of(7, max_open_parts=1, parts=parts)
    pixels: NDArray[np.uint8] = blocks(32, 32, 0)
    stop = threading.Event()
    for position in (1, 0, 3, 2, 5, 4, 6):
        assembly.wait_for_room(position, stop=stop, check_deadline=late)
        assembly.store(position, pixels)
    assert [part.first_pair for part in parts] == [0, 1, 2, 3]
    assert assembly.missing() == []


@pytest.mark.parametrize("source", ["put", "deadline"])
def test_an_error_stops_all_workers_and_comes_out_once(
    clip: bytes, budget: VideoBudget, crew: Crew, source: str
) -> None:
    video = opened(clip, budget)
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if source == "deadline" and len(calls) > 20:
            raise MediaDecodeTimeout("late")

    def put(part: MediaPart) -> None:
        if source == "put" and part.first_pair >= 3:
            raise RuntimeError("the consumer is gone")

    with pytest.raises((MediaDecodeTimeout, RuntimeError), match=r"late|gone"):
        video.decode(put, patches_per_part=1, raw=False, crew=crew, check_deadline=check)
    # The crew is free again.
    assert len(decoded(opened(clip, budget), crew)) == 1


def without_groups(content: bytes, first: int, last: int) -> tuple[bytes, range]:
    """The clip with these groups of pictures damaged, and the numbers of the frames lost."""
    index = read_index(content, LIMITS, go_on)
    starts = [*np.flatnonzero(index.is_start).tolist(), len(index.pts)]
    lost = range(starts[first], starts[last + 1])
    return damaged(content, lost), lost


def greys_of(parts: list[MediaPart], num_frames: int) -> NDArray[np.float64]:
    frames = [frame for part in parts if isinstance(part.pictures, Pixels) for frame in part.pictures.frames]
    return np.array([frame[-20:, -20:].mean() for frame in frames[:num_frames]])


def test_a_damaged_group_in_the_middle_costs_only_its_frames(clip: bytes, budget: VideoBudget, crew: Crew) -> None:
    content, lost = without_groups(clip, 3, 3)
    video = opened(content, budget)
    greys = greys_of(decoded(video, crew, patches_per_part=100, raw=True), len(video.indices))
    numbers = video.indices
    assert numbers[-1] == NUM_FRAMES - 1
    assert any(number in lost for number in numbers)
    # Each lost frame is replaced by the one before the group.
    expected = [grey_of_frame(lost.start - 1 if number in lost else int(number)) for number in numbers]
    np.testing.assert_allclose(greys, expected, atol=4)
    (warning,) = [warning for warning in video.warnings if "stand in" in warning]
    assert int(warning.split()[0]) == sum(number in lost for number in numbers)
    assert any("damaged packets were skipped" in warning for warning in video.warnings)


def test_a_damaged_end_makes_another_choice(clip: bytes, budget: VideoBudget, crew: Crew) -> None:
    content, lost = without_groups(clip, 6, -2)
    video = opened(content, budget)
    with pytest.raises(VideoChanged) as change:
        decoded(video, crew)
    again = change.value.video
    assert again.indices[-1] == lost.start - 1
    assert any(f"90 frames were counted, {lost.start} decode" in warning for warning in again.warnings)
    parts = decoded(again, crew, raw=True)
    assert parts[0].pictures.grid_thw == again.grid_thw
    expected = [grey_of_frame(int(number)) for number in again.indices]
    np.testing.assert_allclose(greys_of(parts, len(again.indices)), expected, atol=4)


def test_the_choice_changes_a_few_times_at_most(clip: bytes, budget: VideoBudget, crew: Crew) -> None:
    content, lost = without_groups(clip, 6, -2)
    video = opened(content, budget)
    video.num_changes = 2
    greys = greys_of(decoded(video, crew, raw=True), len(video.indices))
    assert abs(greys[-1] - grey_of_frame(lost.start - 1)) < 4
    assert any("stand in" in warning for warning in video.warnings)


def test_a_file_of_nothing_but_damage_is_an_error(clip: bytes, budget: VideoBudget) -> None:
    content, _ = without_groups(clip, 0, -2)
    with pytest.raises(MediaUndecodable, match="no frame of the video decodes"):
        opened(content, budget)


def test_the_plan_is_used_where_it_can_be(clip: bytes) -> None:
    assert read_index(clip, LIMITS, go_on).scan_reason is None
