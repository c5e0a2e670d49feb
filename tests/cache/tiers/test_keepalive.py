"""Touches of what is hot above: whole chains, seldom, within a budget, never on a request's path."""

from __future__ import annotations

from epd.cache.tiers.bridge import BridgeSettings
from epd.cache.tiers.ports import store_key
from tests.fakes.bridge_world import BridgeWorld, chain

KEYS = chain("prompt", 12)
WHOLE = [store_key("full", key) for key in KEYS] + [store_key("window", key) for key in KEYS[-2:]]


def touched(world: BridgeWorld) -> list[bytes]:
    return [key for what, keys in world.store.history if what == "touch" for key in keys]


def test_the_whole_chain_and_the_windows_at_its_end() -> None:
    world = BridgeWorld()
    world.bridge.touch_hot(KEYS, "g")
    assert touched(world) == [], "a hit does not wait for the store"
    world.bridge.poll()
    assert touched(world) == WHOLE


def test_at_most_once_in_a_third_of_the_time_to_live() -> None:
    world = BridgeWorld(settings=BridgeSettings(ttl_s=30.0))
    for now_s in range(25):
        world.now_s = float(now_s)
        world.bridge.touch_hot(KEYS, "g")
        world.bridge.poll()
    assert touched(world) == WHOLE * 3


def test_a_growing_chain_touches_its_new_end_only() -> None:
    world = BridgeWorld(settings=BridgeSettings(ttl_s=3.0, touch_keys=100))
    world.bridge.touch_hot(KEYS[:8], "g")
    world.bridge.poll()
    world.now_s = 0.99
    world.bridge.touch_hot(KEYS, "g")
    world.bridge.poll()
    assert len(touched(world)) == 10, "the budget is spent"
    world.now_s = 1.0
    world.bridge.poll()
    assert touched(world)[10:] == WHOLE, "the beginning is due again by now"


def test_in_batches_from_the_beginning() -> None:
    world = BridgeWorld(settings=BridgeSettings(ttl_s=300.0, touch_keys=5))
    world.bridge.touch_hot(KEYS, "g")
    for step in range(3):
        world.now_s = step * 100.0
        world.bridge.poll()
    assert touched(world) == [*WHOLE[:5], *WHOLE[:5], *WHOLE[:5]], "without traffic one batch each interval"


def test_one_operation_in_a_hundred() -> None:
    world = BridgeWorld(num_full_pages=512, num_window_pages=512, settings=BridgeSettings(ttl_s=1e6, touch_keys=4))
    hot = [chain(f"hot {number}", 20) for number in range(8)]
    for one in hot:
        world.bridge.touch_hot(one, "g")
    num_written = 0
    for number in range(8):
        world.computes(chain(f"new {number}", 60), group="g")
        world.settle()
        num_written = world.store.counters["put_keys"]
        for _ in range(20):
            world.bridge.poll()
        assert len(touched(world)) <= 4 + num_written / 100
    assert num_written == 960
    assert len(touched(world)) >= 4 + num_written // 100 - 1


def test_what_was_read_is_fresh() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.settle()
    world.bridge.touch_hot(KEYS, "g")
    world.bridge.poll()
    assert touched(world) == []


def test_many_hot_chains_are_a_bounded_number() -> None:
    world = BridgeWorld(settings=BridgeSettings(touch_keys=1))
    for number in range(1000):
        world.bridge.touch_hot(chain(f"{number}", 3), "g")
    assert world.bridge.bridge_stats().keepalive["chains_dropped"] == 1000 - 256
    world.bridge.touch_hot([], "g")


def test_nothing_is_touched_after_the_end() -> None:
    world = BridgeWorld()
    world.bridge.close()
    world.bridge.touch_hot(KEYS, "g")
    world.bridge.poll()
    assert touched(world) == []
