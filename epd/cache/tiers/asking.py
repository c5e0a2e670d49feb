"""Asking the store what it has: the answers go into a fetch, and into what the store is believed to hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from epd.cache.tiers.belief import Belief
from epd.cache.tiers.fetch import Fetch
from epd.cache.tiers.inbox import Inbox
from epd.cache.tiers.ports import PageKind, PageStore, both_keys, store_key

__all__ = ["Asker"]


class Asker:
    """Owned by the engine thread; one question of a fetch at a time."""

    def __init__(self, store: PageStore, belief: Belief, inbox: Inbox, *, clock: Callable[[], float]) -> None:
        self._store = store
        self._belief = belief
        self._inbox = inbox
        self._clock = clock
        self.counters: Counter[str] = Counter()

    def ask(self, fetch: Fetch, kind: PageKind, pages: list[int]) -> None:
        """Whether the store has these pages; `fetch.is_asking` until it has answered."""
        keys = [store_key(kind, fetch.keys[page]) for page in pages]
        place, deadline_s = self._store.place(fetch.group), fetch.deadline_s
        fetch.is_asking = True
        self.counters["asks"] += 1
        self.counters["asked_keys"] += len(keys)

        def answered(there: tuple[bool, ...]) -> None:
            fetch.is_asking = False
            fetch.learn(kind, pages, there)
            self._believe(place, deadline_s, fetch, kind, keys, there)

        self._store.exists(
            fetch.group, keys, deadline_s=deadline_s, on_done=lambda there: self._inbox.post(partial(answered, there))
        )

    def _believe(
        self, place: str, deadline_s: float, fetch: Fetch, kind: PageKind, keys: list[bytes], there: tuple[bool, ...]
    ) -> None:
        now_s = self._clock()
        # After that time a no may be no more than the lack of an answer.
        if now_s < deadline_s:
            lacks = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            if lacks and kind == "full":
                # Nobody will ask for what is beyond, so it is not known to be there either.
                lacks += both_keys(fetch.keys[fetch.reach_limit :])
            self._belief.forget(place, lacks)
        self._belief.confirm(place, [key for key, is_there in zip(keys, there, strict=True) if is_there], now_s)
