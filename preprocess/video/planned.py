"""Frames by plan: several decoders, each seeking to the starts of its tasks and decoding only what is needed.

Nothing is taken on trust. After a seek, packets are compared with the index before one is decoded; each frame is known
by its pts; each target must come out, undamaged and in order. If one does not, its run is done again without leaving
pictures out, and if that does not help, Unproven goes to the caller, who scans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, Final, Self

import av
import av.error

from preprocess.config import DecodeLimits
from preprocess.container import open_container, read_only
from preprocess.crew import Crew, Teamwork
from preprocess.video.index import VideoIndex
from preprocess.video.parts import Stopped
from preprocess.video.plan import NotPlannable, Run, Target, Task, plan
from preprocess.video.references import Shortcut
from preprocess.video.scan import MAX_CODEC_THREADS, Emit
from preprocess.video.stream import PixelMeter, check_frame_size, pick_video_stream, upright_rgb

# Up to this many packets between two runs are read over; seeking costs about as much.
_MAX_GAP: Final = 8
# A seek may land earlier than asked, at an earlier entry of the container's table, but not endlessly so.
_MAX_EARLY: Final = 250
# What is held of a run to find out which of its packets matter; no more, for a file may be a single run.
_MAX_LOOKAHEAD_PACKETS: Final = 1000
_MAX_LOOKAHEAD_BYTES: Final = 32 * 1024 * 1024


class Unproven(Exception):
    """Something was not as the plan expects, so that its frames cannot be vouched for. Says what."""


def decode_planned(
    content: bytes,
    index: VideoIndex,
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

    `max_frames_ahead` is how far `emit` lets one worker run ahead of another: tasks are cut so that all fit in there.
    `max_decoders` bounds workers and codec threads together, for the memory of their frames.

    Raises Unproven, with some frames emitted (rightly) and others not; and what `emit` or `check_deadline` raises.
    """
    num_workers = min(crew.num_threads + 1, max_decoders)
    try:
        tasks = plan(index, wanted, num_workers=num_workers, max_task_frames=max_frames_ahead // (num_workers + 1))
    except NotPlannable as error:
        raise Unproven(str(error)) from error
    packet_of = {int(pts): packet for packet, pts in enumerate(index.pts)}
    # Frame threads win less than decoders side by side; they are for files with fewer tasks than workers.
    num_codec_threads = max(1, num_workers // len(tasks))
    queue = iter(tasks)
    lock = threading.Lock()

    def next_task() -> Task | None:
        with lock:
            return next(queue, None)

    def work() -> None:
        task = next_task()
        if task is None:
            return
        with _Decoder(content, index, packet_of, num_codec_threads, limits, check_deadline) as decoder:
            while task is not None and not team.stop.is_set():
                try:
                    for run in task:
                        decoder.decode(run, emit)
                except Stopped:
                    return
                task = next_task()

    team.run(crew, work, num_workers=min(num_workers, len(tasks)))


class _Decoder:
    """One open container with its codec, for one thread."""

    def __init__(
        self,
        content: bytes,
        index: VideoIndex,
        packet_of: dict[int, int],
        num_codec_threads: int,
        limits: DecodeLimits,
        check_deadline: Callable[[], None],
    ) -> None:
        self._index = index
        self._packet_of = packet_of
        self._limits = limits
        self._check_deadline = check_deadline
        self._open = ExitStack()
        self._container: Any = self._open.enter_context(open_container(content, "a video"))
        self._stream = pick_video_stream(self._container, content)
        read_only(self._container, self._stream)
        self._meter = PixelMeter(self._stream, content, limits)
        self._codec = self._stream.codec_context
        if num_codec_threads > 1:
            self._stream.thread_type = "AUTO"
        self._codec.thread_count = min(num_codec_threads, MAX_CODEC_THREADS)
        self._shortcut: Shortcut | None = None
        if index.may_skip and self._codec.codec.name == "h264":
            self._shortcut = Shortcut(bytes(self._codec.extradata or b""))
        self._packets: Iterator[Any] = iter(())
        self._next: int | None = None
        """The packet that `_packets` gives next; None where that is not known."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def decode(self, run: Run, emit: Emit) -> None:
        """Emits all targets of a run. Raises Unproven, and what `emit` raises."""
        missing = self._attempt(run, run.targets, emit, skip=self._index.may_skip)
        if missing and self._index.may_skip:
            missing = self._attempt(run, missing, emit, skip=False)
        if missing:
            raise Unproven(f"{len(missing)} frames did not come out of the decoder")

    def _attempt(self, run: Run, targets: Sequence[Target], emit: Emit, *, skip: bool) -> list[Target]:
        """Decodes a run until a target fails to come out; returns the targets that are left then."""
        pts = [int(self._index.pts[target.packet]) for target in targets]
        later = set(pts)
        num_found = 0
        with closing(self._frames(run, {target.packet for target in targets}, skip)) as frames:
            for frame in frames:
                self._check_deadline()
                if targets is run.targets:
                    # The second time is our own doing.
                    self._meter.count(frame)
                # Others may be made from it. Pictures that lead the start may be incomplete, and are not this run's.
                if frame.is_corrupt and frame.pts is not None and frame.pts >= self._index.pts[run.start]:
                    raise Unproven("a frame came out damaged")
                if frame.pts not in later:
                    continue
                if frame.pts != pts[num_found]:
                    # Going on would be wrong: emitting may wait for the frame that was passed over.
                    break
                later.discard(frame.pts)
                check_frame_size(frame.width, frame.height, self._limits)
                emit(targets[num_found].place, upright_rgb(frame))
                num_found += 1
        return list(targets[num_found:])

    def _frames(self, run: Run, targets: set[int], skip: bool) -> Generator[Any, None, None]:
        """All frames that the run's packets give, with the decoder as new before and after."""
        packets: Iterable[tuple[int, Any]] = self._run_packets(run)
        stand_ins: dict[int, bytes] = {}
        try:
            if skip and self._shortcut is not None and self._may_look_ahead(run):
                packets = list(packets)
                stand_ins = self._shortcut.stand_ins(packets, targets)
            not_these = {int(self._index.pts[number]) for number in stand_ins}
            for number, packet in packets:
                mode = "NONREF" if skip and number not in targets and number not in stand_ins else "DEFAULT"
                if self._codec.skip_frame != mode:
                    self._codec.skip_frame = mode
                fed = packet if number not in stand_ins else _with_content(packet, stand_ins[number])
                yield from (frame for frame in self._codec.decode(fed) if frame.pts not in not_these)
            yield from (frame for frame in self._codec.decode(None) if frame.pts not in not_these)
        except av.error.FFmpegError as error:
            raise Unproven("a packet does not decode") from error
        finally:
            self._codec.flush_buffers()

    def _may_look_ahead(self, run: Run) -> bool:
        size_bytes = int(self._index.size_bytes[run.start : run.last + 1].sum())
        return run.num_packets <= _MAX_LOOKAHEAD_PACKETS and size_bytes <= _MAX_LOOKAHEAD_BYTES

    def _run_packets(self, run: Run) -> Iterator[tuple[int, Any]]:
        """The run's packets with their numbers, each compared with the index."""
        packet = self._land_on(run.start)
        for number in range(run.start, run.last + 1):
            if number > run.start:
                packet = next(self._packets, None)
            if packet is None or self._number_of(packet) != number:
                raise Unproven("packets do not follow each other as they did")
            self._next = number + 1
            yield number, packet

    def _land_on(self, start: int) -> Any:
        """The start's packet, read from where the demuxer stands or after a seek."""
        if self._next is not None and 0 <= start - self._next <= _MAX_GAP:
            found = self._read_to(start)
            if found is not None:
                return found
        # Containers look their table up by pts or by dts.
        for offset in (self._index.pts[start], self._index.dts[start]):
            self._container.seek(int(offset), stream=self._stream, backward=True, any_frame=False)
            self._packets = self._container.demux(self._stream)
            found = self._read_to(start)
            if found is not None:
                return found
        raise Unproven("a seek did not land on its start")

    def _read_to(self, start: int) -> Any | None:
        """Reads over packets before `start`; None when it does not follow soon."""
        for _ in range(_MAX_EARLY):
            packet = next(self._packets, None)
            number = None if packet is None else self._number_of(packet)
            if number is None or number > start:
                return None
            if number == start:
                return packet
        return None

    def _number_of(self, packet: Any) -> int | None:
        """A packet's place in the file by its pts; None if the index has it otherwise."""
        number = None if packet.pts is None else self._packet_of.get(packet.pts)
        if number is None or packet.size != self._index.size_bytes[number]:
            return None
        return number


def _with_content(packet: Any, content: bytes) -> Any:
    """Another packet in the place of this one."""
    other: Any = av.Packet(content)
    other.pts, other.dts, other.time_base = packet.pts, packet.dts, packet.time_base
    return other
