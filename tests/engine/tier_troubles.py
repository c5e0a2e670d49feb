"""What befalls an engine with tiers in a schedule, store and copies aside: pages that go, sequences that are put back,
and KV that gets damaged where no checksum looks."""

from __future__ import annotations

import random
import time

from epd.cache.tiers.ports import store_key
from epd.engine.sequence import key_chain
from epd.engine.settling import settle
from epd.types import FinishReason
from tests.engine.conftest import Bench
from tests.engine.test_healing_schedules import Prompt
from tests.engine.tier_bench import SETTLE_S, Stand, to_request

__all__ = ["disturb", "forget_above", "poison", "retract", "run"]


def run(stand: Stand, bench: Bench) -> None:
    """Until idle; what waits for the store needs time, not steps."""
    until_s = time.monotonic() + 30
    while True:
        bench.step()
        if bench.engine.scheduler.is_idle and not bench.mailbox.inbox:
            return
        if bench.engine.scheduler.is_asleep:
            time.sleep(0.0005)
        assert time.monotonic() < until_s, "still busy"


def disturb(bench: Bench, rng: random.Random) -> None:
    """Pages go from the device as other requests would make them go, and from the host."""
    ledger, host = bench.engine.cache.device.ledger, bench.engine.cache.host
    what = rng.random()
    if what < 0.4:
        ledger.evict_window(rng.choice((1, 3, 10, 1000)))
    elif what < 0.7:
        ledger.evict_full(rng.choice((1, 3, 10, 1000)))
    elif host is not None:
        # As they go for others: some of them, or all.
        for pool in (host.full, host.window):
            pool.discard(list(pool._evictable)[: rng.choice((1, 3, 1000))])


def forget_above(bench: Bench) -> None:
    """Only the store may have anything now."""
    settle(bench.engine.cache, 0.2)
    bench.engine.cache.clear()


def retract(bench: Bench) -> None:
    """Put the latest sequence back, as if the earliest had found no page; its step has not been planned yet."""
    running = list(bench.engine.scheduler._roster.running.values())
    if len(running) > 1:
        assert bench.engine.scheduler._retract_after(running[0], {})


def poison(stand: Stand, bench: Bench, prompt: Prompt) -> None:
    """One full page that the prompt's answer rests on is no number any more, on the device and at times wherever else
    it is: whoever reads it is told, once."""
    cache, scheduler = bench.engine.cache, bench.engine.scheduler
    keys = key_chain(to_request("x", prompt), page_size=cache.page_size, seed=scheduler._config.key_seed).keys
    if scheduler._roster.running or not cache.device.walk(keys, len(prompt.token_ids)).usable_pages:
        return
    settle(cache, SETTLE_S)
    pages = cache.device.begin(keys, len(prompt.token_ids))
    index = stand.rng.randrange(len(pages.full_pages))
    target = pages.full_pages[index]
    pages.abort()
    storage = bench.engine.loop._mover._storage
    for layer in storage.full_layer_indices:
        storage.values(layer)[target] = float("nan")
    if stand.rng.random() < 0.7:
        damage_below(bench, keys[index])
    told = stand.request(prompt)
    bench.submit(told)
    run(stand, bench)
    # Unless the page had to go before it was its turn.
    stand.tally["told of damage"] += bench.finishes[told.request_id].reason is FinishReason.FAILED
    stand.told |= {name for name, finish in bench.finishes.items() if finish.reason is FinishReason.FAILED}
    for number in range(2):
        again = stand.request(prompt)
        bench.submit(again)
        run(stand, bench)
        assert bench.finishes[again.request_id].reason is FinishReason.LENGTH
        if number == 0:
            forget_above(bench)
    stand.tally["poisoned"] += 1


def damage_below(bench: Bench, key: bytes) -> None:
    """The page in host memory, too, and what the store gets of it."""
    host, storage, bridge = bench.engine.cache.host, bench.engine.tiers.host, bench.engine.tiers.bridge
    page = None if host is None else host.full.get(key)
    if page is None:
        return
    assert storage is not None
    storage.pool("full")[page].fill_(0xFF)
    if bridge is not None:
        bridge._belief.forget_everywhere([store_key("full", key)])
        bridge.saved([key], [], "")
        settle(bench.engine.cache, SETTLE_S)
