"""The store's cases on little data: they run, measure what they say, and refuse what cannot be measured."""

import os
import shutil
from pathlib import Path

import pytest

from cli.bench_case import BenchFailed, Case, Setting
from cli.bench_kv_store import store_cases


class Silent:
    def begin(self, what: str, total: int) -> None: ...

    def advance(self, amount: int = 1) -> None: ...


def setting(tmp_path: Path) -> Setting:
    return Setting(cache_dir=tmp_path, num_threads=1, quick=True)


@pytest.mark.parametrize("case", store_cases(), ids=lambda case: case.name)
def test_everybody_reads_the_same_bytes(case: Case, tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    assert case.name in ("tiers.redis_get_256k", "tiers.local_get_256k")
    with case.open(setting(tmp_path), Silent()) as contest:
        assert contest.ours() > 0
        assert callable(contest.baseline)
        assert contest.baseline() > 0
        assert callable(contest.limit)
        assert 0 < contest.limit() < 1
        assert contest.findings is not None
        findings = contest.findings()
        assert set(findings.figures["best_mb_per_s"]) == {"ours", "one_by_one"}
        assert "one by one" in findings.lines[0]


def test_without_the_program_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with (
        pytest.raises(BenchFailed, match="apt-get install redis-server"),
        store_cases()[0].open(setting(tmp_path), Silent()),
    ):
        pass
