"""Frames by decoding a file from its start to the last frame wanted: slow, and right wherever anything is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from preprocess.config import DecodeLimits
from preprocess.container import FrameReader, open_container, read_only
from preprocess.video.index import VideoIndex
from preprocess.video.stream import PixelMeter, check_frame_size, pick_video_stream, upright_rgb

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
    fill_end: bool = False,
) -> tuple[str, ...]:
    """Emits the frames `wanted`, (place, frame number) pairs with both ascending, and returns warnings.

    A frame that does not decode although a later one does is replaced by the last one before it that did (at the
    start: by the first after it); with `fill_end` also where no later one does. Raises FewerFrames otherwise.
    """
    delivery = _Delivery(wanted, emit, limits)
    for threads in sorted({min(num_threads, MAX_CODEC_THREADS), 1}, reverse=True):
        with open_container(content, "a video") as container:
            stream = pick_video_stream(container, content)
            read_only(container, stream)
            if threads > 1:
                stream.thread_type = "AUTO"
            stream.codec_context.thread_count = threads
            reader = FrameReader(container, stream, check_deadline)
            numbered = _numbered(reader, index, PixelMeter(stream, content, limits), check_deadline)
            try:
                delivery.run(numbered, fill_end=fill_end, strict=threads > 1)
            except _ThreadsLoseFrames:
                continue
            return reader.warnings + delivery.warnings
    raise AssertionError("one thread loses no frames")


class _ThreadsLoseFrames(Exception):
    """A frame is missing. With frame threads, good frames may be lost with a packet that does not decode."""


def _numbered(
    reader: FrameReader, index: VideoIndex, meter: PixelMeter, check_deadline: Callable[[], None]
) -> Iterator[tuple[int, Any]]:
    """Frames with their numbers, ascending: by pts where packets have them, else counted."""
    number_of: dict[int, int] = {}
    if index.times_s is not None:
        number_of = {int(index.pts[packet]): number for number, packet in enumerate(index.shown)}
    highest = -1
    for frame in reader:
        check_deadline()
        meter.count(frame)
        # Some decoders lose the pts on the way; such a frame follows the one before it.
        number = number_of.get(frame.pts, highest + 1)
        if number > highest:
            highest = number
            yield number, frame


class _Delivery:
    """Matches numbered frames with those wanted, and counts what is not as it should be."""

    def __init__(self, wanted: Sequence[tuple[int, int]], emit: Emit, limits: DecodeLimits) -> None:
        self._wanted = wanted
        self._emit = emit
        self._limits = limits
        self._num_emitted = 0
        self._num_replaced = 0
        self._num_damaged = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        found = []
        if self._num_replaced:
            found.append(f"{self._num_replaced} chosen frames do not decode; their neighbours stand in for them")
        if self._num_damaged:
            found.append(f"{self._num_damaged} chosen frames are damaged in part")
        return tuple(found)

    def run(self, numbered: Iterator[tuple[int, Any]], *, fill_end: bool, strict: bool) -> None:
        """Raises FewerFrames, or with `strict` _ThreadsLoseFrames at the first frame that is missing."""
        wanted = self._wanted
        num_decoded = 0
        previous: Any = None
        for number, frame in numbered:
            num_decoded = number + 1
            while self._num_emitted < len(wanted) and wanted[self._num_emitted][1] < number:
                if strict:
                    raise _ThreadsLoseFrames
                self._deliver(frame if previous is None else previous)
                self._num_replaced += 1
            if self._num_emitted < len(wanted) and wanted[self._num_emitted][1] == number:
                self._deliver(frame)
                self._num_damaged += frame.is_corrupt
            if self._num_emitted == len(wanted):
                return
            previous = frame
        if strict:
            raise _ThreadsLoseFrames
        if previous is None or not fill_end:
            raise FewerFrames(num_decoded)
        while self._num_emitted < len(wanted):
            self._deliver(previous)
            self._num_replaced += 1

    def _deliver(self, frame: Any) -> None:
        check_frame_size(frame.width, frame.height, self._limits)
        self._emit(self._wanted[self._num_emitted][0], upright_rgb(frame))
        self._num_emitted += 1
