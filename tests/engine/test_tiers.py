"""Engines with KV in host memory and in a store: what comes from there gives the same answers, and blocks nobody."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import epd.engine.tiers
from epd.cache.l3.base import Buffer, NodeUsage, Sink
from epd.cache.l3.client import StoreClient
from epd.engine.settling import settle
from epd.kv.copies import CopyFailed, CopyTicket, PageCopies
from epd.kv.errors import PoolTooSmall
from epd.types import Abort, FinishReason, SamplingParams, Usage
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.engine.test_roles import Pair, make_pair
from tests.oracles.plain_generate import plain_generate

PAGE_SIZE = 4
PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(90)]
# All whole pages but the one with the token that is computed.
WHOLE = 88
HOST = {"host_budget_bytes": 1 << 20}
GIVEN_UP_S = 20.0


def truth(checkpoint: Checkpoint, prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
    return plain_generate(checkpoint.model, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def ask(bench: Bench, request_id: str, prompt: Sequence[int], **how: object) -> Usage:
    bench.submit(make_request(request_id, prompt, ignore_eos=True, max_tokens=4, **how))  # type: ignore[arg-type]
    run(bench)
    return bench.finishes[request_id].usage


def run(bench: Bench) -> None:
    """Until idle. Unlike in other tests something happens meanwhile, so it takes its time."""
    until_s = time.monotonic() + GIVEN_UP_S
    while not bench.engine.scheduler.is_idle or bench.mailbox.inbox:
        bench.step()
        assert time.monotonic() < until_s, "still busy"


def rest(bench: Bench) -> None:
    assert settle(bench.engine.cache, GIVEN_UP_S)


def to_host(bench: Bench) -> None:
    """Everything is in host memory alone."""
    rest(bench)
    bench.engine.cache.device.clear()


def to_store(bench: Bench) -> None:
    to_host(bench)
    host = bench.engine.cache.host
    assert host is not None
    host.full.clear()
    host.window.clear()


def assert_quiet(bench: Bench) -> None:
    """Nobody holds anything, in no tier."""
    rest(bench)
    bench.assert_nothing_leased()
    bench.engine.cache.check()
    host = bench.engine.cache.stats().host
    assert host is not None
    for pool in (host.full, host.window):
        assert (pool.filling, pool.pinned, pool.doomed) == (0, 0, 0)


def by_tier(bench: Bench) -> dict[str, float]:
    hits = {
        counter.labels["tier"]: counter.value
        for counter in bench.engine.loop._info(0).labelled
        if counter.name == "cache_hit_tokens_total"
    }
    cached = bench.engine.loop._info(0).counters["cached_tokens"]
    assert hits["l1"] + hits["l2"] + hits["l3"] == cached
    return hits


# -- host memory ------------------------------------------------------------------------------------------------------


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


def test_a_device_too_small_to_keep_anything(checkpoint: Checkpoint, make_bench: MakeBench) -> None:
    """Every reuse comes from host memory, into pools in which others run, are retracted and are aborted."""
    found = [crowd(checkpoint, make_bench, seed) for seed in range(3)]
    assert sum(tokens > 0 for tokens in found) > 1


def crowd(checkpoint: Checkpoint, make_bench: MakeBench, seed: int) -> float:
    """Requests, one upon the other, into the smallest pools; returns how many tokens came from the host."""
    rng = random.Random(seed)
    small = {"expected_sequence_tokens": 100, "max_running": 2, "chunk_tokens": rng.choice((8, 24))}
    bench = make_bench(**HOST, **small, **least(make_bench, **HOST, **small))
    stems = [[rng.randrange(120) for _ in range(60)] for _ in range(2)]
    prompts: dict[str, list[int]] = {}
    for number in range(16):
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
    assert_quiet(bench)
    return by_tier(bench)["l2"]


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


class StuckTicket:
    """A load that never ends by itself."""

    def __init__(self, inner: CopyTicket, fails: bool) -> None:
        self._inner = inner
        self._fails = fails

    def is_done(self) -> bool:
        return self._inner.is_done()

    def wait(self) -> None:
        self._inner.wait()
        if self._fails:
            raise CopyFailed("this copy fails")

    def wait_layer(self, layer_index: int) -> None:
        self.wait()


def fail_loads(bench: Bench, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    mover = bench.engine.tiers.mover
    assert mover is not None
    load, left = mover.load, [times]

    def failing(copies: PageCopies) -> CopyTicket:
        left[0] -= 1
        return StuckTicket(load(copies), fails=left[0] >= 0)

    monkeypatch.setattr(mover, "load", failing)


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


def test_tiers_of_the_prefill_worker_are_told_by_the_decode_worker(make_bench: MakeBench) -> None:
    pair = make_pair(make_bench, both=HOST)
    pair.submit(make_request("first", PROMPT, ignore_eos=True))
    pair.run()
    to_host(pair.prefill)
    pair.submit(make_request("second", PROMPT, ignore_eos=True))
    pair.run()
    usage = pair.finish("second").usage
    assert (usage.cached_tokens, usage.host_tokens) == (WHOLE, WHOLE)


# -- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(kv_store_dir: Path) -> dict[str, object]:
    return {
        **HOST,
        "kv_store": f"local:{kv_store_dir}",
        "kv_store_memory_bytes": 4 << 20,
        "kv_store_disk_bytes": 16 << 20,
        "prefetch_timeout_s": GIVEN_UP_S,
    }


def test_the_store_outlives_the_engine(checkpoint: Checkpoint, make_bench: MakeBench, store: dict[str, object]) -> None:
    bench = make_bench(**store)
    ask(bench, "cold", PROMPT)
    to_store(bench)
    usage = ask(bench, "stored", PROMPT)
    assert usage == Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=WHOLE, store_tokens=WHOLE)
    assert_quiet(bench)
    bench.engine.tiers.close()
    later = make_bench(**store)
    usage = ask(later, "later", PROMPT)
    assert usage == Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=WHOLE, store_tokens=WHOLE)
    assert ask(later, "device", PROMPT).store_tokens == 0
    assert later.answers["later"] == later.answers["device"] == truth(checkpoint, PROMPT)
    assert by_tier(later) == {"l1": WHOLE, "l2": 0, "l3": WHOLE, "healed": 0}
    assert_quiet(later)
    later.engine.tiers.close()


def test_a_request_without_the_cache_asks_nobody(make_bench: MakeBench, store: dict[str, object]) -> None:
    bench = make_bench(**store)
    ask(bench, "cold", PROMPT)
    to_store(bench)
    assert ask(bench, "alone", PROMPT, use_cache=False).cached_tokens == 0
    assert bench.engine.tiers.transfers().prefetch.get("begun", 0) == 1  # type: ignore[union-attr]
    assert_quiet(bench)
    bench.engine.tiers.close()


class SlowNode:
    """A node that holds everything and answers when the test lets it."""

    name = "slow"

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.may_read = threading.Event()
        self.may_read.set()
        self.num_reads = 0

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        self.num_reads += 1
        self.may_read.wait(GIVEN_UP_S)
        for index, key in enumerate(keys):
            value = self.values.get(key)
            sink(index, None if value is None else memoryview(value))

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> Sequence[bool]:
        self.values.update({key: b"".join(pieces) for key, pieces in items})
        return [True] * len(items)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> Sequence[bool]:
        return [key in self.values for key in keys]

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        pass

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        for key in keys:
            self.values.pop(key, None)

    def usage(self) -> NodeUsage:
        return NodeUsage()

    def close(self) -> None:
        pass


MakeSlow = Callable[..., tuple[Bench, SlowNode]]


@pytest.fixture
def make_slow(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSlow]:
    """An engine that has answered PROMPT, whose KV is in a slow store now."""
    made: list[tuple[Bench, SlowNode]] = []

    def make(prefetch_timeout_s: float, **changes: object) -> tuple[Bench, SlowNode]:
        node = SlowNode()
        monkeypatch.setattr(
            epd.engine.tiers, "open_store", lambda url, **settings: StoreClient([node], timeout_s=GIVEN_UP_S)
        )
        bench = make_bench(**HOST, kv_store="local", prefetch_timeout_s=prefetch_timeout_s, **changes)
        made.append((bench, node))
        ask(bench, "first", PROMPT)
        to_store(bench)
        node.may_read.clear()
        node.num_reads = 0
        return bench, node

    yield make
    for bench, node in made:
        node.may_read.set()
        bench.engine.tiers.close()


def until(condition: Callable[[], bool], bench: Bench) -> None:
    until_s = time.monotonic() + GIVEN_UP_S
    while not condition():
        bench.step()
        assert time.monotonic() < until_s


def test_who_waits_for_the_store_blocks_nobody(checkpoint: Checkpoint, make_slow: MakeSlow) -> None:
    bench, node = make_slow(GIVEN_UP_S)
    bench.submit(make_request("waits", PROMPT, ignore_eos=True, max_tokens=4))
    until(lambda: node.num_reads > 0, bench)
    other = [5] * 40
    # One that asked the same store would wait its own time for it.
    bench.submit(make_request("other", other, ignore_eos=True, max_tokens=4, use_cache=False))
    until(lambda: "other" in bench.finishes, bench)
    assert bench.answers["other"] == truth(checkpoint, other)
    assert "waits" not in bench.answers
    assert bench.engine.scheduler.is_asleep
    assert bench.engine.loop.step() <= 0.01, "the loop must look again soon"
    node.may_read.set()
    run(bench)
    assert bench.finishes["waits"].usage.store_tokens == WHOLE
    assert bench.answers["waits"] == truth(checkpoint, PROMPT)
    assert_quiet(bench)


def test_what_has_not_come_by_the_deadline_is_computed(checkpoint: Checkpoint, make_slow: MakeSlow) -> None:
    bench, node = make_slow(0.05)
    start_s = time.monotonic()
    usage = ask(bench, "late", PROMPT)
    assert time.monotonic() - start_s < GIVEN_UP_S / 2
    assert (usage.cached_tokens, usage.store_tokens) == (0, 0)
    assert bench.answers["late"] == truth(checkpoint, PROMPT)
    node.may_read.set()
    assert_quiet(bench)


def test_aborts_while_the_store_reads(checkpoint: Checkpoint, make_slow: MakeSlow) -> None:
    """Its pages are given back when the store is done with them, and others use what came."""
    bench, node = make_slow(GIVEN_UP_S)
    bench.submit(make_request("aborted", PROMPT, ignore_eos=True))
    until(lambda: node.num_reads > 0, bench)
    bench.mailbox.put(Abort(request_id="aborted"))
    bench.step()
    assert bench.finishes["aborted"].reason is FinishReason.CANCELLED
    assert bench.engine.scheduler.is_idle
    node.may_read.set()
    rest(bench)
    assert_quiet(bench)
    ask(bench, "after", PROMPT)
    assert bench.answers["after"] == truth(checkpoint, PROMPT)
    assert_quiet(bench)


def test_aborts_after_the_store_has_read(make_slow: MakeSlow) -> None:
    """Between the last page and the place: nothing stays pinned."""
    bench, node = make_slow(GIVEN_UP_S, max_running=1)
    node.may_read.set()
    bench.submit(make_request("runs", [5] * 40, ignore_eos=True, max_tokens=60))
    bench.step()
    bench.submit(make_request("aborted", PROMPT, ignore_eos=True))
    until(lambda: bench.engine.scheduler._roster.waiting.num_ready > 0, bench)
    host = bench.engine.cache.stats().host
    assert host is not None
    assert host.full.pinned == WHOLE // PAGE_SIZE
    bench.mailbox.put(Abort(request_id="aborted"))
    run(bench)
    assert bench.finishes["aborted"].reason is FinishReason.CANCELLED
    assert_quiet(bench)


def test_a_drain_hands_back_who_waits_for_the_store(make_slow: MakeSlow) -> None:
    bench, node = make_slow(GIVEN_UP_S)
    bench.submit(make_request("waits", PROMPT, ignore_eos=True))
    until(lambda: node.num_reads > 0, bench)
    bench.engine.loop.drain()
    bench.step()
    assert bench.finishes["waits"].code == "draining"
    node.may_read.set()
    assert_quiet(bench)
