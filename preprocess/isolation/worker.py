"""One worker process, as its pool sees it: its socket, its pidfd, its memory, its end."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from numpy.typing import NDArray

from preprocess.isolation.shared_arrays import Handover, Reader
from preprocess.isolation.wire import Channel, FromWorker, GiveBack, Hangup, Ready, Taken

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_LAST_WORDS_BYTES: Final = 16 * 1024


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
            if not readable(self._channel.fileno(), max(0.0, stop_s - time.monotonic())):
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
        return not readable(self._pidfd, 0.0)

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


def readable(fd: int, timeout_s: float) -> bool:
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
