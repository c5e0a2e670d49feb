"""Pages as objects of a Mooncake store, for fleets that already run one: a master that knows where everything is, and
memory that clients lend it.

The library works in a process of its own (`epd.cache.l3.mooncake_agent`), since it blocks for seconds when its master
or the owner of an object is gone. Values pass through memory that both map. An answer that is late is waited for by
the next call, so that it is taken for nobody else's; until it has come the node does not answer.

What is lost: with an owner of memory the objects in it, and the store goes on naming them for some seconds; with the
master all objects, unless it keeps a log. See docs/kv-store.md.
"""

from __future__ import annotations

import ipaddress
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec

from epd.cache.l3.base import Buffer, NodeFailed, NodeTimedOut, NodeUsage, Sink
from epd.store_address import mooncake_parts

__all__ = ["MooncakeAddress", "MooncakeNode"]

_AGENT: Final = Path(__file__).with_name("mooncake_agent.py")
_INSTALL: Final = (
    "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine where CUDA is), and on Debian: "
    "apt-get install libibverbs1 librdmacm1"
)
_PREFIX: Final = "mimo:kv:"
# Of one request to the agent; a call with more keys makes several.
_MAX_VALUES: Final = 32
# A record is a slice and what vouches for it.
_RECORD_ROOM_BYTES: Final = 4096
_START_TIMEOUT_S: Final = 20.0
# For the store to be found while a server starts. Who is not there then is sought again when it is used.
_OPEN_TIMEOUT_S: Final = 2.0
# To give back what it lent, or the store goes on naming it.
_CLOSE_TIMEOUT_S: Final = 3.0
# The library knows no empty objects, and answers for one that is not there with as much; so every object begins so.
_MARK: Final = b"\x01"
# Codes of the library, and one of the agent's.
_NOT_SET_UP: Final = -10_000
_RPC_FAILED: Final = -900
_RPC_TIMED_OUT: Final = -901
_AGENT_ENVIRONMENT: Final = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "GLOG_minloglevel": "2",
}


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """Which store, and how this host takes part in it."""

    master: str
    host: str
    """This host's address, under which others reach what it lends."""
    protocol: str
    devices: str
    replicas: int
    lend_bytes: int

    @classmethod
    def parse(cls, url: str) -> MooncakeAddress:
        """`mooncake://MASTER:PORT[?OPTION=VALUE&...]` with the options host, protocol (tcp, rdma), devices, replicas,
        and lend_bytes. Raises ValueError."""
        master, port, options = mooncake_parts(url)
        return cls(
            f"{master}:{port}",
            options.get("host") or _own_address(master, port),
            options.get("protocol", "tcp"),
            options.get("devices", ""),
            int(options.get("replicas", "1")),
            int(options.get("lend_bytes", "0")),
        )

    @property
    def name(self) -> str:
        return f"mooncake://{self.master}"


class MooncakeNode:
    """One store, however many hosts it spans."""

    def __init__(self, url: str, *, io_bytes: int) -> None:
        """`io_bytes` is the size of the largest slice. Starts the agent, and gives it a while to find the store.

        Raises ValueError for a bad URL, NodeFailed when Mooncake cannot be loaded; not for a store that is not there.
        """
        self._address = MooncakeAddress.parse(url)
        self._stride = io_bytes + _RECORD_ROOM_BYTES + -io_bytes % mmap.PAGESIZE
        self._memory_fd = os.memfd_create("mimo-mooncake")
        os.ftruncate(self._memory_fd, self._stride * _MAX_VALUES)
        self._memory = mmap.mmap(self._memory_fd, self._stride * _MAX_VALUES)
        self._view = memoryview(self._memory)
        self._number = 0
        self._is_late = False
        self._num_started = 0
        self.why_unkept = ""
        self._agent: _AgentProcess | None = None
        try:
            self._agent = self._start()
        except NodeFailed:
            self.close()
            raise
        with suppress(NodeFailed):
            self._ask("open", [b""], [], [], time.monotonic() + _OPEN_TIMEOUT_S)

    @property
    def name(self) -> str:
        return self._address.name

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for start in range(0, len(keys), _MAX_VALUES):
            some = keys[start : start + _MAX_VALUES]
            places = [index * self._stride for index in range(len(some))]
            sizes = self._ask("get", some, places, [self._stride] * len(some), deadline_s)
            for index, (place, num_bytes) in enumerate(zip(places, sizes, strict=True)):
                # Codes of single objects: not there, lost with its owner, larger than anything of ours.
                is_there = num_bytes >= len(_MARK)
                sink(start + index, self._view[place + len(_MARK) : place + num_bytes] if is_there else None)

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> Sequence[bool]:
        deadline_s = time.monotonic() + timeout_s
        kept: list[bool] = []
        for start in range(0, len(items), _MAX_VALUES):
            # Nothing is written to the memory while the agent may still be at it.
            self._settle(deadline_s)
            some = items[start : start + _MAX_VALUES]
            places = [index * self._stride for index in range(len(some))]
            sizes = [self._lay(place, parts) for place, (_, parts) in zip(places, some, strict=True)]
            fitting = [index for index, num_bytes in enumerate(sizes) if num_bytes is not None]
            codes = self._ask(
                "put",
                [some[index][0] for index in fitting],
                [places[index] for index in fitting],
                [sizes[index] or 0 for index in fitting],
                deadline_s,
            )
            answers = dict(zip(fitting, codes, strict=True))
            if len(fitting) < len(some):
                self.why_unkept = f"a value is larger than {self._stride:,} bytes, the most at a time"
            if refusals := [code for code in codes if code != 0]:
                self.why_unkept = f"Mooncake answers {refusals[-1]}: the memory that is lent to it may be full"
            kept.extend(answers.get(index) == 0 for index in range(len(some)))
        return kept

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> Sequence[bool]:
        return [answer == 1 for answer in self._ask("exists", keys, [], [], time.monotonic() + timeout_s)]

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        """Asking whether they are there renews their leases, which is all there is."""
        self.exists(keys, timeout_s=timeout_s)

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self._ask("discard", keys, [], [], time.monotonic() + timeout_s)

    def usage(self) -> NodeUsage:
        return NodeUsage(counters={"agents": self._num_started})

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        self._view.release()
        # Somebody may hold a view yet; then it goes with the last of them.
        with suppress(BufferError):
            self._memory.close()
        os.close(self._memory_fd)

    def _start(self) -> _AgentProcess:
        address = self._address
        settings = {
            "master": address.master,
            "host": address.host,
            "protocol": address.protocol,
            "devices": address.devices,
            "replicas": address.replicas,
            "lend_bytes": address.lend_bytes,
            "memory_fd": self._memory_fd,
            "buffer_bytes": self._stride * _MAX_VALUES,
        }
        agent = _AgentProcess(settings)
        try:
            fault = agent.receive(_START_TIMEOUT_S)
        except (EOFError, OSError):
            fault = "its process has ended"
        if fault != "":
            agent.close()
            raise NodeFailed(f"Mooncake cannot be loaded ({fault}); install it with: {_INSTALL}")
        self._num_started += 1
        return agent

    def _ask(
        self, operation: str, keys: Sequence[bytes], places: list[int], sizes: list[int], deadline_s: float
    ) -> list[int]:
        """The codes for all keys. Raises NodeFailed when they speak of the store itself, NodeTimedOut."""
        if not keys:
            return []
        self._settle(deadline_s)
        if self._agent is None:
            self._agent = self._start()
        self._number += 1
        self._is_late = True
        names = [_PREFIX + key.hex() for key in keys]
        try:
            self._agent.send((self._number, operation, names, places, sizes))
            codes: list[int] = self._receive(deadline_s)
        except (EOFError, OSError) as error:
            self._agent.close()
            self._agent, self._is_late = None, False
            raise NodeFailed(f"{self.name}: the process that speaks to it has ended") from error
        for code in codes:
            if code == _RPC_TIMED_OUT:
                raise NodeTimedOut(f"{self.name}: its master does not answer")
            if code in (_RPC_FAILED, _NOT_SET_UP):
                raise NodeFailed(f"{self.name}: its master is not there ({code})")
        return codes

    def _settle(self, deadline_s: float) -> None:
        """Wait for the answer to an earlier call. Raises NodeTimedOut."""
        if self._is_late and self._agent is not None:
            try:
                self._receive(deadline_s)
            except (EOFError, OSError):
                self._agent.close()
                self._agent, self._is_late = None, False

    def _receive(self, deadline_s: float) -> list[int]:
        assert self._agent is not None
        reply = self._agent.receive(deadline_s - time.monotonic())
        if reply is None:
            raise NodeTimedOut(f"{self.name} does not answer in time")
        number, codes = reply
        assert number == self._number, f"reply {number} to request {self._number}"
        self._is_late = False
        return list(codes)

    def _lay(self, place: int, parts: Sequence[Buffer]) -> int | None:
        """Write a value to the memory; its size there, or None where it has no room."""
        views = [memoryview(part).cast("B") for part in (_MARK, *parts)]
        size_bytes = sum(view.nbytes for view in views)
        if size_bytes > self._stride:
            return None
        for view in views:
            self._view[place : place + view.nbytes] = view
            place += view.nbytes
        return size_bytes


class _AgentProcess:
    """The process, and the connection to it. Methods but `close` raise EOFError or OSError once it has ended."""

    def __init__(self, settings: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), settings["memory_fd"])
            argument = msgspec.json.encode({**settings, "requests_fd": descriptors[0]}).decode()
            # Others reach what is lent at the address that is told them, and at no other.
            environment = {"MC_TCP_BIND_ADDRESS": settings["host"], **_AGENT_ENVIRONMENT, **os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_AGENT), argument],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                # A terminal's interrupt is not for it. With a session of its own it would be scheduled apart from us,
                # which on busy cores costs seven eighths of its speed.
                process_group=0,
            )
        self._connection = Connection(ours.detach())

    def send(self, request: tuple[Any, ...]) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(request))

    def receive(self, timeout_s: float) -> Any | None:
        """The next message, None when it does not come in time."""
        if not self._connection.poll(max(0.0, timeout_s)):
            return None
        return msgspec.msgpack.decode(self._connection.recv_bytes())

    def close(self) -> None:
        """Give it time to take its leave of the store, and no more."""
        self._connection.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _own_address(master: str, port: int) -> str:
    """The address of this host on the way to the master."""
    with suppress(ValueError):
        if ipaddress.ip_address(master).is_loopback:
            return master
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, port))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
