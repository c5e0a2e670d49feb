"""Engine output against full recomputation, whatever the batch, the chunks and the cache."""

import random

import pytest

from epd.model.embed import EmbeddingSpan
from epd.types import Finish, FinishReason, MediaSpan, SamplingParams
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.oracles.plain_generate import plain_generate


def prompts(num: int, *, seed: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(120) for _ in range(rng.randint(1, longest))] for _ in range(num)]


def expected(checkpoint: Checkpoint, token_ids: list[int], **sampling: object) -> list[int]:
    return plain_generate(checkpoint.model, token_ids, SamplingParams(**({"max_tokens": 8} | sampling)))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 4, 15, 16, 17, 64, 65, 200])
def test_one_prompt_of_each_awkward_length(checkpoint: Checkpoint, make_bench: MakeBench, length: int) -> None:
    bench = make_bench()
    [token_ids] = prompts(1, seed=length)
    token_ids = (token_ids * 200)[:length]
    bench.submit(make_request("a", token_ids))
    bench.run()
    assert bench.answers["a"] == expected(checkpoint, token_ids)
    assert bench.finishes["a"].usage.prompt_tokens == length
    bench.assert_nothing_leased()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk_tokens", [5, 16, 512])
def test_batches_of_sixteen(
    checkpoint: Checkpoint, make_bench: MakeBench, prefix_cache: bool, chunk_tokens: int
) -> None:
    bench = make_bench(prefix_cache=prefix_cache, chunk_tokens=chunk_tokens)
    tokens = {f"r{i}": ids for i, ids in enumerate(prompts(16, seed=chunk_tokens))}
    for request_id, token_ids in tokens.items():
        bench.submit(make_request(request_id, token_ids, ignore_eos=True))
    bench.run()
    for request_id, token_ids in tokens.items():
        assert bench.answers[request_id] == expected(checkpoint, token_ids, ignore_eos=True)
        assert bench.finishes[request_id].reason is FinishReason.LENGTH
    assert bench.engine.scheduler.counters.largest_batch > (8 if chunk_tokens == 512 else 2)
    bench.assert_nothing_leased()


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_the_same_prompt_many_times_at_once_is_kept_once(
    checkpoint: Checkpoint, make_bench: MakeBench, chunk_tokens: int
) -> None:
    bench = make_bench(chunk_tokens=chunk_tokens)
    token_ids = [(5 * i * i + i) % 120 for i in range(64)]
    for i in range(6):
        bench.submit(make_request(f"r{i}", token_ids, max_tokens=3 + i, ignore_eos=True))
    bench.run()
    for i in range(6):
        assert bench.answers[f"r{i}"] == expected(checkpoint, token_ids, max_tokens=3 + i, ignore_eos=True)
    bench.assert_nothing_leased()
    # 64 tokens of prompt and at most 7 of answer with KV: 17 whole pages.
    assert bench.engine.cache.stats().full.evictable <= 17


def test_a_second_turn_hits_and_says_so(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    [first] = prompts(1, seed=5, longest=1)
    first = (first + prompts(1, seed=6)[0] * 3)[:70]
    bench.submit(make_request("a", first, ignore_eos=True, max_tokens=12))
    bench.run()
    second = first + bench.answers["a"] + [7, 8, 9]
    bench.submit(make_request("b", second, ignore_eos=True))
    bench.submit(make_request("c", first, ignore_eos=True))
    bench.run()
    assert bench.answers["b"] == expected(checkpoint, second, ignore_eos=True)
    assert bench.answers["c"] == bench.answers["a"][:8]
    assert bench.finishes["b"].usage.cached_tokens >= 80
    assert bench.finishes["c"].usage.cached_tokens == 68
    bench.submit(make_request("d", first, use_cache=False))
    bench.run()
    assert bench.finishes["d"].usage.cached_tokens == 0
    bench.assert_nothing_leased()


def test_media_rows_take_the_place_of_placeholders(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(chunk_tokens=6)
    width = checkpoint.model.config.hidden_size
    ref = bench.rows.put("lease", 20, width, seed=3)
    other = bench.rows.put("other", 20, width, seed=4)
    token_ids = [1, 2, 3] + [126] * 10 + [4, 5] + [126] * 10 + [6]
    spans = (
        MediaSpan(start=3, stop=13, key=ref.key, row_start=0, media=0),
        MediaSpan(start=15, stop=25, key=ref.key, row_start=10, media=0),
    )
    bench.submit(make_request("a", token_ids, spans=spans, embeddings=(ref,), ignore_eos=True))
    bench.run()
    rows = bench.rows.rows["lease"]
    placed = [EmbeddingSpan(3, 13, rows[:10]), EmbeddingSpan(15, 25, rows[10:])]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    assert bench.answers["a"] == plain_generate(checkpoint.model, token_ids, sampling, placed)
    # The same ids with another picture behind the placeholders share only the text in front.
    theirs = tuple(MediaSpan(start=s.start, stop=s.stop, key=other.key, row_start=s.row_start, media=0) for s in spans)
    bench.submit(make_request("b", token_ids, spans=theirs, embeddings=(other,), ignore_eos=True))
    bench.submit(make_request("c", token_ids, spans=spans, embeddings=(ref,), ignore_eos=True))
    bench.run()
    assert bench.finishes["b"].usage.cached_tokens == 0
    assert bench.finishes["c"].usage.cached_tokens == 24
    assert bench.answers["c"] == bench.answers["a"]
    assert bench.answers["b"] != bench.answers["a"]


def test_sampling_repeats_with_its_seed_and_continues_on_a_retry(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    token_ids = list(range(20))
    params: dict[str, object] = {"temperature": 1.5, "seed": 11, "ignore_eos": True, "max_tokens": 10}
    truth = expected(checkpoint, token_ids, **params)
    bench = make_bench()
    bench.submit(make_request("a", token_ids, **params))  # type: ignore[arg-type]
    bench.submit(make_request("b", token_ids + truth[:4], num_emitted=4, **params))  # type: ignore[arg-type]
    bench.run()
    assert bench.answers["a"] == truth
    assert bench.answers["b"] == truth[4:]
    assert [delta.index for delta in bench.deltas if delta.request_id == "b"] == list(range(4, 10))


def test_stop_tokens_end_an_answer_and_are_not_sent(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    token_ids = list(range(30))
    free = expected(checkpoint, token_ids, ignore_eos=True)
    stop = free[4]
    bench = make_bench()
    bench.submit(make_request("a", token_ids, stop_token_ids=(stop,), ignore_eos=True))
    bench.run()
    assert bench.answers["a"] == free[: free.index(stop)]
    finish = bench.finishes["a"]
    assert finish.reason is FinishReason.STOP
    assert finish.usage.completion_tokens == free.index(stop) + 1


def test_logprobs_and_timings_come_along(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(make_request("a", [1, 2, 3], top_logprobs=2, ignore_eos=True, max_tokens=3))
    for _ in range(4):
        bench.clock.advance(1.0)
        bench.step()
    assert [delta.logprobs[0].token_id for delta in bench.deltas] == bench.answers["a"]
    assert all(len(delta.logprobs[0].top) == 2 for delta in bench.deltas)
    finish: Finish = bench.finishes["a"]
    assert set(finish.timings) == {"queue_s", "prefill_s", "first_token_s", "decode_s"}
    assert finish.timings["decode_s"] == 2.0
    first, *others = bench.deltas
    assert first.usage is not None
    assert first.usage.prompt_tokens == 3
    assert first.timings == {**finish.timings, "decode_s": 0.0}
    assert all(delta.usage is None and not delta.timings for delta in others), "said once"
    assert finish.stop_token_id is None


def test_decode_goes_on_while_a_long_prompt_is_computed(make_bench: MakeBench) -> None:
    bench: Bench = make_bench(chunk_tokens=16)
    bench.submit(make_request("short", [1, 2, 3], max_tokens=50, ignore_eos=True))
    bench.step()
    bench.submit(make_request("long", [5] * 300, max_tokens=1, ignore_eos=True))
    for _ in range(10):
        before = len(bench.answers["short"])
        bench.step()
        assert len(bench.answers["short"]) == before + 1
    assert "long" not in bench.answers
