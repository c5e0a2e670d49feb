"""Frames by decoding a file from its start to the last frame wanted: slow, and right wherever anything is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from preprocess.config import DecodeLimits
from preprocess.container import FrameReader, open_container, read_only
from preprocess.video.index import VideoIndex
from preprocess.video.stream import check_frame_size, pick_video_stream, upright_rgb

# Beyond this, frame threads cost memory and win little.
MAX_CODEC_THREADS: Final = 16

Emit = Callable[[int, NDArray[np.uint8]], None]
"""Takes one chosen frame: its place in the list of wanted frames, and its pixels [H, W, 3], RGB, upright, over white.
Frames come in any order and from several threads; may block, may raise."""


class FewerFrames(Exception):
    """No frame from number `num_frames` on decodes, though more were counted."""

    def __init__(self, num_frames: int) -> None:
        super().__init__(f"only {num_frames} frames decode")
        self.num_frames = num_frames


def scan(
    content: bytes,
    index: VideoIndex,
    wanted: Sequence[tuple[int, int]],
    emit: Emit,
    *,
    limits: DecodeLimits,
    num_threads: int,
    check_deadline: Callable[[], None],
) -> tuple[str, ...]:
    """Emits the frames `wanted`, (place, frame number) pairs with both ascending, and returns warnings.

    A frame that does not decode although a later one does is replaced by the last one before it that did (at the
    start: by the first after it). Raises FewerFrames when none decodes from a wanted one on.
    """
    with open_container(content, "a video") as container:
        stream = pick_video_stream(container, content)
        read_only(container, stream)
        if num_threads > 1:
            stream.thread_type = "AUTO"
        stream.codec_context.thread_count = min(num_threads, MAX_CODEC_THREADS)
        reader = FrameReader(container, stream)
        numbered = _numbered(reader, index, check_deadline)
        num_replaced = _emit_wanted(numbered, wanted, emit, limits)
        warnings = reader.warnings
    if num_replaced:
        warnings = (*warnings, f"{num_replaced} chosen frames do not decode; their neighbours stand in for them")
    return warnings


def _numbered(reader: FrameReader, index: VideoIndex, check_deadline: Callable[[], None]) -> Iterator[tuple[int, Any]]:
    """Frames with their numbers, ascending: by pts where packets have them, else counted."""
    number_of: dict[int, int] = {}
    if index.times_s is not None:
        number_of = {int(index.pts[packet]): number for number, packet in enumerate(index.shown)}
    highest = -1
    for frame in reader:
        check_deadline()
        # Some decoders lose the pts on the way; such a frame follows the one before it.
        number = number_of.get(frame.pts, highest + 1)
        if number > highest:
            highest = number
            yield number, frame


def _emit_wanted(
    numbered: Iterator[tuple[int, Any]], wanted: Sequence[tuple[int, int]], emit: Emit, limits: DecodeLimits
) -> int:
    """Returns how many of the wanted frames were replaced by a neighbour."""
    num_emitted = num_replaced = num_decoded = 0
    previous: Any = None

    def deliver(frame: Any) -> None:
        nonlocal num_emitted
        check_frame_size(frame.width, frame.height, limits)
        emit(wanted[num_emitted][0], upright_rgb(frame))
        num_emitted += 1

    for number, frame in numbered:
        num_decoded = number + 1
        while num_emitted < len(wanted) and wanted[num_emitted][1] < number:
            deliver(frame if previous is None else previous)
            num_replaced += 1
        if num_emitted < len(wanted) and wanted[num_emitted][1] == number:
            deliver(frame)
        if num_emitted == len(wanted):
            return num_replaced
        previous = frame
    raise FewerFrames(num_decoded)
