"""Write-back: what reaches the store, in which order, and what is left behind."""

from __future__ import annotations

from epd.cache.tiers.bridge import BridgeSettings
from epd.cache.tiers.ports import store_key
from tests.fakes.bridge_world import BridgeWorld, chain

KEYS = chain("prompt", 12)


def put_names(world: BridgeWorld) -> list[bytes]:
    return [key for what, keys in world.store.history if what == "put" for key in keys]


def test_saved_pages_are_written_in_path_order() -> None:
    world = BridgeWorld(settings=BridgeSettings(write_pages=5))
    world.computes(KEYS)
    world.settle()
    world.check_quiet()
    assert put_names(world) == [store_key("full", key) for key in KEYS] + [store_key("window", key) for key in KEYS]
    assert [len(keys) for what, keys in world.store.history if what == "put"] == [5, 5, 5, 5, 4]
    assert world.bridge.bridge_stats().writeback["written"] == 24


def test_large_pages_go_in_smaller_batches() -> None:
    """Full pages have 24 bytes, window pages 40."""
    world = BridgeWorld(settings=BridgeSettings(write_bytes=50))
    world.computes(KEYS, 0, 4)
    world.settle()
    assert [len(keys) for what, keys in world.store.history if what == "put"] == [3, 2, 2, 1]


def test_pages_are_pinned_only_while_a_put_reads_them() -> None:
    world = BridgeWorld(settings=BridgeSettings(write_pages=4))
    world.computes(KEYS)
    assert world.host.full.stats().pinned == 0
    world.bridge.poll()
    assert world.host.full.stats().pinned == 8, "two batches are under way"
    world.store.run(world.store.waiting[0])
    world.bridge.poll()
    assert world.host.full.stats().pinned == 8
    world.settle()
    world.check_quiet()


def test_nothing_is_written_twice() -> None:
    world = BridgeWorld()
    world.computes(KEYS)
    world.bridge.saved(KEYS, KEYS, "g")
    world.bridge.poll()
    world.bridge.saved(KEYS, KEYS, "g")
    world.settle()
    world.bridge.saved(KEYS, KEYS, "other group, same node")
    world.settle()
    assert len(put_names(world)) == 24
    assert world.bridge.bridge_stats().writeback["known"] == 72


def test_what_was_fetched_is_not_written() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.settle()
    world.bridge.saved(KEYS, KEYS[10:], "g")
    world.settle()
    assert put_names(world) == []


def test_each_node_is_believed_for_itself() -> None:
    world = BridgeWorld()
    world.store.places = {"g": "one", "h": "two"}
    world.computes(KEYS, 0, 2)
    world.settle()
    world.bridge.saved(KEYS[:2], KEYS[:2], "h")
    world.settle()
    assert len(put_names(world)) == 8


def test_a_belief_ends_with_the_stores_memory() -> None:
    world = BridgeWorld(settings=BridgeSettings(ttl_s=10.0))
    world.computes(KEYS, 0, 2)
    world.settle()
    world.now_s = 10.0
    world.bridge.saved(KEYS[:2], KEYS[:2], "g")
    world.settle()
    assert len(put_names(world)) == 8


def test_what_the_store_refused_is_tried_again_next_time() -> None:
    world = BridgeWorld()
    world.store.is_full = True
    world.computes(KEYS, 0, 3)
    world.settle()
    world.check_quiet()
    assert world.bridge.bridge_stats().writeback["refused"] == 6
    world.store.is_full = False
    world.bridge.saved(KEYS[:3], KEYS[:3], "g")
    world.settle()
    assert len(world.store.values) == 6


def test_a_shortfall_ends_a_belief() -> None:
    world = BridgeWorld()
    world.computes(KEYS, 0, 4)
    world.settle()
    world.store.values.clear()
    for pool in world.pools.values():
        pool.clear()
    world.prefetch("a", KEYS[:4])
    world.settle()
    world.computes(KEYS, 0, 4)
    world.settle()
    assert len(world.store.values) == 8


def test_no_answer_ends_no_belief() -> None:
    """Else a store that is slow would be given all its pages once more."""
    world = BridgeWorld()
    world.computes(KEYS, 0, 4)
    world.settle()
    for pool in world.pools.values():
        pool.clear()
    world.prefetch("a", KEYS[:4])
    world.now_s = 0.2
    world.store.expire()
    world.bridge.poll()
    assert world.bridge.bridge_stats().num_believed_keys == 8
    world.bridge.forget("a")
    world.now_s = 0.3
    world.prefetch("b", KEYS[:4])
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    world.now_s = 1.0
    world.store.expire()
    world.bridge.poll()
    assert world.bridge.bridge_stats().num_believed_keys == 8
    world.bridge.forget("b")
    world.check_quiet()


def test_a_full_queue_leaves_the_ends_behind() -> None:
    world = BridgeWorld(settings=BridgeSettings(max_queued_pages=9))
    world.computes(KEYS)
    world.settle()
    assert put_names(world) == [store_key("full", key) for key in KEYS[:9]]
    assert world.bridge.bridge_stats().writeback["dropped"] == 15


def test_what_hangs_in_the_air_is_not_written() -> None:
    """The host lost page 3 before its turn came: no lookup can ever get past it."""
    world = BridgeWorld()
    world.computes(KEYS, 0, 6)
    other = chain("other", 2)
    world.computes(other)
    world.host.full.discard([KEYS[3]])
    world.settle()
    assert put_names(world)[:3] == [store_key("full", key) for key in KEYS[:3]]
    assert put_names(world)[3:] == [store_key(kind, key) for kind in ("full", "window") for key in other]
    assert world.bridge.bridge_stats().writeback["evicted"] == 9


def test_unfinished_pages_stay_here() -> None:
    world = BridgeWorld()
    world.bridge.saved([b"a last page, of one sequence"], [], "g")
    world.settle()
    assert put_names(world) == []


def test_one_node_that_hangs_keeps_no_other_waiting() -> None:
    world = BridgeWorld(settings=BridgeSettings(write_pages=1))
    world.store.places = {"slow": "one", "quick": "two"}
    world.computes(KEYS, 0, 6, group="slow")
    world.bridge.poll()
    hanging = list(world.store.waiting)
    other = chain("other", 3)
    world.computes(other, group="quick")
    for _ in range(6):
        world.bridge.poll()
        for call in world.store.waiting:
            if call not in hanging:
                world.store.run(call)
                break
    world.bridge.poll()
    assert all(store_key("full", key) in world.store.values for key in other)
    assert len(hanging) == 2


def test_condemned_pages_are_not_written_and_are_discarded() -> None:
    world = BridgeWorld(settings=BridgeSettings(write_pages=2))
    world.computes(KEYS, 0, 8)
    world.bridge.poll()
    for pool in world.pools.values():
        pool.condemn(KEYS[0])
    world.bridge.condemn(KEYS)
    world.settle()
    assert world.store.values == {}
    assert world.bridge.bridge_stats().num_believed_keys == 0
    world.check_quiet()


def test_closing_writes_what_waits_and_holds_nothing() -> None:
    world = BridgeWorld(at_once=True)
    world.computes(KEYS)
    world.bridge.close(flush_s=1.0)
    assert len(world.store.values) == 24
    assert world.store.is_closed
    world.check_quiet()
    world.bridge.close()


def test_closing_in_the_middle_of_everything_holds_nothing() -> None:
    world = BridgeWorld(settings=BridgeSettings(write_pages=2))
    other = chain("other", 6)
    world.store_has(other)
    world.prefetch("a", other)
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    world.store.run(world.store.waiting[0], 2)
    world.computes(KEYS, 0, 8)
    world.bridge.poll()
    world.bridge.close()
    world.check_quiet()
    assert world.bridge.bridge_stats().num_queued_pages == 0
    assert not world.prefetch("b", other)
    world.bridge.saved(KEYS, KEYS, "g")
    world.bridge.poll()


def test_what_the_store_has_lost_is_written_again_when_it_is_saved_again() -> None:
    world = BridgeWorld()
    world.computes(KEYS)
    world.settle()
    world.store.values.clear()
    world.bridge.saved(KEYS, KEYS, "g")
    world.settle()
    assert not world.store.values, "it was heard of a moment ago"
    world.now_s += 31.0
    world.bridge.saved(KEYS, KEYS, "g")
    world.settle()
    world.check_quiet()
    assert len(world.store.values) == 24
    counters = world.bridge.bridge_stats().writeback
    assert (counters["rechecked"], counters["lost"]) == (24, 24)


def test_what_is_still_there_is_asked_about_once_in_a_while_and_not_written() -> None:
    world = BridgeWorld()
    world.computes(KEYS)
    world.settle()
    world.now_s += 31.0
    for _ in range(3):
        world.bridge.saved(KEYS, KEYS, "g")
        world.settle()
    assert len(put_names(world)) == 24
    assert world.bridge.bridge_stats().writeback["rechecked"] == 24


def test_a_store_that_does_not_answer_in_time_is_not_taken_for_empty() -> None:
    world = BridgeWorld()
    world.computes(KEYS)
    world.settle()
    world.now_s += 31.0
    world.bridge.saved(KEYS, KEYS, "g")
    world.store.values.clear()
    world.now_s += 3.0
    world.settle()
    assert len(put_names(world)) == 24
