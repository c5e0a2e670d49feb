"""Pages that are hot above are touched in the store, which would otherwise see no read of them and let them expire.

A hit only leaves its chain here; `pump`, once per step, touches a batch of what is due, within a budget: one store
operation in a hundred, and one batch each interval even when nothing else asks the store, since that is when pages
would age unseen. A chain goes whole, from its beginning, with the windows at its end: with a hole it is worth nothing.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from epd.cache.tiers.ports import PageStore, store_key

__all__ = ["KeepAlive"]

_BUDGET: Final = 0.01
_MAX_CHAINS: Final = 256


class KeepAlive:
    """Owned by the engine thread. A page is touched at most once each `interval_s`."""

    def __init__(
        self,
        store: PageStore,
        *,
        clock: Callable[[], float],
        interval_s: float,
        window_pages: int,
        batch_keys: int,
        max_keys: int,
    ) -> None:
        """`interval_s`: a third of the time after which the store forgets. `max_keys`: touches that are remembered."""
        self._store = store
        self._clock = clock
        self._interval_s = interval_s
        self._window_pages = window_pages
        self._batch_keys = batch_keys
        self._max_keys = max_keys
        self._touched: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        # By group and last key, which say all of a chain: what waits, and when what went was seen to be whole.
        self._chains: OrderedDict[tuple[str, bytes], tuple[bytes, ...]] = OrderedDict()
        self._whole: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._allowance = 0.0
        self._num_moved_keys = 0
        self._free_batch_at_s = clock()
        self.counters: Counter[str] = Counter()

    @property
    def num_chains(self) -> int:
        """Chains that may have something due."""
        return len(self._chains)

    def hot(self, keys: Sequence[bytes], group: str) -> None:
        """A chain of page keys, from the first page on, was hit above the store. Cheap."""
        if not keys:
            return
        chain = group, keys[-1]
        if chain in self._chains or self._clock() - self._whole.get(chain, -math.inf) < self._interval_s:
            return
        if len(self._chains) >= _MAX_CHAINS:
            self._chains.popitem(last=False)
            self.counters["chains_dropped"] += 1
        self._chains[chain] = tuple(keys)

    def confirmed(self, group: str, keys: Sequence[bytes]) -> None:
        """Store keys that were just written or read: as good as touched."""
        self._remember(group, keys, self._clock())

    def pump(self, num_moved_keys: int) -> None:
        """Touch one batch, if the budget allows and something is due.

        `num_moved_keys`: what the store was asked for, gave or took so far, by which touches are measured.
        """
        now_s = self._clock()
        earned = (num_moved_keys - self._num_moved_keys) * _BUDGET
        self._num_moved_keys = num_moved_keys
        self._allowance = min(self._allowance + earned, float(self._batch_keys))
        room = int(self._allowance)
        is_free = now_s >= self._free_batch_at_s
        if not self._chains or not (is_free or room):
            return
        chain, keys = next(iter(self._chains.items()))
        group = chain[0]
        wanted = [store_key("full", key) for key in keys]
        wanted += [store_key("window", key) for key in keys[max(0, len(keys) - self._window_pages) :]]
        due = [key for key in wanted if not self._is_fresh(group, key, now_s)]
        batch = due[: self._batch_keys if is_free else room]
        if len(batch) == len(due):
            del self._chains[chain]
            _put_bounded(self._whole, chain, now_s, self._max_keys)
        if not batch:
            return
        if is_free:
            self._free_batch_at_s = now_s + self._interval_s
        else:
            self._allowance -= len(batch)
        self._remember(group, batch, now_s)
        self.counters["batches"] += 1
        self.counters["touches"] += len(batch)
        self._store.touch(group, batch)

    def _is_fresh(self, group: str, key: bytes, now_s: float) -> bool:
        touched_s = self._touched.get((group, key))
        return touched_s is not None and now_s - touched_s < self._interval_s

    def _remember(self, group: str, keys: Sequence[bytes], now_s: float) -> None:
        for key in keys:
            _put_bounded(self._touched, (group, key), now_s, self._max_keys)


def _put_bounded(
    times: OrderedDict[tuple[str, bytes], float], key: tuple[str, bytes], now_s: float, max_keys: int
) -> None:
    times[key] = now_s
    times.move_to_end(key)
    if len(times) > max_keys:
        times.popitem(last=False)
