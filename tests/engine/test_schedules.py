"""Random schedules: shared prefixes, aborts, tight pools, late messages. The answers are those of full recomputation,
every request ends once, and afterwards every page is free or evictable."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.types import Abort, ExpectKv, FinishReason, SamplingParams
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.engine.test_roles import Pair, make_pair
from tests.oracles.plain_generate import plain_generate

NUM_ANSWER = 6
LIGHT = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

Prompt = tuple[int, ...]
Oracle = Callable[[Prompt], list[int]]

# Few stems and few tails, so that prompts share prefixes of every kind and the oracle is asked about each only once.
STEMS = [[(5 * i * i + stem * 31 + i) % 120 for i in range(64)] for stem in range(2)]
prompts = st.builds(
    lambda stem, length, tail: (*STEMS[stem][:length], *((tail,) * tail)),
    st.integers(0, 1),
    st.sampled_from([1, 7, 20, 33, 48, 64]),
    st.integers(0, 3),
)


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> Oracle:
    @cache
    def answer(prompt: Prompt) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=NUM_ANSWER, ignore_eos=True)
        return tuple(plain_generate(checkpoint.model, prompt, sampling))

    return lambda prompt: list(answer(prompt))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("evict"), st.integers(1, 30)),
    ),
    min_size=5,
    max_size=30,
)


def check(
    bench_answers: dict[str, list[int]], finishes: dict[str, FinishReason], asked: dict[str, Prompt], oracle: Oracle
) -> None:
    assert set(finishes) == set(asked)
    for request_id, prompt in asked.items():
        truth, answer = oracle(prompt), bench_answers.get(request_id, [])
        if finishes[request_id] is FinishReason.LENGTH:
            assert answer == truth
        else:
            assert finishes[request_id] is FinishReason.CANCELLED
            assert answer == truth[: len(answer)]


@LIGHT
@given(actions, st.sampled_from([4, 24, 64]), st.sampled_from([360_000, 400_000, 4 << 20]), st.booleans())
def test_one_worker(
    make_bench: MakeBench,
    oracle: Oracle,
    script: list[tuple[str, int | Prompt]],
    chunk_tokens: int,
    kv_budget_bytes: int,
    prefix_cache: bool,
) -> None:
    bench: Bench = make_bench(
        chunk_tokens=chunk_tokens,
        kv_budget_bytes=kv_budget_bytes,
        max_running=6,
        expected_sequence_tokens=72,
        prefix_cache=prefix_cache,
    )
    asked: dict[str, Prompt] = {}
    for action, value in script:
        if isinstance(value, tuple):
            request_id = f"r{len(asked)}"
            asked[request_id] = value
            bench.submit(make_request(request_id, value, max_tokens=NUM_ANSWER, ignore_eos=True))
        elif action == "step":
            for _ in range(value):
                bench.step()
        elif action == "evict":
            # As other requests would; what was found before may now need healing.
            bench.engine.cache.device._ledger.evict_window(value)
        else:
            bench.mailbox.put(Abort(request_id=f"r{value}"))
    bench.run()
    check(bench.answers, {r: finish.reason for r, finish in bench.finishes.items()}, asked, oracle)
    bench.assert_nothing_leased()


@LIGHT
@given(
    actions,
    st.lists(st.sampled_from(["prefill", "decode", "expect"]), max_size=60),
    st.sampled_from([330_000, 4 << 20]),
)
def test_two_workers_in_any_order(
    make_bench: MakeBench,
    oracle: Oracle,
    script: list[tuple[str, int | Prompt]],
    order: list[str],
    kv_budget_bytes: int,
) -> None:
    pair: Pair = make_pair(make_bench, kv_budget_bytes=kv_budget_bytes, max_running=3, expected_sequence_tokens=72)
    asked: dict[str, Prompt] = {}
    late: list[ExpectKv] = []
    turns = iter(order)
    for action, value in script:
        if isinstance(value, tuple):
            request_id = f"r{len(asked)}"
            asked[request_id] = value
            request = make_request(request_id, value, max_tokens=NUM_ANSWER, ignore_eos=True)
            pair.submit(request, expect=False)
            late.append(ExpectKv(request=request))
        elif action == "step":
            for turn in (next(turns, "prefill") for _ in range(value)):
                if turn == "expect" and late:
                    pair.decode.mailbox.put(late.pop(0))
                (pair.decode if turn == "decode" else pair.prefill).step()
        elif action == "evict":
            for bench in (pair.prefill, pair.decode):
                bench.engine.cache.device._ledger.evict_window(value)
        elif value < len(asked):
            # A gateway announces before it aborts, and tells both.
            for expect in [e for e in late if e.request.request_id == f"r{value}"]:
                late.remove(expect)
                pair.decode.mailbox.put(expect)
            pair.prefill.mailbox.put(Abort(request_id=f"r{value}"))
            pair.decode.mailbox.put(Abort(request_id=f"r{value}"))
    for expect in late:
        pair.decode.mailbox.put(expect)
    pair.run()
    finishes = {request_id: pair.finish(request_id).reason for request_id in asked}
    check({request_id: pair.answer(request_id) for request_id in asked}, finishes, asked, oracle)
    assert pair.decode.engine.loop.num_expected == 0
    assert pair.decode.engine.loop.num_orphans == 0
    pair.assert_nothing_leased()
