"""Worker processes: how they are started, kept ready, taken, given back and replaced.

    Worker   one process: its socket, its pidfd, its memory
    Nursery  starts the process that forks workers (`preprocess.isolation.child`), and keeps the idle ones

Everything here blocks and belongs on a pool's threads.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec
from numpy.typing import NDArray

from preprocess.config import DecodeSettings
from preprocess.errors import DecoderUnavailable, MediaError
from preprocess.isolation.shared_arrays import Handover, Reader
from preprocess.isolation.wire import (
    Born,
    Channel,
    Fork,
    FromNursery,
    FromWorker,
    GiveBack,
    Gone,
    Hangup,
    Ready,
    Taken,
    Warm,
)
from preprocess.watch import Watch

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S: Final = 0.02
_SETTLING_S: Final = 5.0
"""For an idle worker to free its last medium, and for a newborn one to say its first word."""
_FAREWELL_S: Final = 2.0
"""To hear from the nursery how a worker ended."""
_LAST_WORDS_BYTES: Final = 16 * 1024
_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 30.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Threads of these libraries would stand in the nursery's way: it may only fork while it has one thread.
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Worker:
    """One worker process. Used by one thread at a time, but for `acknowledge` and `kill`."""

    def __init__(
        self, number: int, channel: Channel[FromWorker], pidfd: int, pid: int, *, max_spare_bytes: int
    ) -> None:
        self.number = number
        self.pid = pid
        self.num_items = 0
        self.first_rss_bytes = 0
        self.rss_bytes = 0
        self.ready = False
        self._channel = channel
        self._reader = Reader(max_spare_bytes=max_spare_bytes)
        self._pidfd = pidfd
        self._last_words: int | None = None
        self._closing = threading.Lock()
        self._closed = False

    def settle(self, ready: Ready) -> None:
        """Notes that the worker is idle. Raises Hangup."""
        self.ready = True
        self.rss_bytes = ready.rss_bytes
        if self.num_items == 0:
            self.first_rss_bytes = ready.rss_bytes
            self._last_words = self._channel.take_fd()

    def last_words(self) -> str:
        """Python's stack at the crash, innermost first, if there is one."""
        if self._last_words is None:
            return ""
        text = os.pread(self._last_words, _LAST_WORDS_BYTES, 0).decode(errors="replace")
        return text.partition("Extension modules:")[0].strip()

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Raises Hangup."""
        kept, dropped = self._reader.given_back()
        if kept or dropped:
            self._channel.send(GiveBack(kept=kept, dropped=dropped))
        self._channel.send(message, fd)

    def receive(self, timeout_s: float) -> FromWorker | None:
        """The next message if it comes in time. Raises Hangup."""
        message = self._channel.buffered()
        stop_s = time.monotonic() + timeout_s
        while message is None:
            if not _readable(self._channel.fileno(), max(0.0, stop_s - time.monotonic())):
                return None
            message = self._channel.receive()
        return message

    def take_arrays(self, handover: Handover) -> tuple[NDArray[Any], ...]:
        """What came with the message just received. Raises Hangup, or ValueError when it cannot be."""
        if not handover.fresh:
            return self._reader.take(handover, None)
        fd = self._channel.take_fd()
        try:
            return self._reader.take(handover, fd)
        finally:
            os.close(fd)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return not _readable(self._pidfd, 0.0)

    def private_bytes(self) -> int:
        """Memory held for itself, now; 0 once the process is gone."""
        try:
            _, resident, shared = Path(f"/proc/{self.pid}/statm").read_text().split()[:3]
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def acknowledge(self, number: int) -> None:
        """Tells that a part was taken, if there is anyone to tell."""
        with self._closing:
            if self._closed:
                return
            try:
                self._channel.send(Taken(number=number))
            except Hangup:
                # Found by the thread that receives, which also knows what to say about it.
                return

    def kill(self) -> None:
        """Ends the process at once. Through its pidfd: a pid may be another's by now."""
        with self._closing:
            if not self._closed:
                try:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    return

    def close(self) -> None:
        """Hangs up, on which a sound worker ends by itself."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._channel.close()
                self._reader.close()
                os.close(self._pidfd)
                if self._last_words is not None:
                    os.close(self._last_words)


class Nursery:
    """Workers for `num_threads` media at a time. `start` it early: loading takes seconds. Thread-safe."""

    def __init__(self, settings: DecodeSettings) -> None:
        """Raises DecoderUnavailable where the system cannot do this."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            raise DecoderUnavailable("isolation by processes needs Linux; use isolation = 'threads'")
        self.settings = settings
        self._counters: Counter[str] = Counter()
        self._idle: list[Worker] = []
        self._lock = threading.Lock()
        """Of the idle list and the counters. Never held while anything blocks."""
        self._ordering = threading.Lock()
        """Of everything below: the nursery process answers one order at a time."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel[FromNursery] | None = None
        self._warm = False
        self._exits: dict[int, int | None] = {}
        """Workers whose end is wanted: None until it is known."""
        self._next_number = 0
        self._num_failures = 0
        self._pause_until_s = 0.0
        self._closed = False

    @property
    def counters(self) -> dict[str, int]:
        """Workers lost: crashed, out_of_memory, timed_out, abandoned, recycled. Processes begun: forked, nurseries."""
        with self._lock:
            return dict(self._counters)

    def count(self, name: str) -> None:
        """Adds one to a counter."""
        with self._lock:
            self._counters[name] += 1

    def start(self) -> None:
        """Starts the nursery process without waiting for it."""
        with self._ordering:
            self._spawn()

    def fill(self, watch: Watch) -> None:
        """Makes `num_threads` workers, so that none has to be made when it is needed."""
        for _ in range(self.settings.num_threads):
            worker = self._fork(watch)
            with self._lock:
                self._idle.append(worker)

    def take(self, watch: Watch) -> Worker:
        """A worker that is ready for a medium. Raises DecoderUnavailable or MediaDecodeTimeout."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = self._fork(watch)
            if not worker.alive:
                self._mourn(worker)
            elif worker.ready or self._settle(worker, watch):
                worker.ready = False
                worker.num_items += 1
                return worker

    def give_back(self, worker: Worker) -> None:
        """Takes a worker back whose medium was discarded. It may be freed only when it is next taken."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        self.retire(worker)

    def retire(self, worker: Worker) -> None:
        """Gives a worker up. It ends by itself, or is dead already."""
        worker.close()
        self._exits.pop(worker.number, None)

    def exit_status(self, worker: Worker) -> int | None:
        """How a worker ended: exit code, or minus a signal's number. None when that is not known in time."""
        stop_s = time.monotonic() + _FAREWELL_S
        if self._ordering.acquire(timeout=_FAREWELL_S):
            try:
                while self._exits.get(worker.number, 0) is None and time.monotonic() < stop_s:
                    self._listen(0.1)
            except Hangup:
                self._lose_nursery()
            finally:
                self._ordering.release()
        return self._exits.get(worker.number)

    def close(self) -> None:
        """Ends all processes, workers at work included."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            self.retire(worker)
        with self._ordering:
            self._lose_nursery()

    def _settle(self, worker: Worker, watch: Watch) -> bool:
        """Waits until the worker has freed its last medium. False when it is not fit for another, and gone."""
        stop_s = time.monotonic() + _SETTLING_S
        try:
            message = None
            while not isinstance(message, Ready) and time.monotonic() < stop_s:
                message = worker.receive(_WATCH_PERIOD_S)
                watch.check()
            if isinstance(message, Ready):
                worker.settle(message)
        except Hangup:
            message = None
        except MediaError:
            worker.kill()
            self.retire(worker)
            raise
        if not isinstance(message, Ready):
            worker.kill()
            self._mourn(worker)
            return False
        if worker.num_items == 0:
            self._num_failures = 0
            return True
        grown = worker.rss_bytes - worker.first_rss_bytes > self.settings.max_worker_growth_bytes
        if grown or worker.num_items >= self.settings.max_worker_items:
            self.count("recycled")
            self.retire(worker)
            return False
        return True

    def _mourn(self, worker: Worker) -> None:
        """A worker that ended while it had nothing to do. Newborns that do so are a fault of the machine: pause."""
        logger.warning("decode worker %d died while idle: %s", worker.number, describe_exit(self.exit_status(worker)))
        self.count("crashed")
        self.retire(worker)
        if worker.num_items == 0:
            with self._ordering:
                self._pause()

    def _fork(self, watch: Watch) -> Worker:
        """A newborn worker, after a pause if the last ones failed. Raises DecoderUnavailable or MediaDecodeTimeout."""
        while not self._ordering.acquire(timeout=_WATCH_PERIOD_S):
            watch.check()
        try:
            while True:
                watch.check()
                if self._closed:
                    raise DecoderUnavailable("the decode pool is closed")
                try:
                    return self._order(watch)
                except (Hangup, OSError) as error:
                    logger.error("no decode worker could be started: %s", error)
                    self._lose_nursery()
                    self._pause()
        finally:
            self._ordering.release()

    def _order(self, watch: Watch) -> Worker:
        """One attempt at a worker. Raises Hangup or OSError when the nursery is not there or cannot."""
        self._sit_out_pause(watch)
        if self._process is None:
            self._spawn()
        control = self._control
        assert control is not None
        while not self._warm:
            watch.check()
            self._listen(_WATCH_PERIOD_S)
        number = self._next_number
        self._next_number += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            control.send(Fork(worker=number), theirs.fileno())
            born: Born | None = None
            while born is None:
                message = self._listen(1.0)
                born = message if isinstance(message, Born) and message.worker == number else None
            if born.pid is None:
                raise OSError("the system refuses another process")
            pidfd = control.take_fd()
        except (Hangup, OSError):
            ours.close()
            raise
        finally:
            theirs.close()
        self._exits[number] = None
        self.count("forked")
        return Worker(
            number,
            Channel(ours, FromWorker),
            pidfd,
            born.pid,
            max_spare_bytes=self.settings.max_worker_spare_bytes,
        )

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            settings = msgspec.json.encode(self.settings).decode()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "preprocess.isolation.child", str(theirs.fileno()), settings],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict.fromkeys(_ONE_THREAD, "1"),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._control = Channel(ours, FromNursery)
        self._warm = False
        self.count("nurseries")

    def _listen(self, timeout_s: float) -> FromNursery | None:
        """One message of the nursery, noted; None if none came in time. Raises Hangup."""
        control = self._control
        if control is None:
            raise Hangup("the nursery is gone")
        message = control.buffered()
        if message is None and _readable(control.fileno(), timeout_s):
            message = control.receive()
        match message:
            case Warm():
                self._warm = True
            case Gone():
                if message.worker in self._exits:
                    self._exits[message.worker] = message.status
        return message

    def _lose_nursery(self) -> None:
        """Ends the nursery, and with it every worker; the next order starts another."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=_FAREWELL_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None
        self._exits.clear()

    def _pause(self) -> None:
        pause_s = min(_FIRST_PAUSE_S * 2**self._num_failures, _MAX_PAUSE_S)
        self._num_failures += 1
        self._pause_until_s = time.monotonic() + pause_s

    def _sit_out_pause(self, watch: Watch) -> None:
        while (pause_s := self._pause_until_s - time.monotonic()) > 0:
            if pause_s > watch.remaining_s:
                raise DecoderUnavailable("decode workers fail to start; see the log")
            time.sleep(min(pause_s, _WATCH_PERIOD_S))
            watch.check()


def _readable(fd: int, timeout_s: float) -> bool:
    """Polls: `select` knows no descriptors above 1023, and a server has many."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "for a reason unknown"
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit status {status}"
