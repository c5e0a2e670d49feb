"""What every store of KV pages must do, over real ones.

To hold another kind of node to it, add it to `PLACES`: a context manager that is given an empty directory and yields
what opens nodes, each time one more that shares what is kept with the others (another process, as it were). It may skip
where what it needs is not installed. Everything else comes by itself.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.cache.l3.base import StoreNode
from epd.cache.l3.client import StoreClient
from epd.cache.l3.local import LocalNode
from epd.cache.l3.mooncake_node import MooncakeNode
from epd.cache.l3.open import hot_root
from epd.cache.l3.record import pack, slice_key
from epd.cache.l3.redis_node import RedisNode
from tests.fakes.mooncake_store import running_mooncake
from tests.fakes.redis_server import running_redis
from tests.fakes.store_calls import StoreCalls

Opener = Callable[[], StoreNode]

IO_BYTES = 4096
TIMEOUT_S = 5.0
# A put of this many bytes, by the first byte of its key; what `exists`, `touch` and `discard` need to know.
SIZES = {b"f": 3000, b"w": 4 * IO_BYTES + 100}


@contextlib.contextmanager
def local_place(directory: Path) -> Iterator[Opener]:
    hot = hot_root(directory)
    try:
        yield lambda: LocalNode(hot, directory / "cold", memory_bytes=4 << 20, disk_bytes=16 << 20)
    finally:
        shutil.rmtree(hot, ignore_errors=True)


@contextlib.contextmanager
def redis_place(directory: Path) -> Iterator[Opener]:
    with running_redis(directory) as server:
        yield lambda: RedisNode(server.url, ttl_s=3600.0)


@contextlib.contextmanager
def mooncake_place(directory: Path) -> Iterator[Opener]:
    del directory
    with running_mooncake() as store, contextlib.ExitStack() as opened:
        pool: list[StoreNode] = []

        def open_node() -> StoreNode:
            if not pool:
                node = MooncakeNode(store.url, io_bytes=IO_BYTES)
                opened.callback(node.close)
                pool.append(node)
            return cast(StoreNode, Returned(pool.pop(), pool))

        yield open_node


class Returned:
    """A node that is not closed but used again: each has a process, which takes a while to start."""

    def __init__(self, node: StoreNode, pool: list[StoreNode]) -> None:
        self._node = node
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def close(self) -> None:
        self._pool.append(self._node)


PLACES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Opener]]] = {
    "local": local_place,
    "redis": redis_place,
    "mooncake": mooncake_place,
}


@pytest.fixture(params=sorted(PLACES), scope="module")
def shared_opener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """One place for all tests of this file: they use keys of their own."""
    with PLACES[request.param](tmp_path_factory.mktemp("store")) as opener:
        yield opener


class Store:
    """Clients of one place."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._opened: list[StoreCalls] = []
        self._raw: StoreNode | None = None

    def open(self) -> StoreCalls:
        """One more client."""
        client = StoreClient(
            [self._opener()], io_bytes=IO_BYTES, timeout_s=TIMEOUT_S, value_bytes=lambda key: SIZES.get(key[:1], 1)
        )
        self._opened.append(StoreCalls(client))
        return self._opened[-1]

    @property
    def raw(self) -> StoreNode:
        """A node, to do to it what no client does."""
        if self._raw is None:
            self._raw = self._opener()
        return self._raw

    def content(self, name: bytes) -> bytes | None:
        found: list[bytes | None] = []
        self.raw.get([name], lambda _, value: found.append(None if value is None else bytes(value)), timeout_s=5)
        return found[0]

    def plant(self, name: bytes, content: bytes) -> None:
        assert list(self.raw.put([(name, [content])], timeout_s=5)) == [True]

    def close(self) -> None:
        for calls in self._opened:
            calls.client.close()
            calls.check()
        if self._raw is not None:
            self._raw.close()


@pytest.fixture
def store(shared_opener: Opener) -> Iterator[Store]:
    store = Store(shared_opener)
    yield store
    store.close()


def page(key: bytes, seed: int = 0) -> bytes:
    return random.Random(key + seed.to_bytes(4, "little")).randbytes(SIZES[key[:1]])


def key(kind: str, number: int, test: str) -> bytes:
    return kind.encode() + test.encode()[:8].ljust(8, b".") + number.to_bytes(8, "little")


def sizes_of(values: dict[bytes, bytes]) -> dict[bytes, int]:
    return {name: len(value) for name, value in values.items()}


@pytest.mark.parametrize("size", [0, 1, IO_BYTES - 1, IO_BYTES, IO_BYTES + 1, 10 * IO_BYTES + 7])
def test_what_was_put_is_what_comes_back(store: Store, size: int) -> None:
    calls = store.open()
    value = random.Random(size).randbytes(size)
    name = b"size %d" % size
    assert calls.put({name: value}) == (True,)
    assert calls.get({name: size, b"another": size}) == {name: value, b"another": None}
    assert store.open().get({name: size}) == {name: value}


def test_many_keys_at_once(store: Store) -> None:
    calls = store.open()
    values = {name: page(name) for number in range(150) for name in (key("f", number, "many"),)}
    values |= {name: page(name) for number in range(5) for name in (key("w", number, "many"),)}
    assert all(calls.put(values))
    absent = {key("f", number, "absent"): 3000 for number in range(50)}
    found = calls.get(sizes_of(values) | absent)
    assert {name: value for name, value in found.items() if value is not None} == values
    assert calls.exists([*values, *absent]) == [True] * len(values) + [False] * len(absent)
    stats = calls.client.stats()
    assert (stats.hits, stats.misses, stats.puts, stats.unkept) == (155, 50, 155, 0)
    assert (stats.corrupt, stats.failures, stats.timeouts) == (0, 0, 0)


def test_pieces_and_buffers_need_not_match(store: Store) -> None:
    calls = store.open()
    name = key("w", 0, "pieces")
    value = page(name)
    put, got = calls.begin(), calls.begin()
    pieces = [value[:1], bytearray(value[1:5000]), memoryview(value)[5000:5000], memoryview(value)[5000:]]
    calls.client.put("group", [(name, pieces)], put.on_done)
    assert put.wait() == (True,)
    buffers = [bytearray(4096), bytearray(0), bytearray(5), bytearray(len(value) - 4101)]
    calls.client.get("group", [(name, [memoryview(buffer) for buffer in buffers])], deadline_s=1e9, on_done=got.on_done)
    assert got.wait() == (True,)
    assert b"".join(buffers) == value


def test_the_last_put_counts(store: Store) -> None:
    calls, others = store.open(), store.open()
    for kind in ("f", "w"):
        name = key(kind, 0, "last")
        for seed in range(4):
            writer = (calls, others)[seed % 2]
            assert writer.put({name: page(name, seed)}) == (True,)
            for reader in (calls, others):
                assert reader.get({name: SIZES[name[:1]]}) == {name: page(name, seed)}


def test_the_same_put_twice(store: Store) -> None:
    calls, others = store.open(), store.open()
    name = key("w", 0, "twice")
    for writer in (calls, calls, others):
        assert writer.put({name: page(name)}) == (True,)
    assert store.open().get({name: SIZES[b"w"]}) == {name: page(name)}


def test_discarded_for_all(store: Store) -> None:
    calls, others = store.open(), store.open()
    values = {name: page(name) for name in (key("f", 0, "discard"), key("w", 0, "discard"), key("f", 1, "discard"))}
    gone = list(values)[:2]
    assert all(calls.put(values))
    assert all(value is not None for value in others.get(sizes_of(values)).values())
    calls.client.discard("group", gone)
    calls.settle()
    for reader in (calls, others, store.open()):
        assert reader.exists(list(values)) == [False, False, True]
        assert list(reader.get(sizes_of(values)).values()) == [None, None, values[key("f", 1, "discard")]]
    for index in range(5):
        assert store.content(slice_key(gone[1], index)) is None
    again = {name: page(name, 1) for name in gone}
    assert all(others.put(again))
    assert calls.get(sizes_of(again)) == again


def test_touching_and_discarding_what_is_not_there(store: Store) -> None:
    calls = store.open()
    calls.client.touch("group", [key("f", 0, "nothing"), key("w", 0, "nothing")])
    calls.client.discard("group", [key("f", 0, "nothing"), key("w", 0, "nothing")])
    calls.settle()
    assert calls.exists([key("f", 0, "nothing")]) == [False]
    assert calls.client.stats().failures == 0


def test_a_touch_changes_nothing_else(store: Store) -> None:
    calls = store.open()
    values = {name: page(name) for name in (key("f", 0, "touch"), key("w", 0, "touch"))}
    assert all(calls.put(values))
    for _ in range(3):
        calls.client.touch("group", list(values))
        calls.settle()
    assert calls.get(sizes_of(values)) == values


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda record: record[:-1],
    "cut within its head": lambda record: record[:20],
    "emptied": lambda record: b"",
    "grown": lambda record: record + b"\0",
    "a bit of its bytes": lambda record: record[:-7] + bytes([record[-7] ^ 1]) + record[-6:],
    "a bit of its checksum": lambda record: record.replace(record[-3008:-3000], b"01234567"),
    "a bit of its magic": lambda record: b"m" + record[1:],
    "foreign": lambda record: b"not ours" * 400,
    "zeros": lambda record: bytes(len(record)),
    "of another size": lambda record: record[:8] + (2999).to_bytes(8, "little") + record[16:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_a_miss_and_goes(store: Store, damage: str) -> None:
    calls = store.open()
    name, whole = key("f", len(damage), "damage"), key("f", 0, "undamage")
    assert all(calls.put({name: page(name), whole: page(whole)}))
    record = store.content(name)
    assert record is not None
    spoiled = DAMAGES[damage](record)
    assert spoiled != record
    store.plant(name, spoiled)
    assert calls.get({name: 3000, whole: 3000}) == {name: None, whole: page(whole)}
    assert calls.client.stats().corrupt == 1
    assert calls.exists([name, whole]) == [False, True]
    assert calls.put({name: page(name)}) == (True,)
    assert calls.get({name: 3000}) == {name: page(name)}


def test_a_record_under_another_key_is_a_miss(store: Store) -> None:
    calls = store.open()
    name, other = key("f", 0, "stale"), key("f", 1, "stale")
    assert all(calls.put({name: page(name)}))
    record = store.content(name)
    assert record is not None
    store.plant(other, record)
    assert calls.get({name: 3000, other: 3000}) == {name: page(name), other: None}
    assert calls.client.stats().corrupt == 1


def test_buffers_of_another_size_are_a_miss(store: Store) -> None:
    calls = store.open()
    name = key("f", 0, "resized")
    assert calls.put({name: page(name)}) == (True,)
    assert calls.get({name: 2999}) == {name: None}
    assert calls.client.stats().corrupt == 1


def test_slices_come_all_or_not_at_all(store: Store) -> None:
    calls = store.open()
    for missing in range(5):
        name = key("w", missing, "slices")
        assert calls.put({name: page(name)}) == (True,)
        assert all(store.content(slice_key(name, index)) is not None for index in range(5))
        store.raw.discard([slice_key(name, missing)], timeout_s=5)
        assert calls.exists([name]) == [False]
        assert calls.get({name: SIZES[b"w"]}) == {name: None}
    assert calls.client.stats().corrupt == 0


def test_slices_of_two_puts_make_no_value(store: Store) -> None:
    calls = store.open()
    name = key("w", 0, "mixed")
    assert calls.put({name: page(name)}) == (True,)
    for slice_name, pieces in pack(name, [memoryview(page(name, 1))], IO_BYTES):
        if slice_name == slice_key(name, 3):
            store.plant(slice_name, b"".join(pieces))
    assert calls.get({name: SIZES[b"w"]}) == {name: None}
    assert calls.client.stats().corrupt == 1


def test_what_is_put_when_it_closes_is_kept(store: Store) -> None:
    calls = store.open()
    values = {name: page(name) for number in range(40) for name in (key("f", number, "closing"),)}
    answers = []
    for name, value in values.items():
        answers.append(calls.begin())
        calls.client.put("group", [(name, [value])], answers[-1].on_done)
    calls.client.close(10)
    assert all(answer.wait(0) == (True,) for answer in answers)
    assert store.open().get(sizes_of(values)) == values
    # And afterwards nothing happens, but calls are answered.
    assert calls.put({b"late": b"x"}) == (False,)
    assert calls.get({key("f", 0, "closing"): 3000}) == {key("f", 0, "closing"): None}
    assert calls.exists([key("f", 0, "closing")]) == [False]
    calls.client.touch("group", [b"late"])
    calls.client.discard("group", [b"late"])


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """What is done, by which client, to which key, with which seed."""
    kinds = st.sampled_from(("put", "get", "exists", "touch", "discard", "reopen"))
    step = st.tuples(kinds, st.integers(0, 1), st.integers(0, 5), st.integers(0, 3))
    return draw(st.lists(step, min_size=5, max_size=25))


HISTORY_NUMBERS = iter(range(1 << 30))


@settings(max_examples=25)
@given(history=histories())
def test_any_history_is_that_of_a_dictionary(shared_opener: Opener, history: list[tuple[str, int, int, int]]) -> None:
    store = Store(shared_opener)
    clients = [store.open(), store.open()]
    test = f"h{next(HISTORY_NUMBERS)}"
    names = [key("fw"[number % 2], number, test) for number in range(6)]
    kept: dict[bytes, bytes] = {}
    for what, client, number, seed in history:
        calls, name = clients[client], names[number]
        if what == "put":
            assert calls.put({name: page(name, seed)}) == (True,)
            kept[name] = page(name, seed)
        elif what == "get":
            assert calls.get({other: SIZES[other[:1]] for other in names}) == {
                other: kept.get(other) for other in names
            }
        elif what == "exists":
            assert calls.exists(names) == [other in kept for other in names]
        elif what == "touch":
            calls.client.touch("group", names[: number + 1])
        elif what == "discard":
            calls.client.discard("group", [name])
            calls.settle()
            kept.pop(name, None)
        else:
            calls.client.close()
            clients[client] = store.open()
    assert clients[0].get({name: SIZES[name[:1]] for name in names}) == {name: kept.get(name) for name in names}
    assert clients[0].client.stats().corrupt == 0
    store.close()
