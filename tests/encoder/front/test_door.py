"""The listening thread: probes are answered whatever the loop that works does; all else is handed over untouched."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from encoder.front.door import Door, open_listener
from encoder.front.health import Verdict


@dataclass
class Opened:
    door: Door
    handed: list[socket.socket] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.door.port), timeout=10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def next_handed(self) -> socket.socket:
        assert self.arrived.acquire(timeout=10)
        connection = self.handed.pop(0)
        connection.setblocking(True)
        connection.settimeout(10)
        return connection


@contextmanager
def opened(status: int = 200) -> Iterator[Opened]:
    def hand_over(connection: socket.socket) -> None:
        parts.handed.append(connection)
        parts.arrived.release()

    door = Door(
        open_listener("127.0.0.1", 0),
        probes={"/health": lambda: Verdict(status, {"status": "x"}), "/ready": lambda: Verdict(200, {})},
        hand_over=hand_over,
    )
    parts = Opened(door)
    door.open()
    try:
        yield parts
    finally:
        door.close()
        for connection in parts.handed:
            connection.close()


def answer(connection: socket.socket) -> tuple[str, dict[str, str], bytes]:
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += connection.recv(4096)
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    while len(body) < int(headers["Content-Length"]):
        body += connection.recv(4096)
    return first, headers, body


def test_probes_are_answered_one_after_another_on_one_connection() -> None:
    with opened() as parts, parts.connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET /health?x=1 HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine-1\r\n\r\n")
            first, headers, body = answer(connection)
            assert first == "HTTP/1.1 200 OK"
            assert json.loads(body) == {"status": "x"}
            assert headers["X-Request-Id"] == "mine-1"
        assert not parts.handed


def test_a_red_verdict_is_503_and_says_when_to_ask_again() -> None:
    with opened(503) as parts, parts.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        first, headers, _ = answer(connection)
        assert first == "HTTP/1.1 503 Service Unavailable"
        assert headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: a\r\n\r\n",
    ],
)
def test_a_connection_ends_when_the_client_wants_it(request_bytes: bytes) -> None:
    with opened() as parts, parts.connect() as connection:
        connection.sendall(request_bytes)
        _, headers, _ = answer(connection)
        assert headers["Connection"] == "close"
        assert connection.recv(1) == b""


def test_an_answer_to_head_has_no_body() -> None:
    with opened() as parts, parts.connect() as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        raw = b""
        while piece := connection.recv(4096):
            raw += piece
        assert raw.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "first_bytes",
    [
        b"POST /v1/encode HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /healthy HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
        b"GE",
        b"\x16\x03\x01",
    ],
)
def test_anything_else_is_handed_over_with_every_byte(first_bytes: bytes) -> None:
    with opened() as parts, parts.connect() as connection:
        connection.sendall(first_bytes)
        with parts.next_handed() as handed:
            assert handed.recv(4096) == first_bytes


def test_what_follows_a_probe_on_its_connection_is_handed_over() -> None:
    with opened() as parts, parts.connect() as connection:
        connection.sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\nPOST /v1/encode HTTP/1.1\r\n")
        assert answer(connection)[0] == "HTTP/1.1 200 OK"
        with parts.next_handed() as handed:
            assert handed.recv(4096) == b"POST /v1/encode HTTP/1.1\r\n"


def test_a_connection_that_says_nothing_holds_up_nobody() -> None:
    with opened() as parts, parts.connect(), parts.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer(connection)[0] == "HTTP/1.1 200 OK"


async def test_probes_are_answered_while_the_loop_that_works_is_blocked() -> None:
    with opened() as parts:
        took_s: list[float] = []

        def probe() -> None:
            for _ in range(20):
                started_s = time.perf_counter()
                with parts.connect() as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                    answer(connection)
                took_s.append(time.perf_counter() - started_s)

        prober = threading.Thread(target=probe)
        prober.start()
        # Blocking the loop is the point.
        prober.join(10)
        await asyncio.sleep(0)
        assert len(took_s) == 20
        assert sorted(took_s)[10] < 0.1


def test_a_port_that_is_taken_is_an_error() -> None:
    with opened() as parts, pytest.raises(OSError, match="in use"):
        open_listener("127.0.0.1", parts.door.port)
