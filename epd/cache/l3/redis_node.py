"""Pages as strings of a Redis server, which any number of hosts may share. Its `maxmemory` and policy bound the size.

What is not read for `ttl_s` goes; a read lets it live on. redis-py speaks to the server, on one connection. It is used
a level below its pipelines, which give all replies or none: here what has come before a failure is kept, and every
reply is waited for only as long as the call may still take. Nothing is tried twice.

The library's time limit is for each piece of data that comes. A server that sends one reply in many small pieces holds
a call for longer than its limit, until that reply is whole; `epd.cache.l3.node_thread` lets nobody wait for that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol, cast

from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from epd.cache.l3.base import Buffer, NodeFailed, NodeTimedOut, NodeUsage, Sink
from epd.store_address import REDIS_FORMS, redis_name

__all__ = ["RedisNode"]

PREFIX: Final = b"mimo:kv:"
_USAGE_EVERY_S: Final = 5.0
_TEND_TIMEOUT_S: Final = 0.05
_SENT_AT_ONCE: Final = 1024
_LIMIT_STEP_S: Final = 0.001
# Words that are longer are sent from where they lie.
_COPIED_BYTES: Final = 6000
# Of a server's words for a refusal, what may be shown: the rest may quote what was sent.
_MAX_CODE_CHARS: Final = 32
# Of nonsense the library says ValueError or IndexError.
_FAILURES: Final = (RedisError, OSError, ValueError, IndexError)

_Word = bytes | memoryview


class RedisNode:
    """One server; connects when it is first used, and again after a failure when it is next used."""

    def __init__(self, url: str, *, ttl_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`ttl_s` None keeps all until the server evicts it. Raises ValueError, without the password, for a bad URL."""
        self._name = _name(url)
        self._ttl: tuple[bytes, ...] = () if ttl_s is None else (b"PX", b"%d" % max(1, round(ttl_s * 1000)))
        self._clock = clock
        self._connection = _connection(url)
        self._is_connected = False
        self.why_unkept = ""
        self._limit_s = math.inf
        self._num_connections = 0
        self._usage = NodeUsage()
        self._usage_due_s = 0.0

    @property
    def name(self) -> str:
        return self._name

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        if not keys:
            return
        command = b"GETEX" if self._ttl else b"GET"
        with self._calling(timeout_s) as deadline_s:
            self._send([(command, PREFIX + key, *self._ttl) for key in keys], deadline_s)
            for index in range(len(keys)):
                sink(index, self._value(deadline_s))

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> Sequence[bool]:
        if not items:
            return []
        with self._calling(timeout_s) as deadline_s:
            # Each by itself: the memory that one was joined in is still at hand for the next.
            for key, parts in items:
                self._send([(b"SET", PREFIX + key, b"".join(parts), *self._ttl)], deadline_s)
            return [self._is_kept(deadline_s) for _ in items]

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> Sequence[bool]:
        if not keys:
            return []
        with self._calling(timeout_s) as deadline_s:
            return [answer == 1 for answer in self._numbers([(b"EXISTS", PREFIX + key) for key in keys], deadline_s)]

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        if not keys:
            return
        with self._calling(timeout_s) as deadline_s:
            if self._ttl:
                self._numbers([(b"PEXPIRE", PREFIX + key, self._ttl[1]) for key in keys], deadline_s)
            else:
                self._numbers(_joined(b"TOUCH", keys), deadline_s)

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        if not keys:
            return
        with self._calling(timeout_s) as deadline_s:
            self._numbers(_joined(b"UNLINK", keys), deadline_s)

    def usage(self) -> NodeUsage:
        """As of the last housekeeping. Of the whole server: others may keep things there, too."""
        return self._usage

    def tend(self) -> bool:
        """Ask the server what it holds, now and then."""
        now_s = self._clock()
        if now_s < self._usage_due_s:
            return False
        self._usage_due_s = now_s + _USAGE_EVERY_S
        with self._calling(_TEND_TIMEOUT_S) as deadline_s:
            self._send([(b"DBSIZE",), (b"INFO", b"memory")], deadline_s)
            num_records = self._number(deadline_s)
            memory = _fields(bytes(self._value(deadline_s) or b""))
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
    def _calling(self, timeout_s: float) -> Iterator[float]:
        """Connected, until the end of the call, which it gives. After any failure the connection is closed: replies may
        still be on their way, and would answer what is asked next."""
        deadline_s = time.monotonic() + timeout_s
        # Between calls the library may go back to the limit that it connected with.
        self._limit_s = math.inf
        is_whole = False
        try:
            self._connect(deadline_s)
            yield deadline_s
            is_whole = True
        finally:
            if not is_whole:
                self._drop()

    def _connect(self, deadline_s: float) -> None:
        if self._is_connected and not self._is_quiet():
            self._drop()
        if self._is_connected:
            return
        connection = self._connection
        connection.socket_timeout = connection.socket_connect_timeout = self._left_s(deadline_s)
        try:
            connection.connect()
        except _FAILURES as error:
            raise self._failed(error) from None
        self._is_connected = True
        self._num_connections += 1

    def _is_quiet(self) -> bool:
        """Whether the server is there and has said nothing: what was not asked for is no reply to anything."""
        try:
            return not self._connection.can_read()
        except _FAILURES:
            return False

    def _drop(self) -> None:
        self._is_connected = False
        self._connection.disconnect()

    def _send(self, commands: Sequence[Sequence[_Word]], deadline_s: float) -> None:
        try:
            for piece in self._connection.pack_commands(commands):
                self._limit(deadline_s)
                self._connection.send_packed_command([piece])
        except _FAILURES as error:
            raise self._failed(error) from None

    def _reply(self, deadline_s: float) -> object:
        """Of one command; a refusal is a reply, too."""
        self._limit(deadline_s)
        try:
            return self._connection.read_response()
        except ResponseError as refusal:
            return refusal
        except _FAILURES as error:
            raise self._failed(error) from None

    def _value(self, deadline_s: float) -> memoryview | None:
        reply = self._reply(deadline_s)
        if isinstance(reply, bytes):
            return memoryview(reply)
        # A list or the like under our name: some other program's, and no page.
        if reply is None or (isinstance(reply, ResponseError) and _code(reply) == "WRONGTYPE"):
            return None
        raise self._strange(reply)

    def _is_kept(self, deadline_s: float) -> bool:
        reply = self._reply(deadline_s)
        if reply == b"OK":
            return True
        # Full, with a policy that evicts nothing.
        if isinstance(reply, OutOfMemoryError):
            self.why_unkept = "its memory is full, and its maxmemory-policy evicts nothing (allkeys-lru would)"
            return False
        raise self._strange(reply)

    def _number(self, deadline_s: float) -> int:
        reply = self._reply(deadline_s)
        if isinstance(reply, int):
            return reply
        raise self._strange(reply)

    def _numbers(self, commands: Sequence[Sequence[_Word]], deadline_s: float) -> list[int]:
        numbers: list[int] = []
        for start in range(0, len(commands), _SENT_AT_ONCE):
            some = commands[start : start + _SENT_AT_ONCE]
            self._send(some, deadline_s)
            numbers += [self._number(deadline_s) for _ in some]
        return numbers

    def _limit(self, deadline_s: float) -> None:
        """Let what follows take what is left of the call's time. The system hears of it when that has changed."""
        left_s = self._left_s(deadline_s)
        if abs(self._limit_s - left_s) > _LIMIT_STEP_S:
            self._connection.update_current_socket_timeout(left_s)
            self._limit_s = left_s

    def _left_s(self, deadline_s: float) -> float:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise NodeTimedOut(f"{self._name} does not answer in time")
        return left_s

    def _strange(self, reply: object) -> NodeFailed:
        if isinstance(reply, ResponseError):
            return NodeFailed(f"{self._name} refused with {_code(reply)}")
        return NodeFailed(f"{self._name} answers with {type(reply).__name__}, which is no reply to what was asked")

    def _failed(self, error: Exception) -> NodeFailed:
        """Raised without `error` as its cause, whose words may quote what was sent: a password."""
        if isinstance(error, ResponseError):
            return self._strange(error)
        if isinstance(error, RedisTimeoutError | TimeoutError):
            return NodeTimedOut(f"{self._name} does not answer in time")
        if isinstance(error, ValueError | IndexError) and not isinstance(error, OSError):
            return self._strange(error)
        return NodeFailed(f"{self._name}: {type(_origin(error)).__name__}")


class _Connection(Protocol):
    """What is used of redis-py's connections, which say little of their types."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def can_read(self) -> bool: ...
    def update_current_socket_timeout(self, relaxed_timeout: float | None) -> None: ...
    def pack_commands(self, commands: Sequence[Sequence[_Word]]) -> Iterable[_Word]: ...
    def send_packed_command(self, command: Sequence[_Word]) -> None: ...
    def read_response(self) -> object: ...


def _connection(url: str) -> _Connection:
    """Not yet connected. The older protocol has no words that nobody asked for. Raises ValueError."""
    try:
        pool = ConnectionPool.from_url(
            url, max_connections=1, protocol=2, retry=Retry(NoBackoff(), 0), decode_responses=False
        )
        # hiredis reads faster than Python, but takes a hundred times as long to write a value, which it copies.
        packer = PythonRespSerializer(_COPIED_BYTES, pool.get_encoder().encode)
        pool.connection_kwargs["command_packer"] = packer
        return cast(_Connection, pool.make_connection())
    except (RedisError, ValueError, TypeError):
        # Its words may quote the URL.
        raise ValueError(f"the Redis server {_name(url)} has an option in its address that redis-py refuses") from None


def _name(url: str) -> str:
    """Raises ValueError, without passwords, for what is no address."""
    try:
        return redis_name(url)
    except ValueError as error:
        raise ValueError(f"{error}; the address of a Redis server is {REDIS_FORMS}") from None


def _joined(command: bytes, keys: Sequence[bytes]) -> list[list[bytes]]:
    """Commands that take many keys at once."""
    starts = range(0, len(keys), _SENT_AT_ONCE)
    return [[command, *(PREFIX + key for key in keys[start : start + _SENT_AT_ONCE])] for start in starts]


def _code(refusal: ResponseError) -> str:
    """The first word of a refusal, which says what kind it is; the class where redis-py has cut that off."""
    word = str(refusal).partition(" ")[0]
    is_code = word.isascii() and word.isalpha() and word.isupper() and len(word) <= _MAX_CODE_CHARS
    return word if is_code and type(refusal) is ResponseError else type(refusal).__name__


def _origin(error: BaseException) -> BaseException:
    """What the system said, which is in the library's words, too, but beside others."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error


def _fields(text: bytes) -> dict[str, int]:
    """The whole numbers of an INFO."""
    with suppress(ValueError):
        lines = (line.partition(b":") for line in text.splitlines())
        return {name.decode(): int(value) for name, _, value in lines if value.isdigit()}
    return {}
