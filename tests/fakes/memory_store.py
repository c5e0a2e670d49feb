"""A store of pages in memory whose answers come when the test says, in the order it says, and as badly as it says.

`MemoryStore` is a real one: it keeps what was put and copies it into the buffers of a get. What a test adds are faults.
A call waits in `waiting` until `run` or `expire` acts on it; with `at_once` it is acted on within the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from epd.cache.l3.base import Buffer, StoreStats
from epd.cache.tiers.ports import Cancel, OnKey, OnKeys

__all__ = ["MemoryStore", "StoreCall"]


@dataclass(eq=False)
class StoreCall:
    """One call under way. `steps` are what is left to do, one key each; `finish` calls `on_done`."""

    kind: str
    group: str
    keys: tuple[bytes, ...]
    deadline_s: float
    on_done: OnKeys
    steps: list[Callable[[], None]] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    views: tuple[memoryview, ...] = ()
    is_over: bool = False
    is_cancelled: bool = False


class MemoryStore:
    """Values by place and key. A group's place is its name, or one for all of them."""

    def __init__(self, *, at_once: bool = False, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.at_once = at_once
        self.values: dict[bytes, bytes] = {}
        # Exists says that these are there.
        self.phantoms: set[bytes] = set()
        # A get of these writes rubbish into the buffer and calls it a miss, as a wrong checksum does.
        self.corrupt: set[bytes] = set()
        # Puts of anything are refused.
        self.is_full = False
        self.places: dict[str, str] = {}
        self.waiting: list[StoreCall] = []
        self.counters: Counter[str] = Counter()
        self.history: list[tuple[str, tuple[bytes, ...]]] = []
        self.is_closed = False
        self._clock = clock

    def get(
        self,
        group: str,
        items: Sequence[tuple[bytes, Sequence[memoryview]]],
        *,
        deadline_s: float,
        on_key: OnKey | None,
        on_done: OnKeys,
    ) -> Cancel:
        call = self._call("get", group, [key for key, _ in items], deadline_s, on_done)
        call.views = tuple(view for _, views in items for view in views)
        for index, (key, views) in enumerate(items):
            call.steps.append(partial(self._get_one, call, index, key, tuple(views), on_key))
        self._begin(call)
        return partial(self._cancel, call)

    def put(self, group: str, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, on_done: OnKeys) -> None:
        call = self._call("put", group, [key for key, _ in items], float("inf"), on_done)
        for index, (key, pieces) in enumerate(items):
            call.steps.append(partial(self._put_one, call, index, key, tuple(pieces)))
        self._begin(call)

    def exists(self, group: str, keys: Sequence[bytes], *, deadline_s: float, on_done: OnKeys) -> None:
        call = self._call("exists", group, keys, deadline_s, on_done)
        for index, key in enumerate(keys):
            call.steps.append(partial(self._exists_one, call, index, key))
        self._begin(call)

    def touch(self, group: str, keys: Sequence[bytes]) -> None:
        self.counters["touched_keys"] += len(keys)
        self.history.append(("touch", tuple(keys)))

    def discard(self, group: str, keys: Sequence[bytes]) -> None:
        self.history.append(("discard", tuple(keys)))
        for key in keys:
            self.values.pop(key, None)

    def place(self, group: str) -> str:
        return self.places.get(group, "memory")

    def stats(self) -> StoreStats:
        return StoreStats(
            hits=self.counters["hits"],
            misses=self.counters["misses"],
            puts=self.counters["puts"],
            unkept=self.counters["unkept"],
            dropped=0,
            corrupt=self.counters["corrupt"],
            timeouts=self.counters["timeouts"],
            failures=0,
            get_bytes=0,
            put_bytes=0,
            seconds={},
            nodes=(),
        )

    def close(self, flush_s: float) -> None:
        self.is_closed = True
        for call in tuple(self.waiting):
            self.finish(call)

    def run(self, call: StoreCall, num_keys: int | None = None, *, index: int = 0) -> None:
        """Do so many of a call's keys, from the `index`-th of those left; when none is left, it is over."""
        for _ in range(len(call.steps) if num_keys is None else num_keys):
            if not call.steps or call.is_over:
                break
            call.steps.pop(index % len(call.steps))()
        if not call.steps:
            self.finish(call)

    def run_all(self) -> None:
        """Everything that waits, and what begins meanwhile."""
        while self.waiting:
            self.run(self.waiting[0])

    def finish(self, call: StoreCall) -> None:
        """It is over, whatever was left to do. Once only, as a client promises."""
        if call.is_over:
            return
        call.is_over = True
        self.waiting.remove(call)
        call.views = ()
        call.on_done(tuple(call.answers))

    def expire(self) -> None:
        """What a client does at deadlines: calls whose time has come are over."""
        for call in tuple(self.waiting):
            if call.deadline_s <= self._clock():
                self.counters["timeouts"] += 1
                self.finish(call)

    def scribble(self) -> None:
        """Write rubbish over all buffers that calls may still write to and have not said to be whole."""
        for call in self.waiting:
            for index, view in enumerate(call.views):
                if not call.answers[index]:
                    view[:] = b"\xee" * len(view)

    def _call(self, kind: str, group: str, keys: Sequence[bytes], deadline_s: float, on_done: OnKeys) -> StoreCall:
        self.history.append((kind, tuple(keys)))
        self.counters[f"{kind}_calls"] += 1
        self.counters[f"{kind}_keys"] += len(keys)
        return StoreCall(kind, group, tuple(keys), deadline_s, on_done, answers=[False] * len(keys))

    def _begin(self, call: StoreCall) -> None:
        self.waiting.append(call)
        if self.is_closed:
            self.finish(call)
        elif self.at_once:
            self.run(call)

    def _cancel(self, call: StoreCall) -> None:
        """The store stops when it next looks: the call ends by `finish`, `run` or `expire`."""
        call.is_cancelled = True
        call.steps.clear()

    def _get_one(
        self, call: StoreCall, index: int, key: bytes, views: tuple[memoryview, ...], on_key: OnKey | None
    ) -> None:
        value = self.values.get(key)
        found = value is not None and len(value) == sum(len(view) for view in views) and key not in self.corrupt
        if found:
            assert value is not None
            start = 0
            for view in views:
                view[:] = value[start : start + len(view)]
                start += len(view)
        elif key in self.corrupt:
            self.counters["corrupt"] += 1
            for view in views:
                view[:] = b"\xdd" * len(view)
        self.counters["hits" if found else "misses"] += 1
        call.answers[index] = found
        if on_key is not None:
            on_key(index, found)

    def _put_one(self, call: StoreCall, index: int, key: bytes, pieces: tuple[Buffer, ...]) -> None:
        if not self.is_full:
            self.values[key] = b"".join(bytes(piece) for piece in pieces)
        self.counters["unkept" if self.is_full else "puts"] += 1
        call.answers[index] = not self.is_full

    def _exists_one(self, call: StoreCall, index: int, key: bytes) -> None:
        call.answers[index] = key in self.values or key in self.phantoms
