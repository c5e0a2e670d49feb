"""Settings of the bridge to the store, and what it says of itself."""

from __future__ import annotations

import pytest

from epd.cache.tiers.bridge import BridgeSettings
from tests.fakes.bridge_world import BridgeWorld, chain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read_pages", 0),
        ("write_pages", -1),
        ("write_bytes", 0),
        ("ask_keys", 0),
        ("touch_keys", 0),
        ("max_queued_pages", 0),
        ("max_believed_keys", 0),
        ("prefetch_timeout_s", -0.1),
        ("prefetch_page_timeout_s", float("nan")),
        ("lease_s", -1.0),
        ("ttl_s", -1.0),
        ("heal_pages", -1),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        BridgeSettings(**{name: value})  # type: ignore[arg-type]


def test_a_bridge_is_busy_while_answers_are_awaited() -> None:
    world = BridgeWorld()
    keys = chain("prompt", 4)
    assert not world.bridge.is_busy
    assert world.bridge.next_deadline_s() is None
    world.computes(keys)
    assert world.bridge.is_busy
    world.settle()
    for pool in world.pools.values():
        pool.clear()
    world.prefetch("a", keys)
    assert world.bridge.is_busy
    assert world.bridge.next_deadline_s() == 0.2
    world.settle()
    assert not world.bridge.is_busy
    assert world.num_wakes > 0
    assert world.bridge.stats().puts == 8
    stats = world.bridge.bridge_stats()
    assert stats.num_fetching == stats.num_incoming_pages == stats.num_queued_pages == stats.num_flying_pages == 0
    assert stats.prefetch["begun"] == sum(
        stats.prefetch.get(outcome, 0) for outcome in ("hit", "partial", "miss", "timeout", "no_room", "aborted")
    )
    world.bridge.forget("a")
    world.check_quiet()


def test_without_a_session_all_that_begins_alike_is_one_group() -> None:
    world = BridgeWorld()
    keys = chain("prompt", 4)
    world.store.places = {keys[0].hex(): "its node"}
    world.computes(keys, group="")
    world.settle()
    for pool in world.pools.values():
        pool.clear()
    groups: list[str] = []
    world.store.place = lambda group: groups.append(group) or "any"  # type: ignore[method-assign,func-returns-value]
    world.prefetch("a", keys, group="")
    world.settle()
    assert set(groups) == {keys[0].hex()}
    assert world.usable(keys) == 4
