"""A server whose arena is full of leases: who waits, who does not, and how waiting ends."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from encoder.client import ArenaReader
from encoder.config import EncoderConfig
from encoder.errors import EmbeddingLost
from encoder.types import CancelEncode, EncodeFailure, EncodeReply
from tests.fakes.encoder_peer import Opener, Peer, until

# A picture of 96 x 128 pixels has 12 rows of 192 float32.
TWO_PICTURES = EncoderConfig(arena_bytes=2 * 9 * 1024, page_bytes=1024, decode_threads=1)


async def fill(peer: Peer, make_png: Callable[..., bytes], *seeds: int) -> list[EncodeReply]:
    """Pictures encoded and held."""
    replies = [await peer.encode(make_png(seed)) for seed in seeds]
    assert all(isinstance(reply, EncodeReply) for reply in replies)
    return [reply for reply in replies if isinstance(reply, EncodeReply)]


def num_waiting(peer: Peer) -> int:
    return len(peer.server._room)


async def test_a_full_arena_refuses_until_leases_end(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(replace(TWO_PICTURES, arena_wait_s=0.05)) as peer:
        first, second = await peer.encode(make_png(1)), await peer.encode(make_png(2))
        refused = await peer.encode(make_png(3))
        assert isinstance(first, EncodeReply)
        assert isinstance(second, EncodeReply)
        assert isinstance(refused, EncodeFailure)
        assert (refused.code, refused.status) == ("embedding_cache_full", 503)
        peer.release(first)
        assert isinstance(await peer.encode(make_png(3)), EncodeReply)
        assert bytes(ArenaReader().content(second.ref))
        huge = await peer.encode(make_png(4, 256, 512))
        assert isinstance(huge, EncodeFailure)
        assert (huge.code, huge.status) == ("embedding_too_large", 413)
        assert str(128 * 192 * 4) in huge.message
        assert str(TWO_PICTURES.arena_bytes) in huge.message


async def test_many_different_media_share_a_tiny_arena(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(TWO_PICTURES) as peer:

        async def use(seed: int) -> bool:
            reply = await peer.encode(make_png(seed))
            if not isinstance(reply, EncodeReply):
                return False
            assert ArenaReader().tensor(reply.ref).isfinite().all()
            peer.release(reply)
            return True

        assert all(await asyncio.gather(*(use(seed) for seed in range(30))))
        assert num_waiting(peer) == 0


async def test_room_goes_to_who_came_first(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(TWO_PICTURES) as peer:
        held = await fill(peer, make_png, 1, 2)
        early = peer.send(peer.request(make_png(3)), make_png(3))
        await until(lambda: num_waiting(peer) == 1)
        late = peer.send(peer.request(make_png(4)), make_png(4))
        await until(lambda: num_waiting(peer) == 2)
        peer.release(held[0])
        assert isinstance(await peer.answer(early), EncodeReply)
        assert not peer.replies[late]
        peer.release(held[1])
        assert isinstance(await peer.answer(late), EncodeReply)


async def test_who_waits_holds_nobody_up(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(TWO_PICTURES) as peer:
        held = await fill(peer, make_png, 1, 2)
        large = peer.send(peer.request(make_png(3, 128, 192)), make_png(3, 128, 192))
        await until(lambda: num_waiting(peer) == 1)
        hit = await peer.encode(make_png(1))
        assert isinstance(hit, EncodeReply)
        assert hit.cached
        peer.release(hit)
        peer.release(held[0])
        assert isinstance(await peer.encode(make_png(4)), EncodeReply)
        assert num_waiting(peer) == 1
        assert isinstance(await peer.encode(make_png(2)), EncodeReply), "nothing is evicted in vain"
        peer.server.handle(CancelEncode(request_id=large), (), lambda *_: None, peer="peer")
        assert isinstance(await peer.answer(large), EncodeFailure)
        await until(lambda: num_waiting(peer) == 0)


async def test_rows_read_without_a_lease_are_right_or_lost(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(TWO_PICTURES) as peer:
        (reply,) = await fill(peer, make_png, 1)
        reader = ArenaReader()
        rows = reader.tensor(reply.ref)
        before = rows.clone()
        peer.release(reply)
        await fill(peer, make_png, 2, 3)
        assert rows.equal(before), "what was read changed when the room was given to another"
        with pytest.raises(EmbeddingLost):
            reader.tensor(reply.ref)


async def test_an_expired_lease_wakes_who_waits(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(replace(TWO_PICTURES, max_lease_s=0.3)) as peer:
        await fill(peer, make_png, 1, 2)
        assert isinstance(await peer.encode(make_png(3)), EncodeReply)


async def test_a_peer_that_leaves_wakes_who_waits(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(TWO_PICTURES) as peer:
        await fill(peer, make_png, 1, 2)
        peer.name = "other"
        waiting = peer.send(peer.request(make_png(3)), make_png(3))
        await until(lambda: num_waiting(peer) == 1)
        peer.server.disconnect("peer")
        assert isinstance(await peer.answer(waiting), EncodeReply)


@pytest.mark.parametrize("margin_s", [0.2, 30.0])
async def test_waiting_ends_at_the_deadline_or_the_bound(
    open_peer: Opener, make_png: Callable[..., bytes], margin_s: float
) -> None:
    async with open_peer(replace(TWO_PICTURES, arena_wait_s=0.5)) as peer:
        held = await fill(peer, make_png, 1, 2)
        failure = await peer.encode(make_png(3), deadline_unix_s=time.time() + margin_s)
        assert isinstance(failure, EncodeFailure)
        if margin_s < 0.5:
            assert failure.code == "deadline_exceeded"
        else:
            assert (failure.code, failure.needed_bytes) == ("embedding_cache_full", 12 * 192 * 4)
            assert failure.retry_after_s is not None
        await until(lambda: num_waiting(peer) == 0)
        peer.release(held[0])
        assert isinstance(await peer.encode(make_png(3)), EncodeReply)


async def test_stopping_ends_who_waits(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(TWO_PICTURES, 0.0) as peer:
        await fill(peer, make_png, 1, 2)
        waiting = peer.send(peer.request(make_png(3)), make_png(3))
        await until(lambda: num_waiting(peer) == 1)
        await peer.server.stop(0.0)
        failure = await peer.answer(waiting)
        assert isinstance(failure, EncodeFailure)
        assert failure.code == "encoder_unavailable"
