"""KV that another worker computed, on its way to a sequence: host pages that hold it until there is room on the device.

    stage()      what the host lacks is reserved, what it has is pinned      filling
    written()    the caller has written it                                   ready, pinned
    take()       a row loads it like any pages of the host (loads.py)        ready

Nothing relies on the device: what it has of the prompt now may be gone when the sequence gets its place. Whole pages
stay in the host for others to find. A last page that is not full has a name of its own, and goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.cache.prefix import PrefixCache
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.loads import Loads, RowPlan
from epd.kv.errors import NoPages

__all__ = ["StagedPages", "StagedPagesLost", "Staging"]


class StagedPagesLost(NoPages):
    """What was staged was condemned meanwhile: it never becomes a row."""


@dataclass(frozen=True, slots=True)
class StagedPages:
    """Host pages for KV that came from another worker: (page of the sequence, host page) to be written, of each pool.

    Pages of the sequence that are not named are in host memory already. A last page that is not full is named too.
    """

    keys: tuple[bytes, ...]
    num_tokens: int
    full: tuple[tuple[int, int], ...]
    window: tuple[tuple[int, int], ...]
    number: int = 0
    """Which staging of the cache this is."""


@dataclass(slots=True, eq=False)
class _Staged:
    """`names` are of all pages of the sequence, `unfinished` of a last one that is not full."""

    names: Sequence[bytes]
    unfinished: Sequence[bytes]
    window_start: int
    pinned_full: list[bytes]
    pinned_window: list[bytes]
    new_full: list[bytes]
    new_window: list[bytes]


class Staging:
    """Everything staged now. Owned by the engine thread."""

    def __init__(self, device: PrefixCache, host: HostTier, loads: Loads, *, settle: Callable[[], None]) -> None:
        """`settle` returns when no page is being copied to the host."""
        self._device = device
        self._host = host
        self._loads = loads
        self._settle = settle
        self._numbers = itertools.count(1)
        self._staged: dict[int, _Staged] = {}
        self._unwritten: list[int] = []

    def __len__(self) -> int:
        return len(self._staged)

    def stage(self, keys: Sequence[bytes], num_tokens: int) -> StagedPages | None:
        """See TieredCache.stage()."""
        full, window, page_size = self._host.full, self._host.window, self._device.page_size
        num_whole, num_pages = num_tokens // page_size, -(-num_tokens // page_size)
        number = next(self._numbers)
        unfinished = [b"staged/%d" % number] if num_pages > num_whole else []
        names = [*keys[:num_whole], *unfinished]
        window_start = min(num_pages, self._device.window_frontier(num_tokens))
        if self._is_filling(names, window_start):
            self._settle()
            if self._is_filling(names, window_start):
                return None
        new_full, new_window = full.absent(names), window.absent(names[window_start:])
        pinned_full = [name for name in names if full.get(name) is not None]
        pinned_window = [name for name in names[window_start:] if window.get(name) is not None]
        full.pin(pinned_full)
        window.pin(pinned_window)
        full_pages = full.reserve(new_full, root=names[0])
        window_pages = None if full_pages is None else window.reserve(new_window, root=names[0])
        if full_pages is None or window_pages is None:
            full.discard(new_full if full_pages is not None else ())
            full.unpin(pinned_full)
            window.unpin(pinned_window)
            return None
        self._staged[number] = _Staged(
            names, unfinished, window_start, pinned_full, pinned_window, new_full, new_window
        )
        self._unwritten.append(number)
        places = {name: index for index, name in enumerate(names)}
        return StagedPages(
            keys=tuple(keys[:num_whole]),
            num_tokens=num_tokens,
            full=tuple((places[name], page) for name, page in zip(new_full, full_pages, strict=True)),
            window=tuple((places[name], page) for name, page in zip(new_window, window_pages, strict=True)),
            number=number,
        )

    def written(self) -> None:
        """All pages named until now are written: they can be looked up, and stay until they are taken."""
        unwritten, self._unwritten = self._unwritten, []
        for number in unwritten:
            staged = self._staged[number]
            for pool, new, pinned in (
                (self._host.full, staged.new_full, staged.pinned_full),
                (self._host.window, staged.new_window, staged.pinned_window),
            ):
                pool.publish(new)
                # Those condemned meanwhile are gone.
                kept = [name for name in new if pool.get(name) is not None]
                pool.pin(kept)
                pinned += kept
                new.clear()

    def take(self, handle: StagedPages) -> SequencePages:
        """See TieredCache.resume_staged()."""
        self.written()
        staged = self._find(handle)
        names, host = staged.names, self._host
        missing = sum(host.full.get(name) is None for name in names)
        missing += sum(host.window.get(name) is None for name in names[staged.window_start :])
        if missing:
            raise StagedPagesLost(pool="host", needed=len(names), free=len(names) - missing)
        walk = self._device.walk(handle.keys, handle.num_tokens)
        row = self._loads.start(
            RowPlan(
                names=names,
                walk=walk,
                num_pages=len(names),
                window_start=staged.window_start,
                num_prompt_tokens=handle.num_tokens,
                usable_pages=walk.usable_pages,
                reached_pages=walk.num_pages,
                num_ready_tokens=None,
            )
        )
        self._leave(handle.number)
        return row

    def give_up(self, handle: StagedPages) -> None:
        """See TieredCache.unstage()."""
        self._find(handle)
        self._leave(handle.number)

    def _leave(self, number: int) -> None:
        staged, host = self._staged.pop(number), self._host
        if number in self._unwritten:
            self._unwritten.remove(number)
        host.full.discard(staged.new_full)
        host.window.discard(staged.new_window)
        host.full.unpin(_in_order(staged.names, staged.pinned_full))
        host.window.unpin(_in_order(staged.names, staged.pinned_window))
        # Freed once the row has it.
        host.full.discard(staged.unfinished)
        host.window.discard(staged.unfinished)

    def _find(self, handle: StagedPages) -> _Staged:
        staged = self._staged.get(handle.number)
        if staged is None:
            raise ValueError(f"staged pages {handle.number} were taken or given up already")
        return staged

    def _is_filling(self, names: Sequence[bytes], window_start: int) -> bool:
        full, window = self._host.full, self._host.window
        return any(map(full.is_filling, names)) or any(map(window.is_filling, names[window_start:]))


def _in_order(names: Sequence[bytes], some: Sequence[bytes]) -> list[bytes]:
    chosen = set(some)
    return [name for name in names if name in chosen]
