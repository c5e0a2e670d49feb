"""The host pool's books: states by hand, and any order of operations against a list and a few dictionaries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.cache.tiers.host import HostPool, HostTier
from epd.kv.errors import PageStateError


def names(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def filled(pool: HostPool, letters: str, *, root: bytes = b"r") -> None:
    assert pool.reserve(names(letters), root=root) is not None
    pool.publish(names(letters))


def test_only_ready_pages_are_found() -> None:
    pool = HostPool("full", 3)
    pages = pool.reserve(names("ab"), root=b"r")
    assert pages is not None
    assert (pool.get(b"a"), pool.knows(b"a"), pool.is_filling(b"a")) == (None, True, True)
    pool.publish(names("a"))
    assert pool.get(b"a") == pages[0]
    assert pool.pages(names("a")) == pages[:1]
    assert pool.num_leading(names("ab"), 0, 2) == 1
    assert pool.num_known(names("abc"), 0, 3) == 2
    assert pool.absent(names("abc")) == [b"c"]
    with pytest.raises(PageStateError, match="no ready page"):
        pool.pages(names("b"))
    pool.discard(names("bz"))
    assert (pool.num_free, pool.num_ready) == (2, 1)
    pool.check()


def test_the_deepest_of_what_was_used_longest_ago_goes_first() -> None:
    pool = HostPool("full", 6)
    filled(pool, "abc")
    filled(pool, "xyz")
    pool.touch(names("ab"))
    for newcomer, victim in zip("123456", "czyxba", strict=True):
        assert pool.get(victim.encode()) is not None
        filled(pool, newcomer)
        assert pool.get(victim.encode()) is None
    assert pool.num_evicted == 6


def test_what_is_outdated_goes_before_everything_and_comes_back_by_a_use() -> None:
    pool = HostPool("window", 6)
    filled(pool, "abcdef")
    pool.outdate(names("a"))
    pool.outdate(names("ef"))
    pool.touch(names("e"))
    pool.check()
    for newcomer, victim in zip("123", "afd", strict=True):
        filled(pool, newcomer)
        assert pool.get(victim.encode()) is None
        pool.touch(names("1"))
    pool.outdate(names("bz"))
    pool.pin(names("b"))
    pool.unpin(names("b"))
    assert pool.stats().evictable == 6
    pool.check()


def test_pages_in_use_leave_too_few_and_nothing_changes() -> None:
    pool = HostPool("full", 4)
    filled(pool, "abc")
    pool.pin(names("ab"))
    assert pool.num_reservable == 2
    assert pool.reserve(names("xyz")) is None
    assert pool.get(b"c") is not None
    assert pool.reserve(names("xy")) is not None
    assert pool.get(b"c") is None
    pool.check()


def test_a_pinned_page_goes_with_its_last_pin() -> None:
    pool = HostPool("full", 2)
    filled(pool, "a")
    pool.pin(names("a"))
    pool.pin(names("a"))
    pool.discard(names("a"))
    assert (pool.get(b"a"), pool.num_free, pool.is_filling(b"a")) == (None, 1, True)
    with pytest.raises(PageStateError, match="reserved that has a page"):
        pool.reserve(names("a"))
    pool.discard(names("a"))
    pool.unpin(names("a"))
    assert pool.num_free == 1
    pool.check()
    pool.unpin(names("a"))
    assert pool.num_free == 2
    with pytest.raises(PageStateError, match="unpinned that is not pinned"):
        pool.unpin(names("a"))
    pool.check()


def test_condemned_paths_are_gone_whatever_their_state() -> None:
    pool = HostPool("full", 8)
    filled(pool, "ab")
    filled(pool, "xy", root=b"other")
    pool.pin(names("b"))
    pool.reserve(names("cd"), root=b"r")
    pool.reserve(names("u"))
    assert sorted(pool.condemn(b"r")) == names("abcdu")
    assert pool.ready(names("abcduxy")) == names("xy")
    assert pool.stats().doomed == 4
    pool.publish(names("c"))
    pool.discard(names("du"))
    pool.unpin(names("b"))
    assert (pool.num_free, pool.num_ready) == (6, 2)
    pool.check()


def test_mistakes_are_refused_by_name() -> None:
    pool = HostPool("full", 4)
    filled(pool, "a")
    with pytest.raises(PageStateError, match="reserved twice"):
        pool.reserve(names("bb"))
    with pytest.raises(PageStateError, match="that nobody was filling"):
        pool.publish(names("a"))
    pool.reserve(names("b"))
    with pytest.raises(PageStateError, match="published twice"):
        pool.publish(names("bb"))
    with pytest.raises(PageStateError, match="only a ready page"):
        pool.pin(names("ab"))
    assert pool.stats().pinned == 0
    assert pool.clear() == 1
    with pytest.raises(ValueError, match="num_pages"):
        HostPool("full", -1)
    tier = HostTier(num_full_pages=1, num_window_pages=1)
    tier.window._free.append(0)
    with pytest.raises(PageStateError, match="host window pool"):
        tier.check()


class Model:
    """One list of (key, state, number of pins), those first that go first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.state: dict[bytes, str] = {}
        self.pins: dict[bytes, int] = {}
        self.order: list[bytes] = []
        self.stale: list[bytes] = []

    def free(self) -> int:
        return self.num_pages - len(self.state)

    def forget(self, key: bytes) -> None:
        del self.state[key]
        for order in (self.order, self.stale):
            if key in order:
                order.remove(key)

    def reserve(self, keys: list[bytes]) -> bool:
        short = len(keys) - self.free()
        if short > len(self.order) + len(self.stale):
            return False
        for key in [*self.stale, *self.order][: max(0, short)]:
            self.forget(key)
        self.state.update(dict.fromkeys(keys, "filling"))
        return True


OPS = st.tuples(
    st.sampled_from(("reserve", "publish", "discard", "pin", "unpin", "touch", "outdate", "condemn")),
    st.lists(st.sampled_from(names("abcdefgh")), unique=True, max_size=4),
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(OPS, max_size=50))
def test_any_order_of_operations(steps: list[tuple[str, list[bytes]]]) -> None:
    pool, model = HostPool("full", 5), Model(5)
    for op, keys in steps:
        state = model.state
        if op == "reserve" and not any(key in state for key in keys):
            assert (pool.reserve(keys, root=keys[0] if keys else b"r") is not None) == model.reserve(keys)
        elif op == "publish" and all(state.get(key) in ("filling", "doomed filling") for key in keys):
            pool.publish(keys)
            for key in reversed(keys):
                if state[key] == "filling":
                    state[key] = "ready"
                    model.order.append(key)
                else:
                    model.forget(key)
        elif op == "discard":
            pool.discard(keys)
            for key in keys:
                if key in model.pins:
                    state[key] = "doomed"
                elif key in state:
                    model.forget(key)
        elif op == "pin" and all(state.get(key) == "ready" for key in keys):
            pool.pin(keys)
            for key in keys:
                model.pins[key] = model.pins.get(key, 0) + 1
                model.order = [each for each in model.order if each != key]
                model.stale = [each for each in model.stale if each != key]
        elif op == "unpin" and all(key in model.pins for key in keys):
            pool.unpin(keys)
            for key in reversed(keys):
                model.pins[key] -= 1
                if not model.pins[key]:
                    del model.pins[key]
                    if state[key] == "ready":
                        model.order.append(key)
                    else:
                        model.forget(key)
        elif op in ("touch", "outdate"):
            getattr(pool, op)(keys)
            for key in reversed(keys):
                if key in model.order or (key in model.stale and op == "touch"):
                    model.order = [each for each in model.order if each != key]
                    model.stale = [each for each in model.stale if each != key]
                    (model.order if op == "touch" else model.stale).append(key)
        elif op == "condemn" and keys:
            _condemn(pool, model, keys[0])
        pool.check()
        assert {key for key in names("abcdefgh") if pool.get(key) is not None} == {
            key for key, of_key in state.items() if of_key == "ready"
        }
        assert {key for key in names("abcdefgh") if pool.knows(key)} == set(state)
        assert pool.num_free == model.free()


def _condemn(pool: HostPool, model: Model, root: bytes) -> None:
    for key in pool.condemn(root):
        if model.state[key] == "ready" and key not in model.pins:
            model.forget(key)
        elif model.state[key] == "filling":
            model.state[key] = "doomed filling"
        elif model.state[key] == "ready":
            model.state[key] = "doomed"
