"""Workload files of `mimo bench kv`: what cannot be played is refused at once, by file, section, field and value."""

import math
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.bench_case import BenchFailed
from cli.bench_kv_bounds import Rising, Span
from cli.bench_kv_config import DIRECTORY, WORKLOADS, read_workload
from cli.bench_kv_hits import hit_cases
from cli.load import ConfigError


def edited(tmp_path: Path, old: str, new: str) -> tuple[str, Path]:
    """The first of the files that has `old`, with `new` instead."""
    for name in WORKLOADS:
        text = (DIRECTORY / f"{name}.toml").read_text()
        if old in text:
            (tmp_path / f"{name}.toml").write_text(text.replace(old, new, 1))
            return name, tmp_path
    raise AssertionError(old)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_sessions = 64", "number_sessions = 64", "'number_sessions' is unknown; allowed: seed, num_sessions"),
        ("[cache]", "[cash]", "section 'cash' is unknown; allowed: workload"),
        ("mean = 6.5, sd = 1.3", "mean = 6.5, deviation = 1", "tool_result 'deviation' is unknown; allowed: mean, sd"),
        ("seed = 20260\n", "", "workload has no 'seed'; needed: seed, num_sessions"),
        ("[cache]", "[cache", "is not TOML: Expected"),
        ("[cache]", "[[cache]]", "; allowed: a table"),
        ("pause = { share", "pause = 3 # {", "workload.pause is 3; allowed: a table"),
        ("seed = 20260", "seed = -1", "workload.seed is -1; allowed: a whole number from 0 to 4,294,967,296"),
        ("seed = 20260", "seed = true", "workload.seed is True; allowed: a whole number"),
        ("seed = 20260", f"seed = {'9' * 400}", "allowed: a whole number"),
        ("seed = 20260", f"seed = {'9' * 5000}", "is not TOML"),
        *(
            ("session_every_s = 30.0", f"session_every_s = {value}", f"session_every_s is {value}; allowed: a number")
            for value in ("inf", "-inf", "nan", "0", "-1.5")
        ),
        ("[4000, 30000]", "[0, 0]", "template_tokens is [0, 0]; allowed: a list of 2"),
        ("[4000, 30000]", "[30000, 4000]", "none smaller than the one before"),
        ("[20, 120]", "[-3, 2]", "steps is [-3, 2]; allowed: a list of 2"),
        ("[20, 120]", "[20]", "steps is [20]; allowed: a list of 2"),
        ("[20, 120]", "20", "steps is 20; allowed: a list of 2"),
        ("[20, 120]", "[20, 1.5]", "allowed: a list of 2"),
        ("mean = 6.5, sd = 1.3", "mean = 6.5, sd = -1", "tool_result.sd is -1; allowed: a number from 0 to 4"),
        ("mean = 6.5", "mean = 1e6", "tool_result.mean is 1000000.0; allowed: a number from -14 to 14"),
        ("exponent = 1.3", "exponent = 0", "context_limit.exponent is 0; allowed: a number from 0.01"),
        ("high = 1000000", "high = 400", "context_limit: high is 400; allowed: low, which is 40,000, or more"),
        ("page_size = 16", "page_size = 0", "cache.page_size is 0; allowed: a whole number from 1 to 1,024"),
        ("page_size = 16", "page_size = 1048576", "cache.page_size is 1048576; allowed"),
        ("retention_stride_tokens = 4096", "retention_stride_tokens = -1", "retention_stride_tokens is -1; allowed"),
        ("release_interval_tokens = 128", "release_interval_tokens = 0", "release_interval_tokens is 0; allowed"),
        ("at_chunk_ends = true", "at_chunk_ends = 1", "cache.at_chunk_ends is 1; allowed: true, false"),
        ("max_running = 32", "max_running = 0", "server.max_running is 0; allowed: a whole number from 1"),
        ("max_running = 32", "max_running = 100000000", "server.max_running is 100000000; allowed"),
        ("chunk_tokens = 2048", "chunk_tokens = 0.5", "server.chunk_tokens is 0.5; allowed: a whole number"),
        ("headline = 0.2", "headline = 1e-9", "budget.headline is 1e-09; allowed: a number from 0.01"),
        ("headline = 0.2", 'headline = "much"', "budget.headline is 'much'; allowed: a number"),
        ("sweep = [0.05, 0.1, 0.2, 0.4]", "sweep = [0.0001]", "budget.sweep is [0.0001]; allowed: a list of 1 to 16"),
        ("sweep = [0.05, 0.1, 0.2, 0.4]", "sweep = []", "budget.sweep is []; allowed"),
        ("branch_share = 0.05", "branch_share = 2.0", "branch_share is 2.0; allowed: a number from 0 to 1"),
        ("num_sessions = 64", "num_sessions = 0", "workload.num_sessions is 0; allowed"),
        ("num_sessions = 64", "num_sessions = 100000000000", "workload.num_sessions is 100000000000; allowed"),
        ("num_sessions = 64", "num_sessions = 10000", "num_sessions and steps make 1,200,000 requests; allowed"),
        ("num_sessions = 6\n", "num_sessions = 0\n", "quick.num_sessions is 0; allowed"),
        ("replayed_share = 0.1", "replayed_share = 0", "replayed_share is 0; allowed: a number above 0, up to 1"),
        ("replayed_share = 0.1", "replayed_share = 1e-9", "make 8e-06 sessions; allowed: at least 1"),
        ("span_s = 1022.0", "span_s = 1e6", "requests; allowed: up to 1,000,000"),
        ("more_turns = 0.16", "more_turns = 0", "workload.more_turns is 0; allowed"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(tmp_path: Path, old: str, new: str, words: str) -> None:
    name, directory = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as refused:
        read_workload(name, directory)
    assert words in str(refused.value)
    assert str(directory / f"{name}.toml") in str(refused.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.toml: No such file"):
        read_workload("agent", tmp_path)
    (tmp_path / "agent.toml").write_bytes(b"seed = \xff")
    with pytest.raises(ConfigError, match=r"agent\.toml is not TOML: 'utf-8' codec"):
        read_workload("agent", tmp_path)
    (tmp_path / "agent.toml").write_text("a = " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"agent\.toml is not TOML"):
        read_workload("agent", tmp_path)


def test_a_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    _, directory = edited(tmp_path, "seed = 20260", "seed = -1")
    for more in ((), ("--list",), ("--only", "agent_sweep"), ("--only", "bytes", "--only", "agent_hit_rate")):
        done = CliRunner().invoke(app, ["bench", "kv", "--workloads", str(directory), *more])
        assert isinstance(done.exception, ConfigError), "main turns it into exit code 2"
        assert "workload.seed is -1" in str(done.exception)
    # Files of other cases are nobody's business.
    done = CliRunner().invoke(app, ["bench", "kv", "--workloads", str(directory), "--list", "--only", "bytes"])
    assert done.exit_code == 0
    done = CliRunner().invoke(app, ["bench", "kv", "--workloads", str(tmp_path / "none"), "--list"])
    assert "--workloads" in str(done.exception)
    assert "no such directory" in str(done.exception)


def leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]


def written(table: dict[str, Any]) -> str:
    def word(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {word(inner)}" for key, inner in value.items()) + "}"
        return str(value).lower()

    return "\n".join(f"{section} = {word(table[section])}" for section in table)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_every_field_is_checked_and_what_passes_can_be_drawn(tmp_path: Path, name: str) -> None:
    """Each number in turn is set to values from none to a great many: refused by its name, or good for a trace."""
    text = (DIRECTORY / f"{name}.toml").read_text()
    shipped, num_drawn = tomllib.loads(text), 0
    for *parents, last in leaves(shipped):
        for value in (-1, 0, 0.5, 1, 1000, 1_000_000, math.nan, "'x'", [1, 1], [0.02, 9]):
            table = deepcopy(shipped)
            where = table
            for parent in parents:
                where = where[parent]
            where[last] = value
            (tmp_path / f"{name}.toml").write_text(written(table))
            try:
                file = read_workload(name, tmp_path)
            except ConfigError as refused:
                told = str(refused)
                assert last in told
            else:
                if parents[0] == "workload":
                    trace = file.workload.trace(1)
                    assert all(turn.num_kept >= 0 for session in trace.sessions for turn in session.turns)
                    num_drawn += 1
    assert num_drawn > 20


def test_bounds() -> None:
    assert Span(0, 1).holds(0)
    assert not Span(0, 1, above=True).holds(0)
    assert not Span(0, 1).holds(math.nan)
    assert Rising(Span(0, 1)).holds((0.5, 0.5, 1))
    assert not Rising(Span(0, 1)).holds((0.5, 0.2))
    assert not Rising(Span(0, 1), 2).holds((0.5,))
    assert not Rising(Span(0, 1)).holds(())


def test_a_workload_with_too_many_pages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cli.bench_case import Setting

    class Quiet:
        def begin(self, what: str, total: int) -> None: ...

        def advance(self, amount: int = 1) -> None: ...

    monkeypatch.setattr("cli.bench_kv_hits._MOST_PAGES", 1000)
    _, directory = edited(tmp_path, "page_size = 16", "page_size = 8")
    case = next(case for case in hit_cases(directory) if case.name == "kv.agent_hit_rate")
    setting = Setting(cache_dir=tmp_path, num_threads=1, quick=True)
    with pytest.raises(BenchFailed, match=r"allowed: up to 1,000"), case.open(setting, Quiet()):
        pass
