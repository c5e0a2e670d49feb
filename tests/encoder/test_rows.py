"""Rows of another host: a real encoder over TCP, and a reader that has no such arena."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue

import msgspec
import torch
import zmq.asyncio

from encoder.client import ArenaReader, EncoderClient
from encoder.errors import EmbeddingLost
from encoder.links import ZmqEndpoint
from encoder.types import EmbeddingRef
from epd.engine.row_source import HostSource
from preprocess.types import MediaOptions, Modality
from tests.fakes.encoder_peer import Opener, Peer, until

PATIENCE_S = 60.0


@asynccontextmanager
async def over_tcp(open_peer: Opener) -> AsyncIterator[tuple[Peer, ZmqEndpoint, EncoderClient]]:
    context = zmq.asyncio.Context()
    async with open_peer() as peer:
        endpoint = ZmqEndpoint("tcp://127.0.0.1:*", peer.server, context)
        endpoint.start()
        async with EncoderClient.connect([endpoint.address]) as client:
            yield peer, endpoint, client
        await endpoint.stop()
    context.destroy(linger=0)


async def encoded(peer: Peer, client: EncoderClient, content: bytes) -> EmbeddingRef:
    await client.info()
    request = peer.request(content)
    reply = await client.encode(content, Modality.IMAGE, MediaOptions(), request.key, time.time() + PATIENCE_S)
    return reply.ref


def elsewhere(ref: EmbeddingRef) -> EmbeddingRef:
    """The reference as another host sees it: its arena cannot be mapped."""
    return msgspec.structs.replace(ref, arena="of-another-host")


async def fetched(source: HostSource, ref: EmbeddingRef) -> torch.Tensor | EmbeddingLost:
    delivered: SimpleQueue[torch.Tensor | EmbeddingLost] = SimpleQueue()
    source.fetch(ref, time.time() + PATIENCE_S, delivered.put)
    return await asyncio.to_thread(delivered.get, timeout=PATIENCE_S)


async def test_frames_bring_the_bytes_of_the_arena(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    source = HostSource(timeout_s=PATIENCE_S)
    async with over_tcp(open_peer) as (peer, endpoint, client):
        refs = [await encoded(peer, client, make_png(seed, 64 + 32 * seed)) for seed in range(4)]
        assert {ref.source for ref in refs} == {endpoint.address}, "the reference says where to ask"
        results = await asyncio.gather(*(fetched(source, elsewhere(ref)) for ref in refs))
        for ref, rows in zip(refs, results, strict=True):
            assert isinstance(rows, torch.Tensor)
            assert torch.equal(rows, ArenaReader().tensor(ref))
            client.release(ref)
        await until(lambda: peer.server.info().leased_bytes == 0)
    source.close()


async def test_what_the_encoder_no_longer_has_is_lost_at_once(
    open_peer: Opener, make_png: Callable[..., bytes]
) -> None:
    source = HostSource(timeout_s=3600.0)
    async with over_tcp(open_peer) as (peer, _, client):
        ref = elsewhere(await encoded(peer, client, make_png(1)))
        other_value = msgspec.structs.replace(ref, checksum=ref.checksum ^ 1)
        unknown = msgspec.structs.replace(ref, key="0" * 32)
        for gone in (other_value, unknown):
            lost = await fetched(source, gone)
            assert isinstance(lost, EmbeddingLost)
            assert "gone from the encoder" in lost.message, "the encoder's own word, and no rows sent for nothing"
        assert isinstance(await fetched(source, ref), torch.Tensor)
    stopped = await fetched(source, ref)
    assert isinstance(stopped, EmbeddingLost)
    assert "reached" in stopped.message
    source.close()


def test_references_of_before_and_those_of_this_host_name_no_source() -> None:
    ref = EmbeddingRef(
        key="0" * 32,  # type: ignore[arg-type]
        arena="arena",
        offset_bytes=0,
        num_rows=1,
        width=1,
        dtype="float32",
        checksum=0,
        lease_id="lease",
    )
    fields = msgspec.to_builtins(ref)
    assert fields.pop("source") == ""
    assert msgspec.convert(fields, EmbeddingRef) == ref
