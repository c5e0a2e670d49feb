"""How a process adds to the local store: to one segment of the hot shelf, its own for as long as it lives."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Sequence
from typing import Final

from epd.cache.l3.base import Buffer, NodeTimedOut
from epd.cache.l3.catalogue import Catalogue
from epd.cache.l3.mover import Mover
from epd.cache.l3.segment import HEAD_BYTES, Entry, Segment, entry_bytes
from epd.cache.l3.shelf import StoreLock

__all__ = ["LOCK_WAIT_S", "Writer"]

LOCK_WAIT_S: Final = 1.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _NoRoom(Exception):
    """All segments of the hot shelf are being written by others, or the value is larger than a segment."""


class Writer:
    """Adding needs the store's lock only to begin another segment. What cannot be added is counted as `unkept`."""

    def __init__(
        self, catalogue: Catalogue, mover: Mover, lock: StoreLock, counters: Counter[str], segment_bytes: int
    ) -> None:
        self.active: Segment | None = None
        self.why_unkept = ""
        self._catalogue = catalogue
        self._mover = mover
        self._lock = lock
        self._counters = counters
        self._segment_bytes = segment_bytes

    def let_go_if_gone(self) -> None:
        """Somebody may have cleared the store."""
        if self.active is not None and self.active.path.name not in self._catalogue.hot.segments:
            self.active.close()
            self.active = None

    def is_room_needed(self) -> bool:
        """Whether there is no room for another segment, and soon need for one. Raises OSError."""
        hot = self._catalogue.hot
        is_half_full = self.active is not None and self.active.tail > self._segment_bytes // 2
        return is_half_full and hot.measure() + self._segment_bytes > hot.max_bytes

    def add(
        self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, is_locked: bool = False, stamp: int | None = None
    ) -> list[int]:
        """Indices of the items that are on the hot shelf now, with the given stamp or new ones. Raises OSError."""
        sizes = [entry_bytes(key, sum(memoryview(piece).nbytes for piece in pieces)) for key, pieces in items]
        kept: list[int] = []
        start = 0
        while start < len(items):
            room_bytes = 0 if self.active is None else self._segment_bytes - self.active.tail
            stop = start
            while stop < len(items) and sizes[stop] <= room_bytes:
                room_bytes -= sizes[stop]
                stop += 1
            try:
                if stop == start:
                    self._begin_segment(sizes[start], is_locked=is_locked)
                    continue
                assert self.active is not None
                batch = [
                    (key, pieces, self._catalogue.next_stamp() if stamp is None else stamp)
                    for key, pieces in items[start:stop]
                ]
                entries = self._append(batch, is_locked=is_locked)
            except (_NoRoom, NodeTimedOut) as error:
                self.why_unkept = str(error)
                self._counters["unkept"] += 1
                start += 1
                continue
            for (key, _, _), entry in zip(batch, entries, strict=True):
                self._catalogue.add(key, entry)
            kept.extend(range(start, stop))
            start = stop
        return kept

    def _append(self, batch: list[tuple[bytes, Sequence[Buffer], int]], *, is_locked: bool) -> list[Entry]:
        """Try again once with less on the hot shelf, when the memory does not hold what it should. Raises _NoRoom."""
        for is_last in (False, True):
            try:
                assert self.active is not None
                return self.active.append(batch)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._counters["full"] += 1
                if is_last:
                    break
                with contextlib.nullcontext() if is_locked else self._lock.hold(LOCK_WAIT_S):
                    self._catalogue.refresh()
                    if not self._mover.make_room(self.active):
                        break
        raise _NoRoom(f"{self._catalogue.hot.root} is full")

    def _begin_segment(self, need_bytes: int, *, is_locked: bool) -> None:
        """Raises _NoRoom, NodeTimedOut, OSError."""
        if need_bytes > self._segment_bytes - HEAD_BYTES:
            raise _NoRoom(
                f"a value of {need_bytes:,} bytes is larger than a segment, {self._segment_bytes:,}: more of "
                "engine.kv_store_memory_bytes gives larger ones, less of engine.kv_store_io_bytes smaller values"
            )
        with contextlib.nullcontext() if is_locked else self._lock.hold(LOCK_WAIT_S):
            hot = self._catalogue.hot
            if self.active is not None:
                self.active.seal()
                self.active.unlock()
                self.active = None
            self._catalogue.refresh()
            if self._adopt(need_bytes):
                return
            hot.sweep()
            while hot.measure() + self._segment_bytes > hot.max_bytes:
                if not self._mover.make_room(None):
                    raise _NoRoom("all its segments are being written by other processes")
            try:
                segment = hot.make(self._segment_bytes)
            except OSError as error:
                if error.errno in _FULL:
                    raise _NoRoom(f"{hot.root} is full: {error.strerror}") from error
                raise
            hot.show(segment)
            self.active = segment

    def _adopt(self, need_bytes: int) -> bool:
        """Go on with a segment whose writer has ended."""
        for segment in self._catalogue.hot.by_age():
            if self._segment_bytes - segment.tail < need_bytes or segment.size_bytes < self._segment_bytes:
                continue
            if not self._mover.is_moving(segment) and segment.lock():
                self._catalogue.scan(segment)
                if segment.is_linked and self._segment_bytes - segment.tail >= need_bytes:
                    self._catalogue.own(segment)
                    self.active = segment
                    return True
                segment.unlock()
        return False
