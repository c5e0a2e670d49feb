"""Engines with KV in a store: it outlives them, and whoever waits for it waits a bounded time and blocks nobody."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import epd.engine.tiers
from epd.cache.l3.base import Buffer, NodeUsage, Sink
from epd.cache.l3.client import StoreClient
from epd.types import Abort, FinishReason, Usage
from tests.engine.conftest import Bench, Checkpoint, MakeBench, make_request
from tests.engine.tier_asks import (
    GIVEN_UP_S,
    HOST,
    PAGE_SIZE,
    PROMPT,
    WHOLE,
    ask,
    assert_quiet,
    by_tier,
    rest,
    run,
    to_store,
    truth,
    until,
)
from tests.fakes.mailbox import Mailbox


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


def test_the_loop_is_woken_when_something_has_come(make_slow: MakeSlow, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = threading.Event()
    monkeypatch.setattr(Mailbox, "wake", lambda self: woken.set())
    bench, node = make_slow(GIVEN_UP_S)
    bench.submit(make_request("waits", PROMPT, ignore_eos=True, max_tokens=4))
    until(lambda: node.num_reads > 0, bench)
    woken.clear()
    node.may_read.set()
    # Nobody steps: a thread of the store says that it is time to.
    assert woken.wait(GIVEN_UP_S)
    run(bench)
    assert bench.finishes["waits"].usage.store_tokens == WHOLE


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
    # And pages of the one that runs, should the store be reading them now.
    assert host.full.pinned >= WHOLE // PAGE_SIZE
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


def test_pages_of_one_session_lie_together_in_the_store(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written and looked for under the request's session."""
    groups: list[tuple[str, str]] = []

    class Watched(StoreClient):
        def put(self, group: str, items: Any, on_done: Any = None) -> Callable[[], None]:
            groups.append(("put", group))
            return super().put(group, items, on_done)

        def exists(self, group: str, keys: Any, *, deadline_s: float, on_done: Any) -> Callable[[], None]:
            groups.append(("exists", group))
            return super().exists(group, keys, deadline_s=deadline_s, on_done=on_done)

    monkeypatch.setattr(epd.engine.tiers, "open_store", lambda url, **settings: Watched([SlowNode()]))
    bench = make_bench(**HOST, kv_store="local")
    bench.submit(msgspec.structs.replace(make_request("a", PROMPT, ignore_eos=True), session="one"))
    run(bench)
    rest(bench)
    assert {kind for kind, _ in groups} == {"put", "exists"}
    assert {group for _, group in groups} == {"one"}
    bench.engine.tiers.close()


def test_a_worker_that_stops_gives_the_store_what_is_on_its_way(
    make_bench: MakeBench, store: dict[str, object]
) -> None:
    bench = make_bench(**store)
    bench.submit(make_request("last", PROMPT, ignore_eos=True, max_tokens=4))
    until(lambda: bench.engine.scheduler.num_running > 0, bench)
    bench.engine.loop.drain()
    bench.engine.loop.run()
    bench.collect()
    assert bench.finishes["last"].reason is FinishReason.LENGTH
    later = make_bench(**store)
    assert ask(later, "later", PROMPT).store_tokens == WHOLE
    later.engine.tiers.close()
