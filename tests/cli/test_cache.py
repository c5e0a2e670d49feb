"""`mimo cache` on a host with and without arenas, without processes."""

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cli.cache
from cli.app import app
from cli.load import ConfigError
from encoder import embedding_arena
from encoder.cache import report
from encoder.cache.arena import INDEX_SUFFIX, SHM_DIR
from encoder.cache.index import RowFormat
from encoder.cache.store import EmbeddingStore
from encoder.config import EncoderConfig
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


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["cache", *arguments])


def test_stats_for_people(store: EmbeddingStore) -> None:
    done = run("stats")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[0].startswith(f"{store.arena} made by pid")
    assert "leased 0.0 MiB 6% in use by a request" in lines
    assert "3 embeddings with rows of 16 float32, 1 leases; last used 0 s ago, the oldest 0 s ago" in lines
    assert "3 found, 1 computed (75% found)" in lines
    assert sum("encoder pid" in line for line in lines) == 1


@pytest.mark.parametrize("arguments", [lambda store: (), lambda store: (store.arena,)], ids=["all", "by name"])
def test_stats_as_json_and_after_a_clear(
    store: EmbeddingStore, arguments: Callable[[EmbeddingStore], tuple[str, ...]]
) -> None:
    (before,) = json.loads(run("stats", "--json").stdout)
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
    (after,) = json.loads(run("stats", "--json").stdout)
    assert (after["num_entries"], after["usage"]["free_bytes"]) == (1, 65536 - 4096)
    assert [key for key in "abc" if store.lookup(MediaKey(key))] == ["b"]


@pytest.mark.parametrize("arguments", [["stats"], ["stats", "--json"], ["clear"]])
def test_where_none_runs_it_says_so(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(report, "SHM_DIR", OnlyThese())
    done = run(*arguments)
    assert done.exit_code == 1
    assert "no encoder runs on this host" in done.output


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
    assert cli.cache._span(seconds) == words
