"""The books of the host tier: which page of host memory holds which KV page. No bytes, no torch, one thread.

Two pools, full and window, each a set of pages known by page key (epd/cache/keys.py). A page is

    free --reserve--> filling --publish--> ready --evicted, discarded--> free
                         |                   | pin, unpin
                         +----discard---> free

    total = free + filling + ready (pinned + evictable) + doomed

`filling`: somebody is writing it, and says when that ended: publish() or discard(), once. `ready`: it can be looked up.
Ready pages nobody has pinned may go when room is needed: what is outdated first, then what was used least recently, and
of pages used together the deepest first, so that what is left of a path is its beginning. `doomed`: condemned while
somebody was writing or had pinned it; no lookup finds it, and it is free when he is done. Its key cannot be reserved
anew before that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from epd.kv.errors import PageStateError
from epd.kv.numbers import require_at_least

__all__ = ["HostPool", "HostPoolStats", "HostStats", "HostTier"]

_BLOCK_PAGES = 256
"""Keys that are looked up in one go."""


@dataclass(frozen=True, slots=True)
class HostPoolStats:
    """Pages of one host pool by state; free + filling + pinned + evictable + doomed == total."""

    total: int
    free: int
    filling: int
    pinned: int
    evictable: int
    doomed: int
    num_evicted: int
    """Pages evicted so far."""


@dataclass(frozen=True, slots=True)
class HostStats:
    """The host tier of a cache. Counters run from its start; pages are those of copies that went well."""

    full: HostPoolStats
    window: HostPoolStats
    num_hit_tokens: int
    """Tokens of hits whose full pages came from the host."""
    num_loads: int
    num_loaded_full_pages: int
    num_loaded_window_pages: int
    num_local_window_pages: int
    """Window pages copied on the device, for a sequence that found its other windows in host memory."""
    num_failed_loads: int
    num_saves: int
    num_saved_full_pages: int
    num_saved_window_pages: int
    num_failed_saves: int
    num_unsaved_pages: int
    """Pages that were to be saved and found no room, since everything in the host pool was in use."""
    num_rescued_pages: int
    """Saved pages of those that were on their way out of the device when they were."""
    num_pending_copies: int


class HostPool:
    """`num_pages` pages with ids `[0, num_pages)`. Every operation is O(keys named), condemn() and check() aside."""

    __slots__ = (
        "_doomed",
        "_evictable",
        "_filling",
        "_free",
        "_pins",
        "_ready",
        "_roots",
        "_stale",
        "name",
        "num_evicted",
    )

    def __init__(self, name: str, num_pages: int) -> None:
        require_at_least(0, num_pages=num_pages)
        self.name = name
        self.num_evicted = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._filling: dict[bytes, int] = {}
        self._ready: dict[bytes, int] = {}
        self._doomed: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}
        # Unpinned ready pages, those first that go first: first the stale ones, then the others.
        self._stale: OrderedDict[bytes, None] = OrderedDict()
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        # First key of the path a page is on, for every page that is not free.
        self._roots: dict[bytes, bytes] = {}

    @property
    def num_pages(self) -> int:
        return len(self._free) + len(self._roots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_reservable(self) -> int:
        """The most pages reserve() can give now."""
        return len(self._free) + self.num_evictable

    @property
    def num_evictable(self) -> int:
        return len(self._evictable) + len(self._stale)

    def num_evictable_of(self, keys: Iterable[bytes]) -> int:
        """How many of these keys have an evictable page."""
        return sum(key in self._evictable or key in self._stale for key in keys)

    def get(self, key: bytes) -> int | None:
        """The ready page of that key."""
        return self._ready.get(key)

    def pages(self, keys: Iterable[bytes]) -> list[int]:
        """The ready pages of keys that all have one. Raises PageStateError naming a key that has none."""
        try:
            return list(map(self._ready.__getitem__, keys))
        except KeyError as error:
            raise PageStateError(f"host {self.name} pool: no ready page of key {error.args[0]!r}") from None

    def ready(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that have a ready page."""
        return list(filter(self._ready.__contains__, keys))

    def knows(self, key: bytes) -> bool:
        """Whether there is a page of that key, ready or not."""
        return key in self._roots

    def is_filling(self, key: bytes) -> bool:
        """Whether there is a page of that key that no lookup may see now: it is being filled, or doomed."""
        return key in self._roots and key not in self._ready

    def absent(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of which there is no page, ready or not: what reserve() may be asked for."""
        roots = self._roots
        return [key for key in keys if key not in roots]

    def num_leading(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The first index in `[start, stop)` whose key has no ready page, else `stop`."""
        return _first_without(self._ready, keys, start, stop)

    def num_known(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The first index in `[start, stop)` whose key has no page in any state, else `stop`."""
        return _first_without(self._roots, keys, start, stop)

    def reserve(self, keys: Sequence[bytes], *, root: bytes = b"") -> list[int] | None:
        """Pages for keys that have none, to be filled; evicts for them. None, with nothing changed, if pages in use
        leave too few.

        `root` is the first key of the path they are on; without one they go whenever any path is condemned. Raises
        PageStateError for a key named twice or one that has a page already, in whatever state (see absent()).
        """
        if len(set(keys)) != len(keys):
            raise PageStateError(f"host {self.name} pool: a key is reserved twice in one call")
        if len(self.absent(keys)) != len(keys):
            raise PageStateError(f"host {self.name} pool: a key is reserved that has a page")
        short = len(keys) - len(self._free)
        if short > self.num_evictable:
            return None
        for _ in range(short):
            victim, _ = (self._stale or self._evictable).popitem(last=False)
            self._release(victim, self._ready.pop(victim))
            self.num_evicted += 1
        # Pages that lie together are copied together, so they are handed out in their own order.
        taken = sorted(self._free.pop() for _ in keys)
        self._filling.update(zip(keys, taken, strict=True))
        self._roots.update(dict.fromkeys(keys, root))
        return taken

    def publish(self, keys: Sequence[bytes]) -> None:
        """Filled pages, in path order, can be looked up from now on; those condemned meanwhile become free.

        Raises PageStateError, with nothing changed, for a key that is not being filled.
        """
        self._require_filling(keys)
        for key in reversed(keys):
            page = self._filling.pop(key, None)
            if page is None:
                self._release(key, self._doomed.pop(key))
            else:
                self._ready[key] = page
                self._evictable[key] = None

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget these pages; unknown keys are nothing to forget. A page being filled is free at once, so its writer
        alone may say this of it. A pinned page goes with its last pin."""
        for key in keys:
            if key in self._filling:
                self._release(key, self._filling.pop(key))
            elif key in self._ready:
                page = self._ready.pop(key)
                if key in self._pins:
                    self._doomed[key] = page
                else:
                    self._forget_order(key)
                    self._release(key, page)
            elif key in self._doomed and key not in self._pins:
                self._release(key, self._doomed.pop(key))

    def condemn(self, root: bytes) -> list[bytes]:
        """No lookup finds a page of a path that begins with `root` any more; returns their keys. O(pages)."""
        condemned = [key for key, first in self._roots.items() if first in (root, b"")]
        for key in condemned:
            if key in self._filling:
                self._doomed[key] = self._filling.pop(key)
        self.discard(key for key in condemned if key in self._ready)
        return condemned

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep these ready pages until unpin(). Counted. Raises PageStateError, changing nothing, if one is not
        ready."""
        keys = list(keys)
        if any(key not in self._ready for key in keys):
            raise PageStateError(f"host {self.name} pool: only a ready page can be pinned")
        for key in keys:
            count = self._pins.get(key, 0)
            self._pins[key] = count + 1
            if count == 0:
                self._forget_order(key)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo one pin() of these keys, in path order; that was a use of them. Raises PageStateError for a key
        that is not pinned."""
        for key in reversed(keys):
            count = self._pins.get(key, 0)
            if count == 0:
                raise PageStateError(f"host {self.name} pool: a key is unpinned that is not pinned")
            if count > 1:
                self._pins[key] = count - 1
                continue
            del self._pins[key]
            if key in self._ready:
                self._evictable[key] = None
            else:
                self._release(key, self._doomed.pop(key))

    def touch(self, keys: Sequence[bytes]) -> None:
        """A use of these pages, in path order; keys without a page are passed over."""
        evictable, stale = self._evictable, self._stale
        move = evictable.move_to_end
        for key in reversed(keys):
            if key in evictable:
                move(key)
            elif key in stale:
                del stale[key]
                evictable[key] = None

    def outdate(self, keys: Sequence[bytes]) -> None:
        """These are unlikely to be used again: unless they are, they go before all others, those outdated longest
        first. Keys without a page are passed over."""
        for key in reversed(keys):
            if key in self._evictable:
                del self._evictable[key]
                self._stale[key] = None

    def clear(self) -> int:
        """Forget every page nobody is using; returns how many."""
        keys = [*self._stale, *self._evictable]
        self.discard(keys)
        return len(keys)

    def stats(self) -> HostPoolStats:
        return HostPoolStats(
            total=self.num_pages,
            free=len(self._free),
            filling=len(self._filling),
            pinned=len(self._ready) - self.num_evictable,
            evictable=self.num_evictable,
            doomed=len(self._doomed),
            num_evicted=self.num_evicted,
        )

    def check(self) -> None:
        """Raise PageStateError unless every page is in exactly one state and every pin on a page."""
        held = [*self._filling.values(), *self._ready.values(), *self._doomed.values()]
        if sorted([*held, *self._free]) != list(range(self.num_pages)):
            raise PageStateError(f"host {self.name} pool: pages are lost or held twice: {self.stats()}")
        if {*self._filling, *self._ready, *self._doomed} != set(self._roots) or len(held) != len(self._roots):
            raise PageStateError(f"host {self.name} pool: a key is in two states or in none")
        unpinned = {key for key in self._ready if key not in self._pins}
        if unpinned != {*self._evictable, *self._stale} or len(unpinned) != self.num_evictable:
            raise PageStateError(f"host {self.name} pool: {len(unpinned)} pages are unpinned, {self.stats()}")
        if any(count < 1 or (key not in self._ready and key not in self._doomed) for key, count in self._pins.items()):
            raise PageStateError(f"host {self.name} pool: a pin is on no page")

    def _forget_order(self, key: bytes) -> None:
        if key in self._evictable:
            del self._evictable[key]
        else:
            del self._stale[key]

    def _release(self, key: bytes, page: int) -> None:
        del self._roots[key]
        self._free.append(page)

    def _require_filling(self, keys: Sequence[bytes]) -> None:
        if len(set(keys)) != len(keys):
            raise PageStateError(f"host {self.name} pool: a key is published twice in one call")
        for key in keys:
            if key not in self._filling and (key not in self._doomed or key in self._pins):
                raise PageStateError(f"host {self.name} pool: a key is published that nobody was filling")


def _first_without(known: Mapping[bytes, object], keys: Sequence[bytes], start: int, stop: int) -> int:
    """The first index in `[start, stop)` of a key that is not known: in blocks, each without a loop in Python."""
    for first in range(start, stop, _BLOCK_PAGES):
        found = list(map(known.__contains__, keys[first : min(first + _BLOCK_PAGES, stop)]))
        if not all(found):
            return first + found.index(False)
    return max(start, stop)


class HostTier:
    """Both pools. A hit asks both at once (hit.py)."""

    __slots__ = ("full", "window")

    def __init__(self, *, num_full_pages: int, num_window_pages: int) -> None:
        self.full = HostPool("full", num_full_pages)
        self.window = HostPool("window", num_window_pages)

    def check(self) -> None:
        """Raise PageStateError unless the books of both pools balance."""
        self.full.check()
        self.window.check()
