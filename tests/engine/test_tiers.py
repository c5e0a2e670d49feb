"""Engines with KV in host memory: what comes from there gives the same answers, in whatever state it is met."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from epd.cache.sequence_pages import SequencePages
from epd.kv.errors import NoPages, PoolTooSmall
from epd.types import Abort, FinishReason, MediaSpan, Usage
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.engine.test_roles import Pair, make_pair
from tests.engine.tier_asks import (
    HOST,
    PAGE_SIZE,
    PROMPT,
    WHOLE,
    ask,
    assert_quiet,
    by_tier,
    fail_loads,
    late_loads,
    rest,
    run,
    spoil_device,
    to_host,
    troubled_loads,
    truth,
)


def test_what_left_the_device_comes_back_from_the_host(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(**HOST)
    answer = truth(checkpoint, PROMPT)
    assert ask(bench, "cold", PROMPT).cached_tokens == 0
    assert ask(bench, "device", PROMPT) == Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=WHOLE)
    to_host(bench)
    usage = ask(bench, "host", PROMPT)
    assert usage == Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=WHOLE, host_tokens=WHOLE)
    # What was loaded is on the device for the next one.
    assert ask(bench, "device again", PROMPT).host_tokens == 0
    assert set(map(tuple, bench.answers.values())) == {tuple(answer)}
    assert by_tier(bench) == {"l1": 2 * WHOLE, "l2": WHOLE, "l3": 0, "healed": 0}
    assert bench.engine.tiers.copies().loaded_bytes > 0  # type: ignore[union-attr]
    assert_quiet(bench)


@pytest.mark.parametrize("num_first", [9, 42, 86])
def test_part_on_the_device_and_part_in_the_host(checkpoint: Checkpoint, make_bench: MakeBench, num_first: int) -> None:
    """The device has the beginning; the rest of the prefix is loaded behind it."""
    bench = make_bench(**HOST)
    ask(bench, "beginning", PROMPT[:num_first])
    ask(bench, "whole", PROMPT)
    to_host(bench)
    num_device = (num_first - 1) // PAGE_SIZE * PAGE_SIZE
    assert ask(bench, "beginning again", PROMPT[:num_first]).host_tokens == num_device
    usage = ask(bench, "mixed", PROMPT)
    # What the answer to the beginning left on the device is not of this prompt.
    num_device = num_first // PAGE_SIZE * PAGE_SIZE
    assert (usage.cached_tokens, usage.host_tokens) == (WHOLE, WHOLE - num_device)
    assert bench.answers["mixed"] == truth(checkpoint, PROMPT)
    assert_quiet(bench)


def least(make_bench: MakeBench, **changes: object) -> dict[str, int]:
    """The smallest device pools there can be, from what is said of smaller ones."""
    with pytest.raises(PoolTooSmall, match="below the") as refused:
        make_bench(kv_budget_bytes=1, **changes)
    words = str(refused.value).partition("below the ")[2].partition(" ")[0]
    return {"kv_budget_bytes": int(words.replace(",", ""))}


def test_a_device_too_small_to_keep_anything(
    checkpoint: Checkpoint, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reuse comes from host memory, into pools in which others run, are retracted and are aborted."""
    found = [crowd(checkpoint, make_bench, monkeypatch, seed) for seed in range(4)]
    assert sum(bench.engine.scheduler.counters.host_hit_tokens > 0 for bench in found) > 1
    assert sum(bench.engine.scheduler.counters.failed_loads for bench in found) > 0


def crowd(checkpoint: Checkpoint, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, seed: int) -> Bench:
    """Requests, one upon the other, into the smallest pools; every other time copies fail now and then."""
    rng = random.Random(seed)
    small = {"expected_sequence_tokens": 100, "max_running": 2, "chunk_tokens": rng.choice((8, 24))}
    bench = make_bench(**HOST, **small, **least(make_bench, **HOST, **small))
    spoil_device(bench)
    if seed % 2:
        troubled_loads(bench, monkeypatch, rng)
    stems = [[rng.randrange(120) for _ in range(60)] for _ in range(2)]
    prompts: dict[str, list[int]] = {}
    for number in range(14):
        prompts[f"r{number}"] = [*rng.choice(stems)[: rng.choice((30, 44, 60))], *rng.choices(range(120), k=3)]
        bench.submit(make_request(f"r{number}", prompts[f"r{number}"], ignore_eos=True, max_tokens=4))
        for _ in range(rng.randrange(6)):
            bench.step()
        if rng.random() < 0.1:
            bench.mailbox.put(Abort(request_id=f"r{rng.randrange(number + 1)}"))
    run(bench)
    for request_id, prompt in prompts.items():
        finish = bench.finishes[request_id]
        assert finish.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        if finish.reason is FinishReason.LENGTH:
            assert bench.answers[request_id] == truth(checkpoint, prompt), request_id
    by_tier(bench)
    assert_quiet(bench)
    return bench


def test_full_pages_from_the_host_are_healed_like_those_of_the_device(
    checkpoint: Checkpoint, make_bench: MakeBench
) -> None:
    prompt = [*PROMPT, *PROMPT[::-1]]
    bench = make_bench(**HOST)
    ask(bench, "first", prompt)
    to_host(bench)
    host = bench.engine.cache.host
    assert host is not None
    host.window.clear()
    usage = ask(bench, "healed", prompt)
    assert usage.healed_tokens > 0
    assert usage.host_tokens == usage.cached_tokens > 100
    assert bench.answers["healed"] == truth(checkpoint, prompt)
    assert bench.engine.scheduler.counters.healed_hits == 1
    assert_quiet(bench)


@pytest.mark.parametrize("chunk_tokens", [4, 64])
@pytest.mark.parametrize("windows", ["host", "healed"])
def test_nothing_is_read_before_it_has_come(
    checkpoint: Checkpoint,
    make_bench: MakeBench,
    monkeypatch: pytest.MonkeyPatch,
    chunk_tokens: int,
    windows: str,
) -> None:
    prompt = [*PROMPT, *PROMPT[::-1]]
    bench = make_bench(**HOST, chunk_tokens=chunk_tokens)
    ask(bench, "first", prompt)
    to_host(bench)
    host = bench.engine.cache.host
    assert host is not None
    if windows == "healed":
        host.window.clear()
    spoil_device(bench)
    late_loads(bench, monkeypatch)
    usage = ask(bench, "late", [*prompt, 1, 2, 3, 4, 5, 6])
    assert (usage.host_tokens, usage.healed_tokens > 0) == (usage.cached_tokens, windows == "healed")
    assert bench.answers["late"] == truth(checkpoint, [*prompt, 1, 2, 3, 4, 5, 6])
    assert_quiet(bench)


def test_a_copy_that_fails_is_computed_instead_and_nobody_else_notices(
    checkpoint: Checkpoint, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(**HOST)
    other = PROMPT[::-1]
    ask(bench, "first", PROMPT)
    to_host(bench)
    bench.submit(make_request("other", other, ignore_eos=True, max_tokens=8))
    bench.step()
    fail_loads(bench, monkeypatch, 1)
    usage = ask(bench, "failed", PROMPT)
    assert bench.answers["failed"] == truth(checkpoint, PROMPT)
    assert bench.answers["other"] == truth(checkpoint, other, 8)
    counters = bench.engine.scheduler.counters
    assert (counters.failed_loads, counters.failed) == (1, 0)
    assert usage.completion_tokens == 4
    assert bench.finishes["other"].usage.prompt_tokens == 90
    # It is not given up for ever.
    to_host(bench)
    assert ask(bench, "again", PROMPT).host_tokens == WHOLE
    assert_quiet(bench)


@pytest.mark.parametrize("is_slow", [False, True])
def test_who_cannot_load_gets_the_rows_it_has_to_compute(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """A medium inside the cached prefix: its rows are not fetched for a hit, and are needed when that is not to be."""
    bench = make_bench(**HOST)
    ref = bench.rows.put("medium", 9, 64, seed=3)
    span = MediaSpan(start=10, stop=19, key=ref.key, row_start=0, media=0)
    ask(bench, "first", PROMPT, spans=(span,), embeddings=(ref,))
    to_host(bench)
    resume, calls = bench.engine.cache.resume, []

    def refusing(*words: Any, **named: Any) -> SequencePages:
        calls.append(words)
        if len(calls) == 1:
            raise NoPages(pool="full", needed=1, free=0)
        return resume(*words, **named)

    monkeypatch.setattr(bench.engine.cache, "resume", refusing)
    bench.rows.fetched.clear()
    bench.rows.is_slow = is_slow
    bench.submit(make_request("short", PROMPT, ignore_eos=True, max_tokens=4, spans=(span,), embeddings=(ref,)))
    for _ in range(3):
        bench.step()
    assert bench.rows.fetched == ["medium"]
    assert ("short" in bench.answers) is not is_slow
    bench.rows.arrive()
    run(bench)
    assert bench.answers["short"] == bench.answers["first"]
    assert bench.finishes["short"].usage.cached_tokens == 0
    assert bench.engine.scheduler.counters.short_loads == 1
    assert ask(bench, "again", PROMPT, spans=(span,), embeddings=(ref,)).cached_tokens == WHOLE
    assert_quiet(bench)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_aborts_while_pages_are_loaded(make_bench: MakeBench, num_steps: int) -> None:
    bench = make_bench(**HOST, chunk_tokens=4)
    ask(bench, "first", PROMPT)
    to_host(bench)
    bench.submit(make_request("aborted", PROMPT, ignore_eos=True))
    for _ in range(num_steps):
        bench.step()
    bench.mailbox.put(Abort(request_id="aborted"))
    run(bench)
    assert bench.finishes["aborted"].reason is FinishReason.CANCELLED
    assert_quiet(bench)


def test_wrong_numbers_are_forgotten_by_the_host_too(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    bench = make_bench(**HOST)
    ask(bench, "first", PROMPT)
    rest(bench)
    storage = bench.engine.loop._mover._storage
    for layer in storage.full_layer_indices:
        storage.values(layer).fill_(float("nan"))
    bench.submit(make_request("wrong", PROMPT, ignore_eos=True))
    run(bench)
    assert bench.finishes["wrong"].code == "logits_not_finite"
    for layer in storage.full_layer_indices:
        storage.values(layer).fill_(0.0)
    assert ask(bench, "after", PROMPT).cached_tokens == 0
    assert bench.answers["after"] == truth(checkpoint, PROMPT)
    assert_quiet(bench)


# -- KV of other workers ----------------------------------------------------------------------------------------------


@dataclass
class Crowded:
    """A decode worker with one place, and more prompts computed for it than that."""

    pair: Pair
    prompts: dict[str, list[int]]


@pytest.fixture
def crowded(make_bench: MakeBench) -> Crowded:
    pair = make_pair(make_bench, both=HOST, max_running=1)
    prompts = {f"r{number}": [number, *PROMPT[number : 60 + number]] for number in range(4)}
    for request_id, prompt in prompts.items():
        pair.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=12))
    for _ in range(6):
        pair.prefill.step()
    pair.decode.step()
    return Crowded(pair, prompts)


def staged(bench: Bench) -> list[str]:
    arrived = bench.engine.scheduler._roster.arrived
    return [each.sequence.request_id for each in arrived if each.held.staged is not None]


def test_kv_that_has_no_place_yet_waits_in_host_pages(checkpoint: Checkpoint, crowded: Crowded) -> None:
    pair = crowded.pair
    assert staged(pair.decode) == ["r1", "r2", "r3"]
    assert all(not each.held.tensors for each in pair.decode.engine.scheduler._roster.arrived)
    pair.run()
    for request_id, prompt in crowded.prompts.items():
        assert pair.answer(request_id) == truth(checkpoint, prompt, 12)
    stats = pair.decode.engine.cache.stats().host
    assert stats is not None
    assert stats.num_loads == 3
    assert pair.decode.engine.loop._info(0).counters["unstaged_transfers"] == 0
    assert_quiet(pair.prefill)
    assert_quiet(pair.decode)


def test_without_room_in_the_host_it_stays_as_it_came(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    pair = make_pair(make_bench, both={"host_budget_bytes": 30_000}, max_running=1)
    prompts = {f"r{number}": [number, *PROMPT[number : 60 + number]] for number in range(4)}
    for request_id, prompt in prompts.items():
        pair.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=12))
    pair.run()
    for request_id, prompt in prompts.items():
        assert pair.answer(request_id) == truth(checkpoint, prompt, 12)
    assert pair.decode.engine.loop._info(0).counters["unstaged_transfers"] > 0
    assert_quiet(pair.decode)


@pytest.mark.parametrize("aborted", ["r0", "r1", "r3"])
def test_who_waits_in_host_pages_and_is_aborted_leaves_nothing(
    checkpoint: Checkpoint, crowded: Crowded, aborted: str
) -> None:
    pair = crowded.pair
    pair.decode.mailbox.put(Abort(request_id=aborted))
    pair.run()
    for request_id, prompt in crowded.prompts.items():
        if request_id == aborted:
            assert pair.finish(request_id).reason is FinishReason.CANCELLED
        else:
            assert pair.answer(request_id) == truth(checkpoint, prompt, 12)
    assert_quiet(pair.decode)


def test_staged_kv_that_does_not_come_ends_the_attempt_and_no_other(
    checkpoint: Checkpoint, crowded: Crowded, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = crowded.pair
    fail_loads(pair.decode, monkeypatch, 1)
    pair.run()
    lost = pair.finish("r1")
    assert (lost.code, lost.retryable) == ("kv_lost", True)
    for request_id in ("r0", "r2", "r3"):
        assert pair.answer(request_id) == truth(checkpoint, crowded.prompts[request_id], 12)
    assert_quiet(pair.decode)


def test_an_import_beside_a_step_whose_copy_fails(
    checkpoint: Checkpoint, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written before anything was computed, and goes on; the step is computed anew."""
    pair = make_pair(make_bench, both=HOST, max_running=2)
    prompts = {"back": PROMPT, "import": PROMPT[::-1]}
    pair.submit(make_request("back", PROMPT, ignore_eos=True, max_tokens=20))
    scheduler = pair.decode.engine.scheduler
    while scheduler.num_running == 0:
        pair.prefill.step()
        pair.decode.step()
    pair.submit(make_request("import", prompts["import"], ignore_eos=True, max_tokens=20))
    while "import" not in pair.prefill.engine.scheduler._roster._by_id:
        pair.prefill.step()
    while not pair.prefill.engine.scheduler.is_idle:
        pair.prefill.step()
    [running] = scheduler._roster.running.values()
    scheduler._roster.put_back(running, keep=True)
    ledger = pair.decode.engine.cache.device.ledger
    assert ledger.evict_full(ledger.num_evictable_full) == 22
    spoil_device(pair.decode)
    fail_loads(pair.decode, monkeypatch, 1)
    pair.decode.step()
    assert (scheduler.counters.failed_loads, scheduler.counters.imports) == (1, 2)
    pair.run()
    for request_id, prompt in prompts.items():
        assert pair.answer(request_id) == truth(checkpoint, prompt, 20)
    assert_quiet(pair.decode)


def test_copies_that_fail_on_a_crowded_decode_worker(
    checkpoint: Checkpoint, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and imports of one plan have nothing to do with each other: right answers, or attempts to be repeated."""
    rng = random.Random(1)
    small = {"expected_sequence_tokens": 90, "max_running": 2}
    pair = make_pair(make_bench, both=HOST, **small, **least(make_bench, **HOST, **small))
    spoil_device(pair.decode)
    troubled_loads(pair.decode, monkeypatch, rng)
    prompts = {f"r{number}": [number, *PROMPT[number : rng.choice((40, 60)) + number]] for number in range(10)}
    for request_id, prompt in prompts.items():
        pair.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=16))
        for _ in range(rng.randrange(8)):
            pair.prefill.step()
            pair.decode.step()
    pair.run()
    lost = [request_id for request_id in prompts if pair.finish(request_id).reason is FinishReason.FAILED]
    assert 0 < len(lost) < 6
    for request_id, prompt in prompts.items():
        if request_id in lost:
            assert (pair.finish(request_id).code, pair.finish(request_id).retryable) == ("kv_lost", True)
        else:
            assert pair.answer(request_id) == truth(checkpoint, prompt, 16), request_id
    assert_quiet(pair.decode)


def test_tiers_of_the_prefill_worker_are_told_by_the_decode_worker(make_bench: MakeBench) -> None:
    pair = make_pair(make_bench, both=HOST)
    pair.submit(make_request("first", PROMPT, ignore_eos=True))
    pair.run()
    to_host(pair.prefill)
    pair.submit(make_request("second", PROMPT, ignore_eos=True))
    pair.run()
    usage = pair.finish("second").usage
    assert (usage.cached_tokens, usage.host_tokens) == (WHOLE, WHOLE)
