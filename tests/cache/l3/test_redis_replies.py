"""A Redis node against a server that answers as it is told: in portions, late, wrongly, not at all."""

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest

from epd.cache.l3.base import NodeFailed, NodeTimedOut
from epd.cache.l3.redis_node import RedisNode

Talk = Callable[[socket.socket], None]


class ScriptedServer:
    """Answers the greeting of every connection, then does what its `talks` say, one for each connection."""

    def __init__(self, talks: list[Talk]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._talks = talks
        self.num_connections = 0
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # Wakes who waits in accept; closing alone does not.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        for talk in self._talks:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while b"SETINFO" in connection.recv(1024, socket.MSG_PEEK):
                    connection.recv(1024)
                    connection.sendall(b"+OK\r\n")
                talk(connection)


@contextlib.contextmanager
def scripted(*talks: Talk) -> Iterator[ScriptedServer]:
    server = ScriptedServer([*talks])
    try:
        yield server
    finally:
        server.close()


def says(*answers: bytes) -> Talk:
    """Each as the answer to one message, then waits for the client to go."""

    def talk(connection: socket.socket) -> None:
        for answer in answers:
            if not connection.recv(1 << 16):
                return
            connection.sendall(answer)
        while connection.recv(1 << 16):
            pass

    return talk


def test_a_server_that_takes_nothing_costs_the_time_limit() -> None:
    gone = threading.Event()
    with scripted(lambda _: gone.wait(10) and None) as server:
        node = RedisNode(server.url, ttl_s=None)
        begun_s = time.monotonic()
        with pytest.raises(NodeTimedOut):
            node.put([(b"k", [bytes(60 << 20)])], timeout_s=0.05)
        assert time.monotonic() - begun_s < 0.5
        gone.set()
        node.close()


@pytest.mark.parametrize("part", [b"", b"$", b"$5\r\n", b"$5\r\nab", b"$5\r\nabcde", b"$5\r\nabcde\r"])
def test_a_reply_that_stops_midway_costs_the_time_limit_and_the_connection(part: bytes) -> None:
    """What it would have said comes later, and answers nothing that is asked then."""
    late = threading.Event()

    def first(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(part)
        late.wait(10)
        connection.sendall(b"$5\r\nabcde\r\n"[len(part) :])

    with scripted(first, says(b"$3\r\nnew\r\n")) as server:
        node = RedisNode(server.url, ttl_s=None)
        begun_s = time.monotonic()
        with pytest.raises(NodeTimedOut):
            node.get([b"old"], lambda *_: pytest.fail("half a value"), timeout_s=0.03)
        assert time.monotonic() - begun_s < 0.5
        late.set()
        found: list[object] = []
        node.get([b"new"], lambda _, value: found.append(bytes(value or b"")), timeout_s=5)
        assert found == [b"new"]
        assert server.num_connections == 2
        node.close()


def dripping(stream: bytes, every_s: float) -> Talk:
    """Answers byte by byte."""

    def talk(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for byte in stream:
            connection.sendall(bytes([byte]))
            time.sleep(every_s)
        connection.recv(1)

    return talk


def test_a_reply_byte_by_byte_is_that_reply() -> None:
    with scripted(dripping(b"$8\r\n\r\n$1\r\n:1\r\n$-1\r\n-WRONGTYPE a list\r\n$0\r\n\r\n", 0.001)) as server:
        node = RedisNode(server.url, ttl_s=None)
        found: list[object] = []
        node.get([b"k"] * 4, lambda _, value: found.append(None if value is None else bytes(value)), timeout_s=5)
        assert found == [b"\r\n$1\r\n:1", None, None, b""]
        node.close()


def test_a_server_that_drips_costs_one_reply_more_than_the_time_limit() -> None:
    reply = b"$4\r\nabcd\r\n"
    with scripted(dripping(reply * 20, 0.02), says(b"$3\r\nnew\r\n")) as server:
        node = RedisNode(server.url, ttl_s=None)
        found: list[object] = []
        begun_s = time.monotonic()
        with pytest.raises(NodeTimedOut):
            node.get([b"k"] * 20, lambda _, value: found.append(bytes(value or b"")), timeout_s=0.1)
        # A reply takes 0.2 s to come.
        assert time.monotonic() - begun_s < 1.0
        assert found in ([], [b"abcd"])
        found.clear()
        node.get([b"new"], lambda _, value: found.append(bytes(value or b"")), timeout_s=5)
        assert found == [b"new"]
        node.close()


def test_what_came_before_it_stopped_is_kept() -> None:
    with scripted(says(b"$2\r\nk0\r\n$-1\r\n$2\r\nk")) as server:
        node = RedisNode(server.url, ttl_s=None)
        found: list[tuple[int, bytes | None]] = []
        with pytest.raises(NodeTimedOut):
            node.get([b"0", b"1", b"2"], lambda *a: found.append((a[0], a[1] and bytes(a[1]))), timeout_s=0.05)
        assert found == [(0, b"k0"), (1, None)]
        node.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$x\r\n",
        b"$999999999999\r\n",
        b"*1\r\n$1\r\na\r\n",
        b":1\r\n",
        b"x" * 10000,
        b"\r\n",
        b"-MOVED\r\n",
        b"-\xff\r\n",
    ],
)
def test_what_is_no_reply_ends_the_connection(nonsense: bytes) -> None:
    with scripted(says(nonsense), says(b"$1\r\nv\r\n")) as server:
        node = RedisNode(server.url, ttl_s=None)
        with pytest.raises(NodeFailed):
            node.get([b"k"], lambda *_: pytest.fail("a value of nonsense"), timeout_s=0.2)
        found: list[object] = []
        node.get([b"k"], lambda _, value: found.append(bytes(value or b"")), timeout_s=5)
        assert found == [b"v"]
        node.close()


@pytest.mark.parametrize("number", [b":2\r\n", b":10\r\n", b":-1\r\n"])
def test_only_one_means_that_it_is_there(number: bytes) -> None:
    with scripted(says(b":1\r\n" + number + b":0\r\n:1\r\n")) as server:
        node = RedisNode(server.url, ttl_s=None)
        assert list(node.exists([b"a", b"b", b"c", b"d"], timeout_s=5)) == [True, False, False, True]
        node.close()


@pytest.mark.parametrize(
    ("refusal", "shown"),
    [
        (b"-LOADING hunter2", "BusyLoadingError"),
        (b"-READONLY hunter2", "ReadOnlyError"),
        (b"-MOVED 3999 hunter2:6381", "MovedError"),
        (b"-NOAUTH hunter2", "AuthenticationError"),
        (b"-MISCONF hunter2", "MISCONF"),
        (b"-ERR unknown command with args beginning with: hunter2", "ResponseError"),
        (b"-ERR HUNTER2 hunter2", "ResponseError"),
    ],
)
def test_a_server_that_refuses_has_failed(refusal: bytes, shown: str) -> None:
    with scripted(*[says(refusal + b"\r\n")] * 5) as server:
        node = RedisNode(server.url, ttl_s=100.0)
        calls: list[Callable[[], object]] = [
            lambda: node.get([b"k"], lambda *_: None, timeout_s=5),
            lambda: node.put([(b"k", [b"v"])], timeout_s=5),
            lambda: node.exists([b"k"], timeout_s=5),
            lambda: node.touch([b"k"], timeout_s=5),
            lambda: node.discard([b"k"], timeout_s=5),
        ]
        for call in calls:
            with pytest.raises(NodeFailed, match=shown) as refused:
                call()
            assert "hunter2" not in "".join(traceback.format_exception(refused.value)).lower()
        assert server.num_connections == len(calls)


def test_words_that_nobody_asked_for_answer_nothing() -> None:
    def chatters(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"$1\r\na\r\n$5\r\nwrong\r\n")
        connection.recv(1)

    with scripted(chatters, says(b"$1\r\nb\r\n")) as server:
        node = RedisNode(server.url, ttl_s=None)
        found: list[object] = []
        for _ in range(2):
            node.get([b"k"], lambda _, value: found.append(bytes(value or b"")), timeout_s=5)
            time.sleep(0.01)
        assert found == [b"a", b"b"]
        node.close()


def test_a_sink_that_fails_leaves_no_replies_behind() -> None:
    with scripted(says(b"$1\r\na\r\n$1\r\nb\r\n"), says(b"$1\r\nc\r\n")) as server:
        node = RedisNode(server.url, ttl_s=None)

        def sink(index: int, value: memoryview | None) -> None:
            raise RuntimeError("ours")

        with pytest.raises(RuntimeError, match="ours"):
            node.get([b"a", b"b"], sink, timeout_s=5)
        found: list[object] = []
        node.get([b"c"], lambda _, value: found.append(bytes(value or b"")), timeout_s=5)
        assert found == [b"c"]
        node.close()


def test_nothing_is_tried_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = RedisNode(f"redis://127.0.0.1:{silent.getsockname()[1]}", ttl_s=None)
        begun_s = time.monotonic()
        with pytest.raises(NodeTimedOut):
            node.exists([b"k"], timeout_s=0.05)
        assert time.monotonic() - begun_s < 0.5
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_name_without_an_address_is_a_failure() -> None:
    node = RedisNode("redis://no-such-host.invalid:1/0", ttl_s=None)
    with pytest.raises(NodeFailed, match="no-such-host"):
        node.exists([b"k"], timeout_s=5)
