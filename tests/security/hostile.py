"""Pickles that would do something if anybody read them, raw connections, and what a process listens on."""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.e2e.service import Service


class Gadget:
    """Unpickling it would make a file."""

    marker = Path(f"/tmp/mimo-gadget-{os.getpid()}")

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (f"{self.marker}-{self.name}",)


def gadgets(name: str) -> list[bytes]:
    return [pickle.dumps(Gadget(f"{name}-{protocol}"), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def assert_no_gadget_ran() -> None:
    assert not list(Gadget.marker.parent.glob(f"{Gadget.marker.name}-*"))


def sockets_of(pids: set[int]) -> tuple[set[tuple[str, int]], set[str]]:
    """TCP (address, port) that these processes listen on, and paths of their Unix sockets."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports, paths = set(), set()
    for family, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                assert len(address) == width
                ports.add((address, int(port, 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[6] in inodes and words[3] == "00010000":
            paths.add(words[7])
    return ports, paths


def send_pickles_everywhere(service: Service) -> None:
    """To every open port and socket of a deployment, in the framing of HTTP, of ZeroMQ and in none."""
    ports, paths = sockets_of({service.pid, *service.stages().values()})
    addresses = [*(f"tcp://127.0.0.1:{port}" for _, port in ports), *(f"ipc://{path}" for path in paths)]
    hostile = [
        *gadgets("zmq"),
        msgspec.msgpack.encode(["submit", {"x": b"\x80\x04."}]),
        b"",
        b"\xc1" * 100,
        b"\x93" * 100_000,
    ]
    context = zmq.Context()
    try:
        for address in addresses:
            for kind in (zmq.DEALER, zmq.PUSH, zmq.REQ):
                with context.socket(kind) as sender:
                    sender.setsockopt(zmq.LINGER, 200)
                    sender.setsockopt(zmq.SNDTIMEO, 200)
                    sender.connect(address)
                    for content in hostile if kind != zmq.REQ else hostile[:1]:
                        for frames in (
                            [content],
                            [b"", content],
                            [content, content],
                            [b"\x00", content, bytes(1 << 20)],
                        ):
                            try:
                                sender.send_multipart(frames)
                            except zmq.Again:
                                break
                            if kind == zmq.REQ:
                                break
    finally:
        context.destroy(linger=500)
    for content in gadgets("http"):
        for path in ("/v1/chat/completions", "/v1/encode", "/v1/files", "/encode", "/send", "/scheduler_receive_url"):
            for kind in (
                "application/json",
                "application/octet-stream",
                "application/x-pickle",
                "multipart/form-data; boundary=x",
            ):
                with connection(service) as client:
                    length = {"Content-Length": str(len(content)), "Content-Type": kind}
                    client.sendall(head(path, **length) + content)
                    assert 400 <= status_of(client) < 500
    for content in gadgets("raw"):
        with connection(service) as client:
            client.sendall(content)
    assert_no_gadget_ran()


def connection(service: Service) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(path: str, **headers: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()


def status_of(client: socket.socket) -> int:
    answer = b""
    while b"\r\n" not in answer:
        piece = client.recv(4096)
        assert piece, f"closed after {answer!r}"
        answer += piece
    return int(answer.split()[1])
