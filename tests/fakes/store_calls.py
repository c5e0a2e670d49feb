"""Calls of a KV store's client, waited for. Each must be answered exactly once; `check` says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from epd.cache.l3.client import StoreClient

__all__ = ["Answer", "StoreCalls"]

_PATIENCE_S = 20.0


class Answer:
    """What comes back from one call, on whatever thread."""

    def __init__(self) -> None:
        self.by_key: list[tuple[int, bool]] = []
        self.at_s: float | None = None
        self.answers: list[tuple[bool, ...]] = []
        self._is_done = threading.Event()
        self.late_keys = 0

    def on_key(self, index: int, is_there: bool) -> None:
        self.late_keys += bool(self.answers)
        self.by_key.append((index, is_there))

    def on_done(self, answers: tuple[bool, ...]) -> None:
        self.at_s = time.monotonic()
        self.answers.append(answers)
        self._is_done.set()

    def wait(self, timeout_s: float = _PATIENCE_S) -> tuple[bool, ...]:
        assert self._is_done.wait(timeout_s), "a call was not answered"
        return self.answers[0]


class StoreCalls:
    """A client's, one after the other."""

    def __init__(self, client: StoreClient, *, group: str = "group") -> None:
        self.client = client
        self.group = group
        self.all: list[Answer] = []

    def begin(self) -> Answer:
        self.all.append(Answer())
        return self.all[-1]

    def put(self, values: dict[bytes, bytes]) -> tuple[bool, ...]:
        answer = self.begin()
        self.client.put(self.group, [(key, [value]) for key, value in values.items()], answer.on_done)
        return answer.wait()

    def get(self, sizes: dict[bytes, int], deadline_s: float = _PATIENCE_S) -> dict[bytes, bytes | None]:
        answer = self.begin()
        buffers = [bytearray(size) for size in sizes.values()]
        items = [(key, [memoryview(buffer)]) for key, buffer in zip(sizes, buffers, strict=True)]
        by_s = time.monotonic() + deadline_s
        self.client.get(self.group, items, deadline_s=by_s, on_key=answer.on_key, on_done=answer.on_done)
        found = answer.wait()
        if all(found):
            assert sorted(answer.by_key) == [(index, True) for index in range(len(found))]
        return {key: bytes(buffer) if there else None for key, buffer, there in zip(sizes, buffers, found, strict=True)}

    def exists(self, keys: Sequence[bytes], deadline_s: float = _PATIENCE_S) -> list[bool]:
        answer = self.begin()
        by_s = time.monotonic() + deadline_s
        self.client.exists(self.group, keys, deadline_s=by_s, on_done=answer.on_done)
        return list(answer.wait())

    def settle(self) -> None:
        """What was asked without an answer (touch, discard) is done."""
        self.put({b"settled": b"x"})

    def check(self) -> None:
        for answer in self.all:
            assert len(answer.answers) == 1, f"a call was answered {len(answer.answers)} times"
            assert not answer.late_keys
            assert len({index for index, _ in answer.by_key}) == len(answer.by_key)
        assert self.client.num_under_way == 0
        self.client.check()
