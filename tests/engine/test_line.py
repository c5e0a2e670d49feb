"""Requests that wait for embeddings: they block nobody, hold no pages, end like any other and leave nothing behind."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoder.types import EmbeddingRef
from epd.model.embed import EmbeddingSpan
from epd.types import Abort, FinishReason, GenerateRequest, MediaSpan, SamplingParams
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.oracles.plain_generate import plain_generate

WIDTH = 64
PAD = 126
NUM_ANSWER = 5
TEXT = [(5 * i * i + i) % 120 for i in range(40)]


def truth(
    checkpoint: Checkpoint, token_ids: Sequence[int], spans: Sequence[EmbeddingSpan] = (), max_tokens: int = NUM_ANSWER
) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return plain_generate(checkpoint.model, token_ids, sampling, spans)


class Prompt:
    """Text and media by turns: a number is so many tokens of text, a pair is a medium and which of its rows."""

    def __init__(self, bench: Bench, *parts: int | tuple[str, int, int]) -> None:
        self.token_ids: list[int] = []
        self.spans: list[MediaSpan] = []
        self.placed: list[EmbeddingSpan] = []
        self.refs: dict[str, EmbeddingRef] = {}
        for part in parts:
            start = len(self.token_ids)
            if isinstance(part, int):
                self.token_ids += TEXT[:part]
                continue
            name, first, stop = part
            if name not in self.refs:
                self.refs[name] = bench.rows.put(name, 24, WIDTH, seed=sum(name.encode()))
            self.token_ids += [PAD] * (stop - first)
            span = MediaSpan(
                start=start,
                stop=len(self.token_ids),
                key=self.refs[name].key,
                row_start=first,
                media=list(self.refs).index(name),
            )
            self.spans.append(span)
            self.placed.append(EmbeddingSpan(span.start, span.stop, bench.rows.rows[name][first:stop]))

    def request(self, request_id: str, *, max_tokens: int = NUM_ANSWER, **changes: object) -> GenerateRequest:
        return make_request(
            request_id,
            self.token_ids,
            max_tokens=max_tokens,
            ignore_eos=True,
            spans=tuple(self.spans),
            embeddings=tuple(self.refs.values()),
            **changes,  # type: ignore[arg-type]
        )


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    bench = make_bench(chunk_tokens=16)
    bench.rows.is_slow = True
    return bench


def test_who_waits_for_rows_holds_no_pages_and_blocks_nobody(checkpoint: Checkpoint, bench: Bench) -> None:
    prompt = Prompt(bench, 4, ("x", 0, 20), 6)
    bench.submit(prompt.request("media"))
    bench.step()
    assert bench.rows.fetched == ["x"], "asked for as soon as it is in line"
    assert bench.engine.cache.stats().full.leased == 0
    bench.submit(make_request("text", TEXT, max_tokens=NUM_ANSWER, ignore_eos=True))
    while "text" not in bench.finishes:
        bench.step()
    assert bench.answers["text"] == truth(checkpoint, TEXT)
    assert "media" not in bench.answers
    assert bench.engine.loop.step() > 0.1, "nothing to do but wait: the loop may sleep until rows wake it"
    bench.rows.arrive()
    bench.run()
    assert bench.answers["media"] == truth(checkpoint, prompt.token_ids, prompt.placed)
    bench.assert_nothing_leased()


def test_a_loss_ends_the_attempt_at_once(bench: Bench) -> None:
    prompt = Prompt(bench, 4, ("x", 0, 20), ("y", 0, 5), 6)
    bench.submit(prompt.request("a"))
    bench.step()
    del bench.rows.rows["y"]
    bench.rows.arrive()
    bench.step()
    finish = bench.finishes["a"]
    assert (finish.code, finish.status, finish.retryable) == ("embedding_lost", 503, True)
    bench.assert_nothing_leased()


@pytest.mark.parametrize("how", ["abort", "deadline", "drain"])
def test_what_ends_while_it_waits_leaves_nothing(bench: Bench, how: str) -> None:
    late = bench.clock.unix_s + 10
    bench.submit(Prompt(bench, 4, ("x", 0, 20), 6).request("a", deadline_unix_s=late))
    bench.step()
    match how:
        case "abort":
            bench.mailbox.put(Abort(request_id="a"))
        case "deadline":
            bench.clock.advance(11.0)
        case "drain":
            bench.engine.loop.drain()
    bench.step()
    codes = {"abort": "", "deadline": "deadline_exceeded", "drain": "draining"}
    assert bench.finishes["a"].code == codes[how]
    bench.assert_nothing_leased()
    bench.rows.arrive()
    bench.step()
    bench.assert_nothing_leased()


def test_rows_are_dropped_with_the_last_token_that_reads_them(checkpoint: Checkpoint, bench: Bench) -> None:
    bench.rows.is_slow = False
    # x is used twice with text and another medium in between; chunks of 16 tokens end inside each of them.
    prompt = Prompt(bench, 4, ("x", 0, 20), 6, ("y", 2, 24), ("x", 10, 24), 9, ("z", 0, 24), 3)
    bench.submit(prompt.request("a"))
    last_read = {name: max(span.stop for span in prompt.spans if span.media == i) for i, name in enumerate("xyz")}
    held = []
    while "a" not in bench.finishes:
        bench.step()
        sequence = bench.engine.scheduler._roster.find("a")
        if sequence is not None and sequence.pages is not None:
            to_come = [name for name, stop in last_read.items() if stop > sequence.num_computed]
            assert bench.engine.feed.held_bytes == len(to_come) * 24 * WIDTH * 4
            held.append(len(to_come))
    assert held[0] == 3
    assert {2, 1, 0} <= set(held)
    assert bench.rows.fetched == ["x", "y", "z"]
    assert bench.answers["a"] == truth(checkpoint, prompt.token_ids, prompt.placed)
    bench.assert_nothing_leased()


def test_rows_behind_a_cached_prefix_are_not_fetched(checkpoint: Checkpoint, bench: Bench) -> None:
    bench.rows.is_slow = False
    prompt = Prompt(bench, 4, ("x", 0, 20), 12)
    bench.submit(prompt.request("a"))
    bench.run()
    longer = Prompt(bench, 4, ("x", 0, 20), 12, ("y", 0, 8), 3)
    bench.submit(longer.request("b"))
    bench.run()
    assert bench.rows.fetched == ["x", "y"]
    assert bench.finishes["b"].usage.cached_tokens >= 24
    assert bench.answers["b"] == truth(checkpoint, longer.token_ids, longer.placed)


def test_a_prefix_that_is_evicted_while_its_heir_waits(checkpoint: Checkpoint, bench: Bench) -> None:
    bench.rows.is_slow = False
    bench.submit(Prompt(bench, 4, ("x", 0, 20), 12).request("a"))
    bench.run()
    bench.rows.is_slow = True
    longer = Prompt(bench, 4, ("x", 0, 20), 12, ("y", 0, 8), 3)
    bench.submit(longer.request("b"))
    bench.step()
    assert bench.rows.fetched == ["x", "y"]
    bench.engine.cache.clear()
    bench.rows.arrive()
    bench.step()
    assert bench.rows.fetched == ["x", "y", "x"], "what the prefix held must be read after all"
    bench.rows.arrive()
    bench.run()
    assert bench.answers["b"] == truth(checkpoint, longer.token_ids, longer.placed)
    bench.assert_nothing_leased()


def test_retracted_requests_fetch_again_what_they_compute_again(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(kv_budget_bytes=330_000, max_running=6, chunk_tokens=32, expected_sequence_tokens=64)
    prompts = {f"r{i}": Prompt(bench, 3 + i, (f"m{i}", 0, 10), 2) for i in range(6)}
    for request_id, prompt in prompts.items():
        bench.submit(prompt.request(request_id, max_tokens=60, use_cache=False))
    bench.run()
    assert bench.engine.scheduler.counters.retractions > 0
    # Those whose prompt is still in the cache need none.
    assert len(prompts) < len(bench.rows.fetched) <= len(prompts) + bench.engine.scheduler.counters.retractions
    for request_id, prompt in prompts.items():
        assert bench.answers[request_id] == truth(checkpoint, prompt.token_ids, prompt.placed, 60)
    bench.assert_nothing_leased()


def test_more_media_than_there_is_room_for(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    # Room for one medium and a half: requests with three of them take turns.
    bench = make_bench(embedding_buffer_bytes=36 * WIDTH * 4, chunk_tokens=16)
    prompts = {
        f"r{i}": Prompt(bench, 2, (f"a{i}", 0, 9), 2, (f"b{i}", 5, 20), 3, (f"c{i}", 0, 24), 4) for i in range(4)
    }
    for request_id, prompt in prompts.items():
        bench.submit(prompt.request(request_id))
    while len(bench.finishes) < len(prompts):
        bench.step()
        assert bench.engine.feed.held_bytes <= 3 * 24 * WIDTH * 4
    for request_id, prompt in prompts.items():
        assert bench.answers[request_id] == truth(checkpoint, prompt.token_ids, prompt.placed)
    bench.assert_nothing_leased()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        st.tuples(st.just("step"), st.just([])),
        st.tuples(st.just("arrive"), st.just([])),
        st.tuples(st.just("abort"), st.lists(st.integers(0, 9), min_size=1, max_size=1)),
        st.tuples(st.just("lose"), st.lists(st.integers(0, 3), min_size=1, max_size=1)),
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_every_request_ends_once_and_the_answers_are_right(
    checkpoint: Checkpoint, make_bench: MakeBench, actions: list[tuple[str, list[int]]]
) -> None:
    bench = make_bench(
        chunk_tokens=16,
        embedding_buffer_bytes=60 * WIDTH * 4,
        kv_budget_bytes=330_000,
        max_running=6,
        expected_sequence_tokens=64,
    )
    bench.rows.is_slow = True
    prompts: dict[str, Prompt] = {}
    for action, numbers in actions:
        match action:
            case "submit":
                media = [(f"m{n}", n, 10 + n) for n in numbers]
                prompts[f"r{len(prompts)}"] = prompt = Prompt(bench, 3, *media, 5, media[0], 2)
                bench.submit(prompt.request(f"r{len(prompts) - 1}"))
            case "step":
                bench.step()
            case "arrive":
                bench.rows.arrive()
            case "abort":
                bench.mailbox.put(Abort(request_id=f"r{numbers[0]}"))
            case "lose":
                bench.rows.rows.pop(f"m{numbers[0]}", None)
        bench.engine.feed.check()
    bench.rows.is_slow = False
    bench.rows.arrive()
    bench.run()
    assert set(bench.finishes) == set(prompts)
    for request_id, prompt in prompts.items():
        finish = bench.finishes[request_id]
        if finish.reason is FinishReason.LENGTH:
            assert bench.answers[request_id] == truth(checkpoint, prompt.token_ids, prompt.placed)
        else:
            assert finish.reason is FinishReason.CANCELLED or finish.code == "embedding_lost"
    bench.assert_nothing_leased()


def test_rows_come_in_the_types_of_towers(checkpoint: Checkpoint, bench: Bench) -> None:
    prompt = Prompt(bench, 4, ("x", 0, 20), 6)
    rows = bench.rows.rows["x"] = bench.rows.rows["x"].to(torch.bfloat16)
    bench.rows.is_slow = False
    bench.submit(prompt.request("a"))
    bench.run()
    assert bench.answers["a"] == truth(checkpoint, prompt.token_ids, [EmbeddingSpan(4, 24, rows[:20].float())])
