"""Schedules that broke others: between two looks something changes. A shorter hit is right, all else wrong."""

from __future__ import annotations

import itertools

import pytest

from epd.cache.tiers.bridge import BridgeSettings
from epd.cache.tiers.ports import store_key
from tests.fakes.bridge_world import BridgeWorld, chain
from tests.fakes.memory_store import StoreCall

KEYS = chain("prompt", 12)


def press(world: BridgeWorld) -> None:
    """Somebody takes all host pages that can be had, and gives them back."""
    for kind, pool in world.pools.items():
        names = [f"{kind} {number}".encode() for number in range(pool.num_reservable)]
        assert pool.reserve(names) is not None
        pool.discard(names)
    world.check()


def reading(world: BridgeWorld) -> list[StoreCall]:
    """Drive the store until pages are being read."""
    for _ in range(50):
        if world.store.waiting and world.store.waiting[0].kind == "get":
            return list(world.store.waiting)
        if world.store.waiting:
            world.store.run(world.store.waiting[0])
        world.bridge.poll()
    raise AssertionError("nothing is read")


def test_9_lookup_then_a_long_wait_under_pressure_then_retrieve() -> None:
    world = BridgeWorld(settings=BridgeSettings(lease_s=60.0))
    world.store_has(KEYS)
    world.computes(KEYS, 0, 3)
    world.settle()
    world.prefetch("a", KEYS)
    world.settle()
    for _ in range(5):
        world.now_s += 10.0
        press(world)
        world.bridge.poll()
    assert world.usable(KEYS) == 12, "what was there before and what came, both"
    world.now_s += 10.0
    world.bridge.poll()
    press(world)
    assert world.usable(KEYS) == 0, "nobody came for it within the lease"
    world.bridge.forget("a")
    world.check_quiet()


def test_10_the_host_loses_what_the_plan_counted_on() -> None:
    """Pages 0 to 4 go while the store is asked about the rest: it is asked about them too, and gives all."""
    world = BridgeWorld()
    world.computes(KEYS)
    world.settle()
    for pool in world.pools.values():
        pool.discard(KEYS[5:])
    world.prefetch("a", KEYS)
    press(world)
    world.settle()
    assert world.usable(KEYS) == 12
    world.bridge.forget("a")
    world.check_quiet()


def test_10_pages_appear_between_the_look_and_the_read() -> None:
    """They were computed meanwhile: not read again (asserted by the world), and the prefetch is shorter by them."""
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.store.run(world.store.waiting[0])
    world.computes(KEYS, 0, 6)
    world.settle()
    assert world.usable(KEYS) == 12
    assert world.bridge.num_fetched_pages("a") == 6
    world.bridge.forget("a")
    world.check_quiet()


def test_10_pages_are_being_written_by_a_backup_when_the_read_would_begin() -> None:
    """A copy from the device fills pages 2 and 3: the fetch waits for it, and joins its pages when they are ready."""
    world = BridgeWorld()
    world.store_has(KEYS)
    backup = KEYS[2:4]
    numbers = world.host.full.reserve(backup, root=KEYS[0])
    assert numbers is not None
    world.prefetch("a", KEYS)
    for _ in range(4):
        world.store.run_all()
        world.bridge.poll()
    assert world.bridge.is_fetching("a")
    for key, number in zip(backup, numbers, strict=True):
        world.bytes["full"][number][:] = world.store.values[store_key("full", key)]
    world.device |= {("full", key) for key in KEYS[:4]}
    world.host.full.publish(backup)
    world.settle()
    assert world.usable(KEYS) == 12
    world.bridge.forget("a")
    world.check_quiet()


@pytest.mark.parametrize("fails", [False, True])
def test_10_a_backup_that_fails_leaves_its_pages_to_the_store(fails: bool) -> None:
    world = BridgeWorld()
    world.store_has(KEYS, full=2 if fails else 12)
    assert world.host.full.reserve(KEYS[2:4], root=KEYS[0]) is not None
    world.prefetch("a", KEYS)
    for _ in range(4):
        world.store.run_all()
        world.bridge.poll()
    world.host.full.discard(KEYS[2:4])
    world.settle()
    assert world.usable(KEYS) == (2 if fails else 12)
    world.bridge.forget("a")
    world.check_quiet()


def test_10_a_backup_of_a_window_fails_and_the_store_has_it() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    assert world.host.window.reserve(KEYS[10:], root=KEYS[0]) is not None
    world.prefetch("a", KEYS)
    for _ in range(4):
        world.store.run_all()
        world.bridge.poll()
    world.host.window.discard(KEYS[10:])
    world.settle()
    assert world.usable(KEYS) == 12
    world.bridge.forget("a")
    world.check_quiet()


@pytest.mark.parametrize("num_landed", range(15))
def test_11_abort_while_the_store_reads(num_landed: int) -> None:
    """Before, during and after: pages return when the store is done with them, and not before."""
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    (call,) = reading(world)
    world.store.run(call, num_landed)
    if num_landed % 2:
        world.bridge.poll()
    num_published = world.num_host_pages(KEYS)
    world.bridge.forget("a")
    stats = world.host.full.stats()
    if num_landed < 14:
        assert stats.filling == 12 - num_published, "the store may still write to them"
        press(world)
        world.store.scribble()
        world.bridge.poll()
        world.check()
        world.store.finish(call)
    world.bridge.poll()
    world.check_quiet()


@pytest.mark.parametrize("num_answers", range(3))
def test_11_abort_while_the_store_is_asked(num_answers: int) -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    for _ in range(num_answers):
        world.store.run(world.store.waiting[0])
        world.bridge.poll()
    world.bridge.forget("a")
    assert not world.bridge.is_fetching("a")
    world.settle()
    world.check_quiet()
    assert world.bridge.collect() == ()


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_12_overlapping_paths_fetched_at_once(order: tuple[str, ...]) -> None:
    """Three requests, pages of different owners under way at the same time, leaving in any order."""
    world = BridgeWorld(settings=BridgeSettings(read_pages=3))
    prompts = {"a": KEYS, "b": chain("b", 10, shared=("prompt", 7)), "c": chain("c", 9, shared=("prompt", 4))}
    for keys in prompts.values():
        world.store_has(keys)
    for request_id in "abc":
        world.prefetch(request_id, prompts[request_id])
        for _ in range(2):
            world.store.run(world.store.waiting[-1])
            world.bridge.poll()
    world.bridge.forget(order[0])
    world.settle()
    for request_id in order[1:]:
        assert world.usable(prompts[request_id]) == len(prompts[request_id])
    world.bridge.forget(order[1])
    press(world)
    assert world.usable(prompts[order[2]]) == len(prompts[order[2]]), "its own pins hold"
    world.bridge.forget(order[2])
    world.check_quiet()


def test_13_host_full_of_held_pages_while_the_device_evicts() -> None:
    """Prefetches leave a quarter of the host to what the device gives up, and a put under way holds its batch only."""
    world = BridgeWorld(num_full_pages=16, num_window_pages=16, settings=BridgeSettings(write_pages=1))
    for name in "abc":
        keys = chain(name, 8)
        world.store_has(keys)
        world.prefetch(name, keys)
        world.settle()
    assert world.host.full.stats().pinned == 12
    saved = chain("saved", 4)
    assert world.computes(saved)
    world.bridge.poll()
    assert not world.computes(chain("more", 4)), "two of them are being put"
    assert world.computes(chain("less", 2))
    world.settle()
    for name in "abc":
        world.bridge.forget(name)
    world.check_quiet()


@pytest.mark.parametrize("lost", [0, 1, 5, 10, 11])
@pytest.mark.parametrize("kind", ["full", "window"])
def test_14_the_middle_vanishes_after_the_store_said_yes(lost: int, kind: str) -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    reading(world)
    del world.store.values[store_key("full" if kind == "full" else "window", KEYS[lost])]
    world.settle()
    if kind == "full":
        assert world.usable(KEYS) == lost
    else:
        # Windows of the last two pages are all that were asked for.
        assert world.usable(KEYS) == (12 if lost < 10 else lost)
    world.bridge.forget("a")
    world.check_quiet()


def test_14_the_whole_store_vanishes_after_it_said_yes() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    reading(world)
    world.store.values.clear()
    world.settle()
    assert world.bridge.collect() == ("a",)
    assert world.usable(KEYS) == 0
    world.bridge.forget("a")
    world.check_quiet()


def test_14_a_store_that_vanishes_between_two_questions_ends_at_the_deadline() -> None:
    world = BridgeWorld()
    world.store_has(KEYS)
    world.prefetch("a", KEYS)
    world.store.run(world.store.waiting[0])
    world.bridge.poll()
    world.now_s = 0.2
    world.store.expire()
    world.bridge.poll()
    assert world.bridge.collect() == ("a",)
    world.bridge.forget("a")
    world.settle()
    world.check_quiet()
