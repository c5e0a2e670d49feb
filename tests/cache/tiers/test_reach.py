"""What a prefetch brings, against brute force over every boundary; and how it probes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.cache.tiers.bridge import BridgeSettings
from epd.cache.tiers.ports import PageKind, store_key
from epd.cache.tiers.reach import WindowProbe, deepest_boundary
from epd.cache.window import window_floor
from tests.fakes.bridge_world import BridgeWorld, chain

NUM_PAGES = 10
KEYS = chain("prompt", NUM_PAGES)
some_pages = st.sets(st.integers(0, NUM_PAGES - 1))
# Mostly there: else hardly any window is whole.
most_pages = st.sets(st.integers(0, NUM_PAGES - 1), max_size=3).map(lambda gone: set(range(NUM_PAGES)) - gone)


def brute_boundary(live: set[int], stop: int, above: int, window_pages: int) -> int | None:
    found = [b for b in range(above + 1, stop + 1) if set(range(window_floor(b, window_pages), b)) <= live]
    return max(found, default=None)


@given(live=some_pages | most_pages, stop=st.integers(0, NUM_PAGES), above=st.integers(0, 6), width=st.integers(0, 4))
@settings(max_examples=120, deadline=None)
def test_the_deepest_boundary(live: set[int], stop: int, above: int, width: int) -> None:
    expected = brute_boundary(live, stop, above, width)
    assert deepest_boundary(live.__contains__, stop=stop, above=above, window_pages=width) == expected


@given(
    live=most_pages,
    stop=st.integers(1, NUM_PAGES),
    above=st.integers(0, 6),
    width=st.integers(1, 4),
    batch=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_probing_finds_it_and_asks_for_no_window_twice(
    live: set[int], stop: int, above: int, width: int, batch: int
) -> None:
    probe = WindowProbe(stop=stop, above=above, window_pages=width, first_batch=batch, max_batch=8)
    asked: list[int] = []
    found = None
    while not probe.is_exhausted and found is None:
        if not probe.skip(lambda page: page % 5 == 0):
            batch_pages = probe.next_batch(lambda page: page % 5 == 0)
            assert 1 <= len(batch_pages) <= 8
            asked += batch_pages
        known = {page for page in live if page >= probe.floor}
        found = deepest_boundary(known.__contains__, stop=stop, above=above, window_pages=width)
    assert found == brute_boundary(live, stop, above, width)
    assert len(asked) == len(set(asked))
    assert all(window_floor(above + 1, width) <= page < stop and page % 5 for page in asked)


@given(
    device=st.integers(0, NUM_PAGES),
    device_windows=some_pages,
    host=st.dictionaries(st.sampled_from(["full", "window"]), some_pages),
    stored_full=st.integers(0, NUM_PAGES),
    stored_windows=most_pages | some_pages,
    width=st.integers(0, 4),
    heal_pages=st.sampled_from([None, 0, 3]),
    batch=st.integers(1, 20),
)
@settings(max_examples=100, deadline=None)
def test_a_prefetch_brings_all_that_is_of_use_and_nothing_else(
    device: int,
    device_windows: set[int],
    host: dict[str, set[int]],
    stored_full: int,
    stored_windows: set[int],
    width: int,
    heal_pages: int | None,
    batch: int,
) -> None:
    world = BridgeWorld(
        window_pages=width,
        at_once=True,
        settings=BridgeSettings(ask_keys=batch, read_pages=batch, heal_pages=heal_pages),
    )
    world.store_has(KEYS, full=stored_full, windows=sorted(stored_windows))
    device_windows = {page for page in device_windows if page < device}
    for kind in world.pools:
        world.fill(kind, KEYS, sorted(host.get(kind, set())))
    full = {*range(device), *host.get("full", set())}
    window = {*device_windows, *host.get("window", set())}
    reach = next((page for page in range(NUM_PAGES) if page not in full and page >= stored_full), NUM_PAGES)
    before = world.usable(KEYS, device_full=device, device_windows=sorted(device_windows))
    boundary = brute_boundary(window | stored_windows, reach, before, width)
    stop = before if boundary is None else boundary
    if heal_pages is not None and reach - stop > heal_pages:
        stop = reach
    wanted = {store_key("full", KEYS[page]) for page in range(stop) if page not in full}
    if boundary is not None:
        span = range(window_floor(boundary, width), boundary)
        wanted |= {store_key("window", KEYS[page]) for page in span if page not in window}

    world.prefetch("a", KEYS, device_full=device, device_windows=sorted(device_windows))
    world.settle()
    after = world.usable(KEYS, device_full=device, device_windows=sorted(device_windows))
    assert after == (before if boundary is None else boundary)
    assert {key for what, keys in world.store.history if what == "get" for key in keys} == wanted
    world.bridge.forget("a")
    world.check_quiet()


@given(
    device=st.integers(0, 4),
    stored_full=st.integers(0, NUM_PAGES),
    stored_windows=most_pages,
    phantoms=st.sets(st.tuples(st.sampled_from(["full", "window"]), st.integers(0, NUM_PAGES - 1)), max_size=6),
    corrupt=st.sets(st.tuples(st.sampled_from(["full", "window"]), st.integers(0, NUM_PAGES - 1)), max_size=3),
    width=st.integers(0, 3),
    batch=st.integers(1, 6),
)
@settings(max_examples=80, deadline=None)
def test_a_store_that_lies_is_found_out_and_the_best_that_is_left_comes(
    device: int,
    stored_full: int,
    stored_windows: set[int],
    phantoms: set[tuple[PageKind, int]],
    corrupt: set[tuple[PageKind, int]],
    width: int,
    batch: int,
) -> None:
    world = BridgeWorld(
        window_pages=width,
        at_once=True,
        settings=BridgeSettings(ask_keys=batch, read_pages=batch, prefetch_timeout_s=1.0),
    )
    world.store_has(KEYS, full=stored_full, windows=sorted(stored_windows))
    world.store.phantoms = {store_key(kind, KEYS[page]) for kind, page in phantoms}
    world.store.corrupt = {store_key(kind, KEYS[page]) for kind, page in corrupt}
    full = {*range(device), *(page for page in range(stored_full) if ("full", page) not in corrupt)}
    windows = {page for page in stored_windows if ("window", page) not in corrupt}
    reach = next((page for page in range(NUM_PAGES) if page not in full), NUM_PAGES)
    expected = brute_boundary(windows, reach, device if width == 0 else 0, width) or (device if width == 0 else 0)

    world.prefetch("a", KEYS, device_full=device)
    world.settle()
    assert world.usable(KEYS, device_full=device) == expected
    world.bridge.forget("a")
    world.check_quiet()
