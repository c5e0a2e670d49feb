"""`mimo cache` on a host with and without arenas, without processes."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cli.cache_view
from cli.app import app
from cli.load import ConfigError
from encoder import embedding_arena
from encoder.cache import report
from encoder.cache.arena import INDEX_SUFFIX, SHM_DIR
from encoder.cache.index import RowFormat
from encoder.cache.store import EmbeddingStore
from encoder.config import EncoderConfig
from epd.cache.l3 import local_report
from epd.cache.l3 import open as open_module
from epd.cache.l3.open import cold_root, hot_root, open_local
from epd.cache.l3.shelf import StoreLock
from preprocess.types import MediaKey, MediaLayout, Modality

ROW_BYTES = 64


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddingStore]:
    """The one arena of a host: 64 KiB, three embeddings of 4 KiB, one of them leased."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    monkeypatch.setattr(report, "SHM_DIR", OnlyThese(name))
    with embedding_arena(EncoderConfig(arena_bytes=64 * 1024), name):
        store = EmbeddingStore(name, holder="inc", rows=RowFormat(16, "float32", ROW_BYTES))
        for key in "abc":
            room = store.reserve(MediaKey(key), 3)
            store.publish(room, layout=MediaLayout(modality=Modality.AUDIO, num_audio_rows=3), checksum=0)
        store.lease(MediaKey("b"), owner="me", expires_s=1.0)
        store.count(hits=3, misses=1)
        store.tidy()
        yield store
        store.check()
        store.close()


class OnlyThese:
    """The directory of shared memory, of which only arenas of these names are to be seen."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def glob(self, pattern: str) -> list[Path]:
        return [path for path in SHM_DIR.glob(pattern) if path.name.removesuffix(INDEX_SUFFIX) in self.names]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Shared memory of its own for stores of KV: those of this host are not for tests to see, or to clear."""
    shared = tmp_path / "shm"
    shared.mkdir()
    for module in (local_report, open_module):
        monkeypatch.setattr(module, "SHARED_MEMORY", shared)
    monkeypatch.setenv("MIMO_KV_STORE_DIR", str(tmp_path / "kv"))
    return shared


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["cache", *arguments])


def test_stats_for_people(store: EmbeddingStore) -> None:
    done = run("stats")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[0].startswith(f"{store.arena} embeddings; made by pid")
    assert "leased 0.0 MiB 6% in use by a request" in lines
    assert "3 embeddings with rows of 16 float32, 1 leases; last used 0 s ago, the oldest 0 s ago" in lines
    assert "3 found, 1 computed (75% found)" in lines
    assert sum("encoder pid" in line for line in lines) == 1


@pytest.mark.parametrize("arguments", [lambda store: (), lambda store: (store.arena,)], ids=["all", "by name"])
def test_stats_as_json_and_after_a_clear(
    store: EmbeddingStore, arguments: Callable[[EmbeddingStore], tuple[str, ...]]
) -> None:
    (before,) = json.loads(run("stats", "--json").stdout)["embeddings"]
    assert before["name"] == store.arena
    assert before["usage"] == {
        "capacity_bytes": 65536,
        "free_bytes": 65536 - 3 * 4096,
        "evictable_bytes": 2 * 4096,
        "leased_bytes": 4096,
        "reserved_bytes": 0,
    }
    assert (before["num_entries"], before["num_leases"], before["hits"], before["misses"]) == (3, 1, 3, 1)
    assert [holder["is_alive"] for holder in before["holders"]] == [True]
    refused = run("clear", "none")
    assert isinstance(refused.exception, ConfigError)
    assert store.arena in str(refused.exception)
    cleared = run("clear", *arguments(store))
    assert cleared.exit_code == 0
    assert cleared.stdout.startswith(f"{store.arena}: 0.0 MiB given back")
    (after,) = json.loads(run("stats", "--json").stdout)["embeddings"]
    assert (after["num_entries"], after["usage"]["free_bytes"]) == (1, 65536 - 4096)
    assert [key for key in "abc" if store.lookup(MediaKey(key))] == ["b"]


@pytest.mark.parametrize("arguments", [["stats"], ["stats", "--json"], ["clear"]])
def test_where_none_runs_it_says_so(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(report, "SHM_DIR", OnlyThese())
    done = run(*arguments)
    assert done.exit_code == 1
    assert "no encoder runs on this host" in done.output
    assert "no local store of KV on this host" in done.output


def test_what_is_no_arena_is_passed_over(store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{store.arena}-foreign"
    (SHM_DIR / f"{name}{INDEX_SUFFIX}").write_bytes(b"not an index")
    monkeypatch.setattr(report, "SHM_DIR", OnlyThese(name, store.arena))
    try:
        assert [found.name for found in report.arena_reports()] == [store.arena]
    finally:
        (SHM_DIR / f"{name}{INDEX_SUFFIX}").unlink()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7_800, "2 h 10 min"), (442_800, "5 d 3 h"), (-3, "0 s")],
)
def test_spans_have_two_units(seconds: float, words: str) -> None:
    assert cli.cache_view.span(seconds) == words


# Stores of KV


def put(directory: Path, *keys: bytes, size_bytes: int = 1000, memory_bytes: int = 1 << 20) -> None:
    node = open_local(directory, memory_bytes=memory_bytes, disk_bytes=1 << 24)
    assert node.put([(key, [key * (size_bytes // len(key))]) for key in keys], timeout_s=5.0) == [True] * len(keys)
    while node.tend():
        pass
    node.close()


def held(directory: Path, *keys: bytes) -> list[bool]:
    node = open_local(directory, memory_bytes=1 << 20, disk_bytes=1 << 24)
    found = node.exists(keys, timeout_s=5.0)
    node.close()
    return found


@pytest.fixture
def no_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SHM_DIR", OnlyThese())


@pytest.mark.usefixtures("no_arenas")
def test_stores_of_kv_for_people_and_as_json(tmp_path: Path) -> None:
    """That of "local", and one in another directory that is known by its memory alone."""
    put(tmp_path / "kv", b"fa", b"fb", b"wb")
    put(tmp_path / "other", b"fc")
    done = run("stats")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert f"{tmp_path / 'kv'} KV" in lines
    assert "3 pages of KV; the last written 0 s ago, the oldest 0 s ago" in lines
    assert "1 page of KV; the last written 0 s ago, the oldest 0 s ago" in lines
    found = json.loads(run("stats", "--json").stdout)
    assert found["embeddings"] == []
    first, second = found["kv_stores"]
    assert (first["directory"], second["directory"]) == (str(tmp_path / "kv"), str(tmp_path / "other"))
    assert (first["num_records"], first["num_memory_records"], first["num_disk_records"]) == (3, 3, 0)
    assert 3000 < first["memory_bytes"] <= 1 << 20
    assert first["disk_bytes"] == 0
    (named,) = json.loads(run("stats", "--json", "--store", str(tmp_path / "other")).stdout)["kv_stores"]
    assert named["directory"] == str(tmp_path / "other")
    assert run("stats", "--embeddings").exit_code == 1


@pytest.mark.usefixtures("no_arenas")
def test_what_lies_on_disk_is_counted_there(tmp_path: Path) -> None:
    """More than memory holds: some has been moved, and a store whose memory went with the host is still one."""
    keys = [b"f%03d" % index for index in range(60)]
    for key in keys:
        put(tmp_path / "kv", key, size_bytes=16_000, memory_bytes=1 << 19)
    (found,) = json.loads(run("stats", "--json").stdout)["kv_stores"]
    assert found["num_disk_records"] > 0
    assert found["disk_bytes"] > 16_000 * found["num_disk_records"]
    assert found["memory_bytes"] <= 1 << 19
    assert max(found["num_memory_records"], found["num_disk_records"]) <= found["num_records"] <= 60
    shutil.rmtree(hot_root(tmp_path / "kv"))
    (found,) = json.loads(run("stats", "--json").stdout)["kv_stores"]
    assert found["memory_bytes"] == found["num_memory_records"] == 0
    assert found["num_records"] == found["num_disk_records"] > 0
    cleared = run("clear", "--kv")
    assert cleared.exit_code == 0
    assert not list(cold_root(tmp_path / "kv").glob("*.seg"))


@pytest.mark.usefixtures("no_arenas")
def test_a_clear_as_json(tmp_path: Path) -> None:
    put(tmp_path / "kv", b"fa")
    (cleared,) = json.loads(run("clear", "--json").stdout)["cleared"]
    assert cleared["store"] == str(tmp_path / "kv")
    assert cleared["cleared_bytes"] > 0
    assert not any(held(tmp_path / "kv", b"fa"))


@pytest.mark.usefixtures("no_arenas")
def test_clearing_a_store_is_a_miss_to_who_uses_it(tmp_path: Path) -> None:
    put(tmp_path / "other", b"fz")
    running = open_local(tmp_path / "kv", memory_bytes=1 << 20, disk_bytes=1 << 24)
    running.put([(b"fa", [b"one"])], timeout_s=5.0)
    cleared = run("clear", "--store", str(tmp_path / "kv"))
    assert cleared.exit_code == 0, cleared.output
    assert cleared.stdout.startswith(f"{tmp_path / 'kv'}: 0.")
    assert running.exists([b"fa"], timeout_s=5.0) == [False]
    got: list[object] = []
    running.get([b"fa"], lambda index, value: got.append(value), timeout_s=5.0)
    assert got == [None]
    assert running.put([(b"fb", [b"two"])], timeout_s=5.0) == [True]
    assert running.exists([b"fb"], timeout_s=5.0) == [True]
    running.close()
    assert held(tmp_path / "other", b"fz") == [True]
    assert run("clear").exit_code == 0
    assert held(tmp_path / "other", b"fz") == held(tmp_path / "kv", b"fb") == [False]


@pytest.mark.usefixtures("no_arenas")
def test_memory_of_a_directory_that_is_gone_goes_with_a_clear(tmp_path: Path, memory: Path) -> None:
    put(tmp_path / "kv", b"fa")
    put(tmp_path / "gone", b"fb")
    shutil.rmtree(tmp_path / "gone")
    assert run("clear").exit_code == 0
    assert list(memory.iterdir()) == [hot_root(tmp_path / "kv")]
    (found,) = json.loads(run("stats", "--json").stdout)["kv_stores"]
    assert found["num_records"] == 0


def test_each_kind_is_cleared_by_itself(store: EmbeddingStore, tmp_path: Path) -> None:
    put(tmp_path / "kv", b"fa")
    assert run("clear", "--embeddings").exit_code == 0
    assert held(tmp_path / "kv", b"fa") == [True]
    assert run("clear", store.arena).exit_code == 0
    assert held(tmp_path / "kv", b"fa") == [True]
    refused = run("clear", store.arena, "--kv")
    assert isinstance(refused.exception, ConfigError)
    assert run("clear", "--kv").exit_code == 0
    assert held(tmp_path / "kv", b"fa") == [False]
    assert [key for key in "abc" if store.lookup(MediaKey(key))] == ["b"]


@pytest.mark.usefixtures("no_arenas")
def test_a_store_that_is_locked_or_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run("stats", "--store", str(tmp_path / "none"))
    assert isinstance(refused.exception, ConfigError)
    assert not (tmp_path / "none").exists()
    put(tmp_path / "kv", b"fa")
    monkeypatch.setattr(local_report, "_LOCK_WAIT_S", 0.01)
    lock = StoreLock(hot_root(tmp_path / "kv") / "lock")
    with lock.hold(1.0):
        done = run("clear", "--kv")
    lock.close()
    assert done.exit_code == 1
    assert "holds the lock" in done.output
    assert held(tmp_path / "kv", b"fa") == [True]


@pytest.mark.usefixtures("no_arenas")
def test_a_damaged_file_is_told_and_does_no_harm(tmp_path: Path) -> None:
    put(tmp_path / "kv", b"fa")
    (hot_root(tmp_path / "kv") / f"{7:020d}-00000000.seg").write_bytes(b"something else")
    done = run("stats")
    assert done.exit_code == 0
    assert "1 files that are damaged" in done.output
    (found,) = json.loads(run("stats", "--json").stdout)["kv_stores"]
    assert (found["num_records"], found["num_damaged_files"]) == (1, 1)
