"""The in-process twin keeps the socket transport's contract."""

import asyncio
import threading
import time

import pytest

from encoder.wire import TensorFrame
from epd.transport.base import ChannelClosed, PeerUnreachable, WorkerDown
from epd.transport.memory import MemoryEndpoint, MemoryNetwork
from epd.types import Abort, Hello, KvRefused, TokenDelta


def test_a_taken_address_is_refused() -> None:
    network = MemoryNetwork()
    first = network.endpoint("w")
    with pytest.raises(ValueError, match="already bound"):
        network.endpoint("w")
    first.close()
    network.endpoint("w")


def _serve(endpoint: MemoryEndpoint, stop: threading.Event) -> None:
    while not stop.is_set():
        for received in endpoint.receive(5.0):
            assert isinstance(received.message, Hello)
            delta = TokenDelta(request_id="r", index=received.message.sequence, token_ids=(1,))
            endpoint.send(received.peer, delta, received.tensors)


async def test_thread_and_loop_exchange_messages() -> None:
    network = MemoryNetwork()
    endpoint = network.endpoint("w")
    stop = threading.Event()
    thread = threading.Thread(target=_serve, args=(endpoint, stop))
    thread.start()
    channel = network.channel("w")
    channel.open()
    assert channel.connected
    frame = TensorFrame.of_bytes(b"xyz")
    for sequence in range(50):
        await channel.send(Hello(sequence=sequence), [frame])
    for sequence in range(50):
        message, tensors = await asyncio.wait_for(channel.receive(), 5)
        assert isinstance(message, TokenDelta)
        assert message.index == sequence
        assert tensors[0] is frame
    stop.set()
    endpoint.wake()
    await asyncio.to_thread(thread.join)
    channel.close()
    with pytest.raises(ChannelClosed):
        await channel.receive()


async def test_disconnect_and_reconnect_are_seen() -> None:
    network = MemoryNetwork()
    channel = network.channel("w")
    channel.open()
    with pytest.raises(WorkerDown):
        await channel.send(Hello(sequence=0))
    endpoint = network.endpoint("w")
    await asyncio.wait_for(channel.wait_connected(), 5)
    await channel.send(Hello(sequence=1))
    peer = endpoint.receive(0)[0].peer
    lost = asyncio.Event()
    channel.on_disconnect = lost.set
    endpoint.close()
    await asyncio.wait_for(lost.wait(), 5)
    with pytest.raises(WorkerDown):
        await channel.send(Hello(sequence=2))
    again = network.endpoint("w")
    await asyncio.wait_for(channel.wait_connected(), 5)
    assert again.receive(0) == []
    await channel.send(Hello(sequence=3))
    assert again.receive(1)[0].peer == peer
    channel.close()
    with pytest.raises(PeerUnreachable):
        again.send(peer, KvRefused(request_id="r", message="m"))


def test_worker_to_worker_and_back() -> None:
    network = MemoryNetwork()
    prefill, decode = network.endpoint("p"), network.endpoint("d")
    with pytest.raises(PeerUnreachable):
        prefill.send_to("nowhere", Abort(request_id="r"))
    prefill.send_to("d", Abort(request_id="r"))
    received = decode.receive(1)[0]
    decode.send(received.peer, KvRefused(request_id="r", message="m"))
    answer = prefill.receive(1)[0]
    assert answer.message == KvRefused(request_id="r", message="m")
    assert answer.peer.address == "d"


def test_wake_ends_a_wait() -> None:
    endpoint = MemoryNetwork().endpoint("w")
    endpoint.wake()
    started = time.monotonic()
    assert endpoint.receive(5.0) == []
    assert time.monotonic() - started < 1
