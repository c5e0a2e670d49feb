"""A KV store's node in memory that does as it is told: refuse, be late, hang until it is let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from epd.cache.l3.base import Buffer, NodeFailed, NodeTimedOut, NodeUsage, Sink

__all__ = ["ScriptedNode"]


class ScriptedNode:
    """See epd.cache.l3.base.StoreNode. `calls` lists what was asked, the sizes with it."""

    def __init__(self, name: str = "scripted") -> None:
        self.name = name
        self.values: dict[bytes, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.trouble: str | None = None
        self.free = threading.Event()
        self.free.set()
        self.is_hanging = threading.Event()
        self.is_closed = False
        self.keeps = True

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        for index in reversed(range(len(keys))):
            if index == len(keys) // 2:
                self._begin("get", len(keys), timeout_s)
            value = self.values.get(keys[index])
            if value is not None:
                sink(index, memoryview(value))
                # Twice is once too often, and changes nothing.
                sink(index, memoryview(b"other"))

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> Sequence[bool]:
        self._begin("put", len(items), timeout_s)
        if self.keeps:
            self.values.update({key: b"".join(pieces) for key, pieces in items})
        return [self.keeps] * len(items)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> Sequence[bool]:
        self._begin("exists", len(keys), timeout_s)
        return [key in self.values for key in keys]

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self._begin("touch", len(keys), timeout_s)

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self._begin("discard", len(keys), timeout_s)
        for key in keys:
            self.values.pop(key, None)

    def usage(self) -> NodeUsage:
        return NodeUsage(num_records=len(self.values))

    def close(self) -> None:
        self.is_closed = True

    def hang(self) -> None:
        """The next call, in its middle, until `free` is set."""
        self.is_hanging.clear()
        self.free.clear()

    def _begin(self, what: str, num_keys: int, timeout_s: float) -> None:
        self.calls.append((what, num_keys))
        if not self.free.is_set():
            self.is_hanging.set()
            assert self.free.wait(30)
        if self.trouble == "refuse":
            raise NodeFailed("connection refused")
        if self.trouble == "late":
            time.sleep(timeout_s)
            raise NodeTimedOut("no answer")
        if self.trouble == "bug":
            raise ZeroDivisionError("not foreseen")
