"""Frames by torchcodec, in its exact mode: optional, with several decoders side by side, and never on trust.

torchcodec counts the frames of a file itself; the count must be ours, and so must the pts of every frame it gives.
Where it cannot be used, or something is not as it should be, `Unproven` goes to the caller, who does the rest by
plan or by scan and says so in the result. That goes for transport streams and all else that is neither MP4 nor
Matroska, for edit lists, mirrored and transparent pictures, and for files whose packets show damage.

Two things it does not tell. A picture that is damaged inside and patched up by the decoder comes without a warning; and
its scaler is the one of the FFmpeg installed: colours of 8-bit pictures of even size are equal to ours, others differ
near sharp edges of colour (10 bits: up to 96 of 255 levels in single pixels, 0.5 on average).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from preprocess.config import DecodeLimits
from preprocess.crew import Crew, Teamwork
from preprocess.video.guests import Guest
from preprocess.video.parts import Stopped
from preprocess.video.plan import NotPlannable, Task, plan
from preprocess.video.planned import Unproven
from preprocess.video.scan import MAX_CODEC_THREADS, Emit
from preprocess.video.stream import check_frame_size

_FAILURES = (RuntimeError, IndexError, ValueError)
"""What torchcodec raises about files."""


def decode_with_torchcodec(
    guest: Guest | str,
    wanted: Sequence[tuple[int, int]],
    emit: Emit,
    *,
    limits: DecodeLimits,
    crew: Crew,
    team: Teamwork,
    max_frames_ahead: int,
    max_decoders: int,
    check_deadline: Callable[[], None],
) -> None:
    """Emits the frames `wanted`, (place, frame number) pairs with both ascending, from this thread and the crew's.

    `guest` may be the reason why there is none. `max_frames_ahead` is how far `emit` lets one worker run ahead of
    another: tasks are cut so that all fit in there. `max_decoders` bounds workers and codec threads together, for the
    memory of their frames.

    Raises Unproven, with some frames emitted (rightly) and others not; and what `emit` or `check_deadline` raises.
    """
    if isinstance(guest, str):
        raise Unproven(guest)
    num_workers = min(crew.num_threads + 1, max_decoders)
    tasks = _tasks(guest, wanted, num_workers=num_workers, max_task_frames=max_frames_ahead // (num_workers + 1))
    num_codec_threads = min(max(1, num_workers // len(tasks)), MAX_CODEC_THREADS)
    # torch warns of memory that it might write to and must not, such as bytes.
    content = torch.frombuffer(bytearray(guest.content), dtype=torch.uint8)
    first = _Reader(content, guest, num_codec_threads)
    if not guest.look.resembles(first.frame(0)):
        raise Unproven("torchcodec shows the first frame differently")
    spare = [first]
    queue = iter(tasks)
    lock = threading.Lock()
    numbers = dict(wanted)

    def next_task() -> Task | None:
        with lock:
            return next(queue, None)

    def work() -> None:
        task = next_task()
        if task is None:
            return
        with lock:
            reader = spare.pop() if spare else None
        reader = reader or _Reader(content, guest, num_codec_threads)
        while task is not None:
            for target in (target for run in task for target in run.targets):
                if team.stop.is_set():
                    return
                check_deadline()
                pixels = reader.frame(numbers[target.place])
                check_frame_size(pixels.shape[1], pixels.shape[0], limits)
                try:
                    emit(target.place, pixels)
                except Stopped:
                    return
            task = next_task()

    team.run(crew, work, num_workers=min(num_workers, len(tasks)))


def _tasks(guest: Guest, wanted: Sequence[tuple[int, int]], *, num_workers: int, max_task_frames: int) -> list[Task]:
    index = guest.index
    if guest.is_av1:
        # torchcodec starts at the packets that the container marks. A decoder that cannot start there says so.
        index = replace(index, is_start=index.is_marked)
    try:
        return plan(index, wanted, num_workers=num_workers, max_task_frames=max_task_frames)
    except NotPlannable as error:
        raise Unproven(str(error)) from error


class _Reader:
    """One decoder of torchcodec, for one thread at a time. It seeks only to other groups of pictures."""

    def __init__(self, content: torch.Tensor, guest: Guest, num_codec_threads: int) -> None:
        try:
            library: Any = importlib.import_module("torchcodec.decoders")
        except (ImportError, RuntimeError, OSError) as error:
            raise Unproven("torchcodec cannot be loaded") from error
        index = guest.index
        self._pts = index.pts[index.shown]
        self._time_base = float(guest.time_base)
        try:
            self._decoder: Any = library.VideoDecoder(
                content,
                stream_index=guest.stream_index,
                dimension_order="NHWC",
                num_ffmpeg_threads=num_codec_threads,
                device="cpu",
                seek_mode="exact",
            )
        except _FAILURES as error:
            raise Unproven("torchcodec cannot open the file") from error
        if len(self._decoder) != index.num_frames:
            raise Unproven(f"torchcodec counts {len(self._decoder)} frames, the file has {index.num_frames}")

    def frame(self, number: int) -> NDArray[np.uint8]:
        """[H, W, 3] RGB, upright. Raises Unproven."""
        try:
            frame = self._decoder.get_frame_at(number)
        except _FAILURES as error:
            raise Unproven(f"torchcodec cannot decode frame {number}") from error
        if round(frame.pts_seconds / self._time_base) != self._pts[number]:
            raise Unproven(f"torchcodec gave another frame in place of frame {number}")
        pixels: NDArray[np.uint8] = frame.data.numpy()
        return pixels
