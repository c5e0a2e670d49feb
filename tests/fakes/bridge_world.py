"""A bridge between real books of host memory and a store in memory, with the bytes of pages, and eyes on all of it.

What must hold at all times is asserted where it would break: a page is published only behind its predecessors and with
the bytes that belong to its key, nothing is read that is above already, and nothing is read twice at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial

from epd.cache.tiers.bridge import BridgeSettings, StoreBridge
from epd.cache.tiers.host import HostPool, HostTier
from epd.cache.tiers.ports import Cancel, OnKey, OnKeys, PageKind, store_key
from epd.cache.tiers.reach import Above
from epd.cache.window import window_floor
from tests.fakes.memory_store import MemoryStore

__all__ = ["PAGE_BYTES", "PAGE_SIZE", "BridgeWorld", "chain", "content"]

PAGE_SIZE = 4
PAGE_BYTES: dict[PageKind, int] = {"full": 24, "window": 40}


def chain(name: str, num_pages: int, *, shared: tuple[str, int] | None = None) -> list[bytes]:
    """Page keys of a prompt; the first `shared[1]` are those of the prompt named `shared[0]`."""
    stem, num_shared = shared or (name, 0)
    names = [f"{stem if i < num_shared else name}/{i}" for i in range(num_pages)]
    return [hashlib.md5(one.encode()).digest() for one in names]


def content(kind: PageKind, key: bytes) -> bytes:
    """The only right bytes of a page."""
    return hashlib.shake_128(kind.encode() + key).digest(PAGE_BYTES[kind])


class _WatchedPool(HostPool):
    """Says what is about to be published."""

    __slots__ = ("on_publish",)

    def __init__(self, name: str, num_pages: int, on_publish: Callable[[bytes], None]) -> None:
        super().__init__(name, num_pages)
        self.on_publish = on_publish

    def publish(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.on_publish(key)
        super().publish(keys)


class _WatchedStore(MemoryStore):
    """Says what is about to be read."""

    def __init__(self, world: BridgeWorld, *, at_once: bool) -> None:
        super().__init__(at_once=at_once, clock=lambda: world.now_s)
        self._world = world

    def get(
        self,
        group: str,
        items: Sequence[tuple[bytes, Sequence[memoryview]]],
        *,
        deadline_s: float,
        on_key: OnKey | None,
        on_done: OnKeys,
    ) -> Cancel:
        self._world.about_to_read([key for key, _ in items])
        return super().get(group, items, deadline_s=deadline_s, on_key=on_key, on_done=on_done)


class BridgeWorld:
    """`now_s` is the time. `device` and `parents` tell what the watching needs to know of each key."""

    def __init__(
        self,
        *,
        num_full_pages: int = 32,
        num_window_pages: int = 32,
        window_pages: int = 2,
        at_once: bool = False,
        settings: BridgeSettings | None = None,
    ) -> None:
        self.now_s = 0.0
        self.window_pages = window_pages
        self.device: set[tuple[PageKind, bytes]] = set()
        self.parents: dict[bytes, bytes | None] = {}
        self.host = HostTier(num_full_pages=0, num_window_pages=0)
        self.host.full = _WatchedPool("full", num_full_pages, partial(self._about_to_publish, "full"))
        self.host.window = _WatchedPool("window", num_window_pages, partial(self._about_to_publish, "window"))
        self.pools: dict[PageKind, HostPool] = {"full": self.host.full, "window": self.host.window}
        self.bytes: dict[PageKind, list[bytearray]] = {
            kind: [bytearray(PAGE_BYTES[kind]) for _ in range(self.pools[kind].num_pages)] for kind in self.pools
        }
        self.store = _WatchedStore(self, at_once=at_once)
        self.num_wakes = 0
        self.bridge = StoreBridge(
            self.store,
            self.host,
            lambda kind, page: memoryview(self.bytes[kind][page]),
            page_size=PAGE_SIZE,
            window_pages=window_pages,
            settings=settings,
            clock=lambda: self.now_s,
            wake=self._wake,
        )

    def store_has(
        self, keys: Sequence[bytes], *, full: int | None = None, windows: Sequence[int] | None = None
    ) -> None:
        """Another process put them: `full` pages from the start, windows of these pages; all of both by default."""
        self.know(keys)
        for key in keys[:full]:
            self.store.values[store_key("full", key)] = content("full", key)
        for page in range(len(keys)) if windows is None else windows:
            self.store.values[store_key("window", keys[page])] = content("window", keys[page])

    def computes(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None, *, group: str = "g") -> bool:
        """Pages [start, stop) come to the host from the device, and the bridge is told. False without room."""
        self.know(keys)
        part = list(keys[start:stop])
        saved: dict[PageKind, list[bytes]] = {}
        before = set(self.device)
        self.device |= {(kind, key) for kind in self.pools for key in keys}
        for kind, pool in self.pools.items():
            absent = pool.absent(part)
            pages = pool.reserve(absent, root=keys[0])
            if pages is None:
                self.device = before
                return False
            for key, page in zip(absent, pages, strict=True):
                self.bytes[kind][page][:] = content(kind, key)
            pool.publish(absent)
            saved[kind] = absent
        self.device = before
        self.bridge.saved(saved["full"], saved["window"], group)
        return True

    def fill(self, kind: PageKind, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """The host has these pages; the bridge was not told how they came."""
        self.know(keys)
        some = [keys[page] for page in pages]
        numbers = self.pools[kind].reserve(some, root=keys[0])
        assert numbers is not None
        for key, number in zip(some, numbers, strict=True):
            self.bytes[kind][number][:] = content(kind, key)
        before, self.device = self.device, {("full", key) for key in keys}
        self.pools[kind].publish(some)
        self.device = before

    def prefetch(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        num_tokens: int | None = None,
        device_full: int = 0,
        device_windows: Sequence[int] = (),
        group: str = "g",
        deadline_s: float = math.inf,
    ) -> bool:
        """The whole prompt by default: all pages of `keys` and a token more."""
        self.know(keys)
        self.device |= {("full", key) for key in keys[:device_full]}
        self.device |= {("window", keys[page]) for page in device_windows}
        above = Above(device_full, frozenset(device_windows))
        num_tokens = len(keys) * PAGE_SIZE + 1 if num_tokens is None else num_tokens
        return self.bridge.prefetch(request_id, keys, num_tokens, above, group=group, deadline_s=deadline_s)

    def settle(self) -> None:
        """The store does all it was asked, and the bridge acts on it."""
        for _ in range(100):
            self.store.run_all()
            self.bridge.poll()
            self.check()
            if not self.store.waiting and not self.bridge.is_busy:
                return
        raise AssertionError("the bridge does not come to rest")

    def num_host_pages(self, keys: Sequence[bytes], kind: PageKind = "full") -> int:
        """How many of the pages, from the start, are ready in the host."""
        return self.pools[kind].num_leading(keys, 0, len(keys))

    def usable(self, keys: Sequence[bytes], *, device_full: int = 0, device_windows: Sequence[int] = ()) -> int:
        """By brute force: the longest prefix that device and host can resume from."""
        best = 0
        for boundary in range(1, len(keys) + 1):
            full = all(i < device_full or self.host.full.get(keys[i]) is not None for i in range(boundary))
            floor = window_floor(boundary, self.window_pages)
            window = all(
                i in device_windows or self.host.window.get(keys[i]) is not None for i in range(floor, boundary)
            )
            best = boundary if full and window else best
        return best

    def check(self) -> None:
        """Books balance, and every ready page and every value in the store holds what belongs to its key."""
        self.host.check()
        for kind, pool in self.pools.items():
            for key in self.parents:
                page = pool.get(key)
                assert page is None or self.bytes[kind][page] == content(kind, key), f"{kind} page {page} is wrong"
        for key, value in self.store.values.items():
            assert value == content("full" if key[:1] == b"f" else "window", key[1:])

    def check_quiet(self) -> None:
        """Nobody holds anything any more."""
        self.check()
        assert not self.bridge.is_busy
        for pool in self.pools.values():
            stats = pool.stats()
            assert (stats.filling, stats.pinned, stats.doomed) == (0, 0, 0), stats

    def know(self, keys: Sequence[bytes]) -> None:
        for parent, key in zip([None, *keys], keys, strict=False):
            self.parents[key] = parent

    def about_to_read(self, names: Sequence[bytes]) -> None:
        """The bridge asks the store for these."""
        assert len(set(names)) == len(names)
        for name in names:
            kind: PageKind = "full" if name[:1] == b"f" else "window"
            assert self.pools[kind].get(name[1:]) is None, "it is in the host"
        under_way = {key for call in self.store.waiting if call.kind == "get" for key in call.keys}
        assert not under_way.intersection(names), "it is being read"

    def _about_to_publish(self, kind: PageKind, key: bytes) -> None:
        parent = self.parents[key]
        if kind == "full" and parent is not None and ("full", parent) not in self.device:
            assert self.host.full.get(parent) is not None, "a page is published whose predecessor is not there"

    def _wake(self) -> None:
        self.num_wakes += 1
