"""Windows that are gone are restored by re-running what they depend on, and the answer stays the same."""

import pytest

from epd.engine.scheduler import Scheduler
from epd.kv.pages import PageOwner
from epd.model.embed import EmbeddingSpan
from epd.types import Abort, FinishReason, GenerateRequest, MediaSpan, SamplingParams
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.oracles.plain_generate import plain_generate

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(200)]
# Two window layers that see 15 tokens back: a window of 16 tokens in pages of 4, and 15 more, in pages.
NUM_HEALED = 32


def truth(checkpoint: Checkpoint, prompt: list[int], max_tokens: int = 8) -> list[int]:
    return plain_generate(checkpoint.model, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def computed_without_windows(bench: Bench, prompt: list[int]) -> None:
    """Leave the prompt's full pages in the tree and none of its windows: what a short window pool does to prefixes."""
    bench.submit(make_request("first", prompt, ignore_eos=True))
    bench.run()
    bench.engine.cache.device._ledger.evict_window(10_000)


@pytest.mark.parametrize("chunk_tokens", [4, 12, 64])
@pytest.mark.parametrize("num_shared", [37, 100, 200])
def test_a_prefix_without_windows_is_healed(
    checkpoint: Checkpoint, make_bench: MakeBench, num_shared: int, chunk_tokens: int
) -> None:
    bench = make_bench(chunk_tokens=chunk_tokens)
    computed_without_windows(bench, PROMPT)
    prompt = [*PROMPT[:num_shared], 1, 2, 3]
    answer = truth(checkpoint, prompt)
    bench.submit(make_request("healed", prompt, ignore_eos=True))
    bench.run()
    usage = bench.finishes["healed"].usage
    reached = num_shared // 4 * 4
    assert (usage.cached_tokens, usage.healed_tokens) == (reached - NUM_HEALED, NUM_HEALED)
    assert bench.answers["healed"] == answer
    # The restored window is found by the next one, and is as good.
    bench.submit(make_request("again", prompt + answer[:4], ignore_eos=True, max_tokens=4))
    bench.run()
    assert bench.finishes["again"].usage.healed_tokens == 0
    assert bench.answers["again"] == answer[4:]
    bench.assert_nothing_leased()
    counters = bench.engine.scheduler.counters
    assert (counters.prefix_misses, counters.healed_hits, counters.prefix_hits) == (1, 1, 1)
    assert counters.healed_tokens == NUM_HEALED
    assert counters.refused_heals == 0
    reported = bench.engine.loop._info(0).counters
    assert (reported["healed_hits"], reported["healed_tokens"]) == (1, NUM_HEALED)


def test_healing_gives_way_to_computing_when_it_would_cost_more(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    computed_without_windows(bench, PROMPT[:40])
    bench.submit(make_request("short", PROMPT[:10], ignore_eos=True))
    bench.run()
    usage = bench.finishes["short"].usage
    assert (usage.cached_tokens, usage.healed_tokens) == (0, 0)
    assert bench.answers["short"] == truth(checkpoint, PROMPT[:10])
    bench.assert_nothing_leased()


def test_near_the_start_windows_are_whole_by_themselves(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    """Fewer tokens than healing counts back, yet fewer layers to run than computing."""
    bench = make_bench()
    computed_without_windows(bench, PROMPT[:40])
    bench.submit(make_request("short", PROMPT[:30], ignore_eos=True))
    bench.run()
    usage = bench.finishes["short"].usage
    assert (usage.cached_tokens, usage.healed_tokens) == (0, 28)
    assert bench.answers["short"] == truth(checkpoint, PROMPT[:30])
    bench.assert_nothing_leased()


@pytest.mark.parametrize("chunk_tokens", [4, 8, 20])
def test_windows_held_while_healing_are_a_window_and_a_chunk(make_bench: MakeBench, chunk_tokens: int) -> None:
    """Not a page per healed token, and nothing is published before the end."""
    bench = make_bench(chunk_tokens=chunk_tokens)
    computed_without_windows(bench, PROMPT)
    cache = bench.engine.cache
    assert cache.stats().window.evictable == 0
    bench.submit(make_request("healed", [*PROMPT, 1, 2, 3], ignore_eos=True))
    most = 0
    while bench.engine.scheduler.counters.healed_tokens < NUM_HEALED:
        stats = cache.stats()
        most = max(most, stats.window.leased)
        assert stats.window.evictable == 0
        bench.step()
    assert 0 < most <= 16 // 4 + chunk_tokens // 4
    bench.run()
    bench.assert_nothing_leased()


def test_two_sequences_heal_the_same_prefix_at_once(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(chunk_tokens=40)
    computed_without_windows(bench, PROMPT)
    prompts = {"a": [*PROMPT[:100], 5], "b": [*PROMPT[:100], 6, 6]}
    for request_id, prompt in prompts.items():
        bench.submit(make_request(request_id, prompt, ignore_eos=True))
    bench.step()
    # The budget is enough for all of one and some of the other.
    assert bench.engine.scheduler.counters.healed_tokens == 40
    bench.run()
    for request_id, prompt in prompts.items():
        assert bench.finishes[request_id].usage.healed_tokens == NUM_HEALED
        assert bench.answers[request_id] == truth(checkpoint, prompt)
    bench.assert_nothing_leased()


def test_a_wrong_number_in_a_healed_row_ends_the_request(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(chunk_tokens=8)
    computed_without_windows(bench, PROMPT)
    storage = bench.engine.loop._mover._storage
    for layer in storage.full_layer_indices:
        storage.values(layer).fill_(float("nan"))
    bench.submit(make_request("healed", PROMPT, ignore_eos=True))
    bench.run()
    finish = bench.finishes["healed"]
    assert (finish.reason, finish.code) == (FinishReason.FAILED, "logits_not_finite")
    assert bench.engine.scheduler.counters.healed_tokens < NUM_HEALED
    bench.assert_nothing_leased()


NUM_ROWS = 9


def with_medium(bench: Bench, request_id: str) -> GenerateRequest:
    """The prompt with a medium near its start, far in front of what healing runs."""
    ref = bench.rows.put("medium", NUM_ROWS, 64, seed=3)
    span = MediaSpan(start=10, stop=10 + NUM_ROWS, key=ref.key, row_start=0, media=0)
    return make_request(request_id, PROMPT, ignore_eos=True, spans=(span,), embeddings=(ref,))


def truth_with_medium(checkpoint: Checkpoint, bench: Bench) -> list[int]:
    spans = [EmbeddingSpan(10, 10 + NUM_ROWS, bench.rows.rows["medium"])]
    return plain_generate(checkpoint.model, PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), spans)


def test_healing_waits_for_no_rows_that_it_does_not_run(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.submit(with_medium(bench, "first"))
    bench.run()
    bench.engine.cache.device._ledger.evict_window(10_000)
    assert bench.rows.fetched == ["medium"]
    bench.submit(with_medium(bench, "healed"))
    bench.run()
    assert bench.finishes["healed"].usage.healed_tokens == NUM_HEALED
    assert bench.answers["healed"] == truth_with_medium(checkpoint, bench)
    assert bench.rows.fetched == ["medium"]
    bench.assert_nothing_leased()


def test_without_room_to_heal_it_waits_for_the_rows_of_all_it_computes(
    checkpoint: Checkpoint, make_bench: MakeBench
) -> None:
    bench = make_bench()
    bench.submit(with_medium(bench, "first"))
    bench.run()
    bench.engine.cache.device._ledger.evict_window(10_000)
    bench.rows.is_slow = True
    pool = bench.engine.cache.device._pool.window
    pages = pool.allocate(pool.num_free - 4)
    bench.submit(with_medium(bench, "r"))
    bench.engine.loop.step()
    counters = bench.engine.scheduler.counters
    assert (counters.refused_heals, bench.engine.scheduler.num_waiting) == (1, 1)
    assert bench.rows.fetched == ["medium", "medium"]
    pool.free(pages, PageOwner.SEQUENCE)
    bench.step()
    assert bench.engine.scheduler.num_waiting == 1
    bench.rows.arrive()
    bench.run()
    assert bench.answers["r"] == truth_with_medium(checkpoint, bench)
    assert bench.finishes["r"].usage.healed_tokens == 0
    bench.assert_nothing_leased()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_abort_in_the_middle_of_healing(checkpoint: Checkpoint, make_bench: MakeBench, num_steps: int) -> None:
    bench = make_bench(chunk_tokens=8)
    computed_without_windows(bench, PROMPT)
    bench.submit(make_request("healed", PROMPT, ignore_eos=True))
    for _ in range(num_steps):
        bench.step()
    assert 0 < bench.engine.scheduler.counters.healed_tokens < NUM_HEALED
    bench.mailbox.put(Abort(request_id="healed"))
    bench.step()
    bench.assert_nothing_leased()
    assert bench.finishes["healed"].reason is FinishReason.CANCELLED
    # Nothing of it is found: the next one heals the same, and gets it right.
    bench.submit(make_request("next", PROMPT, ignore_eos=True))
    bench.run()
    assert bench.finishes["next"].usage.healed_tokens == NUM_HEALED
    assert bench.answers["next"] == truth(checkpoint, PROMPT)
    bench.assert_nothing_leased()


def test_retraction_in_the_middle_of_healing(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    """A healing sequence that is put back leaves nothing behind, and no page that looks as if it were kept."""
    bench = make_bench(chunk_tokens=8)
    computed_without_windows(bench, PROMPT)
    bench.submit(make_request("early", PROMPT[:20], ignore_eos=True, max_tokens=40))
    bench.step()
    bench.submit(make_request("healed", PROMPT, ignore_eos=True))
    while bench.engine.scheduler.counters.healed_tokens == 0:
        bench.step()
    scheduler: Scheduler = bench.engine.scheduler
    healing = scheduler._roster.find("healed")
    early = scheduler._roster.find("early")
    assert healing is not None
    assert early is not None
    assert healing.is_healing
    assert scheduler._retract_after(early, {})
    bench.engine.cache.check()
    bench.run()
    assert bench.answers["healed"] == truth(checkpoint, PROMPT)
    assert bench.answers["early"] == truth(checkpoint, PROMPT[:20], 40)
    bench.assert_nothing_leased()


def test_without_room_to_heal_the_prompt_is_computed_and_it_is_counted(
    checkpoint: Checkpoint, make_bench: MakeBench
) -> None:
    bench = make_bench()
    computed_without_windows(bench, PROMPT)
    pool = bench.engine.cache.device._pool.window
    pages = pool.allocate(pool.num_free - 4)
    bench.submit(make_request("r", PROMPT, ignore_eos=True))
    bench.engine.loop.step()
    counters = bench.engine.scheduler.counters
    assert (counters.refused_heals, counters.healed_hits) == (1, 0)
    assert counters.healed_tokens == 0
    pool.free(pages, PageOwner.SEQUENCE)
    bench.run()
    assert bench.answers["r"] == truth(checkpoint, PROMPT)
    assert bench.finishes["r"].usage.healed_tokens == 0
    bench.assert_nothing_leased()


def test_with_less_room_it_heals_in_smaller_chunks(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench()
    computed_without_windows(bench, PROMPT)
    pool = bench.engine.cache.device._pool.window
    pages = pool.allocate(pool.num_free - 7)
    bench.submit(make_request("r", PROMPT, ignore_eos=True))
    bench.engine.loop.step()
    assert 0 < bench.engine.scheduler.counters.healed_tokens < NUM_HEALED
    pool.free(pages, PageOwner.SEQUENCE)
    bench.run()
    assert bench.finishes["r"].usage.healed_tokens == NUM_HEALED
    assert bench.answers["r"] == truth(checkpoint, PROMPT)
    bench.assert_nothing_leased()


def test_usage_speaks_of_the_first_admission_alone(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    """A cold prompt that is put back and then healed from its own pages was cold all the same."""
    bench = make_bench()
    scheduler = bench.engine.scheduler
    bench.submit(make_request("early", [5, 6, 7], ignore_eos=True, max_tokens=60))
    bench.step()
    bench.submit(make_request("cold", PROMPT, ignore_eos=True, max_tokens=24))
    cold = None
    while cold is None or cold.num_generated < 3:
        bench.step()
        cold = scheduler._roster.find("cold")
    early = scheduler._roster.find("early")
    assert early is not None
    assert scheduler._retract_after(early, {})
    bench.engine.cache.device._ledger.evict_window(10_000)
    bench.run()
    assert scheduler.counters.healed_hits == 1
    assert scheduler.counters.healed_tokens > 0
    assert scheduler.counters.cached_tokens > 0
    usage = bench.finishes["cold"].usage
    assert (usage.cached_tokens, usage.healed_tokens) == (0, 0)
    assert bench.answers["cold"] == truth(checkpoint, PROMPT, max_tokens=24)
    bench.assert_nothing_leased()
