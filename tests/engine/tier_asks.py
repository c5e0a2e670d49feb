"""Questions to engines with tiers, and what takes their KV from one to the next."""

import random
import time
from collections.abc import Callable, Sequence

import pytest

from epd.engine.settling import settle
from epd.kv.copies import CopyFailed, CopyTicket, PageCopies
from epd.types import SamplingParams, Usage
from tests.engine.conftest import Bench, Checkpoint, make_request
from tests.oracles.plain_generate import plain_generate

PAGE_SIZE = 4
PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(90)]
# All whole pages but the one with the token that is computed.
WHOLE = 88
HOST = {"host_budget_bytes": 1 << 20}
GIVEN_UP_S = 120.0


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


def until(condition: Callable[[], bool], bench: Bench) -> None:
    until_s = time.monotonic() + GIVEN_UP_S
    while not condition():
        bench.step()
        assert time.monotonic() < until_s


class StuckTicket:
    """A load that may fail."""

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


class LateTicket:
    """A load that is only made when somebody waits for it: who does not finds numbers that are none."""

    def __init__(self, load: Callable[[], CopyTicket]) -> None:
        self._load = load
        self._ticket: CopyTicket | None = None

    def is_done(self) -> bool:
        return self._ticket is not None and self._ticket.is_done()

    def wait(self) -> None:
        if self._ticket is None:
            self._ticket = self._load()
        self._ticket.wait()

    def wait_layer(self, layer_index: int) -> None:
        self.wait()


def late_loads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = bench.engine.tiers.mover
    assert mover is not None
    load = mover.load
    monkeypatch.setattr(mover, "load", lambda copies: LateTicket(lambda: load(copies)))


def troubled_loads(bench: Bench, monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """Every load comes as late as it may, and one in four fails."""
    mover = bench.engine.tiers.mover
    assert mover is not None
    load = mover.load

    def troubled(copies: PageCopies) -> CopyTicket:
        late = LateTicket(lambda: load(copies))
        return StuckTicket(late, fails=chance.random() < 0.25)

    monkeypatch.setattr(mover, "load", troubled)


def spoil_device(bench: Bench) -> None:
    """Pages of the device hold no numbers until they are written."""
    storage = bench.engine.loop._mover._storage
    for layer in (*storage.full_layer_indices, *storage.window_layer_indices):
        storage.keys(layer).fill_(float("nan"))
        storage.values(layer).fill_(float("nan"))
