"""Media in parts: the bytes of the whole, the tower at work before decoding ends, nothing left of what ends early."""

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image

from encoder import passage as passage_module
from encoder import tower_queue as queue_module
from encoder.client import ArenaReader
from encoder.types import CancelEncode, EncodeFailure, EncodeReply
from preprocess.config import Isolation
from preprocess.errors import MediaDecodeTimeout, MediaUndecodable
from preprocess.pipeline import LayoutChanged, OpenMedia
from preprocess.types import MediaPart, Modality
from tests.fakes.clips import make_video
from tests.fakes.encoder_peer import CONFIG, Opener, Peer, until
from tests.fakes.media_parts import NUM_PARTS, PART_BYTES, SMALL_PASS, RowsOf

Put = Callable[[MediaPart], None]


class Tower:
    """Counts the vision tower's passes, and holds them while it is closed."""

    def __init__(self, peer: Peer) -> None:
        self.num_passes = 0
        self.ran = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at: int | None = None
        self._towers = peer.server._runner._towers
        self._rows_of_pictures = self._towers.rows_of_pictures
        self._towers.rows_of_pictures = self._run  # type: ignore[method-assign]

    def _run(self, *pictures: Any) -> list[torch.Tensor]:
        assert self.gate.wait(20)
        if self.num_passes == self.fail_at:
            raise RuntimeError("out of memory, say")
        rows = self._rows_of_pictures(*pictures)
        self.num_passes += 1
        self.ran.set()
        return rows


@asynccontextmanager
async def nothing_left(peer: Peer) -> AsyncIterator[None]:
    """At the end no room is reserved, no decoder is at work, none is held, and another clip goes through."""
    yield
    server = peer.server
    await until(lambda: not server._flying)
    await until(lambda: not server._pool.num_stuck and not server._pool.num_pending)
    usage = server._store.usage()
    assert usage.reserved_bytes == 0
    server._store.check()
    queue = server._tower
    assert (len(queue._batcher), queue._held_bytes) == (0, 0)
    works = server._works
    for semaphore in (works.decoders, server._pool._places):
        assert semaphore._value == CONFIG.decode_threads
    other = make_video(50, size=(96, 128))
    assert isinstance(await peer.encode(other, modality=Modality.VIDEO), EncodeReply)


def decode_like(monkeypatch: pytest.MonkeyPatch, around: Callable[[Callable[[Put], None], Put], None]) -> None:
    """Has `around(decode, put)` decode the pictures of every medium."""
    decode = OpenMedia.decode

    def changed(self: OpenMedia, put: Put, **settings: Any) -> None:
        around(lambda put: decode(self, put, **settings), put)

    monkeypatch.setattr(OpenMedia, "decode", changed)


def read(reply: object) -> bytes:
    assert isinstance(reply, EncodeReply), reply
    return bytes(ArenaReader().content(reply.ref))


@pytest.mark.parametrize("changes", [{}, {"isolation": "processes", "preprocess": "tower"}])
async def test_parts_give_the_bytes_of_the_whole(
    open_peer: Opener,
    whole_rows: RowsOf,
    clip: bytes,
    damaged: bytes,
    make_png: Callable[..., bytes],
    make_wav: Callable[..., bytes],
    changes: dict[str, Any],
) -> None:
    media = [
        (clip, Modality.VIDEO),
        (damaged, Modality.VIDEO),
        (make_png(1, 300, 500), Modality.IMAGE),
        (make_png(2, 33, 90), Modality.IMAGE),
        (make_wav(1, 4.0), Modality.AUDIO),
    ]
    async with open_peer(replace(CONFIG, arena_bytes=2**23, **changes)) as peer:
        tower = Tower(peer)
        ids = [peer.send(peer.request(content, modality), content) for content, modality in media]
        replies = [await peer.answer(request_id) for request_id in ids]
        for reply, (content, modality) in zip(replies, media, strict=True):
            expected, prepared = whole_rows(content, modality)
            assert read(reply) == expected
            assert isinstance(reply, EncodeReply)
            assert reply.layout == prepared.layout
            assert reply.warnings == prepared.warnings
            assert bool(reply.warnings) == (content is damaged)
            assert min(reply.timings.prepare_s, reply.timings.tower_s) > 0
        counters = peer.server.info().counters
        # Small media may share a pass with others.
        assert tower.num_passes > NUM_PARTS
        assert ("decode_workers_forked" in counters) == ("isolation" in changes)


async def test_the_next_batch_is_decoded_while_the_tower_works_and_shares_one_pass(
    open_peer: Opener, make_png: Callable[..., bytes]
) -> None:
    pictures = [make_png(seed, 64 + 32 * seed, 96) for seed in range(5)]
    async with open_peer() as peer:
        alone = [read(await peer.encode(content)) for content in pictures]
    async with open_peer() as peer:
        tower, queue = Tower(peer), peer.server._tower
        tower.gate.clear()
        first = peer.send(peer.request(pictures[0]), pictures[0])
        await until(lambda: queue.num_batches == 1)
        rest = [peer.send(peer.request(content), content) for content in pictures[1:]]
        await until(lambda: len(queue._batcher) == 4)
        assert tower.num_passes == 0, "all are decoded, and the tower is still at the first"
        tower.gate.set()
        replies = [await peer.answer(request_id) for request_id in (first, *rest)]
        assert [read(reply) for reply in replies] == alone
        assert (queue.num_batches, tower.num_passes) == (2, 2)
        counters = peer.server.info().counters
        assert (counters["tower_passes"], counters["packing_refused"]) == (2, 0)


async def test_the_tower_begins_before_decoding_ends(
    open_peer: Opener, small_parts: None, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    async with open_peer(replace(CONFIG, arena_bytes=2**22)) as peer:
        tower = Tower(peer)
        handed_over: list[int] = []

        def around(decode: Callable[[Put], None], put: Put) -> None:
            def last_is_late(part: MediaPart) -> None:
                if part.first_pair == 2 * (NUM_PARTS - 1):
                    assert tower.ran.wait(20), "the tower waits for the end of decoding"
                put(part)
                handed_over.append(part.first_pair)

            decode(last_is_late)

        decode_like(monkeypatch, around)
        reply = await peer.encode(clip, modality=Modality.VIDEO)
        assert isinstance(reply, EncodeReply)
        assert sorted(handed_over) == list(range(0, 2 * NUM_PARTS, 2))


async def test_decoding_waits_for_the_tower(
    open_peer: Opener, small_parts: None, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    monkeypatch.setattr(queue_module, "MAX_HELD_BYTES", 2 * PART_BYTES)
    async with open_peer(replace(CONFIG, arena_bytes=2**22, max_batch_patches=SMALL_PASS)) as peer:
        tower = Tower(peer)
        tower.gate.clear()
        begun: list[int] = []

        def around(decode: Callable[[Put], None], put: Put) -> None:
            def counted(part: MediaPart) -> None:
                put(part)
                begun.append(part.first_pair)

            decode(counted)

        decode_like(monkeypatch, around)
        request_id = peer.send(peer.request(clip, Modality.VIDEO), clip)
        await until(lambda: len(begun) == 2)
        await asyncio.sleep(0.3)
        assert len(begun) == 2, "one part is in the tower, one waits"
        tower.gate.set()
        assert isinstance(await peer.answer(request_id), EncodeReply)
        assert len(begun) == NUM_PARTS


@pytest.mark.parametrize(
    ("isolation", "ending"),
    [("threads", "cancel"), ("threads", "deadline"), ("threads", "disconnect"), ("processes", "cancel")],
)
async def test_who_leaves_in_the_middle_leaves_nothing(
    open_peer: Opener,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    clip: bytes,
    isolation: Isolation,
    ending: str,
) -> None:
    """One part is in the tower, which is slow, one waits for it, and the decoder waits to hand over a third."""
    monkeypatch.setattr(queue_module, "MAX_HELD_BYTES", 2 * PART_BYTES)
    config = replace(CONFIG, arena_bytes=2**22, max_batch_patches=SMALL_PASS, isolation=isolation)
    async with open_peer(config) as peer:
        await peer.server._pool.warm_up()
        async with nothing_left(peer):
            tower = Tower(peer)
            tower.gate.clear()
            deadline = time.time() + (2.0 if ending == "deadline" else 30.0)
            request = peer.request(clip, Modality.VIDEO, deadline_unix_s=deadline)
            peer.send(request, clip)
            queue = peer.server._tower
            await until(lambda: queue.num_batches > 0 and len(queue._batcher) > 0)
            if ending == "cancel":
                peer.server.handle(CancelEncode(request_id=request.request_id), (), lambda *_: None, peer="peer")
            elif ending == "disconnect":
                peer.server.disconnect("peer")
            failure = await peer.answer(request.request_id)
            assert isinstance(failure, EncodeFailure)
            assert failure.code == ("deadline_exceeded" if ending == "deadline" else "cancelled")
            assert peer.server._store.usage().reserved_bytes > 0, "the tower still writes there"
            tower.gate.set()
        assert tower.num_passes < NUM_PARTS


async def test_who_is_cancelled_while_failing_leaves_nothing(
    open_peer: Opener, small_parts: None, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    """Its time is over, it waits for the part that is in the tower, and then nobody waits for it any more."""
    monkeypatch.setattr(queue_module, "MAX_HELD_BYTES", 2 * PART_BYTES)
    config = replace(CONFIG, arena_bytes=2**22, max_batch_patches=SMALL_PASS, max_item_s=1.0)
    async with open_peer(config) as peer:
        await peer.server._pool.warm_up()
        async with nothing_left(peer):
            tower = Tower(peer)
            tower.gate.clear()
            request = peer.request(clip, Modality.VIDEO)
            peer.send(request, clip)
            await until(lambda: tower_waits(peer))
            await asyncio.sleep(1.5)
            peer.server.handle(CancelEncode(request_id=request.request_id), (), lambda *_: None, peer="peer")
            await asyncio.sleep(0.1)
            assert peer.server._store.usage().reserved_bytes > 0, "the tower still writes there"
            tower.gate.set()


def tower_waits(peer: Peer) -> bool:
    queue = peer.server._tower
    return queue.num_batches > 0 and len(queue._batcher) > 0


async def test_a_part_that_fails_in_the_tower_fails_its_medium_only(
    open_peer: Opener, small_parts: None, clip: bytes, make_png: Callable[..., bytes]
) -> None:
    async with open_peer(replace(CONFIG, arena_bytes=2**22)) as peer, nothing_left(peer):
        tower = Tower(peer)
        for fail_at in (0, 3, NUM_PARTS - 1):
            tower.num_passes, tower.fail_at = 0, fail_at
            failed = peer.send(peer.request(clip, Modality.VIDEO), clip)
            failure = await peer.answer(failed)
            assert isinstance(failure, EncodeFailure)
            assert failure.code == "tower_failed"
            tower.fail_at = None
            assert isinstance(await peer.encode(make_png(fail_at)), EncodeReply)
        assert isinstance(await peer.encode(clip, modality=Modality.VIDEO), EncodeReply)


async def test_a_decoder_that_fails_in_the_middle(
    open_peer: Opener, small_parts: None, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    def around(decode: Callable[[Put], None], put: Put) -> None:
        def first_only(part: MediaPart) -> None:
            if part.first_pair:
                raise MediaUndecodable("no more of this")
            put(part)

        decode(first_only)

    async with open_peer(replace(CONFIG, arena_bytes=2**22)) as peer, nothing_left(peer):
        with monkeypatch.context() as patched:
            decode_like(patched, around)
            failure = await peer.encode(clip, modality=Modality.VIDEO)
        assert isinstance(failure, EncodeFailure)
        assert (failure.code, failure.message) == ("media_undecodable", "no more of this")


def assert_names_the_limit(failure: object, limit: str) -> None:
    assert isinstance(failure, EncodeFailure)
    assert (failure.code, failure.status) == ("media_decode_timeout", 504)
    assert failure.message.startswith(f"decoding took over {limit} s, the longest this server gives to one medium")
    assert failure.message.endswith("(encoder.max_item_s)")


@pytest.mark.parametrize("isolation", ["threads", "processes"])
async def test_the_encoder_s_own_time_limit_is_named(
    open_peer: Opener, make_wav: Callable[..., bytes], isolation: Isolation
) -> None:
    """An operator finds the setting; whoever had less time of their own hears of no setting."""
    async with open_peer(replace(CONFIG, max_item_s=1e-4, isolation=isolation)) as peer:
        assert_names_the_limit(await peer.encode(make_wav(1, 60.0), modality=Modality.AUDIO), "0.0001")
        request = peer.request(make_wav(2, 60.0), Modality.AUDIO)
        passage = passage_module.Passage(
            peer.server._works,
            make_wav(2, 60.0),
            modality=request.modality,
            options=request.options,
            key=request.key,
        )
        with pytest.raises(MediaDecodeTimeout) as own:
            await passage.run(lambda: 1e-5)
        assert "max_item_s" not in own.value.message


async def test_the_time_limit_is_named_wherever_it_strikes(
    open_peer: Opener, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    def around(decode: Callable[[Put], None], put: Put) -> None:
        time.sleep(1.5)
        decode(put)

    async with open_peer(replace(CONFIG, arena_bytes=2**22, max_item_s=1.0)) as peer:
        with monkeypatch.context() as patched:
            decode_like(patched, around)
            assert_names_the_limit(await peer.encode(clip, modality=Modality.VIDEO), "1")


async def test_parts_that_never_come_are_an_error(
    open_peer: Opener, small_parts: None, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    def around(decode: Callable[[Put], None], put: Put) -> None:
        decode(lambda part: None if part.first_pair == 4 else put(part))

    async with open_peer(replace(CONFIG, arena_bytes=2**22)) as peer, nothing_left(peer):
        with monkeypatch.context() as patched:
            decode_like(patched, around)
            failure = await peer.encode(clip, modality=Modality.VIDEO)
        assert isinstance(failure, EncodeFailure)
        assert failure.message == "24 rows of this medium were never made"


async def test_a_layout_that_changes_without_end_is_an_error(
    open_peer: Opener, small_parts: None, monkeypatch: pytest.MonkeyPatch, clip: bytes
) -> None:
    num_decodes = 0

    def restless(self: OpenMedia, put: Put, **settings: Any) -> None:
        nonlocal num_decodes
        num_decodes += 1
        raise LayoutChanged(self)

    async with open_peer(replace(CONFIG, arena_bytes=2**22)) as peer, nothing_left(peer):
        with monkeypatch.context() as patched:
            patched.setattr(OpenMedia, "decode", restless)
            failure = await peer.encode(clip, modality=Modality.VIDEO)
        assert isinstance(failure, EncodeFailure)
        assert failure.code == "media_undecodable"
        assert num_decodes == passage_module.MAX_CHANGES + 1


async def test_a_layout_that_changes_gives_its_room_back(open_peer: Opener, small_parts: None, damaged: bytes) -> None:
    """The arena holds the longer layout or the shorter one, not both."""
    async with open_peer(replace(CONFIG, arena_bytes=160 * 1024, arena_wait_s=0.0)) as peer, nothing_left(peer):
        reply = await peer.encode(damaged, modality=Modality.VIDEO)
        assert isinstance(reply, EncodeReply)
        rows_before = 15 * 12
        assert reply.layout.num_rows < rows_before
        assert (rows_before + reply.layout.num_rows) * 192 * 4 > 160 * 1024
        peer.release(reply)


async def test_a_decoding_process_that_dies_is_counted(
    open_peer: Opener,
) -> None:
    config = replace(CONFIG, arena_bytes=2**22, isolation="processes", max_worker_bytes=64 * 2**20)
    picture = io.BytesIO()
    Image.new("RGB", (6000, 6000)).save(picture, "PNG", compress_level=1)
    async with open_peer(config) as peer, nothing_left(peer):
        failure = await peer.encode(picture.getvalue())
        assert isinstance(failure, EncodeFailure)
        assert failure.code == "media_too_large"
        assert peer.server.info().counters["decode_workers_out_of_memory"] == 1


@pytest.mark.parametrize("preprocess", ["cpu", "tower"])
async def test_many_that_come_and_go(
    open_peer: Opener,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    clip: bytes,
    damaged: bytes,
    make_png: Callable[..., bytes],
    make_wav: Callable[..., bytes],
    preprocess: Literal["cpu", "tower"],
) -> None:
    """Whatever is cancelled when, in an arena that is too small for all: each has one reply, the rest are right."""
    monkeypatch.setattr(queue_module, "MAX_HELD_BYTES", 2 * PART_BYTES)
    random = np.random.RandomState(0)
    contents: list[tuple[bytes, Modality]] = [(clip, Modality.VIDEO), (damaged, Modality.VIDEO)]
    contents += [(make_png(seed, 64 + 32 * seed, 96), Modality.IMAGE) for seed in range(4)]
    contents += [(make_wav(1, 3.0), Modality.AUDIO), (b"no medium", Modality.IMAGE)]
    checksums: dict[str, set[int]] = {}
    config = replace(CONFIG, arena_bytes=300 * 1024, max_pending=100, arena_wait_s=20.0, preprocess=preprocess)
    async with open_peer(config) as peer, nothing_left(peer):

        async def one(number: int) -> None:
            content, modality = contents[number % len(contents)]
            request = peer.request(content, modality)
            await asyncio.sleep(random.uniform(0, 1.0))
            peer.send(request, content)
            if number % 3 == 0:
                await asyncio.sleep(random.uniform(0, 0.3))
                peer.server.handle(CancelEncode(request_id=request.request_id), (), lambda *_: None, peer="peer")
            reply = await peer.answer(request.request_id)
            if isinstance(reply, EncodeReply):
                checksums.setdefault(reply.key, set()).add(reply.ref.checksum)
                peer.release(reply)
            else:
                assert reply.code == "cancelled" or content == b"no medium"

        await asyncio.gather(*(one(number) for number in range(60)))
    assert len(checksums) == len(contents) - 1
    assert all(len(values) == 1 for values in checksums.values())
