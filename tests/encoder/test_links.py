"""How an encoder's socket closes: not before its peers have read every reply."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from encoder import links
from encoder.links import ZmqEndpoint
from encoder.types import (
    EmbeddingRef,
    EncodeFailure,
    EncodeReply,
    EncodeRequest,
    EncoderInfo,
    Farewell,
    FromEncoder,
    Goodbye,
    Ping,
    ReleaseLeases,
    StageTimings,
    ToEncoder,
)
from encoder.wire import Codec, TensorFrame
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality
from tests.fakes.encoder_peer import until

READ_S = 10.0


class Draining:
    """A server that refuses everything, as one does that shuts down."""

    def __init__(self) -> None:
        self.unreached: list[str] = []
        self.gone: list[str] = []
        self.released: list[str] = []
        self.reply: Callable[[FromEncoder, Sequence[TensorFrame]], None] | None = None

    def handle(
        self,
        message: ToEncoder,
        tensors: Sequence[TensorFrame],
        reply: Callable[[FromEncoder, Sequence[TensorFrame]], None],
        *,
        peer: str = "local",
    ) -> None:
        if isinstance(message, ReleaseLeases):
            self.released += message.lease_ids
            return
        self.reply = reply
        if isinstance(message, EncodeRequest):
            failure = EncodeFailure(request_id=message.request_id, code="unavailable", message="", status=503)
            reply(failure, ())
        elif isinstance(message, Ping):
            reply(
                EncoderInfo(
                    sequence=message.sequence,
                    replica="e0",
                    incarnation="i",
                    fingerprint="f",
                    width=1,
                    dtype="float32",
                    modalities=(),
                    num_pending=0,
                    num_cached=0,
                    cached_bytes=0,
                    capacity_bytes=0,
                    leased_bytes=0,
                    ready=False,
                ),
                (),
            )

    def end_requests(self, peer: str) -> None:
        self.unreached.append(peer)

    def disconnect(self, peer: str) -> None:
        self.gone.append(peer)


class Reader:
    """The other end: a DEALER as clients have it, read by hand."""

    def __init__(self, context: zmq.asyncio.Context, address: str, identity: bytes | None = None) -> None:
        self._socket = context.socket(zmq.DEALER)
        if identity is not None:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(address)
        self._out: Codec[ToEncoder] = Codec(ToEncoder)
        self._in: Codec[FromEncoder] = Codec(FromEncoder)

    async def say(self, message: ToEncoder) -> None:
        await self._socket.send_multipart(self._out.encode(message))

    async def read(self) -> FromEncoder:
        message, _ = self._in.decode(await asyncio.wait_for(self._socket.recv_multipart(), READ_S))
        return message

    def close(self) -> None:
        self._socket.close(0)


@asynccontextmanager
async def endpoint_and_reader(folder: Path) -> AsyncIterator[tuple[ZmqEndpoint, Reader]]:
    context = zmq.asyncio.Context()
    try:
        endpoint = ZmqEndpoint(f"ipc://{folder}/e", Draining(), context)
        endpoint.start()
        reader = Reader(context, endpoint.address)
        yield endpoint, reader
        await endpoint.stop()
        reader.close()
    finally:
        context.destroy(linger=0)


def request(request_id: str) -> EncodeRequest:
    key = MediaKey("0" * 32)
    return EncodeRequest(
        request_id=request_id, key=key, modality=Modality.IMAGE, options=MediaOptions(), deadline_unix_s=1e12
    )


def reply_with(lease_id: str) -> EncodeReply:
    key = MediaKey("0" * 32)
    ref = EmbeddingRef(
        key=key,
        arena="arena",
        offset_bytes=0,
        num_rows=1,
        width=4,
        dtype="float32",
        checksum=0,
        lease_id=lease_id,
    )
    layout = MediaLayout(modality=Modality.IMAGE, grid_thw=(1, 2, 2))
    return EncodeReply(request_id="a", key=key, layout=layout, ref=ref, cached=False, timings=StageTimings())


async def test_replies_are_read_before_the_end_and_what_crosses_the_farewell_is_answered(tmp_path: Path) -> None:
    async with endpoint_and_reader(tmp_path) as (endpoint, reader):
        await reader.say(request("a"))
        assert isinstance(await reader.read(), EncodeFailure)
        stopping = asyncio.create_task(endpoint.stop())
        first = await reader.read()
        assert isinstance(first, Farewell)
        await reader.say(request("crossing"))
        await reader.say(Goodbye(sequence=first.sequence))
        refused = await reader.read()
        assert isinstance(refused, EncodeFailure)
        assert refused.request_id == "crossing"
        second = await reader.read()
        assert isinstance(second, Farewell)
        await asyncio.sleep(0.05)
        assert not stopping.done()
        await reader.say(Goodbye(sequence=second.sequence))
        await asyncio.wait_for(stopping, READ_S)


async def test_who_was_told_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PARTING_S", 1e6)
    async with endpoint_and_reader(tmp_path) as (endpoint, reader):
        await reader.say(Ping(sequence=1))
        assert isinstance(await reader.read(), EncoderInfo)
        await asyncio.wait_for(endpoint.stop(), READ_S)


async def test_a_peer_that_leaves_is_noticed_by_the_next_farewell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "PARTING_S", 1e6)
    monkeypatch.setattr(links, "REPEAT_S", 0.05)
    async with endpoint_and_reader(tmp_path) as (endpoint, reader):
        await reader.say(request("a"))
        assert isinstance(await reader.read(), EncodeFailure)
        stopping = asyncio.create_task(endpoint.stop())
        assert isinstance(await reader.read(), Farewell)
        reader.close()
        await asyncio.wait_for(stopping, READ_S)


async def test_a_peer_that_stands_still_is_waited_for_in_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "PARTING_S", 0.1)
    async with endpoint_and_reader(tmp_path) as (endpoint, reader):
        await reader.say(request("a"))
        assert isinstance(await reader.read(), EncodeFailure)
        await asyncio.wait_for(endpoint.stop(), READ_S)
        assert "goodbye" in caplog.text


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_peer_out_of_reach_is_gone_only_if_it_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setattr(links, "ABSENCE_S", 0.3)
    context = zmq.asyncio.Context()
    server = Draining()
    try:
        endpoint = ZmqEndpoint(f"ipc://{tmp_path}/e", server, context)
        endpoint.start()
        reader = Reader(context, endpoint.address, b"me")
        await reader.say(request("a"))
        assert isinstance(await reader.read(), EncodeFailure)
        reader.close()

        def talk_to_nobody() -> bool:
            assert server.reply is not None
            server.reply(reply_with("lease"), ())
            return bool(server.unreached)

        await until(talk_to_nobody)
        assert set(server.released) == {"lease"}
        assert set(server.unreached) == {b"me".hex()}
        assert not server.gone
        if comes_back:
            reader = Reader(context, endpoint.address, b"me")
            await reader.say(Ping(sequence=1))
            await asyncio.sleep(0.5)
            assert not server.gone
            reader.close()
        else:
            await until(lambda: bool(server.gone))
            assert server.gone == [b"me".hex()]
        await endpoint.stop()
    finally:
        context.destroy(linger=0)
