"""What is below the device: the host's books, the copies between the two, and the store behind the host.

The part of a TieredCache that is there when it has a host tier; tiered.py says what each call promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.cache.l3.base import StoreStats
from epd.cache.prefix import PrefixCache, PrefixHit
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.backup import Backups, HitCounts, OvertakenWindows
from epd.cache.tiers.hit import joint_hit
from epd.cache.tiers.host import HostStats, HostTier
from epd.cache.tiers.loads import Loads, RowPlan
from epd.cache.tiers.staging import Staging
from epd.cache.window import window_floor
from epd.kv.copies import PageMover

__all__ = ["Below", "ResumePlan", "StoreLink"]


class StoreLink(Protocol):
    """What this cache asks of the bridge to the store (bridge.py)."""

    def saved(self, keys_full: Sequence[bytes], keys_window: Sequence[bytes], group: str) -> None:
        """These host pages just became ready."""
        ...

    def touch_hot(self, keys: Sequence[bytes], group: str) -> None:
        """A path that was used."""
        ...

    def condemn(self, keys: Sequence[bytes]) -> None: ...

    def poll(self) -> None: ...

    @property
    def is_busy(self) -> bool:
        """Whether calls of the store are under way or queued."""
        ...

    def stats(self) -> StoreStats: ...


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What resume() would do: lease alone, or copy as well."""

    row: RowPlan
    full_only: bool
    copies: bool


class Below:
    """What is below the device: the host's books, the copies between the two, the store behind the host."""

    def __init__(
        self, device: PrefixCache, host: HostTier, mover: PageMover, store: StoreLink | None, hit_threshold: int
    ) -> None:
        self.host = host
        self.store = store
        self.loads = Loads(device, host, mover)
        self.backups = Backups(device, host, mover, settle_loads=self.loads.settle)
        self.staging = Staging(device, host, self.loads, settle=self.backups.wait)
        self._device = device
        self._hits = HitCounts(host, hit_threshold)
        self._overtaken = OvertakenWindows(host.window)
        self._kept_pages = device.window_pages + device.retention.tail_pages if device.window_pages else 0
        self._num_hit_tokens = 0
        device.ledger.witness = self.backups

    @property
    def is_busy(self) -> bool:
        return bool(
            self.loads.num_pending or self.backups.num_pending or (self.store is not None and self.store.is_busy)
        )

    def poll(self) -> None:
        self.staging.written()
        self.loads.poll()
        self.backups.poll()
        if self.store is not None:
            self.store.poll()

    def plan(self, keys: Sequence[bytes], num_tokens: int, hit_tokens: int | None, *, full_only: bool) -> ResumePlan:
        device, page_size = self._device, self._device.page_size
        joint = found = joint_hit(device, self.host, keys, num_tokens)
        if hit_tokens is not None and hit_tokens < joint.num_reached_pages * page_size:
            found = joint_hit(device, self.host, keys, min(num_tokens, hit_tokens + 1))
        num_pages = found.num_reached_pages if full_only else found.num_pages
        row = RowPlan(
            names=keys,
            walk=found.walk,
            num_pages=num_pages,
            window_start=num_pages if full_only else window_floor(num_pages, device.window_pages),
            num_prompt_tokens=num_tokens,
            usable_pages=joint.num_pages,
            reached_pages=joint.num_reached_pages,
            num_ready_tokens=num_pages * page_size,
        )
        return ResumePlan(row, full_only, num_pages > (found.walk.num_pages if full_only else found.walk.usable_pages))

    def resume(
        self, keys: Sequence[bytes], num_tokens: int, hit_tokens: int | None, *, full_only: bool
    ) -> SequencePages:
        plan = self.plan(keys, num_tokens, hit_tokens, full_only=full_only)
        if plan.copies:
            row = self.loads.start(plan.row)
            self._num_hit_tokens += (plan.row.num_pages - plan.row.num_leased_pages) * self._device.page_size
            return row
        return self._device.open_row(
            keys,
            num_tokens,
            num_leased_pages=plan.row.num_pages,
            with_window=not full_only,
            usable_pages=plan.row.usable_pages,
            reached_pages=plan.row.reached_pages,
            counted_pages=(plan.row.num_pages, plan.row.reached_pages),
        )

    def keep(self, keys: Sequence[bytes], num_pages: int, group: str, *, tells_all: bool) -> None:
        """The host gets what it lacks of a path and of the window at its end; then the store is told of that or, if
        it `tells_all`, of everything the host has of the path."""
        path = keys[:num_pages]
        if not path:
            return
        group = group or path[0].hex()

        def saved(full_keys: Sequence[bytes], window_keys: Sequence[bytes]) -> None:
            if self.store is None:
                return
            if tells_all:
                full_keys, window_keys = self.host.full.ready(path), self.host.window.ready(path)
            if full_keys or window_keys:
                self.store.saved(full_keys, window_keys, group)

        window_start = max(0, len(path) - self._kept_pages)
        if not self.backups.save_path(path, len(path), window_start, on_saved=saved) and tells_all:
            saved((), ())
        floor = window_floor(len(path), self._device.window_pages)
        if tells_all and self.host.window.num_known(path, floor, len(path)) == len(path):
            self._overtaken.path_ended(path[:window_start])

    def admitted(self, keys: Sequence[bytes], hit: PrefixHit, group: str) -> None:
        page_size = self._device.page_size
        num_pages, reached = hit.num_tokens // page_size, hit.num_full_only_tokens // page_size
        window_start = max(0, num_pages - self._kept_pages)
        self.host.full.touch(keys[:reached])
        self.host.window.touch(keys[window_start:num_pages])
        if num_pages == 0:
            return
        group = group or keys[0].hex()
        if self.store is not None:
            self.store.touch_hot(keys[:num_pages], group)
        self._overtaken.path_hit(keys[window_start:num_pages])
        hot = self._hits.count(keys, num_pages, window_floor(num_pages, self._device.window_pages))
        if hot:
            store = self.store
            saved = None if store is None else lambda full, window: store.saved(full, window, group)
            self.backups.save_path(keys, hot, window_start if hot == num_pages else hot, on_saved=saved)

    def condemn(self, keys: Sequence[bytes]) -> None:
        root = keys[0]
        self.loads.condemn(root)
        gone = dict.fromkeys([*keys, *self.host.full.condemn(root), *self.host.window.condemn(root)])
        if self.store is not None:
            self.store.condemn(list(gone))

    def clear(self) -> None:
        self.backups.wait()
        self.host.full.clear()
        self.host.window.clear()

    def stats(self) -> HostStats:
        loads, backups = self.loads, self.backups
        return HostStats(
            full=self.host.full.stats(),
            window=self.host.window.stats(),
            num_hit_tokens=self._num_hit_tokens,
            num_loads=loads.num_loads,
            num_loaded_full_pages=loads.num_full_pages,
            num_loaded_window_pages=loads.num_window_pages,
            num_local_window_pages=loads.num_local_window_pages,
            num_failed_loads=loads.num_failed,
            num_saves=backups.num_saves,
            num_saved_full_pages=backups.num_full_pages,
            num_saved_window_pages=backups.num_window_pages,
            num_failed_saves=backups.num_failed,
            num_unsaved_pages=backups.num_unsaved_pages,
            num_rescued_pages=backups.num_rescued_pages,
            num_pending_copies=loads.num_pending + backups.num_pending,
        )
