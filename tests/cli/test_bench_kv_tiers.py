"""`mimo bench kv --tiers`: the replay on the tiered cache, engines whose KV is where a case says, the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.bench_case import BenchFailed, Setting
from cli.bench_kv import tier_cases
from cli.bench_kv_config import read_workload
from cli.bench_kv_contest import Arena, Geometry
from cli.bench_kv_sim import Replay, ServerTimes
from cli.bench_kv_tiers_engine import PAGE_SIZE, Prompts, TierEngine, long_model
from cli.bench_kv_tiers_hits import Stage
from cli.bench_kv_trace import Request, Run, Session, Trace, Turn, written
from cli.load import BUILTIN_MODELS, ConfigError
from epd import (
    DualPool,
    HostTier,
    InstantMover,
    PrefixCache,
    RetentionPolicy,
    TieredCache,
    local_store_reports,
    remove_local_store,
)

PRO = "mimo-v2.5-pro"
TIMES = ServerTimes(chunk_tokens=64, max_running=4, decode_stride_tokens=32)


def turns(content: int, *lengths: int, pause_s: float) -> tuple[Turn, ...]:
    """A session's requests: each keeps all that was said and adds so many tokens, and is answered with two."""
    found: list[Turn] = []
    kept = 0
    for index, length in enumerate(lengths):
        added = Run(content, kept, length)
        found.append(Turn(pause_s if index else 0.0, kept, (added,), Run(1000 * content + index, 0, 2)))
        kept += length + 2
    return tuple(found)


def sessions(*those: tuple[Turn, ...]) -> list[tuple[float, list[Request]]]:
    return [(5.0 * at, written(Session(0.0, each), page_size=PAGE_SIZE)) for at, each in enumerate(those)]


def cache(num_full: int, *, host: tuple[int, int] | None) -> TieredCache:
    device = PrefixCache(
        DualPool(num_full_pages=num_full, num_window_pages=64),
        page_size=PAGE_SIZE,
        window_tokens=127,
        retention=RetentionPolicy(),
    )
    if host is None:
        return TieredCache(device)
    tier = HostTier(num_full_pages=host[0], num_window_pages=host[1])
    return TieredCache(device, host=tier, mover=InstantMover())


def test_what_the_device_loses_comes_back_from_the_host() -> None:
    """Four sessions in turns, and room for one on the device: with a host nothing is computed twice."""
    workload = sessions(*(turns(content, 1000, 100, 100, pause_s=100.0) for content in range(1, 5)))
    tallies = []
    for host in (None, (1000, 500)):
        tiers = cache(90, host=host)
        tallies.append(Replay(tiers, TIMES, heal_cost=None).run(workload, lambda _: None))
        tiers.check()
        assert tiers.stats().num_sequences == 0
    alone, behind = tallies
    infinite = 1 - 4 * 1200 / alone.prompt
    assert alone.hit_rate < 0.1
    assert alone.host == 0
    assert behind.host > 0
    assert infinite - 0.02 < behind.hit_rate < infinite + 0.005


def test_a_host_too_small_for_all_of_it_is_between_the_two() -> None:
    workload = sessions(*(turns(content, 1000, 100, 100, 100, pause_s=100.0 * content) for content in range(1, 5)))
    rates = []
    for host in (None, (120, 60), (1000, 500)):
        tiers = cache(90, host=host)
        rates.append(Replay(tiers, TIMES, heal_cost=None).run(workload, lambda _: None).hit_rate)
        tiers.check()
    assert rates[0] <= rates[1] <= rates[2]
    assert rates[0] < rates[2]


def test_books_balance_where_requests_wait_for_pages_and_heal() -> None:
    geometry = Geometry.of("mimo-v2.5", PAGE_SIZE)
    workload = sessions(*(turns(content, 700, 300, 300, 300, pause_s=8.0) for content in range(1, 9)))
    tiers = cache(110, host=(300, 40))
    ended: list[int] = []
    times = replace(TIMES, decode_tokens_per_s=5.0)
    tally = Replay(tiers, times, heal_cost=geometry.heal_cost).run(workload, ended.append)
    tiers.check()
    assert sum(ended) == tally.requests == 32
    assert tally.host > 0
    assert tally.evicted_full_pages > 0
    assert 0 < tally.hit_rate < 1


def arena(num_sessions: int = 3) -> Arena:
    file = read_workload("agent")
    found = []
    for index, session in enumerate(file.workload.trace(num_sessions).sessions):
        short: list[Turn] = []
        length = 0
        for turn in session.turns[: 4 + 2 * index]:
            kept, added = min(turn.num_kept, length), tuple(replace(run, length=500) for run in turn.added)
            short.append(Turn(turn.pause_s, kept, added, replace(turn.answer, length=20)))
            length = kept + 500 * len(added) + 20
        found.append(Session(session.start_s, tuple(short)))
    server = replace(file.server, max_running=2, chunk_tokens=64)
    return Arena(replace(file, server=server), Trace("agent", tuple(found)), Geometry.of(PRO, PAGE_SIZE))


def test_contexts_longer_than_the_device_are_left_out_of_both_sides() -> None:
    ring = arena()
    whole = Stage(ring, 4.0)
    assert len(whole.sessions) == 3
    assert "left out" not in whole.in_words()
    # A share at which pages are between the shortest and the longest of the sessions.
    pages = sorted(max(len(request.keys) for request in requests) for _, requests in ring.sessions)
    shares = [percent / 100 for percent in range(400, 0, -1)]
    share = next(
        share for share in shares if ring.plan(int(share * ring.dual_working_set_bytes)).num_full_pages < pages[-1]
    )
    part = Stage(ring, share)
    assert 1 <= len(part.sessions) < 3
    assert "left out" in part.in_words()
    for host_share in (None, 0.0):
        part.play(host_share, lambda _: None)
    assert part.tallies[None].requests == part.tallies[0.0].requests == part.num_requests


def test_a_device_for_no_session_at_all_is_refused() -> None:
    with pytest.raises(BenchFailed, match=r"too little|no session's contexts fit"):
        Stage(arena(), 0.01)


# Engines


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model(tmp_path_factory.mktemp("model"), 40_000)


def test_a_longer_mimo_nano_is_a_config_and_links(model_dir: Path) -> None:
    source = BUILTIN_MODELS["mimo-nano"]
    made, kept = (json.loads((folder / "config.json").read_text()) for folder in (model_dir, source))
    assert made.pop("max_position_embeddings") == 40_000
    assert kept.pop("max_position_embeddings") < 40_000
    assert made == kept
    assert (model_dir / "model.safetensors").samefile(source / "model.safetensors")
    assert {path.name for path in model_dir.iterdir()} == {path.name for path in source.iterdir()}


def test_kv_is_where_a_case_says(model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One engine, one prompt: in each tier in turn, and in an engine after it; and a state that is not is refused."""
    setting = Setting(cache_dir=tmp_path, num_threads=1, quick=True)
    request.addfinalizer(lambda: remove_local_store(tmp_path / "store"))
    prompts = Prompts(300)
    engine = TierEngine(model_dir, setting, num_tokens=300, host=True, store=tmp_path / "store")
    prompt = prompts.take()
    assert engine.ask(prompt, "cold").ttft_s > 0
    for state in ("L1", "L2", "L3", "L1"):
        engine.move_to(state)
        engine.ask(prompt, state)
    with pytest.raises(BenchFailed, match=r"of 300 tokens that were to be found as L2, 288 were cached, 0 of them"):
        engine.ask(prompt, "L2")
    engine.settle()
    engine.close()
    again = TierEngine(model_dir, setting, num_tokens=300, host=True, store=tmp_path / "store")
    again.ask(prompt, "L3")
    again.close()


def test_windows_alone_can_be_taken_away(model_dir: Path, tmp_path: Path) -> None:
    setting = Setting(cache_dir=tmp_path, num_threads=1, quick=True)
    engine = TierEngine(model_dir, setting, num_tokens=700, host=False, store=None)
    prompt = Prompts(700).take()
    engine.ask(prompt)
    engine.move_to("heal")
    assert 0 < engine.ask(prompt, "heal").usage.healed_tokens < 700
    engine.ask(prompt, "L1")
    engine.close()


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kv", "--tiers", *arguments])


def test_names_of_the_contract_are_there() -> None:
    names = {case.name for case in tier_cases()}
    assert {f"tiers.ttft_{tier}_{length}" for tier in ("l2", "l3", "heal") for length in ("1k", "8k", "32k")} <= names
    assert {"tiers.restart_8k", "tiers.agent_hit_rate_10pct", "tiers.agent_hit_rate_5pct"} <= names


def bench_stores() -> set[str]:
    return {report.directory for report in local_store_reports([]) if "mimo-bench-kv-" in report.directory}


def test_the_command_measures_and_draws(tmp_path: Path) -> None:
    target, plot, before = tmp_path / "tiers.json", tmp_path / "tiers.png", bench_stores()
    only = [word for name in ("ttft_l2_1k", "tiers.restart_8k") for word in ("--only", name)]
    done = run("--quick", "--runs", "1", "--threads", "1", *only, "--json", str(target), "--plot", str(plot))
    assert done.exit_code == 0, done.output
    found = {each["name"]: each for each in json.loads(target.read_text())["results"]}
    assert set(found) == {"tiers.ttft_l2_1k", "tiers.restart_8k"}
    l2 = found["tiers.ttft_l2_1k"]
    assert l2["unit"] == "s"
    assert l2["ratio"] == pytest.approx(l2["baseline"] / l2["ours"], rel=1e-3)
    assert set(l2["figures"]["ttft_ms"]) == {"L1", "L2"}
    assert found["tiers.restart_8k"]["figures"]["least_hit_share"] > 0.9
    assert bench_stores() <= before, "memory of a store outlives its bench"
    assert plot.stat().st_size > 10_000


def test_a_wrong_name_lists_those_of_the_tiers() -> None:
    done = run("--only", "agent_hit_rate_v25")
    assert isinstance(done.exception, ConfigError)
    assert "tiers.ttft_l3_8k" in str(done.exception)
    assert "kv." not in str(done.exception)
