"""What a caller asked of the store, on its way through a node's thread. Each job ends exactly once, whoever ends it.

A job ends when its work is done, when its deadline passes, when it is cancelled or when the store closes; its lock
makes the ending and the last touch of the caller's buffers exclude each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from epd.cache.l3.base import Buffer
from epd.cache.l3.record import RecordDamaged, flat, measure, num_slices, open_slice, pack, scatter, slice_key

__all__ = ["DiscardJob", "ExistsJob", "GetJob", "Job", "OnDone", "OnKey", "PutJob", "Slice", "TouchJob"]

OnKey = Callable[[int, bool], None]
OnDone = Callable[[tuple[bool, ...]], None]


class Job:
    """The answers, one for each key, and how they are given."""

    kind: str = ""

    def __init__(self, num_keys: int, on_done: OnDone | None, deadline_s: float) -> None:
        self.lock = threading.RLock()
        self.deadline_s = deadline_s
        self.num_keys = num_keys
        self.has_ended = False
        self._answers: list[bool | None] = [None] * num_keys
        self._on_done = on_done

    @property
    def num_unanswered(self) -> int:
        return self._answers.count(None)

    def is_answered(self, index: int) -> bool:
        return self._answers[index] is not None

    def end(self) -> bool:
        """Give the answers there are, no for the others, unless that has been done. True when it was done here."""
        with self.lock:
            if self.has_ended:
                return False
            self.has_ended = True
            answers = tuple(answer is True for answer in self._answers)
            on_done, self._on_done = self._on_done, None
            self._release()
        if on_done is not None:
            on_done(answers)
        return True

    def _release(self) -> None:
        """Let go of the caller's buffers."""


class Slice:
    """One slice of one item that is still to come."""

    __slots__ = ("count", "index", "item", "key", "size_bytes")

    def __init__(self, item: int, key: bytes, index: int, count: int, size_bytes: int) -> None:
        self.item = item
        self.key = key
        self.index = index
        self.count = count
        self.size_bytes = size_bytes


class GetJob(Job):
    """Values to be written to the caller's buffers."""

    kind = "get"

    def __init__(
        self,
        items: Sequence[tuple[bytes, Sequence[memoryview]]],
        on_key: OnKey | None,
        on_done: OnDone,
        deadline_s: float,
    ) -> None:
        super().__init__(len(items), on_done, deadline_s)
        self._items = items
        self._on_key = on_key
        self._next_item = 0
        self._targets: dict[int, list[memoryview]] = {}
        self._sums: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._waiting: list[Slice] = []

    def next_slices(self, io_bytes: int, is_condemned: Callable[[bytes], bool]) -> list[Slice]:
        """What to ask for in one call: `io_bytes` at most, one slice at least; empty when all was asked for."""
        found: list[Slice] = []
        size_bytes = 0
        with self.lock:
            while not self.has_ended:
                while self._waiting and (not found or size_bytes + self._waiting[-1].size_bytes <= io_bytes):
                    piece = self._waiting.pop()
                    if not self.is_answered(piece.item):
                        found.append(piece)
                        size_bytes += piece.size_bytes
                if self._waiting or self._next_item == self.num_keys:
                    break
                self._expand(io_bytes, is_condemned)
        return found

    def _expand(self, io_bytes: int, is_condemned: Callable[[bytes], bool]) -> None:
        item = self._next_item
        self._next_item += 1
        key, buffers = self._items[item]
        if is_condemned(key):
            self._answer(item, False)
            return
        targets = [flat(buffer) for buffer in buffers]
        value_bytes = sum(target.nbytes for target in targets)
        count = num_slices(value_bytes, io_bytes)
        self._targets[item], self._missing[item] = targets, count
        for index in reversed(range(count)):
            size_bytes = min(io_bytes, value_bytes - index * io_bytes)
            self._waiting.append(Slice(item, slice_key(key, index), index, count, size_bytes))

    def land(self, piece: Slice, record: memoryview | None, io_bytes: int) -> bool:
        """Take what a node gave for a slice. False when it is damaged."""
        with self.lock:
            if self.has_ended or self.is_answered(piece.item):
                return True
            if record is None:
                self._answer(piece.item, False)
                return True
            try:
                self._take(piece, record, io_bytes)
            except RecordDamaged:
                self._answer(piece.item, False)
                return False
            return True

    def _take(self, piece: Slice, record: memoryview, io_bytes: int) -> None:
        targets = self._targets[piece.item]
        value_bytes = sum(target.nbytes for target in targets)
        key = self._items[piece.item][0]
        digest, payload = open_slice(record, key, piece.index, piece.count, value_bytes)
        if payload.nbytes != piece.size_bytes:
            raise RecordDamaged(f"a slice has {payload.nbytes} bytes instead of {piece.size_bytes}")
        if self._sums.setdefault(piece.item, digest) != digest:
            raise RecordDamaged("its slices are of two puts")
        scatter(payload, targets, piece.index * io_bytes)
        self._missing[piece.item] -= 1
        if self._missing[piece.item] == 0:
            # Of the bytes where they are now: what the caller is told of is what he has.
            if measure(targets) != digest:
                raise RecordDamaged("its bytes have another checksum")
            self._answer(piece.item, True)

    def size_bytes(self, item: int) -> int:
        """Of the value of a landed item, before the job ends."""
        return sum(target.nbytes for target in self._targets.get(item, ()))

    def _answer(self, item: int, is_there: bool) -> None:
        self._answers[item] = is_there
        if self._on_key is not None:
            self._on_key(item, is_there)

    def _release(self) -> None:
        self._items, self._targets, self._waiting, self._on_key = (), {}, [], None


class PutJob(Job):
    """Values to be read from the caller's buffers."""

    kind = "put"

    def __init__(
        self,
        items: Sequence[tuple[bytes, Sequence[Buffer]]],
        on_done: OnDone | None,
        deadline_s: float,
    ) -> None:
        super().__init__(len(items), on_done, deadline_s)
        self._items = items
        self.size_bytes = sum(memoryview(piece).nbytes for _, pieces in items for piece in pieces)
        self._next_item = 0
        self._unkept: set[int] = set()
        self._left: dict[int, int] = {}
        self._waiting: list[tuple[int, bytes, list[Buffer]]] = []

    def drop(self, keys: frozenset[bytes]) -> None:
        """Write none of these that is not yet written."""
        with self.lock:
            for item, (key, _) in enumerate(self._items):
                if key in keys and self._answers[item] is None:
                    self._unkept.add(item)

    def next_slices(self, io_bytes: int) -> list[tuple[int, bytes, list[Buffer]]]:
        """Item, node key and pieces of what to write in one call; empty when all is written."""
        found: list[tuple[int, bytes, list[Buffer]]] = []
        size_bytes = 0
        with self.lock:
            while not self.has_ended and size_bytes < io_bytes:
                while self._waiting and size_bytes < io_bytes:
                    entry = self._waiting.pop()
                    if entry[0] in self._unkept:
                        self._answers[entry[0]] = False
                        continue
                    found.append(entry)
                    size_bytes += sum(memoryview(piece).nbytes for piece in entry[2])
                if self._waiting or self._next_item == self.num_keys:
                    break
                item = self._next_item
                self._next_item += 1
                key, pieces = self._items[item]
                slices = pack(key, [flat(piece) for piece in pieces], io_bytes)
                self._left[item] = len(slices)
                self._waiting.extend((item, *entry) for entry in reversed(slices))
        return found

    def written(self, item: int, is_kept: bool) -> bytes | None:
        """A slice of it was; the key when the whole value is kept now."""
        with self.lock:
            self._left[item] -= 1
            if not is_kept:
                # Its other slices need not be written, and slice 0 must not.
                self._unkept.add(item)
            if item in self._unkept:
                self._answers[item] = False
            elif self._left[item] == 0:
                self._answers[item] = True
                return None if self.has_ended else self._items[item][0]
            return None

    def _release(self) -> None:
        self._items, self._waiting = (), []


class ExistsJob(Job):
    """Whether values are there, all slices of them."""

    kind = "exists"

    def __init__(self, keys: Sequence[bytes], on_done: OnDone, deadline_s: float) -> None:
        super().__init__(len(keys), on_done, deadline_s)
        self.keys = keys

    def answer(self, answers: Sequence[bool]) -> None:
        with self.lock:
            if not self.has_ended:
                self._answers = list(answers)


class TouchJob(Job):
    kind = "touch"

    def __init__(self, keys: Sequence[bytes], deadline_s: float) -> None:
        super().__init__(len(keys), None, deadline_s)
        self.keys = keys


class DiscardJob(Job):
    kind = "discard"

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(len(keys), None, FOREVER_S)
        self.keys = keys


FOREVER_S: Final = float("inf")
