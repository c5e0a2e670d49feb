"""The store on this host: records in files, the recent ones in shared memory, the others on disk; no server.

Any number of processes share it, each reading all files and adding to one of its own. What was put stays when
processes end or are killed, wherever that happens; what is in memory stays until the host restarts. Why nothing half
written is ever seen says `epd.cache.l3.segment`, and what goes where and when `epd.cache.l3.mover`.

A value that cannot be kept, there being no room or no right to write, is not kept, and that is counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from epd.cache.l3.base import Buffer, NodeFailed, NodeTimedOut, NodeUsage, Sink
from epd.cache.l3.catalogue import Catalogue
from epd.cache.l3.deaths import Deaths
from epd.cache.l3.mover import Mover
from epd.cache.l3.segment import Entry, Scratch, entry_bytes, value_at
from epd.cache.l3.shelf import Shelf, StoreLock
from epd.cache.l3.writer import LOCK_WAIT_S, Writer

__all__ = ["LocalNode"]

logger = logging.getLogger(__name__)

_LOCK: Final = "lock"
_DEATHS: Final = "deaths"
_SEGMENTS: Final = 16
_COLD_SEGMENTS: Final = 512
_FEWEST_SEGMENTS: Final = 4
_LEAST_SEGMENT_BYTES: Final = 1 << 16
# What a segment holds beside a value: names, and what vouches for it.
_RECORD_ROOM_BYTES: Final = 4096
_PROMOTE_BYTES: Final = 1 << 20
_MAX_PROMOTIONS: Final = 4096
_MAX_USES: Final = 1 << 16
# A cold record that is read so often has its place among the hot ones.
_HOT_USES: Final = 2
_RUN_BYTES: Final = 1 << 20
_FRESH_S: Final = 0.01
_LEAVE_S: Final = 10.0


class LocalNode:
    """This process's part in a store; a `StoreNode` that is `Tended`."""

    def __init__(
        self,
        hot_root: Path,
        cold_root: Path | None,
        *,
        memory_bytes: int,
        disk_bytes: int,
        segment_bytes: int | None = None,
        largest_bytes: int = 0,
    ) -> None:
        """Makes the directories, and learns what is there. Without `cold_root` there is no cold shelf.

        `memory_bytes` and `disk_bytes` bound the files in them; `segment_bytes`, the largest value and what is moved
        and evicted at once, follows from these unless given; it has room for `largest_bytes` in one value. Raises
        NodeFailed for a directory that cannot be used, and for too little memory.
        """
        if memory_bytes < _FEWEST_SEGMENTS * _LEAST_SEGMENT_BYTES:
            raise NodeFailed(
                f"a local KV store of {memory_bytes} bytes of memory; allowed: "
                f"{_FEWEST_SEGMENTS * _LEAST_SEGMENT_BYTES} and more"
            )
        need_bytes = largest_bytes + _RECORD_ROOM_BYTES if largest_bytes else 0
        if need_bytes * _FEWEST_SEGMENTS > memory_bytes:
            raise NodeFailed(
                f"a local KV store of {memory_bytes:,} bytes of memory keeps no value of {largest_bytes:,} bytes; "
                f"allowed: engine.kv_store_memory_bytes of {need_bytes * _FEWEST_SEGMENTS:,} and more, or less of "
                "engine.kv_store_io_bytes"
            )
        self._hot_root, self._cold_root = hot_root, cold_root if disk_bytes else None
        self._memory_bytes, self._disk_bytes = memory_bytes, disk_bytes
        if segment_bytes is None:
            wanted_bytes = max(
                memory_bytes // _SEGMENTS, disk_bytes // _COLD_SEGMENTS, _LEAST_SEGMENT_BYTES, need_bytes
            )
            segment_bytes = min(wanted_bytes, memory_bytes // _FEWEST_SEGMENTS)
        self._segment_bytes = segment_bytes
        self._counters: Counter[str] = Counter()
        self._scratch = Scratch()
        self._run_scratch = Scratch()
        self._uses: dict[bytes, int] = {}
        self._promotions: OrderedDict[bytes, None] = OrderedDict()
        self._tends_from_s = 0.0
        self._learned_s = 0.0
        with self._explained("open"):
            self._open()

    @property
    def name(self) -> str:
        return f"local:{self._hot_root if self._cold_root is None else self._cold_root}"

    @property
    def why_unkept(self) -> str:
        return self._writer.why_unkept

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        """`timeout_s` is not looked at: no server is asked, and the disk cannot be hurried."""
        # What is read says itself whether it is alive: only what is missing may have to be learned of.
        if time.monotonic() - self._learned_s > _FRESH_S:
            self._learn()
        missing: list[int] = []

        def first_sink(index: int, value: memoryview | None) -> None:
            if value is None:
                missing.append(index)
            else:
                sink(index, value)

        start = 0
        while start < len(keys):
            start = self._read_run(keys, start, first_sink)
        if missing:
            self._learn()
        for index in missing:
            sink(index, self._read(keys[index]))

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> list[bool]:
        self._learn()
        kept = [False] * len(items)
        fresh: list[int] = []
        for index, (key, pieces) in enumerate(items):
            if self._catalogue.places(key):
                kept[index] = self._put_again(key, pieces)
            else:
                fresh.append(index)
        with self._explained("write to"):
            for index in self._writer.add([items[index] for index in fresh]):
                kept[fresh[index]] = True
        return kept

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        self._learn()
        return [bool(self._catalogue.places(key)) for key in keys]

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self._learn()
        for key in keys:
            places = self._catalogue.places(key)
            if places:
                self._used(key, places[0])

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        with self._explained("discard from"), self._lock.hold(max(timeout_s, LOCK_WAIT_S)):
            # Looked at under the lock: what others promoted or demoted until now dies, too.
            self._catalogue.refresh()
            self._kill_shadows()
            doomed = [(key, entry) for key in keys for entry in self._catalogue.places(key)]
            self._kill([entry for _, entry in doomed])
            for key, entry in doomed:
                self._catalogue.forget(key, entry)

    def usage(self) -> NodeUsage:
        hot, cold = self._catalogue.hot, self._catalogue.cold
        return NodeUsage(
            num_records=len(self._catalogue),
            used_bytes=hot.used_bytes + (cold.used_bytes if cold else 0),
            capacity_bytes=hot.max_bytes + (cold.max_bytes if cold else 0),
            counters=dict(self._counters)
            | {
                "memory_bytes": hot.used_bytes,
                "disk_bytes": cold.used_bytes if cold else 0,
                "damaged_files": hot.num_damaged + (cold.num_damaged if cold else 0),
            },
        )

    def tend(self) -> bool:
        """Makes room before it is needed, promotes what was used, and takes note of what others did."""
        self._learn()
        with self._explained("tend"):
            try:
                return self._tend()
            except NodeTimedOut:
                # Another process is at it.
                return False

    def close(self) -> None:
        """Another process may go on with this one's segment."""
        with contextlib.suppress(OSError):
            self._mover.abandon()
        self._catalogue.close()
        self._lock.close()
        self._deaths.close()

    def _open(self) -> None:
        hot = Shelf(self._hot_root, max_bytes=self._memory_bytes, is_hot=True)
        cold = None if self._cold_root is None else Shelf(self._cold_root, max_bytes=self._disk_bytes, is_hot=False)
        self._lock = StoreLock(self._hot_root / _LOCK)
        self._deaths = Deaths(self._hot_root / _DEATHS)
        self._catalogue = Catalogue(hot, cold, self._deaths)
        self._mover = Mover(self._catalogue, self._counters)
        self._writer = Writer(self._catalogue, self._mover, self._lock, self._counters, self._segment_bytes)
        with contextlib.suppress(NodeTimedOut), self._lock.hold(LOCK_WAIT_S):
            hot.sweep()
            if cold is not None:
                cold.sweep()
        self._catalogue.refresh()

    def _learn(self) -> None:
        """Take notice of what others did. Raises NodeFailed."""
        self._learned_s = time.monotonic()
        with self._explained("read"):
            try:
                self._catalogue.refresh()
            except FileNotFoundError:
                logger.warning("the local KV store in %s was removed and begins anew", self._hot_root)
                self.close()
                self._open()
        self._writer.let_go_if_gone()

    def _read_run(self, keys: Sequence[bytes], start: int, sink: Sink) -> int:
        """Give the values from this key on that lie side by side, read at once; the key after them.

        What was put together is read together, in a few long calls: between short ones other threads would take over,
        each time for some milliseconds.
        """
        places = self._catalogue.places(keys[start])
        if not places:
            sink(start, None)
            return start + 1
        first = places[0]
        run = [first]
        end = first.offset + entry_bytes(keys[start], first.value_bytes)
        while start + len(run) < len(keys) and end - first.offset < _RUN_BYTES:
            key = keys[start + len(run)]
            places = self._catalogue.places(key)
            if not places or places[0].segment is not first.segment or places[0].offset != end:
                break
            run.append(places[0])
            end += entry_bytes(key, places[0].value_bytes)
        loaded = memoryview(b"")
        # A cold segment may have been evicted a moment ago, or its disk be at fault.
        with contextlib.suppress(OSError):
            self._catalogue.opened(first.segment)
            loaded = first.segment.load(first.offset, end - first.offset, self._run_scratch)
        for index, entry in enumerate(run, start):
            value = value_at(loaded, entry.offset - first.offset, keys[index], entry)
            if value is None:
                value = self._read(keys[index])
            else:
                self._was_read(keys[index], entry)
            sink(index, value)
        return start + len(run)

    def _read(self, key: bytes) -> memoryview | None:
        for entry in self._catalogue.places(key):
            value = None
            # A cold segment may have been evicted a moment ago, or its disk be at fault.
            with contextlib.suppress(OSError):
                self._catalogue.opened(entry.segment)
                value = entry.segment.read(key, entry, self._scratch)
            if value is not None:
                self._was_read(key, entry)
                return value
            self._catalogue.forget(key, entry)
        return None

    def _was_read(self, key: bytes, entry: Entry) -> None:
        self._counters["hot_reads" if entry.segment.is_hot else "cold_reads"] += 1
        self._used(key, entry)

    def _used(self, key: bytes, entry: Entry) -> None:
        """Promote it in time, if it has earned that."""
        shelf = self._catalogue.hot if entry.segment.is_hot else self._catalogue.cold
        assert shelf is not None
        is_old = entry.segment.created_ns < shelf.old_before_ns
        if entry.segment.is_hot:
            is_due = is_old and self._catalogue.cold is None
        else:
            uses = self._uses[key] = self._uses.get(key, 0) + 1
            is_due = is_old or uses >= _HOT_USES
            if len(self._uses) > _MAX_USES:
                self._uses.clear()
        if is_due and len(self._promotions) < _MAX_PROMOTIONS:
            self._promotions[key] = None

    def _put_again(self, key: bytes, pieces: Sequence[Buffer]) -> bool:
        """In place of a value that is there: the same one stays, another one dies. Raises NodeFailed."""
        content = b"".join(pieces)
        value = self._read(key)
        if value is not None and bytes(value) == content:
            return True
        try:
            with self._explained("write to"), self._lock.hold(LOCK_WAIT_S):
                self._catalogue.refresh()
                kept = bool(self._writer.add([(key, [content])], is_locked=True))
                if kept:
                    self._kill_shadows()
                return kept
        except NodeTimedOut as error:
            self._counters["unkept"] += 1
            self._writer.why_unkept = str(error)
            return False

    def _tend(self) -> bool:
        if self._catalogue.shadows:
            with self._lock.hold(0):
                self._catalogue.refresh()
                self._kill_shadows()
        if self._mover.is_moving():
            return self._go_on_moving()
        if self._promotions:
            with self._lock.hold(0):
                self._catalogue.refresh()
                self._promote()
            return bool(self._promotions)
        if time.monotonic() < self._tends_from_s or not self._writer.is_room_needed():
            return False
        try:
            with self._lock.hold(0):
                self._catalogue.refresh()
                return self._mover.begin(self._writer.active)
        except OSError:
            return self._leave_for_now()

    def _go_on_moving(self) -> bool:
        try:
            if self._mover.step():
                with self._lock.hold(0):
                    self._mover.finish()
            return True
        except OSError:
            return self._leave_for_now()

    def _leave_for_now(self) -> bool:
        """The disk is full, or at fault: room is made when there is no other way, by letting go of something."""
        self._tends_from_s = time.monotonic() + _LEAVE_S
        return False

    def _promote(self) -> None:
        """Under the store's lock: what dies meanwhile has died in all places."""
        left_bytes = _PROMOTE_BYTES
        while self._promotions and left_bytes > 0:
            key, _ = self._promotions.popitem(last=False)
            places = self._catalogue.places(key)
            if not places or (places[0].segment.is_hot and self._catalogue.cold is not None):
                continue
            entry = places[0]
            value = self._read(key)
            if value is None:
                continue
            self._promotions.pop(key, None)
            left_bytes -= value.nbytes
            if self._writer.add([(key, [bytes(value)])], is_locked=True, stamp=entry.stamp):
                self._uses.pop(key, None)
                self._counters["promoted"] += 1

    def _kill_shadows(self) -> None:
        """Under the store's lock. Raises OSError."""
        shadows, self._catalogue.shadows = self._catalogue.shadows, []
        self._kill([entry for _, entry in shadows])

    def _kill(self, entries: Sequence[Entry]) -> None:
        """Under the store's lock. Raises OSError."""
        for entry in entries:
            # A segment that is gone has taken its entries with it.
            with contextlib.suppress(FileNotFoundError):
                self._catalogue.opened(entry.segment)
                entry.segment.kill(entry)
        if entries:
            self._deaths.note([(entry.segment.uid, entry.offset) for entry in entries])

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = self._hot_root if self._cold_root is None else self._cold_root
            where = f" ({error.filename})" if isinstance(error.filename, str | os.PathLike) else ""
            raise NodeFailed(f"cannot {what} the local KV store in {place}: {error.strerror}{where}") from error
