"""What a decode pool and its processes say to each other, and how: msgpack over a socket pair, descriptors beside it.

    pool -> nursery    Fork (+ the new worker's socket)
    nursery -> pool    Born (+ a pidfd), Gone
    pool -> worker     Open (+ the content), Decode, Taken, GiveBack, Discard
    worker -> pool     Ready (+ last words), Opened (+ sound), Part (+ pictures), Changed (+ sound), Decoded, Refused,
                       Broke

Large things travel in shared memory (`preprocess.isolation.shared_arrays`), nothing is pickled, and what a worker sends
is checked: it has handled hostile files.
"""

from __future__ import annotations

import array
import os
import socket
import threading
from collections import deque
from typing import Final, Generic, TypeVar

import msgspec

from preprocess.config import ProcessorConfig
from preprocess.isolation.shared_arrays import Handover
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality

_MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
_READ_BYTES: Final = 256 * 1024
_MAX_FDS: Final = 4
_HEADER_BYTES: Final = 4
_T = TypeVar("_T")


class Fork(msgspec.Struct, tag=True, frozen=True):
    """Make a worker that serves the socket sent with this."""

    worker: int


class Born(msgspec.Struct, tag=True, frozen=True):
    """A pidfd comes with this. None: the system refused another process."""

    worker: int
    pid: int | None


class Gone(msgspec.Struct, tag=True, frozen=True):
    """`status` is an exit code, or minus the number of the signal that ended the worker."""

    worker: int
    status: int


class Warm(msgspec.Struct, tag=True, frozen=True):
    """The nursery has loaded everything and takes orders."""


class Open(msgspec.Struct, tag=True, frozen=True):
    modality: Modality
    options: MediaOptions
    config: ProcessorConfig
    key: MediaKey
    remaining_s: float
    announce: bool
    """Answer with Opened. Else that comes with the end of decoding, which need not wait for the sound."""


class Decode(msgspec.Struct, tag=True, frozen=True):
    patches_per_part: int | None
    raw: bool
    remaining_s: float


class Taken(msgspec.Struct, tag=True, frozen=True):
    """The part of that number was accepted: whoever decoded it may go on."""

    number: int


class GiveBack(msgspec.Struct, tag=True, frozen=True):
    """Buffers that the pool has done with: for use again, or to be freed."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]


class Discard(msgspec.Struct, tag=True, frozen=True):
    """Forget the open medium."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Idle: nothing is open. `rss_bytes` is private memory held. With the first comes a file for last words."""

    rss_bytes: int


class Opened(msgspec.Struct, tag=True, frozen=True):
    """An opened medium; `mel` and its memory where it has sound."""

    layout: MediaLayout
    warnings: tuple[str, ...]
    mel: Handover | None = None
    duration_s: float = 0.0


class Changed(Opened, tag=True, frozen=True):
    """Decoding found that the medium is another than `Opened` said; it is open as this one now."""


class Part(msgspec.Struct, tag=True, frozen=True):
    """Pictures. `size` (height, width) to resize to makes them raw frames, `grid_thw` makes them patches."""

    number: int
    first_pair: int
    pictures: Handover
    grid_thw: tuple[int, int, int] | None = None
    size: tuple[int, int] | None = None
    frames: tuple[int, ...] = ()
    """Raw frames as indices into `pictures`: one picture may stand for several frames."""


class Decoded(msgspec.Struct, tag=True, frozen=True):
    warnings: tuple[str, ...]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A MediaError. The worker is idle again, and still sound."""

    error: str
    """Name of its class."""
    message: str
    field: str | None = None
    hint: str = ""
    out_of_memory: bool = False
    """There was no memory for it: the ceiling is the reason."""


class Broke(msgspec.Struct, tag=True, frozen=True):
    """Anything but a MediaError. The worker ends. `out_of_memory` tells the ceiling from a fault."""

    reason: str
    out_of_memory: bool = False


ToNursery = Fork
FromNursery = Warm | Born | Gone
ToWorker = Open | Decode | Taken | GiveBack | Discard
FromWorker = Ready | Opened | Changed | Part | Decoded | Refused | Broke


class Hangup(Exception):
    """The other side is gone, or says things that make no sense."""


class NoDescriptors(Hangup):
    """Descriptors were sent that this process has no room for. A fault of this side."""


class Channel(Generic[_T]):
    """Messages of one socket. Any thread may send; one receives.

    Incoming descriptors queue up in order and are taken with `take_fd`; those never taken are closed with the channel.
    """

    def __init__(self, connection: socket.socket, incoming: object) -> None:
        self._connection = connection
        self._connection.setblocking(True)
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Raises Hangup. The descriptor stays the caller's."""
        body = self._encoder.encode(message)
        data = len(body).to_bytes(_HEADER_BYTES, "little") + body
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            with self._sending:
                sent = self._connection.sendmsg([data], ancillary)
                self._connection.sendall(memoryview(data)[sent:])
        except OSError as error:
            raise Hangup(f"sending failed: {error}") from error

    def receive(self) -> _T | None:
        """One read, then the next message if it is whole by now. Blocks only while nothing at all has come.

        Raises Hangup at the end of the stream or at nonsense, NoDescriptors.
        """
        message = self.buffered()
        if message is not None:
            return message
        try:
            data, ancillary, flags, _ = self._connection.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise Hangup(f"receiving failed: {error}") from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(received)
        if not data:
            raise Hangup("the other side has closed")
        self._buffer += data
        if flags & socket.MSG_CTRUNC:
            raise NoDescriptors("this process may open no more descriptors")
        return self.buffered()

    def buffered(self) -> _T | None:
        """The next message, if all of it has been read already. Raises Hangup at nonsense."""
        if len(self._buffer) < _HEADER_BYTES:
            return None
        size_bytes = int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
        if size_bytes > _MAX_MESSAGE_BYTES or len(self._fds) > _MAX_FDS:
            raise Hangup("nonsense was received")
        end = _HEADER_BYTES + size_bytes
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER_BYTES:end])
        del self._buffer[:end]
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise Hangup(f"nonsense was received: {error}") from error

    def wait(self) -> _T:
        """The next message, however long it takes. Raises Hangup."""
        while True:
            message = self.receive()
            if message is not None:
                return message

    def take_fd(self) -> int:
        """The oldest descriptor received; the caller closes it. Raises Hangup when none came."""
        if not self._fds:
            raise Hangup("a message came without its descriptor")
        return self._fds.popleft()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())
        self._connection.close()
