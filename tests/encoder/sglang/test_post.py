"""Sockets to receivers that misbehave: gone, deaf, slow, or no receivers at all."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import zmq

from encoder.sglang.errors import ReceiverUnreachable
from encoder.sglang.message import Hold
from encoder.sglang.post import Post
from tests.encoder.sglang.conftest import until
from tests.fakes.sglang_receiver import Receiver

LARGE = bytes(8 << 20)


class Counted:
    """A lease."""

    def __init__(self) -> None:
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


def held(lease: Counted) -> Hold:
    return Hold([lease])  # type: ignore[list-item]


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    sockets = Post(send_timeout_s=1.0, connect_timeout_s=0.4)
    yield sockets
    await sockets.close()


@contextlib.asynccontextmanager
async def tcp_server(answer: bytes | None, port: int = 0) -> AsyncIterator[str]:
    """Something that takes connections and does not speak ZeroMQ."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            if answer is not None:
                writer.write(answer)
                await writer.drain()
            while await reader.read(1 << 16):
                pass

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_what_is_sent_arrives_and_the_lease_ends_once(post: Post, is_shared: bool) -> None:
    receiver = Receiver()
    lease = Counted()
    await post.push(f"tcp://{receiver.url}", [b"\x80", LARGE], held(lease), is_shared=is_shared)
    assert await receiver.socket.recv_multipart() == [b"\x80", LARGE]
    await until(lambda: lease.num_released)
    assert lease.num_released == 1
    assert (post.num_on_their_way, post.num_kept) == (0, int(is_shared))
    receiver.close()


@pytest.mark.parametrize("answer", [None, b"\xff" * 5000])
async def test_what_is_no_receiver_is_given_up(post: Post, answer: bytes | None) -> None:
    async with tcp_server(answer) as endpoint:
        lease = Counted()
        with pytest.raises(ReceiverUnreachable):
            await post.push(endpoint, [b"a", LARGE], held(lease), is_shared=True)
        await until(lambda: lease.num_released)
        assert lease.num_released == 1
        assert post.num_kept == 0


NO_RECEIVERS = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"cos\nsystem\n(S'x'\ntR.",
    b"\x80\x04N.",
    b"\x01\x00",
]


@pytest.mark.parametrize("answer", NO_RECEIVERS)
@pytest.mark.parametrize("is_shared", [True, False])
async def test_what_talks_first_and_is_no_receiver_gets_nothing(post: Post, answer: bytes, is_shared: bool) -> None:
    """ZeroMQ takes a peer of unknown words for one of its own first version, and would send."""
    async with tcp_server(answer) as endpoint:
        lease = Counted()
        with pytest.raises(ReceiverUnreachable, match=r"is no receiver|the handshake that ZeroMQ has"):
            await post.push(endpoint, [b"a", b"b" * 1000], held(lease), is_shared=is_shared)
        await until(lambda: lease.num_released)
        assert lease.num_released == 1
        assert post.num_kept == 0


async def test_a_socket_of_another_kind_is_refused_at_once() -> None:
    post = Post(send_timeout_s=60.0, connect_timeout_s=60.0)
    receiver = Receiver()
    wrong = receiver.context.socket(zmq.REP)
    port = wrong.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(ReceiverUnreachable, match="handshake failed"):
            async with asyncio.timeout(3.0):
                await post.push(f"tcp://127.0.0.1:{port}", [b"a"], Hold(), is_shared=True)
    finally:
        wrong.close(0)
        receiver.close()
        await post.close()


async def test_a_receiver_that_comes_again_at_its_place_is_greeted_anew(post: Post) -> None:
    receiver = Receiver()
    url = receiver.url
    await post.push(f"tcp://{url}", [b"a"], Hold(), is_shared=True)
    assert await receiver.socket.recv_multipart() == [b"a"]
    receiver.close()
    await asyncio.sleep(0.1)
    async with tcp_server(b"HTTP/1.1 400 Bad Request\r\n\r\n", int(url.rpartition(":")[2])):
        with pytest.raises(ReceiverUnreachable):
            await post.push(f"tcp://{url}", [b"b"], Hold(), is_shared=True)


async def test_a_receiver_that_stops_reading_is_given_up_with_all_that_waits_for_it(post: Post) -> None:
    context = Receiver()
    context.socket.close(0)
    deaf = context.context.socket(7)  # PULL
    deaf.rcvhwm = 1
    deaf.rcvbuf = 4096
    port = deaf.bind_to_random_port("tcp://127.0.0.1")
    leases = [Counted() for _ in range(12)]
    outcomes = await asyncio.gather(
        *(post.push(f"tcp://127.0.0.1:{port}", [b"a", LARGE], held(lease), is_shared=True) for lease in leases),
        return_exceptions=True,
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, ReceiverUnreachable)]
    assert len(refused) > 6
    assert all(outcome is None or isinstance(outcome, ReceiverUnreachable) for outcome in outcomes)
    await until(lambda: all(lease.num_released for lease in leases))
    assert [lease.num_released for lease in leases] == [1] * 12
    assert post.num_on_their_way == 0
    deaf.close(0)
    context.close()


async def test_a_caller_that_leaves_before_there_is_a_connection(post: Post) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lease = Counted()
    pushing = asyncio.create_task(post.push(f"tcp://127.0.0.1:{port}", [b"a", LARGE], held(lease), is_shared=True))
    await until(lambda: post.num_on_their_way)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    await until(lambda: lease.num_released and not post.num_on_their_way)
    # The same endpoint still works, when somebody is there.
    receiver = Receiver()
    receiver.socket.bind(f"tcp://127.0.0.1:{port}")
    await post.push(f"tcp://127.0.0.1:{port}", [b"b"], Hold(), is_shared=True)
    assert await receiver.socket.recv_multipart() == [b"b"]
    receiver.close()


async def test_a_caller_that_leaves_at_any_moment(post: Post) -> None:
    """The message arrives whole or not at all, and its rows are held until nobody reads them."""
    for num_ms in range(12):
        receiver = Receiver()
        lease = Counted()
        pushing = asyncio.create_task(post.push(f"tcp://{receiver.url}", [b"a", LARGE], held(lease), is_shared=True))
        await asyncio.sleep(num_ms / 1000)
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        await until(lambda lease=lease: lease.num_released and not post.num_on_their_way)
        assert lease.num_released == 1
        if await receiver.socket.poll(20):
            assert await receiver.socket.recv_multipart() == [b"a", LARGE]
        receiver.close()


async def test_sockets_that_idle_are_closed(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver()
    await post.push(f"tcp://{receiver.url}", [b"a"], Hold(), is_shared=True)
    post.sweep()
    assert post.num_kept == 1
    monkeypatch.setattr("encoder.sglang.post._IDLE_S", -1.0)
    await until(lambda: not post.num_on_their_way)
    post.sweep()
    assert post.num_kept == 0
    receiver.close()
