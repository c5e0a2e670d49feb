"""The connection to a Redis server against one that answers as it is told: in portions, late, wrongly, not at all."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.cache.l3.base import NodeFailed, NodeTimedOut
from epd.cache.l3.redis_node import RedisNode
from epd.cache.l3.resp import Connection, RedisAddress, RedisRefused, command

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
                assert connection.recv(1024) == command(b"PING")
                connection.sendall(b"+PONG\r\n")
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


def connected(server: ScriptedServer) -> Connection:
    return Connection(RedisAddress.parse(server.url), time.monotonic() + 10)


REPLIES: dict[bytes, object] = {
    b"$-1\r\n": None,
    b"$0\r\n\r\n": b"",
    b"$9\r\n$-1\r\n+OK\r\r\n": b"$-1\r\n+OK\r",
    b"$70000\r\n" + b"xy" * 35000 + b"\r\n": b"xy" * 35000,
    b":1\r\n": 1,
    b":-20\r\n": -20,
    b"+OK\r\n": b"OK",
    b"-WRONGTYPE it is a list\r\n": "WRONGTYPE",
}


def read(connection: Connection, reply: bytes, deadline_s: float) -> object:
    """As the one kind that `reply` is."""
    try:
        match reply[:1]:
            case b"$" | b"-":
                value = connection.read_bulk(deadline_s)
                return None if value is None else bytes(value)
            case b":":
                return connection.read_number(deadline_s)
            case _:
                return connection.read_status(deadline_s)
    except RedisRefused as error:
        return error.code


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([*REPLIES]), min_size=1, max_size=8), st.lists(st.integers(1, 60000), max_size=12))
def test_replies_in_any_portions(replies: list[bytes], portions: list[int]) -> None:
    stream = b"".join(replies)

    def talk(connection: socket.socket) -> None:
        connection.recv(1)
        start = 0
        for portion in (*portions, len(stream)):
            connection.sendall(stream[start : start + portion])
            start += portion
            time.sleep(0.0005)
        connection.recv(1)

    with scripted(talk) as server:
        connection = connected(server)
        deadline_s = time.monotonic() + 10
        connection.send([b"?"], deadline_s)
        assert [read(connection, reply, deadline_s) for reply in replies] == [REPLIES[reply] for reply in replies]
        assert connection.is_quiet()
        connection.close()


def test_every_cut_of_a_reply() -> None:
    stream = b"$3\r\nabc\r\n:1\r\n:0\r\n$-1\r\n"
    for cut in range(1, len(stream)):

        def talk(connection: socket.socket, cut: int = cut) -> None:
            connection.sendall(stream[:cut])
            connection.recv(1)
            connection.sendall(stream[cut:])
            connection.recv(1)

        with scripted(talk) as server:
            connection = connected(server)
            timer = threading.Timer(0.002, connection.send, ([b"?"], time.monotonic() + 10))
            timer.start()
            deadline_s = time.monotonic() + 10
            value = connection.read_bulk(deadline_s)
            assert value is not None
            assert bytes(value) == b"abc"
            assert connection.read_digits(2, deadline_s) == [1, 0]
            assert connection.read_bulk(deadline_s) is None
            timer.join()
            connection.close()


def test_more_is_sent_than_the_system_takes_at_once() -> None:
    pieces = [bytes([number % 251]) * (number % 5000) for number in range(3000)]
    come = bytearray()

    def talk(connection: socket.socket) -> None:
        while data := connection.recv(1 << 15):
            come.extend(data)

    with scripted(talk) as server:
        connection = connected(server)
        connection.send(pieces, time.monotonic() + 10)
        connection.close()
    assert bytes(come) == b"".join(pieces)


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
        b"$3\r\nabcde",
        b"$999999999999\r\n",
        b"*1\r\n$1\r\na\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"x" * 10000,
        b"\r\n",
    ],
)
def test_what_is_no_reply_ends_the_connection(nonsense: bytes) -> None:
    with scripted(says(nonsense), says(b"$1\r\nv\r\n")) as server:
        node = RedisNode(server.url, ttl_s=None)
        with pytest.raises(NodeFailed, match="no reply"):
            node.get([b"k"], lambda *_: pytest.fail("a value of nonsense"), timeout_s=5)
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


@pytest.mark.parametrize("code", ["LOADING", "READONLY", "MOVED", "ERR"])
def test_a_server_that_refuses_has_failed(code: str) -> None:
    refusal = f"-{code} the password is 'hunter2'\r\n".encode()
    with scripted(*[says(refusal * 3)] * 5) as server:
        node = RedisNode(server.url, ttl_s=100.0)
        calls: list[Callable[[], object]] = [
            lambda: node.get([b"k"], lambda *_: None, timeout_s=5),
            lambda: node.put([(b"k", [b"v"])], timeout_s=5),
            lambda: node.exists([b"k"], timeout_s=5),
            lambda: node.touch([b"k"], timeout_s=5),
            lambda: node.discard([b"k"], timeout_s=5),
        ]
        for call in calls:
            with pytest.raises(NodeFailed, match=code) as refused:
                call()
            assert "hunter2" not in str(refused.value)
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


def test_a_name_without_an_address_is_a_failure() -> None:
    node = RedisNode("redis://no-such-host.invalid:1/0", ttl_s=None)
    with pytest.raises(NodeFailed, match="no-such-host"):
        node.exists([b"k"], timeout_s=5)
