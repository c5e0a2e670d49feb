"""Which packets must be decoded for the frames wanted, cut into tasks that decoders can do side by side. Pure.

    decode order   I0 P4 B2 B1 B3 | I8 b6 b5 b7 P12 B10 ...      (numbers are display order)
    runs           [I0 ......... B3  I8 b6 b5 b7]
                                    [I8 b6 b5 b7 P12 ...]

Leading pictures (b5 to b7: after the start I8 in the file, before it on the screen) may need what came before I8, so
they belong to the run of I0, which then reaches over I8. A run begins with a start and ends with the last frame wanted
of it in decode order; runs of which nothing is wanted do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from preprocess.video.index import VideoIndex

_TASKS_PER_WORKER: Final = 8
_MIN_TASK_PACKETS: Final = 24


@dataclass(frozen=True, slots=True)
class Target:
    """One frame wanted."""

    place: int
    """In the list of wanted frames."""
    packet: int


@dataclass(frozen=True, slots=True)
class Run:
    """Packets `[start, last]` in file order, fed to a decoder that knows nothing yet."""

    start: int
    last: int
    targets: tuple[Target, ...]
    """In display order, which is the order they come out of the decoder."""

    @property
    def num_packets(self) -> int:
        return self.last - self.start + 1


Task = tuple[Run, ...]
"""Runs that one decoder does one after the other, in display order."""


class NotPlannable(Exception):
    """A frame wanted has no start before it."""


def plan(index: VideoIndex, wanted: Sequence[tuple[int, int]], *, num_workers: int, max_task_frames: int) -> list[Task]:
    """Tasks for the frames `wanted`, (place, frame number) pairs with both ascending.

    Tasks are in display order, so that early frames come first where workers take them in this order; about equal in
    packets, and several for each worker, so that none waits long for the last. A task has up to `max_task_frames`
    frames, or one run. Raises NotPlannable.
    """
    runs = _runs(index, wanted)
    num_packets = sum(run.num_packets for run in runs)
    limit = max(_MIN_TASK_PACKETS, num_packets // (num_workers * _TASKS_PER_WORKER))
    tasks: list[list[Run]] = []
    room = frames_room = 0
    for run in runs:
        if run.num_packets > room or len(run.targets) > frames_room:
            tasks.append([run])
            room = limit - run.num_packets
            frames_room = max_task_frames - len(run.targets)
            continue
        room -= run.num_packets
        frames_room -= len(run.targets)
        previous = tasks[-1][-1]
        if run.start <= previous.last + 1:
            # Nothing lies between them: the decoder goes on without starting anew.
            tasks[-1][-1] = Run(previous.start, max(previous.last, run.last), previous.targets + run.targets)
        else:
            tasks[-1].append(run)
    return [tuple(task) for task in tasks]


def _runs(index: VideoIndex, wanted: Sequence[tuple[int, int]]) -> list[Run]:
    starts = np.flatnonzero(index.is_start)
    by_start: dict[int, list[Target]] = {}
    for place, number in wanted:
        packet = int(index.shown[number])
        # Starts increase in both orders; a packet's is the last one that comes before it in both.
        in_file = int(np.searchsorted(starts, packet, side="right"))
        on_screen = int(np.searchsorted(index.pts[starts], index.pts[packet], side="right"))
        if not min(in_file, on_screen):
            raise NotPlannable(f"frame {number} comes before the first start")
        start = int(starts[min(in_file, on_screen) - 1])
        by_start.setdefault(start, []).append(Target(place, packet))
    # Starts increase on the screen like the wanted frames, so this is their order already.
    return [Run(start, max(target.packet for target in targets), tuple(targets)) for start, targets in by_start.items()]
