"""Prefetch from the store to the host: what is asked for, what is read, what is left of it when things go wrong."""

from __future__ import annotations

import pytest

from epd.cache.tiers.bridge import BridgeSettings
from epd.cache.tiers.ports import store_key
from tests.fakes.bridge_world import PAGE_SIZE, BridgeWorld, chain

KEYS = chain("prompt", 12)


def names(world: BridgeWorld, kind: str) -> list[bytes]:
    return [key for what, keys in world.store.history for key in keys if what == kind]


def test_the_whole_prefix_comes() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    assert world.prefetch("a", KEYS)
    assert world.bridge.is_fetching("a")
    world.settle()
    assert not world.bridge.is_fetching("a")
    assert world.bridge.collect() == ("a",)
    assert world.bridge.collect() == ()
    assert world.usable(KEYS) == 12
    assert world.bridge.num_fetched_pages("a") == 12
    assert world.host.full.stats().pinned == 12
    assert world.host.window.stats().pinned == 2, "windows of the deepest boundary only"
    world.bridge.forget("a")
    world.check_quiet()
    assert world.bridge.bridge_stats().prefetch["hit"] == 1


def test_the_last_token_is_computed() -> None:
    """A prompt that ends with a page resumes from a boundary before it, as a lookup would."""
    world = BridgeWorld()
    world.store_has(KEYS)
    assert world.prefetch("a", KEYS, num_tokens=12 * PAGE_SIZE)
    world.settle()
    assert world.num_host_pages(KEYS) == 11
    assert world.usable(KEYS) == 11


@pytest.mark.parametrize("num_tokens", [0, 1, PAGE_SIZE])
def test_nothing_to_look_for(num_tokens: int) -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    assert not world.prefetch("a", KEYS, num_tokens=num_tokens)
    assert not world.bridge.is_fetching("a")
    assert world.store.history == []


def test_what_is_above_is_neither_asked_for_nor_read() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.computes(KEYS, 4, 6)
    world.settle()
    world.store.history.clear()
    world.prefetch("a", KEYS, device_full=4, device_windows=[11])
    world.settle()
    above = {store_key("full", key) for key in KEYS[:6]} | {store_key("window", KEYS[11])}
    assert not above.intersection(names(world, "exists"))
    assert names(world, "get") == [store_key("full", key) for key in KEYS[6:]] + [store_key("window", KEYS[10])]
    assert world.usable(KEYS, device_full=4, device_windows=[11]) == 12


def test_a_prefix_that_is_above_costs_nothing() -> None:
    world = BridgeWorld()
    world.computes(KEYS)
    assert not world.prefetch("a", KEYS)


def test_the_deepest_whole_window_decides() -> None:
    world = BridgeWorld()
    world.store_has(KEYS, windows=[2, 3, 4, 7, 8, 10])
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 9
    assert world.num_host_pages(KEYS) == 9, "full pages beyond the boundary are of no use here"
    assert world.host.window.get(KEYS[4]) is None


def test_a_window_may_be_made_of_device_host_and_store() -> None:
    world = BridgeWorld(window_pages=3)
    world.store_has(KEYS, windows=[11])
    world.fill("window", KEYS, [10])
    world.prefetch("a", KEYS, device_windows=[9])
    world.settle()
    assert world.usable(KEYS, device_windows=[9]) == 12
    assert names(world, "get")[-1:] == [store_key("window", KEYS[11])]


def test_without_window_layers_full_pages_are_all_it_takes() -> None:
    world = BridgeWorld(window_pages=0)
    world.store_has(KEYS, full=7, windows=[])
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 7
    assert all(key[:1] == b"f" for key in names(world, "exists"))


@pytest.mark.parametrize(("heal_pages", "expected"), [(None, 3), (7, 3), (6, 10)])
def test_full_pages_beyond_the_last_window_come_when_healing_pays(heal_pages: int | None, expected: int) -> None:
    world = BridgeWorld(settings=BridgeSettings(heal_pages=heal_pages))
    world.store_has(KEYS, full=10, windows=[1, 2])
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 3
    assert world.num_host_pages(KEYS) == expected
    assert names(world, "get")[:5] == [
        *(store_key("full", key) for key in KEYS[:3]),
        *(store_key("window", key) for key in KEYS[1:3]),
    ]


def test_windows_that_are_above_are_not_probed_for() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.fill("window", KEYS, [10])
    world.prefetch("a", KEYS, device_windows=[11])
    world.settle()
    assert world.usable(KEYS, device_windows=[11]) == 12
    assert all(key[:1] == b"f" for key in names(world, "exists"))


def test_few_round_trips_for_a_sparse_chain() -> None:
    """Windows are probed from deep to shallow in batches that grow."""
    keys = chain("long", 1000)
    world = BridgeWorld(num_full_pages=100, num_window_pages=8, settings=BridgeSettings(ask_keys=512))
    world.store_has(keys, windows=[8, 9])
    world.prefetch("a", keys)
    world.settle()
    asked = [keys for what, keys in world.store.history if what == "exists"]
    assert len(asked) <= 9, [len(one) for one in asked]
    assert world.usable(keys) == 10


def test_full_pages_are_asked_for_until_one_is_missing() -> None:
    keys = chain("long", 40)
    world = BridgeWorld(num_full_pages=40, settings=BridgeSettings(ask_keys=4))
    world.store_has(keys, full=6)
    world.prefetch("a", keys)
    world.settle()
    asked = [key for key in names(world, "exists") if key[:1] == b"f"]
    assert asked == [store_key("full", key) for key in keys[:8]]


def test_pages_are_published_in_order_as_they_arrive() -> None:
    world = BridgeWorld(settings=BridgeSettings(read_pages=4, prefetch_timeout_s=10))
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    first, second = world.store.waiting[:2]
    world.store.run(second)
    world.bridge.poll()
    assert world.num_host_pages(KEYS) == 0, "pages 4 to 7 came before their predecessors"
    world.store.run(first, 1, index=1)
    world.bridge.poll()
    assert world.num_host_pages(KEYS) == 0
    world.store.run(first, 1)
    world.bridge.poll()
    assert world.num_host_pages(KEYS) == 2
    world.store.run(first)
    world.bridge.poll()
    assert world.num_host_pages(KEYS) == 8
    world.settle()
    assert world.usable(KEYS) == 12


def test_at_the_deadline_what_has_come_is_taken() -> None:
    settings = BridgeSettings(prefetch_timeout_s=1.0, prefetch_page_timeout_s=0.1, heal_pages=0)
    world = BridgeWorld(settings=settings)
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.store.run(world.store.waiting[0])
    world.bridge.poll()
    world.store.run(world.store.waiting[0])
    world.bridge.poll()
    (call,) = world.store.waiting
    world.store.run(call, 5)
    deadline_s = 1.0 + 0.1 * (12 + 2)
    assert world.bridge.next_deadline_s() == pytest.approx(deadline_s)
    world.now_s = deadline_s - 0.01
    world.bridge.poll()
    assert world.bridge.is_fetching("a")
    world.now_s = deadline_s
    world.bridge.poll()
    assert not world.bridge.is_fetching("a")
    assert world.num_host_pages(KEYS) == 5
    assert world.host.full.stats().filling == 7, "the store may still write to them"
    world.store.scribble()
    world.check()
    world.store.finish(call)
    world.bridge.poll()
    assert world.host.full.stats().filling == 0
    world.bridge.forget("a")
    world.check_quiet()
    assert world.bridge.bridge_stats().prefetch["timeout"] == 1


def test_what_came_while_the_store_was_asked_again_is_taken_too() -> None:
    """Page 4 is missing after all, the windows of shallower boundaries are asked for, and there is no answer."""
    world = BridgeWorld(settings=BridgeSettings(prefetch_timeout_s=1.0, read_pages=4, ask_keys=6, heal_pages=0))
    world.store_has(KEYS, windows=[10, 11])
    world.prefetch("a", KEYS)
    for _ in range(3):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    del world.store.values[store_key("full", KEYS[4])]
    first, second = world.store.waiting[:2]
    world.store.run(first, 1)
    world.bridge.poll()
    world.store.run(second, 1)
    world.bridge.poll()
    world.store.run(first, 1)
    world.bridge.poll()
    assert world.num_host_pages(KEYS) == 2
    assert world.store.waiting[-1].kind == "exists"
    world.store.run(first)
    world.now_s = 5.0
    world.bridge.poll()
    assert not world.bridge.is_fetching("a")
    assert world.num_host_pages(KEYS) == 4
    world.settle()
    world.bridge.forget("a")
    world.check_quiet()


def test_reading_ends_with_the_request() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS, deadline_s=0.201)
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    (call,) = world.store.waiting
    assert call.deadline_s == world.bridge.next_deadline_s() == 0.201


def test_never_past_the_requests_own_deadline() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS, deadline_s=0.05)
    world.now_s = 0.05
    world.bridge.poll()
    assert not world.bridge.is_fetching("a")
    assert world.bridge.collect() == ("a",)
    assert not world.prefetch("late", KEYS, deadline_s=0.05)


def test_a_store_that_never_answers_costs_the_base_time() -> None:
    world = BridgeWorld(settings=BridgeSettings(prefetch_timeout_s=0.2))
    world.prefetch("a", KEYS)
    world.now_s = 0.2
    world.bridge.poll()
    assert world.bridge.collect() == ("a",)
    world.bridge.forget("a")
    world.settle()
    world.check_quiet()


def test_two_requests_share_one_read() -> None:
    world = BridgeWorld()
    other = chain("other", 12, shared=("prompt", 8))
    world.store_has(KEYS)
    world.store_has(other)
    world.prefetch("a", KEYS)
    world.prefetch("b", other)
    world.settle()
    assert world.usable(KEYS) == world.usable(other) == 12
    read = names(world, "get")
    assert len(read) == len(set(read))
    assert world.bridge.num_fetched_pages("a") == world.bridge.num_fetched_pages("b") == 12
    world.bridge.forget("a")
    assert world.host.full.stats().pinned == 12, "what b needs stays"
    world.bridge.forget("b")
    world.check_quiet()


def test_one_that_shares_may_go_and_the_other_gets_all() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.prefetch("b", KEYS)
    for _ in range(4):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    (call,) = world.store.waiting
    assert call.kind == "get"
    world.bridge.forget("a")
    assert not call.is_cancelled
    world.settle()
    assert world.usable(KEYS) == 12
    world.bridge.forget("b")
    world.check_quiet()


def test_a_page_that_was_given_up_can_be_fetched_again_once_the_store_is_done_with_it() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    (call,) = world.store.waiting
    world.bridge.forget("a")
    assert call.is_cancelled
    world.prefetch("b", KEYS)
    world.bridge.poll()
    assert world.bridge.is_fetching("b"), "it waits for the pages"
    world.store.scribble()
    world.settle()
    assert world.usable(KEYS) == 12


def test_a_lying_store_is_a_shorter_hit_and_is_not_believed() -> None:
    world = BridgeWorld()
    world.computes(KEYS)
    world.settle()
    stats = world.bridge.bridge_stats()
    assert stats.num_believed_keys == 24
    for pool in world.pools.values():
        pool.clear()
    lost = store_key("full", KEYS[7])
    del world.store.values[lost]
    world.store.phantoms.add(lost)
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 7, "the windows of a shallower boundary are fetched instead"
    assert world.bridge.bridge_stats().prefetch["partial"] == 1
    world.bridge.forget("a")
    world.check_quiet()
    world.store.phantoms.clear()
    world.computes(KEYS, 7)
    world.settle()
    assert lost in world.store.values, "what proved to be missing is written again"


def test_a_corrupt_window_moves_the_boundary() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.store.corrupt.add(store_key("window", KEYS[11]))
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 11
    world.bridge.forget("a")
    world.check_quiet()


def test_pages_are_reserved_after_the_hit_is_known() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.store.run(world.store.waiting[0])
    world.bridge.poll()
    assert world.host.full.stats().filling == world.host.window.stats().filling == 0
    world.store.run(world.store.waiting[0])
    world.bridge.poll()
    assert (world.host.full.stats().filling, world.host.window.stats().filling) == (12, 2)


def test_without_room_the_hit_is_shorter_then_none() -> None:
    """Prefetches hold three quarters of a pool at most."""
    world = BridgeWorld(num_full_pages=8)
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 6
    assert world.bridge.bridge_stats().prefetch["shortened"] == 1
    other = chain("other", 4)
    world.store_has(other)
    world.prefetch("b", other)
    world.settle()
    assert world.usable(other) == 0
    assert world.bridge.bridge_stats().prefetch["no_room"] == 1
    world.bridge.forget("a")
    world.bridge.forget("b")
    world.check_quiet()


def test_making_room_does_not_take_what_the_prefix_needs() -> None:
    """The host holds its first four pages, not pinned by anybody; there is room for two more."""
    world = BridgeWorld(num_full_pages=8)
    world.store_has(KEYS)
    world.fill("full", KEYS, [0, 1, 2, 3, 10])
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 6
    assert world.host.full.stats().pinned == 6, "page 10 is of no use and not held"
    world.bridge.forget("a")
    world.check_quiet()


def test_room_that_others_hold_shortens_the_hit() -> None:
    world = BridgeWorld(num_full_pages=8)
    other = chain("other", 5)
    world.store_has(KEYS)
    world.fill("full", other, range(5))
    world.host.full.pin(other)
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 3
    world.host.full.unpin(other)
    world.bridge.forget("a")
    world.check_quiet()


def test_the_windows_of_a_shorter_hit_are_held_while_room_is_made() -> None:
    world = BridgeWorld(num_full_pages=8, num_window_pages=3)
    world.store_has(KEYS, windows=[5, 10, 11])
    world.fill("window", KEYS, [4])
    world.fill("window", chain("other", 2), [0, 1])
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 6
    world.bridge.forget("a")
    world.check_quiet()


def test_without_room_for_windows_only_healing_is_left() -> None:
    world = BridgeWorld(num_window_pages=2, settings=BridgeSettings(heal_pages=2))
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.settle()
    assert world.usable(KEYS) == 0
    assert world.num_host_pages(KEYS) == 12


def test_a_lease_ends() -> None:
    world = BridgeWorld(settings=BridgeSettings(lease_s=5.0))
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.settle()
    world.now_s = 5.0
    world.bridge.poll()
    world.check_quiet()
    assert world.bridge.collect() == (), "nobody is told of pages that may be gone"
    world.bridge.forget("a")


def test_a_request_that_comes_again_has_one_prefetch() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.prefetch("a", KEYS)
    world.settle()
    assert world.bridge.collect() == ("a",)
    world.bridge.forget("a")
    world.check_quiet()


def test_condemned_pages_do_not_come_back() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.store.run(world.store.waiting[0])
    world.bridge.poll()
    world.host.full.condemn(KEYS[0])
    world.bridge.condemn(KEYS)
    # A node that was away when it was told to forget.
    world.store_has(KEYS)
    world.settle()
    assert world.num_host_pages(KEYS) == 0
    assert not world.prefetch("b", KEYS)
    world.bridge.forget("a")
    world.check_quiet()
    world.computes(KEYS, 0, 4)
    for pool in world.pools.values():
        pool.clear()
    assert world.prefetch("c", KEYS), "computed anew, they may be fetched again"


def test_condemned_while_they_come() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    (call,) = world.store.waiting
    world.store.run(call, 4)
    for pool in world.pools.values():
        pool.condemn(KEYS[0])
    world.bridge.condemn(KEYS)
    world.bridge.poll()
    assert not world.bridge.is_fetching("a")
    world.store.scribble()
    world.settle()
    world.bridge.forget("a")
    world.check_quiet()
    assert world.num_host_pages(KEYS) == 0


def test_condemned_by_the_store_side_alone() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    (call,) = world.store.waiting
    world.store.run(call, 3)
    world.bridge.condemn(KEYS)
    assert call.is_cancelled
    world.settle()
    assert world.num_host_pages(KEYS) == 0
    world.bridge.forget("a")
    world.check_quiet()


def test_condemned_with_a_path_that_shares_its_beginning() -> None:
    """The host condemns by first page, so pages of a branch go that the bridge was not told of."""
    world = BridgeWorld()
    branch = chain("branch", 8, shared=("prompt", 4))
    world.store_has(branch)
    world.prefetch("a", branch)
    for _ in range(2):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    (call,) = world.store.waiting
    world.store.run(call, 6)
    for pool in world.pools.values():
        pool.condemn(KEYS[0])
    world.settle()
    assert world.num_host_pages(branch) == 0
    assert world.bridge.collect() == ("a",)
    world.bridge.forget("a")
    world.check_quiet()
