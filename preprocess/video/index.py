"""What a video file holds, packet by packet, learnt in one pass without decoding.

What the container says about its frame count is not believed; packets are counted. Some packets are needed as
references and never shown: those that an edit list cuts off, hidden frames of VP8. They make no frames.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from preprocess.config import DecodeLimits
from preprocess.container import PacketReader, open_container, read_only
from preprocess.errors import MediaUndecodable
from preprocess.joined import joined_warnings
from preprocess.sniff import describe
from preprocess.video.bitstream import PROVABLE_CODECS, SKIPPING_CODECS, BitstreamReader
from preprocess.video.stream import (
    check_frame_size,
    check_length,
    check_total,
    pick_video_stream,
    pixels_allowed,
    stream_rate_fps,
)

_CHECK_EVERY: Final = 1024
# Containers that keep a table of packets with their times, by which one can seek. Landings are verified all the same.
_SEEKABLE: Final = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"})
_NO_LAYER: Final = 8
# Containers without times of display: FFmpeg makes them up, in file order, which for some codecs is another.
_UNTIMED: Final = frozenset({"avi", "h264", "hevc", "m4v", "mpegvideo", "obu"})
# Sound may be longer than the pictures, and the last picture be shown for long.
_MAX_SHORTFALL_S: Final = 1.0
_LENGTH: Final = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class VideoIndex:
    """All packets of one video stream, in file order (N of them), and the frames they make (F)."""

    pts: NDArray[np.int64]
    """[N] in units of the stream's time base; 0 where there is none."""
    dts: NDArray[np.int64]
    """[N] like pts."""
    size_bytes: NDArray[np.int64]
    """[N]"""
    is_start: NDArray[np.bool_]
    """[N] decoding can start here: frames from this one on, in display order, need nothing before it."""
    is_marked: NDArray[np.bool_]
    """[N] the container says that decoding can start here; of these `is_start` are proven."""
    shown: NDArray[np.int64]
    """[F] the packet of each frame that is shown, in display order."""
    times_s: NDArray[np.float64] | None
    """[F] when each frame is shown, strictly increasing from 0; None where the packets do not tell them apart."""
    rate_fps: float
    """Frames per second on average, as the container has it."""
    scan_reason: str | None
    """Why frames can only be found by decoding from the start; None where `plan` may be used."""
    may_skip: bool
    """Pictures that no other needs may be left out by the decoder."""
    warnings: tuple[str, ...] = ()
    start_s: float | None = None
    """When the first frame is shown by the container's clock, by which its sound is placed; None: not known."""

    @property
    def num_frames(self) -> int:
        return len(self.shown)

    def cut_to(self, num_frames: int, warning: str) -> VideoIndex:
        """The same file as if it ended after its first `num_frames` frames."""
        times_s = None if self.times_s is None else self.times_s[:num_frames]
        return replace(self, shown=self.shown[:num_frames], times_s=times_s, warnings=(*self.warnings, warning))


@dataclass(slots=True)
class _Rows:
    """One entry per packet."""

    pts: list[int | None]
    dts: list[int | None]
    size_bytes: list[int]
    is_start: list[bool]
    is_marked: list[bool]
    is_shown: list[bool]
    has_discards: bool = False
    highest_layer: int = 0
    lowest_droppable_layer: int = _NO_LAYER
    has_damage: bool = False


def read_index(content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]) -> VideoIndex:
    """Raises MediaUndecodable, MediaUnsupported or MediaTooLarge, and what `check_deadline` raises."""
    with open_container(content, "a video") as container:
        stream = pick_video_stream(container, content)
        read_only(container, stream)
        context = stream.codec_context
        check_frame_size(context.width, context.height, limits)
        packets = PacketReader(container, stream)
        bitstream = BitstreamReader(context.codec.name, bytes(context.extradata or b""))
        rows = _read_rows(packets, bitstream, check_deadline)
        num_frames = sum(rows.is_shown)
        if num_frames == 0:
            raise MediaUndecodable(f"the video has no frames ({describe(content)})")
        check_total(
            num_frames,
            context.width,
            context.height,
            pixels_allowed(context.codec.canonical_name, len(content), limits),
        )
        index = _index_of(rows, packets, container, stream, content)
    length_s = num_frames / index.rate_fps
    if index.times_s is not None:
        length_s = max(length_s, float(index.times_s[-1]))
    check_length(num_frames, length_s, limits)
    return index


def _read_rows(packets: PacketReader, bitstream: BitstreamReader, check_deadline: Callable[[], None]) -> _Rows:
    rows = _Rows([], [], [], [], [], [])
    for packet in packets:
        if not packet.size:
            continue
        is_start, is_shown = False, True
        if packet.is_keyframe or bitstream.reads_every_packet:
            facts = bitstream.facts(memoryview(packet))
            is_start = facts.is_start and packet.is_keyframe
            is_shown = facts.is_shown
            rows.highest_layer = max(rows.highest_layer, facts.layer)
            if facts.may_be_left_out:
                rows.lowest_droppable_layer = min(rows.lowest_droppable_layer, facts.layer)
        if packet.is_discard:
            is_shown, rows.has_discards = False, True
        rows.has_damage = rows.has_damage or packet.is_corrupt
        rows.pts.append(packet.pts)
        rows.dts.append(packet.dts)
        rows.size_bytes.append(packet.size)
        rows.is_start.append(is_start)
        rows.is_marked.append(packet.is_keyframe)
        rows.is_shown.append(is_shown)
        if len(rows.pts) % _CHECK_EVERY == 0:
            check_deadline()
    return rows


def _index_of(rows: _Rows, packets: PacketReader, container: Any, stream: Any, content: bytes) -> VideoIndex:
    pts = np.array([value or 0 for value in rows.pts], dtype=np.int64)
    shown = np.flatnonzero(np.array(rows.is_shown, dtype=np.bool_))
    times_s: NDArray[np.float64] | None = None
    start_s: float | None = None
    is_timed = all(rows.pts[packet] is not None for packet in shown) and len(np.unique(pts[shown])) == len(shown)
    if is_timed and not (container.format.name in _UNTIMED and stream.codec_context.has_b_frames):
        shown = shown[np.argsort(pts[shown])]
        times_s = (pts[shown] - pts[shown[0]]) * float(stream.time_base)
        start_s = int(pts[shown[0]]) * float(stream.time_base)
    num_frames = len(shown)
    warnings: tuple[str, ...] = (packets.damage,) if packets.damage is not None else ()
    warnings += joined_warnings(content)
    if not rows.has_discards:
        warnings += _shortfall(stream, num_frames, None if times_s is None else int(pts[shown[-1]]))
    codec = stream.codec_context.codec.name
    return VideoIndex(
        pts=pts,
        dts=np.array([value or 0 for value in rows.dts], dtype=np.int64),
        size_bytes=np.array(rows.size_bytes, dtype=np.int64),
        is_start=np.array(rows.is_start, dtype=np.bool_),
        is_marked=np.array(rows.is_marked, dtype=np.bool_),
        shown=shown,
        times_s=times_s,
        rate_fps=stream_rate_fps(container, stream, num_frames),
        scan_reason=_scan_reason(rows, container.format.name, codec),
        # A picture that its own temporal layer does not refer to may still be needed by the layers above.
        may_skip=codec in SKIPPING_CODECS and rows.lowest_droppable_layer >= rows.highest_layer,
        warnings=warnings,
        start_s=start_s,
    )


def _shortfall(stream: Any, num_frames: int, last_pts: int | None) -> tuple[str, ...]:
    """A file cut short announces more than it holds: frames, or in Matroska the time at which the track ends."""
    if stream.frames > num_frames:
        return (f"the file announces {stream.frames} frames and holds {num_frames}",)
    length = _LENGTH.fullmatch(stream.metadata.get("DURATION", ""))
    if length is not None and last_pts is not None:
        held_s = last_pts * float(stream.time_base)
        hours, minutes, seconds = length.groups()
        announced_s = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
        if announced_s > held_s + _MAX_SHORTFALL_S:
            return (f"the file announces {announced_s:.1f} s of pictures and holds {held_s:.1f} s",)
    return ()


def _scan_reason(rows: _Rows, container: str, codec: str) -> str | None:
    """The first reason found against planning; see `VideoIndex.scan_reason`."""
    pts = [value for value in rows.pts if value is not None]
    dts = [value for value in rows.dts if value is not None]
    starts = [packet for packet, is_start in enumerate(rows.is_start) if is_start]
    if container not in _SEEKABLE:
        return f"no exact seeking in {container}"
    if codec not in PROVABLE_CODECS:
        return f"starts are not proven for {codec}"
    if rows.has_discards:
        return "an edit list cuts packets off"
    if rows.has_damage:
        return "damaged packets"
    if len(pts) < len(rows.pts) or len(set(pts)) < len(pts):
        return "packets without a time of their own"
    if any(later <= earlier for earlier, later in itertools.pairwise(dts)):
        return "decoding times do not increase"
    if not starts or starts[0] != 0 or min(pts) < pts[0]:
        return "the file does not begin with a start"
    if any(pts[later] <= pts[earlier] for earlier, later in itertools.pairwise(starts)):
        return "starts out of order"
    return None
