"""The ZMQ transport against real sockets, and against a process that is killed."""

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from encoder.cluster import ClusterKeys, new_secret
from encoder.wire import TensorFrame
from epd.transport.base import ChannelClosed, Peer, PeerUnreachable, Received, WorkerDown
from epd.transport.sockets import WorkerChannel, WorkerEndpoint
from epd.types import Abort, Hello, KvRefused, TokenDelta

spawn = multiprocessing.get_context("spawn")


def ipc(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}.sock"


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    endpoint = WorkerEndpoint(ipc(tmp_path, "w") if request.param == "ipc" else "tcp://127.0.0.1:*")
    yield endpoint
    endpoint.close()


@pytest.fixture
async def open_channel() -> AsyncIterator[Callable[[str], WorkerChannel]]:
    channels: list[WorkerChannel] = []

    def open_(address: str) -> WorkerChannel:
        channel = WorkerChannel(address)
        channel.open()
        channels.append(channel)
        return channel

    yield open_
    for channel in channels:
        channel.close()


def take(endpoint: WorkerEndpoint, *, timeout_s: float = 5.0) -> Received:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        received = endpoint.receive(0.1)
        if received:
            return received[0]
    raise AssertionError("nothing arrived")


async def test_messages_and_tensors_go_both_ways(
    endpoint: WorkerEndpoint, open_channel: Callable[[str], WorkerChannel]
) -> None:
    channel = open_channel(endpoint.address)
    await asyncio.wait_for(channel.wait_connected(), 5)
    big = np.arange(100_000, dtype=np.float32)
    await channel.send(Hello(sequence=7), [TensorFrame("float32", (100_000,), big.data), TensorFrame.of_bytes(b"abc")])
    received = await asyncio.to_thread(take, endpoint)
    assert received.message == Hello(sequence=7)
    assert np.array_equal(np.frombuffer(received.tensors[0].data, np.float32), big)
    assert bytes(received.tensors[1].data) == b"abc"
    delta = TokenDelta(request_id="r", index=0, token_ids=(1, 2))
    endpoint.send(received.peer, delta, [TensorFrame("float32", (100_000,), big.data)])
    message, tensors = await asyncio.wait_for(channel.receive(), 5)
    assert message == delta
    assert bytes(tensors[0].data) == big.tobytes()


async def test_unknown_peer_and_absent_worker_raise(endpoint: WorkerEndpoint, tmp_path: Path) -> None:
    other = WorkerEndpoint(ipc(tmp_path, "other"), connect_grace_s=0.05)
    try:
        started = time.monotonic()
        with pytest.raises(PeerUnreachable, match="absent"):
            other.send_to(ipc(tmp_path, "absent"), Abort(request_id="r"))
        assert time.monotonic() - started < 1
        other.send_to(endpoint.address, Abort(request_id="r"))
        peer = take(endpoint).peer
        endpoint.send(peer, KvRefused(request_id="r", message="no"))
        answer = take(other)
        assert answer.message == KvRefused(request_id="r", message="no")
        assert answer.peer.address == endpoint.address
    finally:
        other.close()
    with pytest.raises(PeerUnreachable):
        _send_until_refused(endpoint, peer)


def _send_until_refused(endpoint: WorkerEndpoint, peer: Peer) -> None:
    """The end of a connection is noticed within a moment, not at once."""
    for _ in range(100):
        endpoint.send(peer, KvRefused(request_id="r", message="no"))
        endpoint.receive(0.02)


def test_malformed_frames_are_dropped_and_counted(endpoint: WorkerEndpoint) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint.address)
        for frames in ([b""], [b"\x00\xff"], [b"\x81\xa1v\x01", b"x"], [b"\x83\xa1v\x63\xa1b\xc0\xa1t\x90"]):
            socket.send_multipart(frames)
        deadline = time.monotonic() + 5
        while endpoint.num_dropped < 4 and time.monotonic() < deadline:
            assert endpoint.receive(0.1) == []
        socket.linger = 0
    assert endpoint.num_dropped == 4


def test_wake_ends_a_wait(endpoint: WorkerEndpoint) -> None:
    endpoint.wake()
    started = time.monotonic()
    assert endpoint.receive(5.0) == []
    assert time.monotonic() - started < 1


async def test_closing_a_channel_ends_its_receive(open_channel: Callable[[str], WorkerChannel], tmp_path: Path) -> None:
    channel = open_channel(ipc(tmp_path, "nobody"))
    with pytest.raises(WorkerDown, match="nobody"):
        await channel.send(Hello(sequence=0))
    waiting = asyncio.create_task(channel.receive())
    await asyncio.sleep(0)
    channel.close()
    with pytest.raises(ChannelClosed):
        await waiting


def _echo(address: str) -> None:
    endpoint = WorkerEndpoint(address)
    while True:
        for received in endpoint.receive(1.0):
            assert isinstance(received.message, Abort)
            delta = TokenDelta(request_id=received.message.request_id, index=0, token_ids=(os.getpid(),))
            endpoint.send(received.peer, delta)


async def test_a_killed_worker_is_known_at_once_and_the_next_one_starts_clean(
    open_channel: Callable[[str], WorkerChannel], tmp_path: Path
) -> None:
    address = ipc(tmp_path, "mortal")
    first = spawn.Process(target=_echo, args=(address,), daemon=True)
    first.start()
    channel = open_channel(address)
    lost = asyncio.Event()
    channel.on_disconnect = lost.set
    await asyncio.wait_for(channel.wait_connected(), 60)
    await channel.send(Abort(request_id="a"))
    message, _ = await asyncio.wait_for(channel.receive(), 5)
    assert isinstance(message, TokenDelta)
    assert message.token_ids == (first.pid,)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    await channel.send(Abort(request_id="for the dead"))
    os.kill(first.pid, signal.SIGKILL)
    killed = time.monotonic()
    await asyncio.wait_for(lost.wait(), 5)
    assert time.monotonic() - killed < 1
    assert not channel.connected
    with pytest.raises(WorkerDown):
        await channel.send(Abort(request_id="b"))
    first.join()
    second = spawn.Process(target=_echo, args=(address,), daemon=True)
    second.start()
    try:
        await asyncio.wait_for(channel.wait_connected(), 60)
        await channel.send(Abort(request_id="c"))
        message, _ = await asyncio.wait_for(channel.receive(), 5)
        assert isinstance(message, TokenDelta)
        assert (message.request_id, message.token_ids) == ("c", (second.pid,))
    finally:
        second.kill()
        second.join()


def test_others_are_told_the_advertised_address() -> None:
    endpoint = WorkerEndpoint("tcp://127.0.0.1:*", advertise="tcp://10.0.0.7:*")
    try:
        assert re.fullmatch(r"tcp://10\.0\.0\.7:[1-9]\d+", endpoint.address)
    finally:
        endpoint.close()
    endpoint = WorkerEndpoint("tcp://127.0.0.1:*", advertise="tcp://pod-1:7002")
    try:
        assert endpoint.address == "tcp://pod-1:7002"
    finally:
        endpoint.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _port_of(endpoint: WorkerEndpoint) -> str:
    return endpoint.address.rpartition(":")[2]


def _send_until_taken(sender: WorkerEndpoint, address: str, clock: Clock, *, step_s: float) -> None:
    """Time passes with every try; what was refused is tried again."""
    for _ in range(200):
        try:
            sender.send_to(address, Abort(request_id="r"))
        except PeerUnreachable:
            clock.now_s += step_s
            time.sleep(0.01)
        else:
            return
    raise AssertionError("nothing was taken")


def test_workers_of_one_cluster_exchange_kv_and_of_two_do_not() -> None:
    """A worker that was started with the wrong secret is reached once it is started again with the right one, though
    ZMQ gives a connection up that was refused."""
    ours, theirs = (ClusterKeys.derive(new_secret().encode()) for _ in range(2))
    clock = Clock()
    prefill = WorkerEndpoint("tcp://127.0.0.1:*", keys=ours, connect_grace_s=0.2, clock=clock)
    stranger = WorkerEndpoint("tcp://127.0.0.1:*", keys=theirs)
    address, port = stranger.address, _port_of(stranger)
    try:
        for _ in range(3):
            with pytest.raises(PeerUnreachable):
                prefill.send_to(address, Abort(request_id="r"))
        assert stranger.receive(0.1) == []
    finally:
        stranger.close()
    decode = WorkerEndpoint(f"tcp://127.0.0.1:{port}", keys=ours)
    try:
        clock.now_s += 1.0
        _send_until_taken(prefill, address, clock, step_s=4.0)
        assert take(decode).message == Abort(request_id="r")
    finally:
        decode.close()
        prefill.close()


def test_connections_to_workers_that_are_gone_for_good_are_closed() -> None:
    clock = Clock()
    sender = WorkerEndpoint("tcp://127.0.0.1:*", connect_grace_s=5.0, clock=clock)
    try:
        for number in range(5):
            receiver = WorkerEndpoint("tcp://127.0.0.1:*")
            sender.send_to(receiver.address, Abort(request_id=str(number)))
            assert take(receiver).message == Abort(request_id=str(number))
            receiver.close()
            clock.now_s += 1000.0
        assert sender.num_connections == 1
    finally:
        sender.close()


async def test_a_channel_says_that_it_is_refused_and_gets_in_when_the_key_is_right() -> None:
    ours, theirs = (ClusterKeys.derive(new_secret().encode()) for _ in range(2))
    stranger = WorkerEndpoint("tcp://127.0.0.1:*", keys=theirs)
    port = _port_of(stranger)
    channel = WorkerChannel(stranger.address, keys=ours)
    channel.open()
    try:
        async with asyncio.timeout(10):
            while not channel.is_refused:  # noqa: ASYNC110 - the channel's own state
                await asyncio.sleep(0.01)
        assert not channel.connected
        stranger.close()
        friend = WorkerEndpoint(f"tcp://127.0.0.1:{port}", keys=ours)
        try:
            await asyncio.wait_for(channel.wait_connected(), 10)
            assert not channel.is_refused
        finally:
            friend.close()
    finally:
        channel.close()


async def test_a_channel_without_a_key_gets_in_where_none_is_asked_any_more() -> None:
    """The other way round ZMQ would never try again."""
    guarded = WorkerEndpoint("tcp://127.0.0.1:*", keys=ClusterKeys.derive(new_secret().encode()))
    port = _port_of(guarded)
    channel = WorkerChannel(guarded.address)
    channel.open()
    try:
        await asyncio.sleep(0.3)
        assert not channel.connected
        guarded.close()
        plain = WorkerEndpoint(f"tcp://127.0.0.1:{port}")
        try:
            await asyncio.wait_for(channel.wait_connected(), 10)
        finally:
            plain.close()
    finally:
        channel.close()
