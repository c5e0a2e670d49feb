"""The bridge with the real client and its threads, over a real local store and over nodes behind which all is wrong."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from epd.cache.l3.base import NodeFailed, StoreNode
from epd.cache.l3.client import StoreClient
from epd.cache.l3.open import hot_root, open_local
from epd.cache.tiers.bridge import BridgeSettings, StoreBridge
from epd.cache.tiers.host import HostPool, HostTier
from epd.cache.tiers.ports import PageKind
from epd.cache.tiers.reach import Above
from tests.fakes.bridge_world import PAGE_BYTES, PAGE_SIZE, chain, content
from tests.fakes.faulty_node import FaultyNode, Troubles

IO_BYTES = 64
"""Pages are one slice, a put of several of them is several calls."""


def value_bytes(key: bytes) -> int:
    return PAGE_BYTES["full" if key[:1] == b"f" else "window"]


class Worker:
    """Host memory, a bridge, and the thread that polls it: the test's."""

    def __init__(self, client: StoreClient, *, num_pages: int = 40, settings: BridgeSettings | None = None) -> None:
        self.host = HostTier(num_full_pages=num_pages, num_window_pages=num_pages)
        self.pools: dict[PageKind, HostPool] = {"full": self.host.full, "window": self.host.window}
        self.bytes = {kind: [bytearray(PAGE_BYTES[kind]) for _ in range(num_pages)] for kind in self.pools}
        self.woken = threading.Event()
        self.client = client
        self.keys: set[bytes] = set()
        self.bridge = StoreBridge(
            client,
            self.host,
            lambda kind, page: memoryview(self.bytes[kind][page]),
            page_size=PAGE_SIZE,
            window_pages=2,
            settings=settings,
            wake=self.woken.set,
        )

    def computes(self, keys: Sequence[bytes]) -> None:
        self.keys.update(keys)
        for kind, pool in self.pools.items():
            absent = pool.absent(keys)
            pages = pool.reserve(absent, root=keys[0])
            if pages is None:
                continue
            for key, page in zip(absent, pages, strict=True):
                self.bytes[kind][page][:] = content(kind, key)
            pool.publish(absent)
            self.bridge.saved(absent if kind == "full" else (), absent if kind == "window" else (), "g")

    def prefetch(self, request_id: str, keys: Sequence[bytes]) -> bool:
        self.keys.update(keys)
        return self.bridge.prefetch(request_id, keys, len(keys) * PAGE_SIZE + 1, Above(), group="g")

    def step(self) -> None:
        """Wait to be woken, or a moment, and act."""
        self.woken.wait(0.002)
        self.woken.clear()
        self.bridge.poll()
        self.check()

    def until(self, done: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
        by_s = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < by_s, self.bridge.bridge_stats()
            self.step()

    def rest(self) -> None:
        self.until(lambda: not self.bridge.is_busy)

    def check(self) -> None:
        self.host.check()
        for kind, pool in self.pools.items():
            for key in self.keys:
                page = pool.get(key)
                assert page is None or self.bytes[kind][page] == content(kind, key)

    def check_quiet(self) -> None:
        self.check()
        for pool in self.pools.values():
            stats = pool.stats()
            assert (stats.filling, stats.pinned, stats.doomed) == (0, 0, 0), stats


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if hot_root(tmp_path).exists():
        shutil.rmtree(hot_root(tmp_path))


def local(directory: Path) -> StoreNode:
    return open_local(directory, memory_bytes=1 << 20, disk_bytes=1 << 20)


def client_of(node: StoreNode, *, timeout_s: float = 2.0) -> StoreClient:
    return StoreClient([node], io_bytes=IO_BYTES, timeout_s=timeout_s, value_bytes=value_bytes)


def test_what_one_process_wrote_the_next_one_fetches(directory: Path) -> None:
    keys = chain("prompt", 12)
    patient = BridgeSettings(prefetch_timeout_s=20.0)
    first = Worker(client_of(local(directory)), settings=patient)
    first.computes(keys)
    first.bridge.close(flush_s=10.0)
    first.check_quiet()
    assert first.bridge.bridge_stats().writeback["written"] == 24

    second = Worker(client_of(local(directory)), settings=patient)
    assert second.prefetch("a", keys)
    second.until(lambda: second.bridge.collect() == ("a",))
    assert second.bridge.num_fetched_pages("a") == 12
    assert second.host.window.get(keys[-1]) is not None
    second.bridge.forget("a")
    second.rest()
    second.check_quiet()
    second.bridge.condemn(keys)
    second.host.full.clear()
    second.host.window.clear()
    second.rest()
    second.bridge.close(flush_s=10.0)

    third = Worker(client_of(local(directory)), settings=patient)
    third.prefetch("a", keys)
    third.until(lambda: third.bridge.collect() == ("a",))
    assert third.bridge.num_fetched_pages("a") == 0, "condemned pages are gone"
    third.bridge.close()
    third.check_quiet()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_over_a_node_behind_which_all_is_wrong(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    troubles = Troubles(
        slow=0.02, late=0.02, failing=0.02, missing=0.05, corrupt=0.05, stale=0.02, full=0.05, lying=0.1
    )
    node = FaultyNode(local(directory), troubles, rng, io_bytes=IO_BYTES)
    settings = BridgeSettings(prefetch_timeout_s=0.02, read_pages=4, write_pages=4, ask_keys=8)
    worker = Worker(client_of(node, timeout_s=0.01), num_pages=30, settings=settings)
    prompts = [chain("trunk", 10), *(chain(name, 10, shared=("trunk", rng.randrange(1, 10))) for name in "abc")]
    live: list[str] = []
    for number in range(300):
        keys = rng.choice(prompts)
        match rng.randrange(6):
            case 0:
                worker.computes(keys[: rng.randrange(1, 11)])
            case 1 | 2:
                if worker.prefetch(f"r{number}", keys):
                    live.append(f"r{number}")
            case 3:
                if live:
                    worker.bridge.forget(live.pop(rng.randrange(len(live))))
            case 4:
                for pool in worker.pools.values():
                    pool.clear()
            case _:
                pass
        if rng.random() < 0.5:
            worker.step()
    worker.rest()
    for request_id in live:
        worker.bridge.forget(request_id)
    worker.rest()
    worker.check_quiet()
    worker.client.check()
    worker.bridge.close()
    worker.check_quiet()
    assert worker.client.num_under_way == 0


class _Hanging:
    """A node that does not come back before it is told to; for gets, it holds on to the buffers until then."""

    def __init__(self, inner: StoreNode) -> None:
        self._inner = inner
        self.go = threading.Event()
        self.is_inside = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get(self, keys: Sequence[bytes], sink: object, *, timeout_s: float) -> None:
        self.is_inside.set()
        self.go.wait(10.0)
        raise NodeFailed("too late")


def test_11_the_stores_thread_hangs_in_the_middle_and_the_request_is_aborted(directory: Path) -> None:
    keys = chain("prompt", 8)
    node = _Hanging(local(directory))
    worker = Worker(client_of(node), settings=BridgeSettings(prefetch_timeout_s=0.1))  # type: ignore[arg-type]
    worker.computes(keys)
    worker.rest()
    for pool in worker.pools.values():
        pool.clear()
    worker.prefetch("a", keys)
    worker.until(node.is_inside.is_set)
    worker.until(lambda: worker.bridge.collect() == ("a",), timeout_s=5.0)
    worker.bridge.forget("a")
    worker.rest()
    worker.check_quiet()
    node.go.set()
    worker.bridge.close()


def test_11_the_store_closes_while_pages_come(directory: Path) -> None:
    keys = chain("prompt", 8)
    worker = Worker(client_of(local(directory)))
    worker.computes(keys)
    worker.rest()
    for pool in worker.pools.values():
        pool.clear()
    worker.prefetch("a", keys)
    worker.client.close(0.0)
    worker.until(lambda: not worker.bridge.is_fetching("a"))
    worker.bridge.forget("a")
    worker.rest()
    worker.check_quiet()
    worker.bridge.close()
