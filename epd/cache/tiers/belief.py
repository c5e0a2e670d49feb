"""What a store is believed to hold, so that nothing is written twice: bounded, by place, healed where it proves wrong.

A store evicts and expires by itself and says nothing, so a belief is never a fact: it saves a write, and no read relies
on it. It ends when the store says otherwise, or after `lifetime_s` without a sign.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["Belief"]


class Belief:
    """Store keys by place (a node of the store), least recently confirmed first."""

    def __init__(self, *, max_keys: int, lifetime_s: float) -> None:
        """At most `max_keys` for each place."""
        self._max_keys = max_keys
        self._lifetime_s = lifetime_s
        self._places: dict[str, OrderedDict[bytes, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def holds(self, place: str, key: bytes, now_s: float) -> bool:
        """Whether `key` needs no writing."""
        confirmed = self._places.get(place)
        confirmed_s = None if confirmed is None else confirmed.get(key)
        return confirmed_s is not None and now_s - confirmed_s < self._lifetime_s

    def is_older(self, place: str, key: bytes, since_s: float) -> bool:
        """Whether the last sign of a key that is believed to be there came before `since_s`."""
        return self._places[place][key] < since_s

    def confirm(self, place: str, keys: Iterable[bytes], now_s: float) -> None:
        """The store took them, gave them, or says that it has them."""
        confirmed = self._places.setdefault(place, OrderedDict())
        for key in keys:
            confirmed[key] = now_s
            confirmed.move_to_end(key)
        while len(confirmed) > self._max_keys:
            confirmed.popitem(last=False)

    def forget(self, place: str, keys: Iterable[bytes]) -> None:
        """The store lacks them there."""
        confirmed = self._places.get(place)
        if confirmed:
            for key in keys:
                confirmed.pop(key, None)

    def forget_everywhere(self, keys: Iterable[bytes]) -> None:
        gone = tuple(keys)
        for place in self._places:
            self.forget(place, gone)
