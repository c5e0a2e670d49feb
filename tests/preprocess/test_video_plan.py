"""Planned decoding gives the frames that a scan gives, byte for byte, and decodes no more than it must."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import DecodeLimits
from preprocess.crew import NO_CREW, Crew, Teamwork
from preprocess.video.index import VideoIndex, read_index
from preprocess.video.plan import NotPlannable, Task, plan
from preprocess.video.planned import Unproven, decode_planned
from tests.fakes.media.priority import ordinary_priority
from tests.oracles.video_scan import all_frames

LIMITS = DecodeLimits()


def go_on() -> None:
    pass


@dataclass(frozen=True)
class Clip:
    codec: str = "libx264"
    container: str = "mp4"
    num_frames: int = 40
    gop: int = 12
    num_b_frames: int = 2
    rate: Fraction = Fraction(25)
    options: tuple[tuple[str, str], ...] = ()
    seed: int = 0


OPEN_H264 = (("x264-params", "open-gop=1:b-pyramid=normal:scenecut=0:threads=1"),)
CLOSED_H264 = (("x264-params", "scenecut=0:threads=1"),)
OPEN_HEVC = (("preset", "ultrafast"), ("x265-params", "open-gop=1:bframes=3:b-adapt=0:log-level=none:pools=none"))
LAYERED_HEVC = (
    ("preset", "ultrafast"),
    ("x265-params", "temporal-layers=3:bframes=3:b-pyramid=1:b-adapt=0:log-level=none:pools=none"),
)
VP9 = (("deadline", "realtime"), ("cpu-used", "8"), ("auto-alt-ref", "1"), ("lag-in-frames", "10"))
VP8 = (("deadline", "realtime"), ("cpu-used", "8"), ("auto-alt-ref", "1"), ("lag-in-frames", "10"))
CODECS: list[tuple[str, tuple[tuple[str, str], ...]]] = [
    ("libx264", CLOSED_H264),
    ("libx264", OPEN_H264),
    ("libx265", OPEN_HEVC),
    ("libx265", LAYERED_HEVC),
    ("libvpx-vp9", VP9),
    ("libvpx", VP8),
    ("mpeg4", ()),
    ("mjpeg", ()),
]


def encode(clip: Clip) -> bytes:
    """A textured picture that moves, so that a wrong reference shows in every frame after it."""
    rng = np.random.default_rng(clip.seed)
    world = rng.integers(0, 256, (12, 24, 3), dtype=np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    file = io.BytesIO()
    with ordinary_priority(), av.open(file, mode="w", format=clip.container) as output:
        stream: Any = output.add_stream(clip.codec, rate=clip.rate, options=dict(clip.options))
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if clip.codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = clip.gop
        stream.codec_context.max_b_frames = clip.num_b_frames if clip.codec in ("libx264", "mpeg4") else 0
        stream.codec_context.bit_rate = 400_000
        for number in range(clip.num_frames):
            left = (5 * number) % 120
            pixels = world[number % 40 : number % 40 + 48, left : left + 64].copy()
            pixels[:8] = (number * 37) % 256
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, 1 / clip.rate
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def planned(content: bytes, index: VideoIndex, numbers: list[int], crew: Crew) -> list[NDArray[np.uint8]]:
    found: dict[int, NDArray[np.uint8]] = {}
    decode_planned(
        content,
        index,
        list(enumerate(numbers)),
        found.__setitem__,
        limits=LIMITS,
        crew=crew,
        team=Teamwork(),
        max_frames_ahead=1000,
        max_decoders=16,
        check_deadline=go_on,
    )
    return [found[place] for place in range(len(numbers))]


def compare(clip: Clip, numbers: list[int], crew: Crew) -> None:
    content = encode(clip)
    index = read_index(content, LIMITS, go_on)
    assert index.scan_reason is None
    truth = all_frames(content)
    assert index.num_frames == len(truth)
    for number, pixels in zip(numbers, planned(content, index, numbers, crew), strict=True):
        assert np.array_equal(pixels, truth[number]), f"{clip}: frame {number} of {numbers}"


CLIPS = st.builds(
    lambda codec, container, num_frames, gop, num_b_frames, rate, seed: Clip(
        codec[0],
        "matroska" if codec[0] == "libvpx" else container,
        num_frames,
        gop,
        num_b_frames,
        rate,
        codec[1],
        seed,
    ),
    st.sampled_from(CODECS),
    st.sampled_from(["mp4", "matroska"]),
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(0, 4),
    st.sampled_from([Fraction(25), Fraction(30000, 1001), Fraction(10)]),
    st.integers(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(clip=CLIPS, data=st.data())
def test_planned_frames_are_the_scan_s(clip: Clip, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, clip.num_frames - 1), min_size=1, max_size=12, unique=True).map(sorted))
    crew = Crew(data.draw(st.integers(0, 2)))
    try:
        compare(clip, numbers, crew)
    finally:
        crew.close()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec[0]}-{len(codec[1])}")
def test_starts_are_found(codec: tuple[str, tuple[tuple[str, str], ...]]) -> None:
    container = "matroska" if codec[0] == "libvpx" else "mp4"
    index = read_index(encode(Clip(codec[0], container, 40, 10, 2, options=codec[1])), LIMITS, go_on)
    assert index.scan_reason is None
    assert 4 <= sum(index.is_start) <= (40 if codec[0] == "mjpeg" else 5)
    # Layers refer to each other's pictures in ways that their headers do not tell.
    assert index.may_skip == (codec[0] in ("libx264", "libx265") and codec[1] != LAYERED_HEVC)


def test_leading_pictures_belong_to_the_run_before() -> None:
    index = read_index(encode(Clip("libx265", options=OPEN_HEVC, gop=20, num_frames=60)), LIMITS, go_on)
    (start,) = (int(packet) for packet in np.flatnonzero(index.is_start)[1:2])
    number = int(np.searchsorted(index.shown, -1)) + int(np.flatnonzero(index.shown == start)[0])
    ((run,),) = plan(index, [(0, number - 1)], num_workers=1, max_task_frames=9)
    assert run.start == 0
    assert run.last > start


@st.composite
def indices(draw: st.DrawFn) -> VideoIndex:
    """Files of groups such as I0 P4 B2 B1 B3: the last picture of a group comes first, the others in any order."""
    order: list[int] = []
    starts: list[bool] = []
    while len(order) < draw(st.integers(1, 60)):
        first, size = len(order), draw(st.integers(1, 5))
        group = list(range(first, first + size))
        order.append(group.pop())
        starts.append(first == 0 or draw(st.booleans()))
        order.extend(draw(st.permutations(group)))
        starts.extend([False] * len(group))
    # The file begins with a start, in both orders.
    order[order.index(0)], order[0] = order[0], 0
    pts = np.array(order, dtype=np.int64) * 3
    return VideoIndex(
        pts=pts,
        dts=np.arange(len(order), dtype=np.int64),
        size_bytes=np.ones(len(order), dtype=np.int64),
        is_start=np.array(starts, dtype=np.bool_),
        is_marked=np.array(starts, dtype=np.bool_),
        shown=np.argsort(pts),
        times_s=np.sort(pts).astype(np.float64),
        rate_fps=1.0,
        scan_reason=None,
        may_skip=False,
    )


def own_start(index: VideoIndex, packet: int) -> int:
    """The last start that comes before the packet in the file and not after it on the screen."""
    return max(start for start in range(packet + 1) if index.is_start[start] and index.pts[start] <= index.pts[packet])


@settings(max_examples=200, deadline=None)
@given(index=indices(), data=st.data(), num_workers=st.integers(1, 4), max_task_frames=st.integers(0, 9))
def test_a_plan_holds_what_is_needed_and_no_more(
    index: VideoIndex, data: st.DataObject, num_workers: int, max_task_frames: int
) -> None:
    numbers = data.draw(st.lists(st.integers(0, index.num_frames - 1), min_size=1, unique=True).map(sorted))
    tasks = plan(index, list(enumerate(numbers)), num_workers=num_workers, max_task_frames=max_task_frames)
    runs = [run for task in tasks for run in task]
    # Every frame wanted is in one run, and all are in display order.
    found = [(target.place, target.packet) for run in runs for target in run.targets]
    assert found == [(place, index.shown[number]) for place, number in enumerate(numbers)]
    needed = {
        packet
        for number in numbers
        for packet in range(own_start(index, int(index.shown[number])), index.shown[number] + 1)
    }
    assert {packet for run in runs for packet in range(run.start, run.last + 1)} == needed
    for run in runs:
        assert index.is_start[run.start]
        assert run.last == max(target.packet for target in run.targets)
        assert all(run.start <= own_start(index, target.packet) for target in run.targets)
    for task in tasks:
        # What one decoder does next to each other is done once.
        assert all(later.start > earlier.last + 1 for earlier, later in itertools.pairwise(task))
        own_starts = {own_start(index, target.packet) for run in task for target in run.targets}
        assert len(own_starts) == 1 or sum(len(run.targets) for run in task) <= max_task_frames
    assert_balanced(tasks, num_workers)


def assert_balanced(tasks: list[Task], num_workers: int) -> None:
    """No task is so long that the other workers wait for it, unless a single run is."""
    total = sum(run.num_packets for task in tasks for run in task)
    for task in tasks:
        if sum(run.num_packets for run in task) > max(24, total / (8 * num_workers) + 24):
            assert len(task) == 1


def test_frames_before_the_first_start_are_not_planned() -> None:
    index = read_index(encode(Clip()), LIMITS, go_on)
    late = replace(index, is_start=index.is_start & (np.arange(40) > 0))
    with pytest.raises(NotPlannable):
        plan(late, [(0, 0)], num_workers=1, max_task_frames=9)


@pytest.mark.parametrize("field", ["size_bytes", "pts"])
def test_a_landing_elsewhere_is_noticed(field: str) -> None:
    content = encode(Clip(gop=10))
    index = read_index(content, LIMITS, go_on)
    values = getattr(index, field).copy()
    values[20] += 1
    wrong = replace(index, **{field: values})
    with pytest.raises(Unproven):
        planned(content, wrong, [22], NO_CREW)
    assert len(planned(content, wrong, [5], NO_CREW)) == 1


def test_damage_on_the_way_is_noticed() -> None:
    content = bytearray(encode(Clip(gop=10)))
    index = read_index(bytes(content), LIMITS, go_on)
    with av.open(io.BytesIO(bytes(content)), mode="r") as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][10]
    assert packet.pos is not None
    content[packet.pos + 8 : packet.pos + packet.size] = b"\xa5" * (packet.size - 8)
    with pytest.raises(Unproven):
        planned(bytes(content), index, [12], NO_CREW)
    assert len(planned(bytes(content), index, [25], NO_CREW)) == 1


@pytest.mark.parametrize(
    ("clip", "reason"),
    [
        (Clip(container="mpegts"), "no exact seeking"),
        (Clip("libx264", "avi"), "no exact seeking"),
        (Clip("mpeg2video", "matroska"), "not proven"),
    ],
)
def test_what_cannot_be_planned(clip: Clip, reason: str) -> None:
    index = read_index(encode(clip), LIMITS, go_on)
    assert reason in (index.scan_reason or "")
