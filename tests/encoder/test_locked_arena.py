"""Another process keeps the arena locked: everybody waits, the loop runs on, and nothing is lost."""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from encoder.cache.arena import index_path
from encoder.client import EncoderClient
from encoder.config import EncoderConfig
from encoder.errors import ArenaLocked
from encoder.failures import error_of, failure_of
from encoder.front.health import trouble_of
from encoder.links import MemoryLink
from encoder.types import CancelEncode, EncodeFailure, EncodeReply, FetchRows, Rows
from preprocess.types import MediaOptions, Modality
from tests.encoder.test_shared_arena import two_peers
from tests.fakes.encoder_peer import Opener, Peer, until

ROOMY = EncoderConfig(arena_bytes=4 << 20, max_pending=64)
HASTY = replace(ROOMY, arena_wait_s=0.2)


@contextmanager
def locked(peer: Peer) -> Iterator[sqlite3.Connection]:
    """An outside connection in the middle of a transaction; `close` it to end that before the block does."""
    stopped = sqlite3.connect(index_path(peer.server.info().arena), isolation_level=None)
    try:
        stopped.execute("BEGIN IMMEDIATE")
        yield stopped
    finally:
        stopped.close()


@asynccontextmanager
async def responsive(peer: Peer, most_s: float = 0.25) -> AsyncIterator[None]:
    """The loop stands still for no longer than `most_s`, and the server answers pings."""
    longest_s = 0.0

    async def feel() -> None:
        nonlocal longest_s
        while True:
            since_s = time.monotonic()
            await asyncio.sleep(0.005)
            peer.server.info()
            longest_s = max(longest_s, time.monotonic() - since_s)

    feeling = asyncio.create_task(feel())
    try:
        yield
    finally:
        feeling.cancel()
    assert longest_s < most_s


async def test_a_lock_of_a_second_fails_nobody(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    """Cached media, new ones, the same one many times, and one whose place is already reserved."""
    async with open_peer(ROOMY) as peer:
        kept = [await peer.encode(make_png(seed)) for seed in (1, 2)]
        under_way = peer.send(peer.request(make_png(3)), make_png(3))
        with locked(peer) as stopped:
            async with responsive(peer):
                contents = [make_png(1 + number % 12) for number in range(49)]
                sent = [peer.send(peer.request(content), content) for content in contents]
                for reply in kept:
                    assert isinstance(reply, EncodeReply)
                    peer.release(reply)
                await asyncio.sleep(1.0)
                assert not any(peer.replies[request_id] for request_id in (*sent, under_way))
                stopped.close()
                answers = [await peer.answer(request_id) for request_id in (*sent, under_way)]
        for answer in answers:
            assert isinstance(answer, EncodeReply)
            peer.release(answer)
        counters = peer.server.info().counters
        assert counters["encoded"] == 12, "each medium once, and none that was there"
        assert counters["hits"] >= 2
        assert counters.get("refused", 0) == counters.get("failed", 0) == 0
        await until(lambda: peer.server.info().leased_bytes == 0)
        assert peer.server.info().num_pending == 0


async def test_a_lock_that_stays_ends_every_request_once(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(HASTY) as peer:
        kept = await peer.encode(make_png(1))
        assert isinstance(kept, EncodeReply)
        with locked(peer):
            sent = [peer.send(peer.request(make_png(seed)), make_png(seed)) for seed in (1, 2, 3, 2)]
            for request_id in sent:
                failure = await peer.answer(request_id)
                assert isinstance(failure, EncodeFailure)
                assert (failure.code, failure.status) == ("arena_locked", 503)
            peer.release(kept)
            assert peer.server.info().num_pending == 0
            assert peer.server.info().arena_locked_s > 0.0
        again = await peer.encode(make_png(2))
        assert isinstance(again, EncodeReply)
        peer.release(again)
        await until(lambda: peer.server.info().leased_bytes == 0)
        assert peer.server.info().arena_locked_s == 0.0


async def test_who_leaves_or_runs_out_of_time_meanwhile_holds_nothing(
    open_peer: Opener, make_png: Callable[..., bytes]
) -> None:
    async with open_peer(ROOMY) as peer:
        kept = await peer.encode(make_png(1))
        assert isinstance(kept, EncodeReply)
        with locked(peer):
            gone = peer.send(peer.request(make_png(1)), make_png(1))
            late = peer.send(peer.request(make_png(2), deadline_unix_s=time.time() + 0.2), make_png(2))
            await asyncio.sleep(0.05)
            peer.server.handle(CancelEncode(request_id=gone), (), lambda *_: None, peer=peer.name)
            codes = [await peer.answer(request_id) for request_id in (gone, late)]
            assert [answer.code for answer in codes if isinstance(answer, EncodeFailure)] == [
                "cancelled",
                "deadline_exceeded",
            ]
        peer.release(kept)
        await until(lambda: peer.server.info().leased_bytes == 0)


async def test_rows_are_sent_when_the_lock_has_gone(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(ROOMY) as peer:
        kept = await peer.encode(make_png(1))
        assert isinstance(kept, EncodeReply)
        answers: list[object] = []
        with locked(peer):
            fetch = FetchRows(request_id="r", key=kept.key, checksum=kept.ref.checksum)
            peer.server.handle(fetch, (), lambda message, _: answers.append(message), peer=peer.name)
            await asyncio.sleep(0.1)
            assert not answers
        await until(lambda: bool(answers))
        assert isinstance(answers[0], Rows)
        peer.release(kept)


async def test_a_lock_that_stays_is_told_to_health_without_any_request(open_peer: Opener) -> None:
    async with open_peer(ROOMY) as peer:
        assert trouble_of(peer.server.info()) is None
        with locked(peer):
            await until(lambda: trouble_of(peer.server.info()) is not None)
            assert "locked" in (trouble_of(peer.server.info()) or "")
        await until(lambda: trouble_of(peer.server.info()) is None)


async def test_replicas_of_the_same_arena_are_not_tried_in_turn(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with two_peers(tiny_model_dir, HASTY) as peers:
        client = EncoderClient([MemoryLink(peer.name, peer.server) for peer in peers], ping_period_s=0.02)
        async with client:
            await client.info()
            await until(lambda: all(client.infos().values()))
            request = peers[0].request(make_png(1))
            with locked(peers[0]), pytest.raises(ArenaLocked):
                await client.encode(make_png(1), Modality.IMAGE, MediaOptions(), request.key, request.deadline_unix_s)
            assert sum(peer.server.info().counters.get("requests", 0) for peer in peers) == 1


def test_the_lock_keeps_its_kind_on_the_wire() -> None:
    error = error_of(failure_of(uuid.uuid4().hex, ArenaLocked("locked", retry_after_s=1.0)))
    assert type(error) is ArenaLocked
    assert error.retry_after_s == 1.0
