"""Two encoder servers on one arena: what one computed the other answers, whoever of them dies or waits."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from encoder.cache.host import embedding_arena
from encoder.client import ArenaReader, EncoderClient
from encoder.config import EncoderConfig
from encoder.links import MemoryLink
from encoder.process import open_server
from encoder.types import EncodeFailure, EncodeReply, KeepLeases
from tests.fakes.encoder_peer import CONFIG, Peer, until

# A picture of 96 x 128 pixels has 12 rows of 192 float32.
TWO_PICTURES = EncoderConfig(arena_bytes=2 * 9 * 1024, page_bytes=1024, decode_threads=1)


@asynccontextmanager
async def two_peers(model_dir: Path, config: EncoderConfig = CONFIG) -> AsyncIterator[tuple[Peer, Peer]]:
    with ExitStack() as stack:
        arena = stack.enter_context(embedding_arena(config, f"t-{uuid.uuid4().hex}"))
        servers = [
            stack.enter_context(open_server(config, model_dir=model_dir, name=name, arena=arena, shared=True))
            for name in ("e0", "e1")
        ]
        for server in servers:
            server.start()
        peers = [Peer(server, model_dir, name=f"peer-{number}") for number, server in enumerate(servers)]
        yield peers[0], peers[1]
        for server in servers:
            await server.stop(5.0)


async def test_what_one_computed_the_other_has(tiny_model_dir: Path, make_png: Callable[..., bytes]) -> None:
    async with two_peers(tiny_model_dir) as (one, two):
        first = await one.encode(make_png(1))
        second = await two.encode(make_png(1))
        assert isinstance(first, EncodeReply)
        assert isinstance(second, EncodeReply)
        assert (first.cached, second.cached) == (False, True)
        assert first.layout == second.layout
        assert (first.ref.arena, first.ref.offset_bytes) == (second.ref.arena, second.ref.offset_bytes)
        assert two.server.info().counters.get("encoded", 0) == 0
        assert {peer.server.info().arena for peer in (one, two)} == {first.ref.arena}
        one.release(second)
        two.release(first)
        assert one.server.info().leased_bytes == 0


async def test_the_same_medium_at_both_at_once_has_one_value(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with two_peers(tiny_model_dir) as peers:
        replies = await asyncio.gather(*(peer.encode(make_png(2)) for peer in peers for _ in range(2)))
        assert all(isinstance(reply, EncodeReply) for reply in replies)
        assert (
            len({(reply.ref.offset_bytes, reply.ref.checksum) for reply in replies if isinstance(reply, EncodeReply)})
            == 1
        )
        info = peers[0].server.info()
        assert (info.num_cached, info.leased_bytes) == (1, 12 * 1024)


async def test_room_made_by_one_serves_who_waits_at_the_other(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with two_peers(tiny_model_dir, TWO_PICTURES) as (one, two):
        held = [await one.encode(make_png(seed)) for seed in (1, 2)]
        started_s = time.monotonic()
        waiting = two.send(two.request(make_png(3)), make_png(3))
        await until(lambda: len(two.server._room) == 1)
        assert isinstance(held[0], EncodeReply)
        one.release(held[0])
        assert isinstance(await two.answer(waiting), EncodeReply)
        assert time.monotonic() - started_s < TWO_PICTURES.arena_wait_s / 2


async def test_waiting_for_the_other_is_bounded(tiny_model_dir: Path, make_png: Callable[..., bytes]) -> None:
    async with two_peers(tiny_model_dir, replace(TWO_PICTURES, arena_wait_s=0.3)) as (one, two):
        for seed in (1, 2):
            await one.encode(make_png(seed))
        failure = await two.encode(make_png(3))
        assert isinstance(failure, EncodeFailure)
        assert failure.code == "embedding_cache_full"


async def test_a_peer_lost_by_one_keeps_what_it_holds_at_the_other(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with two_peers(tiny_model_dir) as (one, two):
        two.name = one.name
        await one.encode(make_png(1))
        await two.encode(make_png(2))
        one.server.disconnect(one.name)
        assert one.server.info().leased_bytes == 12 * 1024
        two.server.disconnect(one.name)
        assert one.server.info().leased_bytes == 0


async def test_who_is_back_after_a_loss_keeps_what_it_holds_and_nothing_else(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    """The first replica is killed after two answers, one of which was never read. The second one is told."""
    async with two_peers(tiny_model_dir) as (one, two):
        two.name = one.name
        held, _ = await one.encode(make_png(1)), await one.encode(make_png(2))
        assert isinstance(held, EncodeReply)
        other = await two.encode(make_png(3))
        assert isinstance(other, EncodeReply)
        keep = KeepLeases(lease_ids=(held.ref.lease_id, other.ref.lease_id))
        two.server.handle(keep, (), lambda *_: None, peer="somebody else")
        assert two.server.info().leased_bytes == 3 * 12 * 1024
        two.server.handle(keep, (), lambda *_: None, peer=two.name)
        assert two.server.info().leased_bytes == 2 * 12 * 1024
        assert ArenaReader().tensor(held.ref).isfinite().all()
        for reply in (held, other):
            two.release(reply)
        assert two.server.info().leased_bytes == 0


async def test_a_lease_of_a_stopped_replica_is_ended_through_the_other(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with two_peers(tiny_model_dir) as (one, two):
        reply = await one.encode(make_png(1))
        assert isinstance(reply, EncodeReply)
        async with EncoderClient([MemoryLink("e1", two.server)]) as client:
            await client.info()
            assert ArenaReader().tensor(reply.ref).isfinite().all()
            client.release(reply.ref)
            await until(lambda: two.server.info().leased_bytes == 0)
            client.release(reply.ref)
