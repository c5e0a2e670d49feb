"""`mimo bench kv`: the replay finds what a search token by token finds, workloads look like what they stand for, and
faults are refused."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.bench_case import BenchFailed
from cli.bench_kv import kv_cases
from cli.bench_kv_bytes import bytes_per_token
from cli.bench_kv_config import DIRECTORY, WORKLOADS, read_workload
from cli.bench_kv_contest import CONTENDERS, Arena, Geometry
from cli.bench_kv_sim import Replay, ServerTimes
from cli.bench_kv_trace import Request, Run, Session, Trace, Turn, contexts, written
from cli.bench_kv_workloads import ConversationWorkload, SyntheticWorkload
from cli.load import ConfigError
from epd import DualPool, PrefixCache, RetentionPolicy, make_policy

PAGE_SIZE = 16
PRO, V25 = "mimo-v2.5-pro", "mimo-v2.5"
TIMES = ServerTimes(chunk_tokens=64, max_running=4, decode_stride_tokens=32)


def tokens(context: tuple[Run, ...]) -> list[tuple[int, int]]:
    return [(run.content, run.start + offset) for run in context for offset in range(run.length)]


def small(name: str, *, most_answer: int = 50, at_once: bool = False) -> Trace:
    """A few sessions of a real workload, cut down to lengths that can be compared token by token.

    `at_once`: all start together, and nobody pauses.
    """
    sessions = []
    for session in read_workload(name).workload.trace(5).sessions:
        turns: list[Turn] = []
        length = 0
        for turn in session.turns[:12]:
            added = tuple(replace(run, length=1 + run.length % 300) for run in turn.added)
            kept = min(turn.num_kept, length)
            answer = replace(turn.answer, length=1 + turn.answer.length % most_answer)
            turns.append(Turn(0.0 if at_once else turn.pause_s, kept, added, answer))
            length = kept + sum(run.length for run in added) + answer.length
        sessions.append(Session(0.0 if at_once else session.start_s, tuple(turns)))
    return Trace(name, tuple(sessions))


def arena(trace: Trace, name: str = "agent", *, max_running: int = 32, model: str = PRO) -> Arena:
    file = read_workload(name)
    return Arena(
        replace(file, server=replace(file.server, max_running=max_running)), trace, Geometry.of(model, PAGE_SIZE)
    )


# Keys


def test_page_keys_are_equal_exactly_where_tokens_are() -> None:
    for name in WORKLOADS:
        seen: dict[bytes, tuple[tuple[int, int], ...]] = {}
        for session in small(name).sessions:
            for request, context in zip(written(session, page_size=PAGE_SIZE), contexts(session), strict=True):
                ids = tokens(context)
                assert len(ids) == request.num_prompt_tokens + request.num_answer_tokens
                assert len(request.keys) == len(ids) // PAGE_SIZE
                for page, key in enumerate(request.keys):
                    prefix = tuple(ids[: (page + 1) * PAGE_SIZE])
                    assert seen.setdefault(key, prefix) == prefix
        assert len(set(seen.values())) == len(seen)


def test_a_run_that_goes_on_makes_the_same_keys_as_one_run() -> None:
    answer = Run(9, 0, 5)
    whole = Session(0.0, (Turn(0.0, 0, (Run(1, 0, 100),), answer),))
    pieces = Session(0.0, (Turn(0.0, 0, (Run(1, 0, 37), Run(1, 37, 63)), answer),))
    other = Session(0.0, (Turn(0.0, 0, (Run(1, 0, 37), Run(1, 38, 63)), answer),))
    keys = [written(session, page_size=PAGE_SIZE)[0].keys for session in (whole, pieces, other)]
    assert keys[0] == keys[1]
    assert keys[2][:2] == keys[0][:2]
    assert not set(keys[2][2:]) & set(keys[0])


def test_a_turn_cannot_keep_what_is_not_there() -> None:
    answer = Run(2, 0, 5)
    with pytest.raises(ValueError, match="keeps 106 tokens of 105"):
        contexts(Session(0.0, (Turn(0.0, 0, (Run(1, 0, 100),), answer), Turn(0.0, 106, (), answer))))


# The replay


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_an_infinite_cache_finds_the_longest_common_prefix(name: str) -> None:
    """One request at a time, against every sequence that was computed before, token by token."""
    ring = arena(small(name), name, max_running=1)
    order: list[tuple[int, int]] = []

    class Watched(PrefixCache):
        def begin(self, keys, num_tokens, **how):  # type: ignore[no-untyped-def]
            order.append(next(at for at, request in requests.items() if request.keys is keys))
            return super().begin(keys, num_tokens, **how)

    requests = {(s, t): request for s, (_, turns) in enumerate(ring.sessions) for t, request in enumerate(turns)}
    ids = {
        (s, t): tokens(context)
        for s, session in enumerate(ring.trace.sessions)
        for t, context in enumerate(contexts(session))
    }
    plain = ring.cache(CONTENDERS["infinite"], 1.0)
    cache = Watched(
        DualPool(num_full_pages=plain.stats().full.total, num_window_pages=0),
        page_size=PAGE_SIZE,
        window_tokens=0,
        retention=RetentionPolicy(),
    )
    tally = Replay(cache, ring.file.server, heal_cost=None).run(ring.sessions, lambda _: None)
    cache.check()

    num_hit, log = 0, list[list[tuple[int, int]]]()
    for at in order:
        prompt = ids[at][: requests[at].num_prompt_tokens]
        shared = max((common(prompt[:-1], before) for before in log), default=0)
        num_hit += shared // PAGE_SIZE * PAGE_SIZE
        # The last token of an answer is never computed.
        log.append(ids[at][:-1])
    assert len(order) == len(requests) == tally.requests
    assert num_hit > 0
    assert tally.computed == tally.prompt - num_hit
    assert tally.hit_rate == pytest.approx(num_hit / tally.prompt)


def common(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("who", [who for who, contender in CONTENDERS.items() if not contender.is_infinite])
def test_every_contender_ends_with_its_books_in_order(who: str) -> None:
    """Pools so small that requests wait, are put back, lose pages; and nothing is left of any of them."""
    ring = arena(small("agent", most_answer=200, at_once=True))
    contender = CONTENDERS[who]
    num_full = 2 + max(len(request.keys) for _, requests in ring.sessions for request in requests)
    window_tokens = 0 if contender.single_pool else 127
    cache = PrefixCache(
        DualPool(num_full_pages=num_full, num_window_pages=0 if contender.single_pool else 60),
        page_size=PAGE_SIZE,
        window_tokens=window_tokens,
        retention=RetentionPolicy(),
        policy=make_policy(
            contender.eviction, window_pages=8, tail_pages=1, page_size=PAGE_SIZE, num_window_pages=60, heal_tokens=4953
        ),
    )
    ended: list[int] = []
    times = replace(TIMES, decode_tokens_per_s=5.0)
    replay = Replay(cache, times, heal_cost=ring.geometry.heal_cost if contender.heals else None)
    tally = replay.run(ring.sessions, ended.append)
    cache.check()
    assert cache.stats().num_sequences == 0
    assert sum(ended) == tally.requests == ring.num_requests
    assert tally.computed >= tally.prompt - tally.full_only
    assert tally.num_retractions > 0
    assert tally.peak_cached <= num_full * PAGE_SIZE


def one(pause_s: float, kept: int, added: Run, answer: int) -> Turn:
    return Turn(pause_s, kept, (added,), Run(1000 + answer, 0, 2))


def test_a_window_that_is_lost_is_healed_and_counted() -> None:
    """A long context whose windows another's crowd out: healing runs its reach again, not the whole context."""
    geometry = Geometry.of(V25, PAGE_SIZE)
    length, later = 20_000, 40
    again = Session(0.0, (one(0.0, 0, Run(1, 0, length), 1), one(2000.0, length + 2, Run(2, 0, later), 2)))
    between = Session(1000.0, (one(0.0, 0, Run(3, 0, 6000), 3),))
    sessions = [(session.start_s, written(session, page_size=PAGE_SIZE)) for session in (again, between)]
    tallies = []
    for heal_cost in (geometry.heal_cost, None):
        cache = PrefixCache(
            DualPool(num_full_pages=2000, num_window_pages=60),
            page_size=PAGE_SIZE,
            window_tokens=127,
            retention=RetentionPolicy(),
            policy=make_policy(
                "lru", window_pages=8, tail_pages=1, page_size=PAGE_SIZE, num_window_pages=60, heal_tokens=0
            ),
        )
        tallies.append(Replay(cache, TIMES, heal_cost=heal_cost).run(sessions, lambda _: None))
        cache.check()
    healed, computed = tallies
    new = length + 6000 + later + 2 + PAGE_SIZE
    assert healed.num_healings == 1
    assert 0 < healed.heal_work < healed.healed <= geometry.heal_tokens + 2 * PAGE_SIZE
    assert new - 2 * PAGE_SIZE <= healed.computed - healed.healed <= new
    assert computed.computed > healed.computed
    assert computed.healed == 0
    assert healed.full_only == computed.full_only == length // PAGE_SIZE * PAGE_SIZE
    assert healed.hit_rate == pytest.approx(1 - healed.computed / healed.prompt)
    assert healed.hit_rate < healed.work_rate < healed.reach_rate


def test_a_context_longer_than_the_pools_is_refused_and_counts_as_computed() -> None:
    sessions = [(0.0, written(Session(0.0, (one(0.0, 0, Run(1, 0, 2000), 1),)), page_size=PAGE_SIZE))]
    cache = PrefixCache(
        DualPool(num_full_pages=100, num_window_pages=100),
        page_size=PAGE_SIZE,
        window_tokens=127,
        retention=RetentionPolicy(),
    )
    tally = Replay(cache, TIMES, heal_cost=None).run(sessions, lambda _: None)
    assert (tally.num_refused, tally.computed, tally.hit_rate) == (1, 2000, 0.0)


def test_the_same_workload_gives_the_same_figures() -> None:
    tallies = [arena(small("agent")).tally("ours", 1.5) for _ in range(2)]
    assert tallies[0] == tallies[1]


# Workloads


def test_agents_have_the_lengths_and_habits_they_are_meant_to_have() -> None:
    found = read_workload("agent").workload.trace().statistics()
    assert found["prompts_0k_64k_share"] == pytest.approx(0.90, abs=0.06)
    assert found["prompts_64k_256k_share"] == pytest.approx(0.08, abs=0.06)
    assert found["prompts_256k_1024k_share"] == pytest.approx(0.02, abs=0.02)
    assert 20 <= found["turns_mean"] <= 120
    assert found["turns_max"] <= 120
    assert found["kept_share"] == pytest.approx(0.94, abs=0.02)
    assert found["answer_ln_mean"] == pytest.approx(4.6, abs=0.05)
    # Of pauses that are 70 % a tool's and 30 % a person's.
    assert 2.5 <= found["pause_s_p50"] <= 8


def test_conversations_have_the_statistics_of_the_trace_they_stand_for() -> None:
    workload = read_workload("conversation").workload
    assert isinstance(workload, ConversationWorkload)
    found = workload.trace(share=1.0).statistics()
    assert found["requests"] == pytest.approx(12_031, rel=0.06)
    assert found["sessions"] == pytest.approx(7_997, rel=0.05)
    assert found["prompt_mean"] == pytest.approx(12_035, rel=0.15)
    assert found["prompt_p50"] == pytest.approx(6_909, rel=0.1)
    assert found["prompt_p90"] == pytest.approx(27_367, rel=0.25)
    assert found["prompt_p99"] == pytest.approx(85_401, rel=0.25)
    assert found["prompt_max"] <= 126_195
    assert found["prompt_ln_mean"] == pytest.approx(8.74, abs=0.1)
    assert found["prompt_ln_sd"] == pytest.approx(1.20, abs=0.1)
    assert found["answer_ln_mean"] == pytest.approx(5.34, abs=0.1)
    assert found["turns_mean"] == pytest.approx(1.50, abs=0.05)
    assert found["turns_p90"] == 3
    assert found["several_turns_share"] == pytest.approx(0.26, abs=0.02)
    assert found["pause_s_p50"] == pytest.approx(123, rel=0.15)
    assert found["sessions_fano_per_minute"] == pytest.approx(3.0, abs=1.0)
    assert found["kept_share"] == pytest.approx(0.366, abs=0.03)


def test_documents_have_the_statistics_of_the_trace_they_stand_for() -> None:
    workload = read_workload("synthetic").workload
    assert isinstance(workload, SyntheticWorkload)
    found = workload.trace(share=1.0).statistics()
    assert found["requests"] == pytest.approx(3_993, rel=0.06)
    assert found["sessions"] == pytest.approx(2_395, rel=0.06)
    assert found["prompt_mean"] == pytest.approx(15_325, rel=0.1)
    assert found["prompt_p10"] == pytest.approx(30, rel=0.5)
    assert found["prompt_p50"] == pytest.approx(11_587, rel=0.15)
    assert found["prompt_p90"] == pytest.approx(38_615, rel=0.15)
    assert found["prompt_p99"] == pytest.approx(66_458, rel=0.25)
    assert found["prompt_ln_mean"] == pytest.approx(7.98, abs=0.2)
    assert found["prompt_ln_sd"] == pytest.approx(2.70, abs=0.2)
    assert found["answer_ln_mean"] == pytest.approx(3.92, abs=0.1)
    assert found["turns_mean"] == pytest.approx(1.67, abs=0.1)
    assert found["turns_max"] <= 24
    assert found["several_turns_share"] == pytest.approx(0.16, abs=0.02)
    assert found["sessions_fano_per_minute"] < 3
    # Together with documents that several sessions ask about: 0.64 of the tokens were seen before.
    assert found["kept_share"] == pytest.approx(0.60, abs=0.06)


# Bytes


@pytest.mark.parametrize(("model", "ratio"), [(PRO, 7.0), (V25, 29 / 3)])
def test_a_long_sequence_holds_what_the_geometry_says(model: str, ratio: float) -> None:
    geometry = Geometry.of(model, PAGE_SIZE)
    layout = geometry.layout
    assert geometry.single_bytes_per_token / layout.full_bytes_per_token == pytest.approx(ratio)
    held = bytes_per_token(geometry, 100_000)
    least = layout.full_bytes_per_token + layout.window_bytes_per_token * layout.window_tokens / 100_000
    assert least <= held <= 1.02 * least


# The command


def test_names_of_the_contract_are_there() -> None:
    names = {case.name for case in kv_cases()}
    assert {
        "kv.bytes_per_token_pro",
        "kv.bytes_per_token_v25",
        "kv.agent_hit_rate",
        "kv.agent_hit_rate_no_heal",
        "kv.conversation_hit_rate",
        "kv.synthetic_hit_rate",
        "kv.ttft_warm_8k",
    } <= names
    assert {"kv.prefill_4k", "kv.decode_b1", "kv.decode_b8"} <= names


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_quick_has_room_for_every_contender(name: str) -> None:
    """Whatever `--quick` plays: pools above the least that its server needs, and a share of requests that they hold."""
    file = read_workload(name).as_played(quick=True)
    ring = Arena(file, file.trace(quick=True), Geometry.of(PRO, file.cache.page_size))
    for who, contender in CONTENDERS.items():
        for share in (file.budget.headline, *file.budget.sweep):
            if not contender.is_infinite:
                num_full, num_window = ring.num_pages(who, share)
                assert (num_window == 0) == contender.single_pool
                lengths = [len(request.keys) for _, requests in ring.sessions for request in requests]
                # A single pool of few bytes is what cannot hold many.
                assert contender.single_pool or sum(length < num_full for length in lengths) > 0.9 * len(lengths)


def test_pools_too_small_for_the_server_are_told_by_file_and_share() -> None:
    ring = arena(small("agent"), max_running=4096)
    with pytest.raises(BenchFailed, match=r"0\.05 of the working set of agent\.toml is too little: KV budget of"):
        ring.tally("ours", 0.05)


def test_a_transformers_that_does_not_load_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "transformers"
    broken.mkdir()
    (broken / "__init__.py").write_text("from torch import no_such_name\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MIMO_CACHE_DIR", str(tmp_path / "cache"))
    args = ["bench", "kv", "--quick", "--threads", "1", "--only", "decode_b1", "--only", "bytes_per_token_pro"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 1
    assert "kv.decode_b1: transformers is there and does not load (cannot import name 'no_such_name'" in done.stderr
    assert "bytes_per_token_pro" in done.stdout


def test_without_transformers_its_cases_are_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.bench_choice.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["bench", "kv", "--only", "decode_b1"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("kv.decode_b1: not installed, but needed: transformers; pip install")
    assert done.output == ""


def test_bench_on_a_tiny_workload(tmp_path: Path) -> None:
    workloads, found = tmp_path / "workloads", tmp_path / "kv.json"
    shutil.copytree(DIRECTORY, workloads)
    text = (DIRECTORY / "agent.toml").read_text()
    tiny = text.replace("[quick]\nnum_sessions = 6", "[quick]\nnum_sessions = 3").replace("[20, 120]", "[5, 9]")
    (workloads / "agent.toml").write_text(tiny.replace("sweep = [0.1, 0.4]", "sweep = [0.2, 0.4]"))
    options = ["--only", "agent_hit_rate", "--only", "agent_sweep", "--only", "bytes_per_token"]
    plot = ["--plot", str(tmp_path / "kv.png")]
    args = ["bench", "kv", "--quick", "--workloads", str(workloads), *options, "--json", str(found), *plot]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    results = {result["name"]: result for result in json.loads(found.read_text())["results"]}
    assert list(results) == ["kv.bytes_per_token_pro", "kv.bytes_per_token_v25", "kv.agent_hit_rate", "kv.agent_sweep"]
    figures = results["kv.agent_hit_rate"]["figures"]
    assert set(figures["contenders"]) == set(CONTENDERS)
    assert figures["workload"]["sessions"] == 3
    assert results["kv.agent_hit_rate"]["baseline"] == figures["contenders"]["infinite"]["hit_rate"]
    for who, contender in figures["contenders"].items():
        assert 0 <= contender["hit_rate"] <= figures["contenders"]["infinite"]["hit_rate"] + 1e-9, who
    assert (tmp_path / "kv.png").read_bytes().startswith(b"\x89PNG")
    assert "ours" in done.output


def test_requests_of_the_arena_are_those_of_the_trace() -> None:
    ring = arena(small("agent"))
    flat: list[Request] = [request for _, requests in ring.sessions for request in requests]
    assert len(flat) == ring.num_requests == sum(len(session.turns) for session in ring.trace.sessions)
    longest = max(len(request.keys) for request in flat)
    assert longest * PAGE_SIZE <= ring.working_set_tokens <= sum(len(request.keys) for request in flat) * PAGE_SIZE
