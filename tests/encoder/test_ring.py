"""The ring against a plain scan over all points."""

from collections import Counter

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.ring import MIN_CAPACITY, POINTS_PER_REPLICA, Ring, bounded_capacity

names = st.lists(st.text("abcdef0123", min_size=1, max_size=8), min_size=1, max_size=6, unique=True)
keys = st.text("0123456789abcdef", min_size=1, max_size=32)


def scanned_owner(replicas: list[str], key: str) -> str:
    """Slow truth: the point with the smallest clockwise distance from the key."""
    target = xxhash.xxh3_64_intdigest(key.encode())
    points = [
        ((xxhash.xxh3_64_intdigest(f"{name}/{i}".encode()) - target) % 2**64, name)
        for name in replicas
        for i in range(POINTS_PER_REPLICA)
    ]
    return min(points)[1]


@settings(deadline=None)
@given(names, keys)
def test_owner_equals_a_scan_and_preference_names_everyone_once(replicas: list[str], key: str) -> None:
    order = list(Ring(replicas).preference(key))
    assert order[0] == scanned_owner(replicas, key)
    assert sorted(order) == sorted(replicas)


@settings(deadline=None)
@given(names.filter(lambda replicas: len(replicas) > 1), keys)
def test_a_lost_replica_moves_only_its_own_keys(replicas: list[str], key: str) -> None:
    before = list(Ring(replicas).preference(key))
    lost = replicas[0]
    after = list(Ring(replicas[1:]).preference(key))
    assert after == [name for name in before if name != lost]


@settings(deadline=None)
@given(names, keys, st.data())
def test_choice_respects_the_bound(replicas: list[str], key: str, data: st.DataObject) -> None:
    up = data.draw(st.lists(st.sampled_from(replicas), unique=True))
    loads = {name: data.draw(st.integers(0, 40)) for name in up}
    excluded = frozenset(data.draw(st.lists(st.sampled_from(replicas), unique=True)))
    chosen = Ring(replicas).choose(key, loads, excluded)
    usable = [name for name in Ring(replicas).preference(key) if name in loads and name not in excluded]
    if not usable:
        assert chosen is None
        return
    capacity = max(MIN_CAPACITY, bounded_capacity(sum(loads.values()), len(loads)))
    below = [name for name in usable if loads[name] < capacity]
    assert chosen == (below[0] if below else usable[0])


def test_some_replica_is_always_below_capacity() -> None:
    for total in range(200):
        for count in range(1, 9):
            assert bounded_capacity(total, count) * count > total


def test_keys_spread_evenly() -> None:
    ring = Ring(["a", "b", "c", "d"])
    counts = Counter(next(ring.preference(str(i))) for i in range(4000))
    assert all(700 < count < 1300 for count in counts.values()), counts


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        Ring(["a", "a"])


def test_no_replicas_choose_nobody() -> None:
    assert Ring([]).choose("0", {}) is None
