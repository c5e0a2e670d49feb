"""What a video file holds, packet by packet, learnt in one pass without decoding.

What the container says about its frame count is not believed; packets are counted. Edit lists mark packets that are
needed as references and never shown: those are no frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from preprocess.config import DecodeLimits
from preprocess.container import PacketReader, open_container
from preprocess.errors import MediaUndecodable
from preprocess.sniff import describe
from preprocess.video.stream import check_frame_size, check_length, pick_video_stream, stream_rate_fps

_CHECK_EVERY: Final = 1024


@dataclass(frozen=True, slots=True)
class VideoIndex:
    """All packets of one video stream, in file order (N of them), and the frames they make (F)."""

    pts: NDArray[np.int64]
    """[N] in units of the stream's time base; 0 where there is none."""
    dts: NDArray[np.int64]
    """[N] like pts."""
    size_bytes: NDArray[np.int64]
    """[N]"""
    is_key: NDArray[np.bool_]
    """[N] marked by the container as a point to start from."""
    shown: NDArray[np.int64]
    """[F] the packet of each frame that is shown, in display order."""
    times_s: NDArray[np.float64] | None
    """[F] when each frame is shown, strictly increasing from 0; None where the packets do not tell them apart."""
    rate_fps: float
    """Frames per second on average, as the container has it."""
    warnings: tuple[str, ...] = ()

    @property
    def num_frames(self) -> int:
        return len(self.shown)

    def cut_to(self, num_frames: int, warning: str) -> VideoIndex:
        """The same file as if it ended after its first `num_frames` frames."""
        times_s = None if self.times_s is None else self.times_s[:num_frames]
        return replace(self, shown=self.shown[:num_frames], times_s=times_s, warnings=(*self.warnings, warning))


@dataclass(slots=True)
class _Rows:
    pts: list[int | None]
    dts: list[int | None]
    size_bytes: list[int]
    is_key: list[bool]
    is_hidden: list[bool]


def read_index(content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]) -> VideoIndex:
    """Raises MediaUndecodable, MediaUnsupported or MediaTooLarge, and what `check_deadline` raises."""
    with open_container(content, "a video") as container:
        stream = pick_video_stream(container, content)
        check_frame_size(stream.codec_context.width, stream.codec_context.height, limits)
        rows = _read_rows(PacketReader(container, stream), check_deadline)
        num_frames = len(rows.size_bytes) - sum(rows.is_hidden)
        if num_frames == 0:
            raise MediaUndecodable(f"the video has no frames ({describe(content)})")
        index = _index_of(rows, container, stream)
    length_s = num_frames / index.rate_fps
    if index.times_s is not None:
        length_s = max(length_s, float(index.times_s[-1]))
    check_length(num_frames, length_s, limits)
    return index


def _read_rows(packets: PacketReader, check_deadline: Callable[[], None]) -> _Rows:
    rows = _Rows([], [], [], [], [])
    for packet in packets:
        if not packet.size:
            continue
        rows.pts.append(packet.pts)
        rows.dts.append(packet.dts)
        rows.size_bytes.append(packet.size)
        rows.is_key.append(packet.is_keyframe)
        rows.is_hidden.append(packet.is_discard)
        if len(rows.pts) % _CHECK_EVERY == 0:
            check_deadline()
    return rows


def _index_of(rows: _Rows, container: Any, stream: Any) -> VideoIndex:
    pts = np.array([value or 0 for value in rows.pts], dtype=np.int64)
    shown = np.flatnonzero(~np.array(rows.is_hidden, dtype=np.bool_))
    times_s: NDArray[np.float64] | None = None
    if all(rows.pts[packet] is not None for packet in shown) and len(np.unique(pts[shown])) == len(shown):
        shown = shown[np.argsort(pts[shown])]
        times_s = (pts[shown] - pts[shown[0]]) * float(stream.time_base)
    num_frames = len(shown)
    # A file cut short announces more than it holds.
    short = (f"the file announces {stream.frames} frames and holds {num_frames}",)
    return VideoIndex(
        pts=pts,
        dts=np.array([value or 0 for value in rows.dts], dtype=np.int64),
        size_bytes=np.array(rows.size_bytes, dtype=np.int64),
        is_key=np.array(rows.is_key, dtype=np.bool_),
        shown=shown,
        times_s=times_s,
        rate_fps=stream_rate_fps(container, stream, num_frames),
        warnings=short if stream.frames > num_frames else (),
    )
