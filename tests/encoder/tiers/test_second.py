"""The second tier behind an encoder: what it saves, and that none of its faults reaches a request."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from encoder.cache.arena import checksum
from encoder.client import ArenaReader
from encoder.errors import ArenaLocked
from encoder.tiers.base import Buffer, TierFailed
from encoder.tiers.record import RecordHeader, pack
from encoder.tiers.second import SecondTier
from encoder.types import EncodeReply
from preprocess.types import MediaKey, MediaLayout, Modality
from tests.fakes.encoder_peer import CONFIG, Opener, until
from tests.fakes.redis_server import running_redis

KEY = MediaKey("ab" * 16)


class FakeTier:
    """Holds records; fails or dawdles when told to."""

    name = "fake"

    def __init__(self) -> None:
        self.records: dict[MediaKey, bytes] = {}
        self.fails = False
        self.writing_fails = False
        self.delay_s = 0.0
        self.num_asked = 0
        self.closed = False

    async def get(self, key: MediaKey) -> bytes | None:
        await self._take_part()
        return self.records.get(key)

    async def put(self, key: MediaKey, record: Sequence[Buffer]) -> None:
        await self._take_part()
        if self.writing_fails:
            raise TierFailed("read only")
        self.records[key] = b"".join(record)

    async def discard(self, key: MediaKey) -> None:
        self.records.pop(key, None)

    async def close(self) -> None:
        self.closed = True

    async def _take_part(self) -> None:
        self.num_asked += 1
        await asyncio.sleep(self.delay_s)
        if self.fails:
            raise TierFailed("no space left")


class Arena:
    """One embedding of two rows."""

    layout = MediaLayout(Modality.AUDIO, num_audio_rows=2)
    rows = bytes(range(64))
    checksum = checksum(bytes(range(64)))
    warnings = ("something was left out",)

    def __init__(self) -> None:
        self.troubles: list[Exception | None] = []
        """Of the next readings of rows."""

    def lookup(self, key: MediaKey) -> "Arena | None":
        return self if key == KEY else None

    def content(self, key: MediaKey) -> bytes:
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is not None:
            raise trouble
        return self.rows


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def files_of(root: Path) -> list[Path]:
    return list(root.rglob("*.emb"))


def second_over(tier: FakeTier, clock: Callable[[], float] = time.monotonic, *, width: int = 8) -> SecondTier:
    return SecondTier(tier, Arena(), width=width, dtype="float32", timeout_s=0.2, clock=clock)


async def test_what_is_kept_is_found() -> None:
    tier = FakeTier()
    second = second_over(tier)
    second.start()
    assert await second.find(KEY) is None
    second.keep(KEY)
    second.keep(MediaKey("cd" * 16))  # evicted before its turn
    await second.stop(5.0)
    assert tier.closed
    record = await second.find(KEY)
    assert record is not None
    assert bytes(record.rows) == Arena.rows
    assert record.header.warnings == Arena.warnings
    assert second.counters == {"misses": 1, "written": 1, "unwritten": 1, "hits": 1}


async def test_damage_is_a_miss_counted_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier()
    second = second_over(tier)
    header = RecordHeader(key=KEY, layout=Arena.layout, width=8, dtype="float32", checksum=Arena.checksum)
    whole = b"".join(pack(header, Arena.rows))
    tier.records[KEY] = whole[:-1] + b"\xff"
    with caplog.at_level(logging.WARNING):
        assert await second.find(KEY) is None
    assert "damaged" in caplog.text
    assert second.counters["damaged"] == 1
    assert KEY not in tier.records
    await second.stop(0.0)


async def test_rows_of_another_width_are_never_used() -> None:
    tier = FakeTier()
    header = RecordHeader(key=KEY, layout=Arena.layout, width=8, dtype="float32", checksum=Arena.checksum)
    tier.records[KEY] = b"".join(pack(header, Arena.rows))
    second = second_over(tier, width=16)
    assert await second.find(KEY) is None
    assert second.counters["damaged"] == 1
    await second.stop(0.0)


async def test_a_tier_that_fails_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    tier, clock = FakeTier(), Clock()
    second = second_over(tier, clock)
    tier.fails = True
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert await second.find(KEY) is None
    assert tier.num_asked == 3
    assert (second.counters["errors"], second.counters["skipped"]) == (3, 7)
    assert caplog.text.count("left alone") == 1
    clock.now_s += 1.5
    assert await second.find(KEY) is None
    assert tier.num_asked == 4  # tried once more, and left alone for twice as long
    clock.now_s += 1.5
    assert await second.find(KEY) is None
    assert tier.num_asked == 4
    tier.fails = False
    clock.now_s += 1.0
    with caplog.at_level(logging.WARNING):
        await second.find(KEY)
    assert "works again" in caplog.text
    tier.fails = True
    for _ in range(2):
        await second.find(KEY)
    assert tier.num_asked == 7  # counted anew
    await second.stop(0.0)


async def test_reading_that_works_proves_nothing_of_writing(caplog: pytest.LogCaptureFixture) -> None:
    tier, clock = FakeTier(), Clock()
    tier.writing_fails = True
    second = second_over(tier, clock)
    second.start()

    async def write(num_kept: int) -> None:
        second.keep(KEY)
        assert await second.find(KEY) is None
        await until(lambda: second.counters["errors"] + second.counters["unwritten"] >= num_kept)

    with caplog.at_level(logging.WARNING):
        for num_kept in range(1, 7):
            await write(num_kept)
        assert (second.counters["errors"], second.counters["unwritten"]) == (3, 3)
        assert second.counters["misses"] == 6, "reading goes on"
        clock.now_s += 1.5
        await write(7)
        assert second.counters["errors"] == 4
        assert "works again" not in caplog.text
        tier.writing_fails = False
        clock.now_s += 2.5
        second.keep(KEY)
        await until(lambda: second.counters["written"] == 1)
    assert caplog.text.count("writing to the embedding store fake works again") == 1
    await second.stop(0.0)


async def test_what_waits_to_be_written_waits_for_a_locked_arena_and_lets_evicted_rows_go() -> None:
    tier, arena = FakeTier(), Arena()
    second = SecondTier(tier, arena, width=8, dtype="float32", timeout_s=0.2, clock=time.monotonic)
    arena.troubles = [ArenaLocked("locked"), ArenaLocked("locked"), None, KeyError(KEY)]
    started = second.start()
    second.keep(KEY)
    second.keep(KEY)
    await until(lambda: second.counters["written"] + second.counters["unwritten"] == 2)
    assert second.counters == {"written": 1, "unwritten": 1}
    assert not started.done()
    await second.stop(0.0)


async def test_a_slow_tier_costs_its_time_limit_and_no_more() -> None:
    tier = FakeTier()
    tier.delay_s = 60.0
    second = second_over(tier)
    begun_s = time.monotonic()
    assert await second.find(KEY) is None
    assert 0.15 < time.monotonic() - begun_s < 5.0
    assert second.counters["errors"] == 1
    await second.stop(0.0)


# With a real server, real towers and real stores


async def test_embeddings_outlive_the_process(
    open_peer: Opener, make_png: Callable[..., bytes], tmp_path: Path
) -> None:
    config = replace(CONFIG, embedding_store=str(tmp_path / "store"))
    async with open_peer(config) as peer:
        first = await peer.encode(make_png(1))
        assert isinstance(first, EncodeReply)
        rows = bytes(ArenaReader().content(first.ref))
        await until(lambda: peer.server.info().counters.get("tier_written") == 1)
    async with open_peer(config) as peer:
        ids = [peer.send(peer.request(make_png(1)), make_png(1)) for _ in range(3)]
        again = [await peer.answer(request_id) for request_id in ids]
        for answer in again:
            assert isinstance(answer, EncodeReply)
            assert answer.cached
            assert answer.layout == first.layout
            assert bytes(ArenaReader().content(answer.ref)) == rows
        counters = peer.server.info().counters
        assert (counters.get("encoded", 0), counters["recalled"], counters["batches"]) == (0, 1, 0)


async def test_what_waits_is_written_before_the_end(
    open_peer: Opener, make_png: Callable[..., bytes], tmp_path: Path
) -> None:
    config = replace(CONFIG, embedding_store=str(tmp_path / "store"))
    async with open_peer(config) as peer:
        for seed in range(5):
            await peer.encode(make_png(seed))
    assert len(files_of(tmp_path / "store")) == 5


async def test_damaged_files_are_computed_again_and_replaced(
    open_peer: Opener, make_png: Callable[..., bytes], tmp_path: Path
) -> None:
    config = replace(CONFIG, embedding_store=str(tmp_path))
    async with open_peer(config) as peer:
        first = await peer.encode(make_png(1))
        assert isinstance(first, EncodeReply)
    (path,) = files_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    async with open_peer(config) as peer:
        second = await peer.encode(make_png(1))
        assert isinstance(second, EncodeReply)
        assert not second.cached
        assert second.ref.checksum == first.ref.checksum
        assert peer.server.info().counters["tier_damaged"] == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("fault", ["killed", "paused"])
async def test_a_dead_redis_fails_no_request(
    open_peer: Opener, make_png: Callable[..., bytes], tmp_path: Path, fault: str
) -> None:
    with running_redis(tmp_path) as redis:
        config = replace(CONFIG, embedding_store=redis.url, embedding_store_timeout_s=0.2)
        async with open_peer(config) as peer:
            assert isinstance(await peer.encode(make_png(0)), EncodeReply)
            await until(lambda: peer.server.info().counters.get("tier_written") == 1)
            redis.kill() if fault == "killed" else redis.pause()
            for seed in range(1, 9):
                assert isinstance(await peer.encode(make_png(seed)), EncodeReply)
            counters = peer.server.info().counters
            assert counters["tier_errors"] >= 3
            assert counters["tier_skipped"] >= 1
            assert counters["encoded"] == 9
