"""Engines with tiers of KV: what is refused at the start, and what is said then."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from epd.config import EngineConfig
from epd.engine.tiers import store_memory_bytes
from epd.kv.errors import PoolTooSmall
from epd.types import Role
from tests.engine.conftest import MakeBench
from tests.engine.tier_asks import (
    GIVEN_UP_S,
    HOST,
    PROMPT,
    ask,
)


@pytest.fixture
def store(kv_store_dir: Path) -> dict[str, object]:
    return {
        **HOST,
        "kv_store": f"local:{kv_store_dir}",
        "kv_store_memory_bytes": 4 << 20,
        "kv_store_disk_bytes": 16 << 20,
        "prefetch_timeout_s": GIVEN_UP_S,
    }


def test_both_tiers_are_told_of_at_the_start(
    make_bench: MakeBench, store: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        bench = make_bench(**store)
    [line] = [record.getMessage() for record in caplog.records if "host memory" in record.getMessage()]
    host = bench.engine.cache.host
    assert host is not None
    assert f"{host.full.num_pages} full pages" in line
    assert f"{host.window.num_pages} window pages" in line
    assert "; store local:/" in line
    assert "of 4,194,304 bytes in memory and 16,777,216 on disk" in line
    bench.engine.tiers.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"host_budget_bytes": 1000},
            r"engine\.host_budget_bytes is 1,000; allowed: 0 for no host tier, or [0-9,]+ and",
        ),
        (
            {"host_budget_bytes": 1 << 50},
            r"engine\.host_budget_bytes is 1,125,.* bytes cannot be had beside engine\.kv_b",
        ),
        (
            {"kv_store": "local:/proc/nowhere"},
            r"engine\.kv_store is 'local:/proc/nowhere': a local KV store needs a directory that can be written",
        ),
        (
            {"kv_store": "local", "kv_store_memory_bytes": 1 << 50},
            r"engine\.kv_store_memory_bytes is 1,125,.*; allowed: less than /dev/shm has, [0-9,]+ \(docker",
        ),
        ({"kv_store": "local", "kv_store_memory_bytes": 1000}, r"engine\.kv_store is 'local': .*1000 bytes of memory"),
    ],
)
def test_memory_and_places_that_cannot_be_had_are_refused_by_name(
    make_bench: MakeBench, changes: dict[str, object], words: str
) -> None:
    with pytest.raises((ValueError, PoolTooSmall), match=words):
        make_bench(**HOST | changes)


@pytest.mark.parametrize(("num_blocks", "expected"), [(16 << 10, 16 << 20), (1 << 20, 128 << 20)])
def test_unless_set_a_store_takes_what_little_shared_memory_there_is_into_account(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, expected: int
) -> None:
    found = os.statvfs_result((4096, 4096, num_blocks, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    config = EngineConfig(model_dir=Path(), model_name="", role=Role.BOTH, kv_store="local", host_budget_bytes=1)
    assert store_memory_bytes(config) == expected
    assert store_memory_bytes(replace(config, kv_store="")) == 0


def test_without_a_cache_there_are_no_tiers(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        bench = make_bench(**HOST, kv_store="local", prefix_cache=False)
    assert "engine.prefix_cache is off" in caplog.text
    assert bench.engine.cache.host is None
    assert ask(bench, "a", PROMPT).cached_tokens == ask(bench, "b", PROMPT).cached_tokens == 0
