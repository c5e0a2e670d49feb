"""From decoded frames, in any order and from any thread, to the parts that a consumer takes.

A part is a run of frame pairs. It is handed over as soon as its last frame is there, by the thread that brought it.
Back pressure: a thread whose frame lies too many parts ahead of the oldest part that is not done waits for that one.
A consumer that blocks in `put` blocks its thread, and through the oldest part soon all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from preprocess.patchify import PatchWriter
from preprocess.types import TEMPORAL_PATCH_SIZE, MediaPart, Patches, Pixels

Put = Callable[[MediaPart], None]
_WAIT_S: Final = 0.05


class Stopped(Exception):
    """Another worker of the same job failed, so this one gives up. Never leaves the job."""


@dataclass(slots=True)
class _OpenPart:
    first_frame: int
    num_frames: int
    num_missing: int
    writer: PatchWriter | None
    frames: list[NDArray[np.uint8] | None] = field(default_factory=list)


class PartAssembly:
    """Collects `num_frames` sampled frames of one video, an odd count padded by its last frame."""

    def __init__(
        self,
        *,
        num_frames: int,
        height: int,
        width: int,
        put: Put,
        pairs_per_part: int,
        raw: bool,
        max_open_parts: int,
    ) -> None:
        self._size = (height, width)
        self._num_frames = num_frames
        self._put = put
        self._raw = raw
        self._max_open_parts = max_open_parts
        num_pairs = -(-num_frames // TEMPORAL_PATCH_SIZE)
        self._frames_per_part = pairs_per_part * TEMPORAL_PATCH_SIZE
        self._num_parts = -(-num_pairs // pairs_per_part)
        self._open: dict[int, _OpenPart] = {}
        self._stored = [False] * num_frames
        self._done = [False] * self._num_parts
        self._oldest = 0
        self._changed = threading.Condition()

    @property
    def max_frames_ahead(self) -> int:
        """How many frames there is room for at a time."""
        return self._max_open_parts * self._frames_per_part

    def missing(self) -> list[int]:
        """Positions of the frames that have not come yet, ascending."""
        return [position for position, stored in enumerate(self._stored) if not stored]

    def has(self, position: int) -> bool:
        """Whether the frame at this position has come."""
        return self._stored[position]

    def wait_for_room(self, position: int, *, stop: threading.Event, check_deadline: Callable[[], None]) -> None:
        """Waits until the part of this position may be begun. Raises Stopped, or what `check_deadline` raises."""
        part = position // self._frames_per_part
        with self._changed:
            while part >= self._oldest + self._max_open_parts:
                self._changed.wait(_WAIT_S)
                if stop.is_set():
                    raise Stopped
                check_deadline()

    def store(self, position: int, pixels: NDArray[np.uint8]) -> None:
        """Takes one frame, [H, W, 3] RGB of any size, and hands its part over if it was the last one missing."""
        number = position // self._frames_per_part
        with self._changed:
            part = self._open.get(number)
            if part is None:
                part = self._open[number] = self._begin(number)
        slot = position - part.first_frame
        if part.writer is None:
            part.frames[slot] = np.ascontiguousarray(pixels)
        else:
            part.writer.put(slot, pixels)
        with self._changed:
            self._stored[position] = True
            part.num_missing -= 1
            if part.num_missing:
                return
            del self._open[number]
        self._put(MediaPart(part.first_frame // TEMPORAL_PATCH_SIZE, self._pictures(part)))
        with self._changed:
            self._done[number] = True
            while self._oldest < self._num_parts and self._done[self._oldest]:
                self._oldest += 1
            self._changed.notify_all()

    def _begin(self, number: int) -> _OpenPart:
        first = number * self._frames_per_part
        num_frames = min(self._frames_per_part, self._num_frames - first)
        if self._raw:
            return _OpenPart(first, num_frames, num_frames, None, [None] * num_frames)
        height, width = self._size
        padded = num_frames + num_frames % TEMPORAL_PATCH_SIZE
        writer = PatchWriter(num_frames=padded, height=height, width=width)
        return _OpenPart(first, num_frames, num_frames, writer)

    def _pictures(self, part: _OpenPart) -> Patches | Pixels:
        if part.writer is not None:
            if part.num_frames % TEMPORAL_PATCH_SIZE:
                part.writer.repeat(part.num_frames)
            return part.writer.patches()
        frames = [frame for frame in part.frames if frame is not None]
        if len(frames) % TEMPORAL_PATCH_SIZE:
            frames.append(frames[-1])
        return Pixels(frames=tuple(frames), height=self._size[0], width=self._size[1])
