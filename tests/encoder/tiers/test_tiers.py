"""One contract over all tiers, each against the real thing: files on a disk, a Redis server."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from encoder.tiers.base import EmbeddingTier, TierFailed, open_tier
from encoder.tiers.directory import DirectoryTier
from encoder.tiers.record import RecordDamaged
from preprocess.types import MediaKey
from tests.fakes.redis_server import running_redis


def key(number: int) -> MediaKey:
    return MediaKey(f"{number:02x}" * 16)


def files_of(root: Path) -> list[Path]:
    return list(root.rglob("*.emb"))


def opened(url: str, *, max_bytes: int = 1 << 20, ttl_s: float | None = None, timeout_s: float = 5.0) -> EmbeddingTier:
    return open_tier(url, max_bytes=max_bytes, ttl_s=ttl_s, timeout_s=timeout_s)


@pytest_asyncio.fixture(params=["directory", "redis"])
async def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EmbeddingTier]:
    if request.param == "directory":
        found = opened(str(tmp_path / "store"))
        yield found
        await found.close()
        return
    with running_redis(tmp_path) as server:
        found = opened(server.url)
        yield found
        await found.close()


async def test_put_get_discard(tier: EmbeddingTier) -> None:
    assert await tier.get(key(1)) is None
    await tier.put(key(1), [b"head", memoryview(b"rows")])
    found = await tier.get(key(1))
    assert found is not None
    assert bytes(found) == b"headrows"
    assert await tier.get(key(2)) is None
    await tier.discard(key(1))
    await tier.discard(key(1))
    assert await tier.get(key(1)) is None


async def test_a_second_put_takes_the_place_of_the_first(tier: EmbeddingTier) -> None:
    await tier.put(key(1), [b"one"])
    await tier.put(key(1), [b"another"])
    found = await tier.get(key(1))
    assert found is not None
    assert bytes(found) == b"another"


async def test_many_at_once(tier: EmbeddingTier) -> None:
    contents = {key(number): os.urandom(1000 + number) for number in range(100)}
    await asyncio.gather(*(tier.put(name, [content]) for name, content in contents.items()))
    found = await asyncio.gather(*(tier.get(name) for name in contents))
    assert [bytes(content or b"") for content in found] == list(contents.values())


async def test_two_processes_worth_of_tiers_share(tmp_path: Path) -> None:
    first, second = opened(str(tmp_path)), opened(str(tmp_path))
    await first.put(key(1), [b"shared"])
    found = await second.get(key(1))
    assert found is not None
    assert bytes(found) == b"shared"
    await first.close()
    await second.close()


async def test_a_directory_keeps_to_its_bound_and_lets_the_longest_unread_go(tmp_path: Path) -> None:
    tier = opened(str(tmp_path), max_bytes=100_000)
    for number in range(10):
        await tier.put(key(number), [bytes(9_000)])
        os.utime(tmp_path / key(number)[:2] / f"{key(number)}.emb", (number, number))
    assert await tier.get(key(0)) is not None  # read last now
    for number in range(10, 14):
        await tier.put(key(number), [bytes(9_000)])
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 105_000
    assert await tier.get(key(0)) is not None
    assert await tier.get(key(1)) is None
    assert await tier.get(key(13)) is not None
    # Larger than everything: not kept, and nothing goes for it.
    await tier.put(key(99), [bytes(200_000)])
    assert await tier.get(key(99)) is None
    assert await tier.get(key(13)) is not None
    await tier.close()


async def test_left_over_partial_files_go(tmp_path: Path) -> None:
    old, young = tmp_path / ".partial-1-old", tmp_path / ".partial-2-young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    long_ago_s = time.time() - 7200
    os.utime(old, (long_ago_s, long_ago_s))
    await opened(str(tmp_path)).close()
    assert not old.exists()
    assert young.exists()


def test_a_killed_writer_leaves_whole_records_only(tmp_path: Path) -> None:
    script = f"""
        import asyncio
        from pathlib import Path
        from encoder.tiers.directory import DirectoryTier
        from preprocess.types import MediaKey

        async def main():
            tier = DirectoryTier(Path({str(tmp_path)!r}), max_bytes=1 << 30)
            print("writing", flush=True)
            for number in range(10_000):
                name = f"{{number % 256:02x}}" * 16
                await tier.put(MediaKey(name), [bytes([number % 256]) * 300_000])

        asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    written = files_of(tmp_path)
    assert written
    for path in written:
        content = path.read_bytes()
        assert content == bytes([int(path.name[:2], 16)]) * 300_000


async def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(TierFailed, match="cannot be used"):
        DirectoryTier(file, max_bytes=1 << 20)


async def test_records_of_redis_end_when_nobody_reads_them(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        tier = opened(server.url, ttl_s=0.6)
        await tier.put(key(1), [b"read"])
        await tier.put(key(2), [b"unread"])
        for _ in range(5):
            await asyncio.sleep(0.2)
            assert await tier.get(key(1)) is not None
        assert await tier.get(key(2)) is None
        await tier.close()


@pytest.mark.parametrize("fault", ["killed", "paused"])
async def test_a_redis_that_is_gone_is_known_within_the_time_limit(tmp_path: Path, fault: str) -> None:
    with running_redis(tmp_path) as server:
        tier = opened(server.url, timeout_s=0.2)
        await tier.put(key(1), [b"x"])
        server.kill() if fault == "killed" else server.pause()
        for work in (tier.get(key(1)), tier.put(key(2), [b"y"]), tier.discard(key(1))):
            begun_s = time.monotonic()
            with pytest.raises(TierFailed, match=r"127\.0\.0\.1"):
                await work
            # Known at once or at the limit, not after the library's own seconds of trying again.
            assert time.monotonic() - begun_s < 2.0
        await tier.close()


async def test_passwords_stay_out_of_names_and_errors() -> None:
    tier = opened("redis://someone:secret@127.0.0.1:1/3", timeout_s=0.2)
    assert tier.name == "redis://127.0.0.1:1/3"
    with pytest.raises(TierFailed) as caught:
        await tier.get(key(1))
    assert "secret" not in str(caught.value)
    await tier.close()


@pytest.mark.parametrize("url", ["relative/path", "http://x/y", "s3://bucket", "ftp://user:secret@host/"])
def test_other_stores_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: an absolute path of a directory, or redis://") as caught:
        opened(url)
    assert "secret" not in str(caught.value)


async def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "above" / "store"
    tier = opened(str(root))
    await tier.put(key(1), [b"one"])
    shutil.rmtree(root.parent)
    assert await tier.get(key(1)) is None
    await tier.put(key(2), [b"two"])
    assert await tier.get(key(2)) == b"two"
    assert root.stat().st_mode & 0o777 == 0o700
    await tier.close()


def _directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_read_first", [True, False])
@pytest.mark.parametrize("in_the_way", [_directory, os.mkfifo, _link_to_itself])
async def test_what_is_no_file_is_a_damaged_record_and_goes(
    tmp_path: Path, in_the_way: Callable[[Path], None], is_read_first: bool
) -> None:
    tier = opened(str(tmp_path))
    await tier.put(key(1), [b"one"])
    (path,) = files_of(tmp_path)
    path.unlink()
    in_the_way(path)
    if is_read_first:
        with pytest.raises(RecordDamaged):
            await tier.get(key(1))
        await tier.discard(key(1))
        assert await tier.get(key(1)) is None
    await tier.put(key(1), [b"again"])
    assert await tier.get(key(1)) == b"again"
    await tier.close()


@pytest.mark.parametrize("is_read_first", [True, False])
async def test_a_file_where_records_belong_goes(tmp_path: Path, is_read_first: bool) -> None:
    tier = opened(str(tmp_path))
    (tmp_path / key(1)[:2]).write_bytes(b"in the way")
    if is_read_first:
        with pytest.raises(RecordDamaged):
            await tier.get(key(1))
        await tier.discard(key(1))
    await tier.put(key(1), [b"one"])
    assert await tier.get(key(1)) == b"one"
    await tier.close()


async def test_a_file_where_the_root_was_fails_the_tier(tmp_path: Path) -> None:
    root = tmp_path / "store"
    tier = opened(str(root))
    root.rmdir()
    root.write_bytes(b"somebody's")
    for act in (tier.get(key(1)), tier.put(key(1), [b"one"])):
        with pytest.raises(TierFailed):
            await act
    assert root.read_bytes() == b"somebody's"
    await tier.close()


async def test_directories_among_the_records_make_room_and_keep_nobody_from_starting(tmp_path: Path) -> None:
    _directory(tmp_path / ".partial-1-old")
    os.utime(tmp_path / ".partial-1-old", (1, 1))
    (tmp_path / key(1)[:2]).mkdir()
    _directory(tmp_path / key(1)[:2] / f"{key(1)}.emb")
    os.utime(tmp_path / key(1)[:2] / f"{key(1)}.emb", (1, 1))
    tier = opened(str(tmp_path), max_bytes=10_000)
    assert not (tmp_path / ".partial-1-old").exists()
    await tier.put(key(2), [bytes(7_000)])
    assert [path.name for path in files_of(tmp_path)] == [f"{key(2)}.emb"]
    await tier.close()
