"""From host to device: sequences that start with pages the device does not have.

    path        0 ........ d ............... target        the tree has [0, d), the host what is missing
    full pages  leased     copied from the host
    windows                    [window_start, target)       own pages: copied on the device where it has them,
                                                            from the host where not

Exactly what is missing is moved. The sequence's own pages are filled while it computes already
(`SequencePages.arrival`) and published by its first commit, like computed ones. Until the copy is over its source pages
are pinned, on both sides, whatever becomes of the sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from epd.cache.pins import PathPin
from epd.cache.prefix import PrefixCache
from epd.cache.radix import Walk
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.hit import LiveWindows
from epd.cache.tiers.host import HostTier
from epd.kv.copies import CopyFailed, CopyTicket, PageCopies, PageMover
from epd.kv.errors import NoPages

__all__ = ["Loads", "RowPlan", "window_runs"]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A row to start: `num_pages` pages of the path named by `names`, the tree's as far as `walk` went, with windows
    from page `window_start` on (`num_pages`: none).

    The last of `names` may be no page key but its maker's own name of a host page. Found were `usable_pages` and
    `reached_pages`, as PrefixCache.open_row() has them; `num_ready_tokens` as SequencePages.receive() has it.
    """

    names: Sequence[bytes]
    walk: Walk
    num_pages: int
    window_start: int
    num_prompt_tokens: int
    usable_pages: int
    reached_pages: int
    num_ready_tokens: int | None

    @property
    def num_leased_pages(self) -> int:
        return min(self.walk.num_pages, self.num_pages)


@dataclass(slots=True, eq=False)
class _Load:
    """A copy under way, and what is pinned for it."""

    ticket: CopyTicket
    full_names: Sequence[bytes]
    window_names: Sequence[bytes]
    pins: Sequence[PathPin]
    num_local_windows: int


@dataclass(slots=True, eq=False)
class _Unpublished:
    """A row with pages that came from the host and are not in the tree yet."""

    row: SequencePages
    root: bytes
    num_pages: int


class Loads:
    """The copies under way. Owned by the engine thread."""

    def __init__(self, device: PrefixCache, host: HostTier, mover: PageMover) -> None:
        self._device = device
        self._host = host
        self._mover = mover
        self._flying: list[_Load] = []
        self._unpublished: list[_Unpublished] = []
        self.num_loads = 0
        self.num_full_pages = 0
        self.num_window_pages = 0
        self.num_local_window_pages = 0
        self.num_failed = 0

    @property
    def num_pending(self) -> int:
        return len(self._flying)

    def room_needed(self, plan: RowPlan) -> tuple[int, int]:
        """(full, window) pages that start(plan) would take or make pinned, of those that are free or evictable."""
        leased = plan.num_leased_pages
        pinned = self._device.would_pin(plan.walk, leased, min(plan.window_start, leased))
        return plan.num_pages - leased + pinned[0], plan.num_pages - plan.window_start + pinned[1]

    def start(self, plan: RowPlan) -> SequencePages:
        """Lease, allocate, and start the copy. The host has every page the device lacks.

        Raises NoPages, with nothing changed.
        """
        names, num_pages, window_start = plan.names, plan.num_pages, plan.window_start
        leased = plan.num_leased_pages
        live = LiveWindows(self._device, plan.walk)
        local = [index for index in range(window_start, leased) if index in live]
        from_host = sorted({*range(window_start, num_pages)}.difference(local))
        full_names, window_names = names[leased:num_pages], [names[index] for index in from_host]
        self._host.full.pin(full_names)
        self._host.window.pin(window_names)
        path = self._device.pin(names, leased) if leased else None
        pins = [self._device.pin(names, stop, window_start=start) for start, stop in window_runs(local)]
        try:
            grant = self._device.ledger.allocate(num_pages - leased, num_pages - window_start)
        except NoPages:
            self._release(full_names, window_names, [*pins, *([path] if path else [])])
            raise
        own = dict(zip(range(window_start, num_pages), grant.window_pages, strict=True))
        local_pages = [page for pin in pins for page in pin.window_pages]
        copies = PageCopies(
            full=tuple(zip(self._host.full.pages(full_names), grant.full_pages, strict=True)),
            window=tuple(zip(self._host.window.pages(window_names), map(own.__getitem__, from_host), strict=True)),
            local_window=tuple(zip(local_pages, map(own.__getitem__, local), strict=True)),
        )
        row = self._device.open_row(
            names,
            plan.num_prompt_tokens,
            num_leased_pages=leased,
            with_window=False,
            usable_pages=plan.usable_pages,
            reached_pages=plan.reached_pages,
            counted_pages=(leased if plan.num_ready_tokens is None else num_pages, plan.reached_pages),
        )
        if path is not None:
            path.release()
        ticket = self._mover.load(copies)
        row.receive(grant, ticket, window_start=window_start, num_tokens=plan.num_ready_tokens)
        self._flying.append(_Load(ticket, full_names, window_names, pins, len(local)))
        whole_pages = min(num_pages, plan.num_prompt_tokens // self._device.page_size)
        self._unpublished.append(_Unpublished(row, names[0], whole_pages))
        self.num_loads += 1
        self.poll()
        return row

    def poll(self) -> bool:
        """Book the copies that are over; whether any was."""
        over = [load for load in self._flying if load.ticket.is_done()]
        for load in over:
            self._flying.remove(load)
            self._book(load)
        self._unpublished = [each for each in self._unpublished if _is_unpublished(each)]
        return bool(over)

    def settle(self) -> bool:
        """Wait for a copy that keeps pages of the device pinned; False when there is none."""
        if self.poll():
            return True
        for load in self._flying:
            if load.pins:
                with contextlib.suppress(CopyFailed):
                    load.ticket.wait()
                self.poll()
                return True
        return False

    def condemn(self, root: bytes) -> None:
        """Rows on a path that begins with this key publish nothing of what came to them."""
        for each in self._unpublished:
            if each.root == root and _is_unpublished(each):
                each.row.hide()

    def _book(self, load: _Load) -> None:
        try:
            load.ticket.wait()
        except CopyFailed:
            self.num_failed += 1
        else:
            self.num_full_pages += len(load.full_names)
            self.num_window_pages += len(load.window_names)
            self.num_local_window_pages += load.num_local_windows
        self._release(load.full_names, load.window_names, load.pins)

    def _release(self, full_names: Sequence[bytes], window_names: Sequence[bytes], pins: Sequence[PathPin]) -> None:
        self._host.full.unpin(full_names)
        self._host.window.unpin(window_names)
        for pin in pins:
            pin.release()


def window_runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending page indices as runs `[start, stop)`."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _is_unpublished(each: _Unpublished) -> bool:
    return each.row.is_open and each.row.num_published_pages < each.num_pages
