"""Pages as strings of a Redis server, which any number of hosts may share. Its `maxmemory` and policy bound the size.

What is not read for `ttl_s` goes; a read lets it live on. The server is one thread that copies memory, so what a call
costs is mostly the copying: see `epd.cache.l3.resp` for how that is kept short, and why nothing is tried twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from epd.cache.l3.base import Buffer, NodeFailed, NodeUsage, Sink
from epd.cache.l3.resp import Connection, RedisAddress, RedisRefused, command

__all__ = ["RedisNode"]

PREFIX: Final = b"mimo:kv:"
_USAGE_EVERY_S: Final = 5.0
_TEND_TIMEOUT_S: Final = 0.05
_SENT_AT_ONCE: Final = 1024


class RedisNode:
    """One server; connects when it is first used, and again after a failure when it is next used."""

    def __init__(self, url: str, *, ttl_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`ttl_s` None keeps all until the server evicts it. Raises ValueError for a bad URL."""
        self._address = RedisAddress.parse(url)
        self._ttl_ms = None if ttl_s is None else b"%d" % max(1, round(ttl_s * 1000))
        self._clock = clock
        self._connection: Connection | None = None
        self._num_connections = 0
        self._usage = NodeUsage()
        self._usage_due_s = 0.0

    @property
    def name(self) -> str:
        return self._address.name

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        if not keys:
            return
        with self._calling(timeout_s) as (connection, deadline_s):
            if self._ttl_ms is None:
                requests = [command(b"GET", PREFIX + key) for key in keys]
            else:
                requests = [command(b"GETEX", PREFIX + key, b"PX", self._ttl_ms) for key in keys]
            connection.send([b"".join(requests)], deadline_s)
            for index in range(len(keys)):
                sink(index, self._value(connection, deadline_s))

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> Sequence[bool]:
        if not items:
            return []
        with self._calling(timeout_s) as (connection, deadline_s):
            pieces: list[Buffer] = []
            for key, parts in items:
                self._add_set(pieces, PREFIX + key, parts)
            connection.send(pieces, deadline_s)
            return [self._is_kept(connection, deadline_s) for _ in items]

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> Sequence[bool]:
        if not keys:
            return []
        found: list[int] = []
        with self._calling(timeout_s) as (connection, deadline_s):
            for start in range(0, len(keys), _SENT_AT_ONCE):
                some = keys[start : start + _SENT_AT_ONCE]
                requests = [command(b"EXISTS", PREFIX + key) for key in some]
                connection.send([b"".join(requests)], deadline_s)
                found += connection.read_digits(len(some), deadline_s)
        return [answer == 1 for answer in found]

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        if not keys:
            return
        with self._calling(timeout_s) as (connection, deadline_s):
            for start in range(0, len(keys), _SENT_AT_ONCE):
                some = keys[start : start + _SENT_AT_ONCE]
                if self._ttl_ms is None:
                    connection.send([command(b"TOUCH", *(PREFIX + key for key in some))], deadline_s)
                    connection.read_number(deadline_s)
                else:
                    requests = [command(b"PEXPIRE", PREFIX + key, self._ttl_ms) for key in some]
                    connection.send([b"".join(requests)], deadline_s)
                    connection.read_digits(len(some), deadline_s)

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        if not keys:
            return
        with self._calling(timeout_s) as (connection, deadline_s):
            for start in range(0, len(keys), _SENT_AT_ONCE):
                some = keys[start : start + _SENT_AT_ONCE]
                connection.send([command(b"UNLINK", *(PREFIX + key for key in some))], deadline_s)
                connection.read_number(deadline_s)

    def usage(self) -> NodeUsage:
        """As of the last housekeeping. Of the whole server: others may keep things there, too."""
        return self._usage

    def tend(self) -> bool:
        """Ask the server what it holds, now and then."""
        now_s = self._clock()
        if now_s < self._usage_due_s:
            return False
        self._usage_due_s = now_s + _USAGE_EVERY_S
        with self._calling(_TEND_TIMEOUT_S) as (connection, deadline_s):
            connection.send([command(b"DBSIZE"), command(b"INFO", b"memory")], deadline_s)
            num_records = connection.read_number(deadline_s)
            memory = _fields(bytes(connection.read_bulk(deadline_s) or b""))
        self._usage = NodeUsage(
            num_records=num_records,
            used_bytes=memory.get("used_memory"),
            capacity_bytes=memory.get("maxmemory") or None,
            counters={"connections": self._num_connections},
        )
        return False

    def close(self) -> None:
        self._drop()

    @contextmanager
    def _calling(self, timeout_s: float) -> Iterator[tuple[Connection, float]]:
        """A connection and the end of the call. It is closed after any failure: replies may still be on their way."""
        deadline_s = time.monotonic() + timeout_s
        if self._connection is not None and not self._connection.is_quiet():
            self._drop()
        if self._connection is None:
            self._connection = Connection(self._address, deadline_s)
            self._num_connections += 1
        is_whole = False
        try:
            yield self._connection, deadline_s
            is_whole = True
        except RedisRefused as error:
            raise NodeFailed(f"{self.name} refused with {error.code}") from error
        finally:
            if not is_whole:
                self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _value(self, connection: Connection, deadline_s: float) -> memoryview | None:
        try:
            return connection.read_bulk(deadline_s)
        except RedisRefused as error:
            # A list or the like under our name; some other program's fault, and no page.
            if error.code == "WRONGTYPE":
                return None
            raise

    def _is_kept(self, connection: Connection, deadline_s: float) -> bool:
        try:
            connection.read_status(deadline_s)
        except RedisRefused as error:
            # Full, with a policy that evicts nothing.
            if error.code == "OOM":
                return False
            raise
        return True

    def _add_set(self, pieces: list[Buffer], name: bytes, parts: Sequence[Buffer]) -> None:
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        num_words = 3 if self._ttl_ms is None else 5
        pieces.append(b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (num_words, len(name), name, num_bytes))
        pieces.extend(parts)
        ttl_ms = self._ttl_ms
        pieces.append(b"\r\n" if ttl_ms is None else b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl_ms), ttl_ms))


def _fields(text: bytes) -> dict[str, int]:
    """The whole numbers of an INFO."""
    lines = (line.partition(b":") for line in text.splitlines())
    return {name.decode(): int(value) for name, _, value in lines if value.isdigit()}
