"""Who gets in: keys from one secret, and what everybody else meets."""

import logging
import pickle
import resource
import socket as sockets
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from encoder.cluster import (
    CLIENT_EVENTS,
    ClusterKeys,
    Handshakes,
    RefusalLog,
    WeakSecret,
    host_of,
    limit,
    needs_keys,
    new_secret,
    secure_client,
    secure_server,
)

SECRET = b"mQ0v3nZpYt7cJ2xW9sLk4dRf8hTg1uBa6eNi5oVzXyC="
KEYS = ClusterKeys.derive(SECRET)
PATIENCE_S = 10.0


class Server:
    """A ROUTER that echoes, on loopback."""

    def __init__(self, keys: ClusterKeys | None) -> None:
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        limit(self.socket, max_frame_bytes=1 << 20)
        secure_server(self.socket, "tcp://127.0.0.1:*", keys)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def received(self, timeout_s: float = PATIENCE_S) -> list[bytes] | None:
        """The next message, None after `timeout_s`."""
        return self.socket.recv_multipart() if self.socket.poll(round(1000 * timeout_s)) else None

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(KEYS)
    yield server
    server.close()


@pytest.fixture
def dealer() -> Iterator[Callable[..., "zmq.Socket[bytes]"]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    opened: list[zmq.Socket[bytes]] = []

    def connect(address: str, prepare: Callable[["zmq.Socket[bytes]"], None]) -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        prepare(socket)
        socket.connect(address)
        opened.append(socket)
        return socket

    yield connect
    for socket in opened:
        socket.close(0)
    context.term()


def test_keys_are_the_secret_s_alone_and_two_different_pairs() -> None:
    assert ClusterKeys.derive(SECRET + b"\n") == KEYS
    assert len({KEYS.server_secret, KEYS.server_public, KEYS.client_secret, KEYS.client_public}) == 4
    assert zmq.curve_public(KEYS.server_secret) == KEYS.server_public
    other = ClusterKeys.derive(SECRET[:-2] + b"D=")
    assert not {other.server_secret, other.client_secret} & {KEYS.server_secret, KEYS.client_secret}
    long = SECRET * 4
    assert ClusterKeys.derive(long) != ClusterKeys.derive(long[:-1])


def test_keys_are_never_shown() -> None:
    shown = f"{KEYS!r} {KEYS} {[KEYS]}"
    assert all(key.decode() not in shown for key in (KEYS.server_secret, KEYS.client_secret, KEYS.client_public))


@pytest.mark.parametrize(
    "secret", [b"", b"short", b"x" * 64, b"0123456789abcdef" * 2, b"correct horse battery staple, again!", bytes(32)]
)
def test_a_secret_that_can_be_guessed_is_refused_without_being_told(secret: bytes) -> None:
    with pytest.raises(WeakSecret) as refused:
        ClusterKeys.derive(secret)
    assert len(secret) < 5 or secret.decode() not in str(refused.value)


@pytest.mark.parametrize("secret", [new_secret().encode(), bytes(range(100, 140)), b"0123456789abcdef" * 4])
def test_a_secret_of_32_random_bytes_will_do(secret: bytes) -> None:
    ClusterKeys.derive(secret)


@pytest.mark.parametrize(
    ("address", "needed"),
    [
        ("tcp://127.0.0.1:1", False),
        ("tcp://127.8.9.10:1", False),
        ("tcp://localhost:1", False),
        ("tcp://[::1]:1", False),
        ("ipc:///tmp/x", False),
        ("inproc://x", False),
        ("tcp://0.0.0.0:1", True),
        ("tcp://[::]:1", True),
        ("tcp://10.0.0.1:1", True),
        ("tcp://127.0.0.1.example.org:1", True),
        ("tcp://prefill:7001", True),
    ],
)
def test_which_addresses_are_beyond_this_machine(address: str, needed: bool) -> None:
    assert needs_keys(address) is needed
    assert host_of("tcp://[fe80::1]:7001") == "fe80::1"


def test_whoever_has_the_secret_gets_in(server: Server, dealer: Callable[..., "zmq.Socket[bytes]"]) -> None:
    socket = dealer(server.address, lambda socket: secure_client(socket, server.address, KEYS))
    assert socket.poll(round(1000 * PATIENCE_S), zmq.POLLOUT)
    socket.send(b"hello")
    received = server.received()
    assert received is not None
    server.socket.send_multipart(received)
    assert socket.recv() == b"hello"


def _other_secret(socket: "zmq.Socket[bytes]") -> None:
    secure_client(socket, "tcp://", ClusterKeys.derive(new_secret().encode()))


def _no_secret(socket: "zmq.Socket[bytes]") -> None:
    pass


def _server_s_key_alone(socket: "zmq.Socket[bytes]") -> None:
    """Somebody who found out the server's public key, and makes up a pair of his own."""
    secure_client(socket, "tcp://", KEYS)
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def _plain(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.PLAIN_USERNAME, b"admin")
    socket.setsockopt(zmq.PLAIN_PASSWORD, b"admin")


@pytest.mark.parametrize("prepare", [_other_secret, _no_secret, _server_s_key_alone, _plain])
def test_nobody_else_does_and_it_is_said_once(
    server: Server,
    dealer: Callable[..., "zmq.Socket[bytes]"],
    prepare: Callable[["zmq.Socket[bytes]"], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    strangers = [dealer(server.address, prepare) for _ in range(3)]
    deadline_s = time.monotonic() + PATIENCE_S
    while "did not show this cluster's key" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    for stranger in strangers:
        assert not stranger.poll(100, zmq.POLLOUT)
    assert server.received(0.05) is None
    assert caplog.text.count("did not show this cluster's key") == 1
    friend = dealer(server.address, lambda socket: secure_client(socket, server.address, KEYS))
    friend.send(b"still there")
    assert (server.received() or [])[1:] == [b"still there"]


def test_a_server_without_the_secret_is_not_spoken_to(dealer: Callable[..., "zmq.Socket[bytes]"]) -> None:
    """What a worker would send, rows and KV, goes to nobody who merely took the address."""
    impostor = Server(None)
    try:
        socket = dealer(impostor.address, lambda socket: secure_client(socket, impostor.address, KEYS))
        assert not socket.poll(300, zmq.POLLOUT)
        assert impostor.received(0.05) is None
    finally:
        impostor.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


def _greeting(mechanism: bytes) -> bytes:
    return GREETING + mechanism.ljust(20, b"\0") + bytes(32)


HOSTILE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100,
    "pickle": pickle.dumps({"x": list(range(1000))}),
    "zeros": bytes(1 << 16),
    "huge command in the handshake": _greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 40) + bytes(1 << 16),
    "huge frame instead of one": _greeting(b"CURVE") + b"\x02" + struct.pack(">Q", 1 << 40) + bytes(1 << 16),
    "null mechanism and a pickle": _greeting(b"NULL")
    + b"\x04\x05\x05READY"
    + b"\x00\x20"
    + pickle.dumps(b"x" * 20)[:32],
    "hello of nonsense": _greeting(b"CURVE") + b"\x04\xc8" + b"\x05HELLO\x01\x00" + bytes(193),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_garbage_is_dropped_and_memory_stays(
    server: Server, dealer: Callable[..., "zmq.Socket[bytes]"], name: str
) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        with sockets.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            try:
                for _ in range(4):
                    connection.sendall(HOSTILE[name])
                connection.shutdown(sockets.SHUT_WR)
                while connection.recv(65536):
                    pass
            except OSError:
                pass  # Closed in the middle of it: as good.
    assert server.received(0.05) is None
    friend = dealer(server.address, lambda socket: secure_client(socket, server.address, KEYS))
    friend.send(b"healthy")
    assert (server.received() or [])[1:] == [b"healthy"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


def test_a_frame_that_is_too_large_ends_its_connection_alone(
    server: Server, dealer: Callable[..., "zmq.Socket[bytes]"]
) -> None:
    friend, glutton = (
        dealer(server.address, lambda socket: secure_client(socket, server.address, KEYS)) for _ in range(2)
    )
    assert glutton.poll(round(1000 * PATIENCE_S), zmq.POLLOUT)
    glutton.send(bytes(2 << 20))
    assert server.received(0.3) is None
    friend.send(bytes(1 << 19))
    assert len((server.received() or [b"", b""])[1]) == 1 << 19


def test_closing_the_server_ends_its_doorkeeper() -> None:
    server = Server(KEYS)
    keepers = [thread for thread in threading.enumerate() if thread.name.startswith("doorkeeper")]
    assert keepers
    server.close()
    for keeper in keepers:
        keeper.join(PATIENCE_S)
        assert not keeper.is_alive()


def test_refusals_are_told_seldom(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    log = RefusalLog("no", clock=lambda: now_s[0])
    for _ in range(100):
        log.tell()
    now_s[0] += 1000
    log.tell()
    assert [record.getMessage() for record in caplog.records] == ["no (1 so far)", "no (101 so far)"]


def test_a_restart_is_no_refusal() -> None:
    handshakes = Handshakes("tcp://a:1")
    assert not handshakes.take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert not handshakes.is_refused
    handshakes.take(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert handshakes.is_up
    handshakes.take(zmq.EVENT_DISCONNECTED)
    assert not handshakes.is_up
    for _ in range(2):
        handshakes.take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert not handshakes.is_refused
    assert handshakes.take(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    assert handshakes.is_refused
    assert CLIENT_EVENTS & zmq.EVENT_HANDSHAKE_FAILED_AUTH


def test_a_peer_that_hangs_refuses_nobody() -> None:
    """Its host takes the connection, and the time for the handshake runs out: again and again."""
    now_s = 0.0
    handshakes = Handshakes("tcp://a:1", lambda: now_s)
    for _ in range(5):
        handshakes.take(zmq.EVENT_CONNECTED)
        now_s += 5.0
        assert handshakes.is_silent
        assert not handshakes.take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        assert handshakes.is_silent
        assert not handshakes.is_refused
    # It was killed: nobody takes the connection.
    handshakes.take(zmq.EVENT_CLOSED)
    assert not handshakes.is_silent
    handshakes.take(zmq.EVENT_CONNECTED)
    assert not handshakes.is_silent
    handshakes.take(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    now_s += 100.0
    assert not handshakes.is_silent
