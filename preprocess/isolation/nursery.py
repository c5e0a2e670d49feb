"""Worker processes: how they are started, kept ready, taken, given back and replaced.

The nursery's own process forks them (`preprocess.isolation.child`). Everything here blocks and belongs on threads of
the pool.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from preprocess.config import DecodeSettings
from preprocess.errors import DecoderUnavailable, MediaError, unavailable
from preprocess.isolation.wire import (
    Born,
    Channel,
    Fork,
    FromNursery,
    FromWorker,
    Gone,
    Hangup,
    NoDescriptors,
    Ready,
    Warm,
)
from preprocess.isolation.worker import Worker, describe_exit, readable
from preprocess.watch import Watch

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S: Final = 0.02
_SETTLING_S: Final = 5.0
"""For an idle worker to free its last medium, and for a newborn one to say its first word."""
_FAREWELL_S: Final = 2.0
"""To hear from the nursery how a worker ended."""
_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 30.0
# Threads of these libraries would stand in the nursery's way: it may only fork while it has one thread.
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


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
        """Workers lost: crashed, killed (by others), out_of_memory, timed_out, abandoned, recycled. Processes begun:
        forked, nurseries."""
        with self._lock:
            return dict(self._counters)

    def count(self, name: str) -> None:
        """Adds one to a counter."""
        with self._lock:
            self._counters[name] += 1

    def start(self) -> None:
        """Starts the nursery process without waiting for it. Raises DecoderUnavailable."""
        with self._ordering:
            try:
                self._spawn()
            except OSError as error:
                raise DecoderUnavailable(f"no decode process can be started: {error.strerror}") from error

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
            if self._orphaned() or not worker.alive:
                worker.kill()
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
        except NoDescriptors as error:
            worker.kill()
            self.retire(worker)
            raise _no_descriptors() from error
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

    def _orphaned(self) -> bool:
        """Whether the nursery process is gone. Its workers follow it, if not in the same moment."""
        process = self._process
        return process is None or process.poll() is not None

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
                except NoDescriptors as error:
                    raise _no_descriptors() from error
                except (Hangup, OSError) as error:
                    # Others' workers need not end for want of a descriptor here.
                    short = unavailable(error) if isinstance(error, OSError) else None
                    if short is not None:
                        raise short from error
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
        try:
            with theirs:
                self._process = self._popen(theirs.fileno())
        except OSError:
            ours.close()
            raise
        self._control = Channel(ours, FromNursery)
        self._warm = False
        self.count("nurseries")

    def _popen(self, socket_fd: int) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = msgspec.json.encode(self.settings).decode()
        return subprocess.Popen(
            [sys.executable, "-m", "preprocess.isolation.child", str(socket_fd), settings],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict.fromkeys(_ONE_THREAD, "1"),
            stdin=subprocess.DEVNULL,
            pass_fds=[socket_fd],
        )

    def _listen(self, timeout_s: float) -> FromNursery | None:
        """One message of the nursery, noted; None if none came in time. Raises Hangup."""
        control = self._control
        if control is None:
            raise Hangup("the nursery is gone")
        message = control.buffered()
        if message is None and readable(control.fileno(), timeout_s):
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


def _no_descriptors() -> DecoderUnavailable:
    error = unavailable(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert error is not None
    return error
