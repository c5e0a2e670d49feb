"""H.264 pictures that others refer to are left out where those wanted do not need them, and only there."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from preprocess import DecodeLimits
from preprocess.crew import NO_CREW, Crew, Teamwork
from preprocess.video.h264 import I_SLICE, P_SLICE, HeaderReader, Picture, Slice, Sps, Unreadable, stand_in
from preprocess.video.index import read_index
from preprocess.video.planned import decode_planned
from preprocess.video.references import Shortcut, needed, references
from tests.oracles.video_scan import all_frames

LIMITS = DecodeLimits()
VERYFAST = {"ref": "1", "bframes": "3", "b-pyramid": "normal", "weightp": "1"}


def encode(num_frames: int, params: dict[str, str], *, seed: int = 0) -> bytes:
    """Textures that move back and forth and fade, so that several references and weights pay."""
    rng = np.random.default_rng(seed)
    world = rng.integers(0, 256, (20, 30, 3)).repeat(6, axis=0).repeat(6, axis=1).astype(np.float32)
    file = io.BytesIO()
    text = ":".join(f"{key}={value}" for key, value in ({"scenecut": "0", "threads": "1"} | params).items())
    with av.open(file, mode="w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=25, options={"x264-params": text, "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.codec_context.bit_rate = 300_000
        for number in range(num_frames):
            x, y = round(30 + 28 * np.sin(number / 3)), round(20 + 18 * np.cos(number / 5))
            pixels = world[y : y + 64, x : x + 64] * (0.6 + 0.4 * np.sin(number / 7))
            frame = av.VideoFrame.from_ndarray(pixels.astype(np.uint8), format="rgb24")
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


@dataclass(frozen=True)
class Stream:
    """The packets of a clip."""

    content: bytes

    @property
    def packets(self) -> list[tuple[int, bytes]]:
        with av.open(io.BytesIO(self.content), mode="r") as container:
            return list(enumerate(bytes(memoryview(packet)) for packet in container.demux(video=0) if packet.size))

    @property
    def extradata(self) -> bytes:
        with av.open(io.BytesIO(self.content), mode="r") as container:
            return bytes(container.streams.video[0].codec_context.extradata or b"")


CLIP = Stream(encode(24, VERYFAST | {"keyint": "60"}))


def planned(content: bytes, numbers: list[int]) -> list[NDArray[np.uint8]]:
    found: dict[int, NDArray[np.uint8]] = {}
    decode_planned(
        content,
        read_index(content, LIMITS, lambda: None),
        list(enumerate(numbers)),
        found.__setitem__,
        limits=LIMITS,
        crew=NO_CREW,
        team=Teamwork(),
        max_frames_ahead=1000,
        max_decoders=16,
        check_deadline=lambda: None,
    )
    return [found[place] for place in range(len(numbers))]


PARAMS = st.fixed_dictionaries(
    {
        "ref": st.sampled_from(["1", "1", "2", "3", "5"]),
        "bframes": st.sampled_from(["0", "1", "2", "3", "5", "8"]),
        "b-pyramid": st.sampled_from(["none", "strict", "normal", "normal"]),
        "b-adapt": st.sampled_from(["0", "2"]),
        "weightp": st.sampled_from(["0", "1", "2"]),
        "weightb": st.sampled_from(["0", "1"]),
        "direct": st.sampled_from(["spatial", "temporal", "auto"]),
        "slices": st.sampled_from(["1", "1", "3"]),
        "open-gop": st.sampled_from(["0", "0", "1"]),
        "keyint": st.sampled_from(["7", "20", "40"]),
        "cabac": st.sampled_from(["0", "1"]),
        "tff": st.sampled_from(["0", "0", "0", "0", "1"]),
        "intra-refresh": st.sampled_from(["0", "0", "0", "0", "1"]),
    }
)


@settings(max_examples=40, deadline=None)
@given(params=PARAMS, num_frames=st.integers(1, 50), data=st.data(), seed=st.integers(0, 3))
def test_frames_are_the_scan_s_whatever_refers_to_what(
    params: dict[str, str], num_frames: int, data: st.DataObject, seed: int
) -> None:
    content = encode(num_frames, params, seed=seed)
    truth = all_frames(content)
    numbers = data.draw(st.lists(st.integers(0, num_frames - 1), min_size=1, max_size=5, unique=True).map(sorted))
    for number, pixels in zip(numbers, planned(content, numbers), strict=True):
        assert np.array_equal(pixels, truth[number]), f"{params}: frame {number} of {numbers}"


def test_half_the_pictures_of_a_pyramid_are_replaced() -> None:
    stream = Stream(encode(41, VERYFAST | {"keyint": "60", "b-adapt": "0"}))
    replaced = Shortcut(stream.extradata).stand_ins(stream.packets, {40})
    # Groups of P, B with two neighbours of its own; the last one is where the frame wanted is.
    assert len(replaced) >= 8
    reader = HeaderReader(stream.extradata)
    pictures = [reader.read(packet) for _, packet in stream.packets]
    assert all(pictures[number].is_reference for number in replaced)


def test_longer_lists_need_more() -> None:
    short, long = (Stream(encode(41, VERYFAST | {"ref": ref, "keyint": "60", "b-adapt": "0"})) for ref in ("1", "5"))
    num_replaced = [len(Shortcut(stream.extradata).stand_ins(stream.packets, {40})) for stream in (short, long)]
    assert num_replaced[0] > num_replaced[1]


def test_references_come_before_and_stay_within_the_store() -> None:
    stream = Stream(encode(50, {"ref": "4", "bframes": "3", "b-pyramid": "normal", "keyint": "25"}))
    reader = HeaderReader(stream.extradata)
    pictures = [reader.read(packet) for _, packet in stream.packets]
    sps = reader.parameters()
    used = references(pictures, sps)
    for number, picture in enumerate(pictures):
        assert len(used[number]) <= sps.max_references
        assert all(other < number and pictures[other].is_reference for other in used[number])
        assert bool(used[number]) == any(max(one.num_active) for one in picture.slices)
    assert needed(used, {0}) == {0}
    assert needed(used, {7}) >= {7} | used[7]


SPS = Sps(number=0, num_macroblocks=16, has_chroma=True, frame_num_bits=4, order_bits=6, max_references=2)


def test_the_store_holds_the_latest_and_lets_go_of_those_named() -> None:
    def picture(number: int, unmarked: list[int]) -> Picture:
        one = Slice(P_SLICE if number else I_SLICE, (5 * bool(number), 0), ((), ()))
        return Picture(number == 0, True, number % 16, 2 * number % 64, None, slices=[one], unmarked=unmarked)

    # Numbers of frames wrap at 16.
    used = references([picture(number, []) for number in range(40)], SPS)
    assert used == [frozenset(range(max(number - 2, 0), number)) for number in range(40)]
    used = references([picture(number, [1] if number == 3 else []) for number in range(6)], SPS)
    assert [set(one) for one in used] == [set(), {0}, {0, 1}, {1, 2}, {1, 3}, {3, 4}]


@given(
    frame_num=st.integers(0, 15),
    order_lsb=st.integers(0, 63),
    order_delta=st.none() | st.integers(-9, 9),
    unmarked=st.lists(st.integers(1, 15), max_size=3),
    length_bytes=st.sampled_from([1, 2, 4]),
)
def test_a_stand_in_reads_like_the_picture_it_replaces(
    frame_num: int, order_lsb: int, order_delta: int | None, unmarked: list[int], length_bytes: int
) -> None:
    reader = HeaderReader(bytes([*CLIP.extradata[:4], 0xFC + length_bytes - 1, *CLIP.extradata[5:]]))
    sps = reader.parameters()
    picture = Picture(False, True, frame_num, order_lsb % (1 << sps.order_bits), order_delta, unmarked=unmarked)
    packet = stand_in(picture, sps, length_bytes=length_bytes)
    found = reader.read(packet)
    assert len(packet) < 60
    assert (found.is_idr, found.is_reference, found.frame_num) == (False, True, picture.frame_num)
    assert (found.order_lsb, found.order_delta) == (picture.order_lsb, order_delta)
    assert found.unmarked == unmarked
    assert [(one.kind, one.num_active) for one in found.slices] == [(P_SLICE, (1, 0))]


def test_what_is_not_understood_leaves_nothing_out() -> None:
    fields = Stream(encode(20, VERYFAST | {"tff": "1"}))
    with pytest.raises(Unreadable, match="fields"):
        HeaderReader(fields.extradata)
    assert Shortcut(fields.extradata).stand_ins(fields.packets, {10}) == {}
    clip = Stream(encode(41, VERYFAST | {"keyint": "60", "b-adapt": "0"}))
    for damaged in (b"", b"\x01\x64\x00", clip.extradata[:12]):
        assert Shortcut(damaged).stand_ins(clip.packets, {40}) == {}
    cut = [(number, packet[:7]) for number, packet in clip.packets]
    assert Shortcut(clip.extradata).stand_ins(cut, {40}) == {}
    # A reference picture that is missing shows in the numbering of those after it.
    gap = [(number, packet) for number, packet in clip.packets if number != 5]
    assert Shortcut(clip.extradata).stand_ins(gap, {40}) == {}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_escape_as_something_else(data: st.DataObject) -> None:
    packet = bytearray(CLIP.packets[data.draw(st.integers(0, 20))][1])
    for _ in range(data.draw(st.integers(1, 20))):
        packet[data.draw(st.integers(0, min(len(packet), 60) - 1))] = data.draw(st.integers(0, 255))
    packets = [*CLIP.packets[:20], (20, bytes(packet))]
    Shortcut(CLIP.extradata).stand_ins(packets, {20})


def test_several_decoders_leave_out_alike() -> None:
    content = encode(100, VERYFAST | {"keyint": "20"})
    truth = all_frames(content)
    numbers = list(range(3, 100, 9))
    crew = Crew(2)
    found: dict[int, NDArray[np.uint8]] = {}
    decode_planned(
        content,
        read_index(content, LIMITS, lambda: None),
        list(enumerate(numbers)),
        found.__setitem__,
        limits=LIMITS,
        crew=crew,
        team=Teamwork(),
        max_frames_ahead=12,
        max_decoders=16,
        check_deadline=lambda: None,
    )
    crew.close()
    for place, number in enumerate(numbers):
        np.testing.assert_array_equal(found[place], truth[number])
