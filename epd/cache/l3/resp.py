"""One connection to a Redis server: requests written together, replies read in place.

A general client copies a value three or four times on its way. Here the system copies it into a buffer that is used
again and again, and whoever asked takes it from there.

After anything unexpected, lateness above all, the connection is closed, so that a reply that comes too late never
answers another question. Nothing is tried twice.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from epd.cache.l3.base import Buffer, NodeFailed, NodeTimedOut

__all__ = ["Connection", "RedisAddress", "RedisRefused", "command"]

_DEFAULT_PORT: Final = 6379
_FIRST_BUFFER_BYTES: Final = 1 << 16
# Of one reply. What is longer is none of ours, and not worth the memory.
_MAX_BULK_BYTES: Final = 64 << 20
_MAX_LINE_BYTES: Final = 1 << 12
# Of what comes after the value that is being read.
_READ_AHEAD_BYTES: Final = 1 << 14
# The system takes that many pieces in one call.
_MAX_PIECES: Final = 512
_SCHEMES: Final = ("redis", "rediss")


class RedisRefused(Exception):
    """The server answered with an error. `code` is its first word; the others may quote what was sent."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a server is, and how it is spoken to. `name` and `repr` are without the password."""

    host: str
    port: int
    database: int
    is_encrypted: bool
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """`redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`. Raises ValueError, without the password."""
        parts = urlsplit(url)
        host = parts.hostname
        if parts.scheme not in _SCHEMES or not host or parts.query or parts.fragment:
            raise ValueError("the address of a Redis server is redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]")
        try:
            port = _DEFAULT_PORT if parts.port is None else parts.port
        except ValueError:
            raise ValueError(f"the port of the Redis server {host} is no number up to 65535") from None
        database = parts.path.strip("/") or "0"
        if not (database.isascii() and database.isdigit()):
            raise ValueError(f"the database of the Redis server {host} is {database!r}; it must be a number")
        return cls(
            host,
            port,
            int(database),
            parts.scheme == "rediss",
            unquote(parts.username) if parts.username else None,
            unquote(parts.password) if parts.password else None,
        )

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.is_encrypted else ''}://{host}:{self.port}/{self.database}"


def command(*words: bytes) -> bytes:
    """A request as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class Connection:
    """Open and greeted. All methods raise NodeTimedOut past `deadline_s` (monotonic), NodeFailed when the other side is
    gone or speaks something else, RedisRefused; after the first two it is closed, after a refusal the next reply may be
    read."""

    def __init__(self, address: RedisAddress, deadline_s: float) -> None:
        """Connects, and says who it is and which database it means. Raises NodeFailed, NodeTimedOut."""
        self._name = address.name
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # Bytes that came and were not yet read are those of `[start, end)`.
        self._start = 0
        self._end = 0
        self._limit_s: float | None = None
        self._socket = self._open(address, deadline_s)
        try:
            self._greet(address, deadline_s)
        except RedisRefused as error:
            self.close()
            raise NodeFailed(f"{self._name} refused with {error.code}") from error

    def is_quiet(self) -> bool:
        """Whether it is open with nothing to be read: what was not asked for is no reply to anything."""
        if self._start != self._end:
            return False
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN | select.POLLHUP | select.POLLERR)
            return not poller.poll(0)
        except (OSError, ValueError):
            return False

    def send(self, pieces: Sequence[Buffer], deadline_s: float) -> None:
        """All of the pieces; their bytes are not copied on the way."""
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                self._wait_until(deadline_s)
                self._socket.sendall(b"".join(pieces))
                return
            left = [view for view in (memoryview(piece).cast("B") for piece in pieces) if view.nbytes]
            first = 0
            while first < len(left):
                self._wait_until(deadline_s)
                num_bytes = self._socket.sendmsg(left[first : first + _MAX_PIECES])
                while first < len(left) and num_bytes >= left[first].nbytes:
                    num_bytes -= left[first].nbytes
                    first += 1
                if num_bytes:
                    left[first] = left[first][num_bytes:]
        except OSError as error:
            raise self._failed(error) from error

    def read_bulk(self, deadline_s: float) -> memoryview | None:
        """A string, which lies in the buffer until the next read; None where there is none."""
        line = self._read_line(deadline_s)
        if line[:1] != b"$":
            raise self._strange(line)
        num_bytes = self._number(line)
        if num_bytes < 0:
            return None
        if num_bytes > _MAX_BULK_BYTES:
            raise self._strange(line)
        self._need(num_bytes + 2, deadline_s)
        start, self._start = self._start, self._start + num_bytes + 2
        if self._buffer[self._start - 2 : self._start] != b"\r\n":
            raise self._strange(b"a string that does not end")
        return self._view[start : start + num_bytes]

    def read_number(self, deadline_s: float) -> int:
        line = self._read_line(deadline_s)
        if line[:1] != b":":
            raise self._strange(line)
        return self._number(line)

    def read_status(self, deadline_s: float) -> bytes:
        line = self._read_line(deadline_s)
        if line[:1] != b"+":
            raise self._strange(line)
        return line[1:]

    def read_digits(self, count: int, deadline_s: float) -> list[int]:
        """`count` numbers of one digit each, as many of them at a time as have come."""
        digits: list[int] = []
        while len(digits) < count:
            self._need(4, deadline_s)
            num_whole = min((self._end - self._start) // 4, count - len(digits))
            stop = self._start + 4 * num_whole
            window = bytes(self._view[self._start : stop])
            if window[0::4] != b":" * num_whole or window[2::4] + window[3::4] != b"\r" * num_whole + b"\n" * num_whole:
                # Something else is among them: one at a time, up to it.
                digits.append(self.read_number(deadline_s))
                continue
            digits.extend(digit - 48 for digit in window[1::4])
            self._start = stop
        return digits

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _open(self, address: RedisAddress, deadline_s: float) -> socket.socket:
        """The first of the host's addresses that answers."""
        error: OSError = OSError("the name has no address")
        try:
            places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as unknown:
            raise NodeFailed(f"{self._name}: {type(unknown).__name__}") from unknown
        for family, kind, protocol, _, place in places:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise NodeTimedOut(f"{self._name} is not there in time")
            opened = socket.socket(family, kind, protocol)
            try:
                opened.settimeout(left_s)
                opened.connect(place)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not address.is_encrypted:
                    return opened
                return ssl.create_default_context().wrap_socket(opened, server_hostname=address.host)
            except OSError as found:
                opened.close()
                error = found
        if isinstance(error, TimeoutError):
            raise NodeTimedOut(f"{self._name} is not there in time") from error
        raise NodeFailed(f"{self._name}: {type(error).__name__}") from error

    def _greet(self, address: RedisAddress, deadline_s: float) -> None:
        greetings = []
        if address.password is not None:
            words = (address.username or "default", address.password) if address.username else (address.password,)
            greetings.append(command(b"AUTH", *(word.encode() for word in words)))
        if address.database:
            greetings.append(command(b"SELECT", b"%d" % address.database))
        greetings.append(command(b"PING"))
        self.send([b"".join(greetings)], deadline_s)
        for _ in greetings:
            self.read_status(deadline_s)

    def _read_line(self, deadline_s: float) -> bytes:
        """A line without its end. Raises RedisRefused for an error, which is a line, too."""
        while (stop := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > _MAX_LINE_BYTES:
                raise self._strange(b"a line that does not end")
            self._need(self._end - self._start + 1, deadline_s)
        line = bytes(self._view[self._start : stop])
        self._start = stop + 2
        if line[:1] == b"-":
            raise RedisRefused(line[1:].split(b" ", 1)[0].decode("ascii", "replace")[:32])
        return line

    def _need(self, num_bytes: int, deadline_s: float) -> None:
        """Read until as many bytes as that are there, all in one piece."""
        if self._end - self._start >= num_bytes:
            return
        self._make_room(num_bytes)
        stop = min(len(self._buffer), self._start + num_bytes + _READ_AHEAD_BYTES)
        try:
            while self._end - self._start < num_bytes:
                self._wait_until(deadline_s)
                num_come = self._socket.recv_into(self._view[self._end : stop])
                if not num_come:
                    raise ConnectionResetError("the other side hung up")
                self._end += num_come
        except OSError as error:
            raise self._failed(error) from error

    def _make_room(self, num_bytes: int) -> None:
        """So that the buffer can hold that many unread bytes."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + num_bytes <= len(self._buffer):
            return
        unread = bytes(self._view[self._start : self._end])
        if num_bytes + _READ_AHEAD_BYTES > len(self._buffer):
            # A new one, should somebody still look at the old one.
            self._buffer = bytearray(num_bytes + _READ_AHEAD_BYTES)
            self._view = memoryview(self._buffer)
        self._view[: len(unread)] = unread
        self._start, self._end = 0, len(unread)

    def _wait_until(self, deadline_s: float) -> None:
        """Let the next call of the socket take until then."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no time is left")
        self._socket.settimeout(left_s)

    def _number(self, line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError:
            raise self._strange(line) from None

    def _strange(self, line: bytes) -> NodeFailed:
        self.close()
        return NodeFailed(f"{self._name} answers with {line[:16]!r}, which is no reply to what was asked")

    def _failed(self, error: OSError) -> NodeFailed:
        self.close()
        if isinstance(error, TimeoutError):
            return NodeTimedOut(f"{self._name} does not answer in time")
        return NodeFailed(f"{self._name}: {type(error).__name__}")
