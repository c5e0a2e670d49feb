"""One file of the local store: entries one after the other, written by one process at a time, read by all.

    head, 64 bytes: magic "MIMOKVS1" | uid, 8 bytes | created, u64 ns | xxh3-64 of these, u64 | zeros
    entry, at multiples of 8: mark, u8 (1 alive, 2 dead) | 0 | key size, u16 | value size, u32 | stamp, u64
                              | xxh3-64 of uid, offset, sizes, stamp and key, u64 | key | value

All numbers little-endian. An entry is there from the moment its first 24 bytes are: they are written last, and those of
a batch all before the first of them. So whoever is killed, wherever, leaves whole entries and nothing else to be seen.
The checksum is bound to the file and the place, so that left-over bytes never look like an entry; that a value is what
was put is not for this file to say. An entry dies by one byte, written in place by anybody who holds the store's lock.

Nothing is mapped into memory: a file that is cut short or overwritten by somebody gives misses, not a signal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from epd.cache.l3.base import Buffer

__all__ = ["ALIVE", "HEAD_BYTES", "SUFFIX", "Entry", "Scratch", "Segment", "SegmentDamaged", "entry_bytes", "value_at"]

MAGIC: Final = b"MIMOKVS1"
SUFFIX: Final = ".seg"
HEAD_BYTES: Final = 64
ALIVE: Final = 1
DEAD: Final = 2
_HEAD: Final = struct.Struct("<8s8sQQ")
_ENTRY: Final = struct.Struct("<BBHIQQ")
_BOUND: Final = struct.Struct("<8sQHIQ")
_ALIGN: Final = 8
# Most keys end within this: a scan reads an entry's front in one go.
_GLANCE_BYTES: Final = _ENTRY.size + 40
_MAX_PIECES: Final = 1000
_MAX_KEY_BYTES: Final = 1024
_MAX_VALUE_BYTES: Final = (1 << 32) - 1


class SegmentDamaged(Exception):
    """A file that is none of ours, or of another layout. Says why."""


class Entry(NamedTuple):
    """Where a value lies. `stamp` orders the puts of a key: the highest is the last."""

    segment: Segment
    offset: int
    value_bytes: int
    stamp: int


class Scratch:
    """Memory to read into, used again and again."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(1 << 16))

    def view(self, size_bytes: int) -> memoryview:
        """Of this size, valid until the next one is asked for."""
        if self._memory.nbytes < size_bytes:
            self._memory = memoryview(bytearray(size_bytes))
        return self._memory[:size_bytes]


def entry_bytes(key: bytes, value_bytes: int) -> int:
    """What an entry takes of its segment."""
    size_bytes = _ENTRY.size + len(key) + value_bytes
    return size_bytes + -size_bytes % _ALIGN


def value_at(loaded: memoryview, at: int, key: bytes, entry: Entry) -> memoryview | None:
    """The value of an entry that was loaded with its front at this place; None when it is dead or not there."""
    start = at + _ENTRY.size + len(key)
    stop = start + entry.value_bytes
    if loaded.nbytes < stop:
        return None
    mark, _, key_bytes, value_bytes, stamp, _ = _ENTRY.unpack_from(loaded, at)
    if (mark, key_bytes, value_bytes, stamp) != (ALIVE, len(key), entry.value_bytes, entry.stamp):
        return None
    return loaded[start:stop] if loaded[at + _ENTRY.size : start] == key else None


class Segment:
    """An open file. `tail` is the end of what is known of it; `entries` is that, in order."""

    def __init__(self, path: Path, descriptor: int, uid: bytes, created_ns: int, *, is_hot: bool) -> None:
        self.path = path
        self.created_ns = created_ns
        self.is_hot = is_hot
        self.tail = HEAD_BYTES
        self.entries: list[tuple[bytes, Entry]] = []
        self.is_sealed = False
        self.uid = uid
        self._descriptor: int | None = descriptor

    @classmethod
    def create(cls, partial: Path, created_ns: int, capacity_bytes: int, *, is_hot: bool) -> Segment:
        """A new empty file under a name that no reader looks at; locked. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(partial, flags, 0o600)
        uid = secrets.token_bytes(8)
        segment = cls(partial, descriptor, uid, created_ns, is_hot=is_hot)
        try:
            segment.lock()
            os.ftruncate(descriptor, max(capacity_bytes, HEAD_BYTES))
            front = _HEAD.pack(MAGIC, uid, created_ns, 0)[:-8]
            head = front + xxhash.xxh3_64_intdigest(front).to_bytes(8, "little")
            if os.pwrite(descriptor, head.ljust(HEAD_BYTES, b"\0"), 0) != HEAD_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            segment.close()
            partial.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def attach(cls, path: Path, *, is_hot: bool) -> Segment:
        """A file that is there; not yet scanned. Raises OSError, SegmentDamaged."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            head = os.pread(descriptor, HEAD_BYTES, 0)
            if len(head) < HEAD_BYTES:
                raise SegmentDamaged(f"{path} has {len(head)} bytes")
            magic, uid, created_ns, digest = _HEAD.unpack_from(head)
            if magic != MAGIC:
                raise SegmentDamaged(f"{path} begins like something else")
            if xxhash.xxh3_64_intdigest(head[: _HEAD.size - 8]) != digest:
                raise SegmentDamaged(f"the head of {path} has another checksum")
        except (OSError, SegmentDamaged):
            os.close(descriptor)
            raise
        return cls(path, descriptor, uid, created_ns, is_hot=is_hot)

    @property
    def size_bytes(self) -> int:
        """Of the file. Raises OSError."""
        return os.fstat(self._file()).st_size

    @property
    def is_linked(self) -> bool:
        """Whether it still has a name. Raises OSError."""
        return os.fstat(self._file()).st_nlink > 0

    def lock(self) -> bool:
        """Become who writes or moves it, until `close` or `unlock`. False when somebody else is. Raises OSError."""
        try:
            fcntl.flock(self._file(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._file(), fcntl.LOCK_UN)

    def scan(self) -> Iterator[tuple[bytes, Entry, bool]]:
        """Key, place and whether alive of what was added since the last scan. Raises OSError."""
        descriptor = self._file()
        while True:
            front = os.pread(descriptor, _GLANCE_BYTES, self.tail)
            if len(front) < _ENTRY.size:
                return
            mark, _, key_bytes, value_bytes, stamp, digest = _ENTRY.unpack_from(front)
            if mark not in (ALIVE, DEAD) or key_bytes > _MAX_KEY_BYTES:
                return
            if key_bytes > _GLANCE_BYTES - _ENTRY.size:
                front = os.pread(descriptor, _ENTRY.size + key_bytes, self.tail)
            key = front[_ENTRY.size : _ENTRY.size + key_bytes]
            if self._digest(self.tail, key, value_bytes, stamp) != digest:
                return
            entry = Entry(self, self.tail, value_bytes, stamp)
            self.tail += entry_bytes(key, value_bytes)
            self.entries.append((key, entry))
            yield key, entry, mark == ALIVE

    def append(self, items: Sequence[tuple[bytes, Sequence[Buffer], int]]) -> list[Entry]:
        """Add key, pieces and stamp of each, all or none, behind `tail`. Raises OSError, and none is there then."""
        descriptor, offset = self._file(), self.tail
        pieces: list[Buffer] = []
        entries: list[Entry] = []
        for key, parts, stamp in items:
            value_bytes = sum(memoryview(part).nbytes for part in parts)
            head = _ENTRY.pack(ALIVE, 0, len(key), value_bytes, stamp, self._digest(offset, key, value_bytes, stamp))
            size_bytes = entry_bytes(key, value_bytes)
            padding = size_bytes - _ENTRY.size - len(key) - value_bytes
            pieces += [head, key, *parts, bytes(padding)]
            entries.append(Entry(self, offset, value_bytes, stamp))
            offset += size_bytes
        first, pieces[0] = pieces[0], bytes(_ENTRY.size)
        if len(pieces) > _MAX_PIECES:
            pieces = [b"".join(pieces)]
        # Cut short only by a full file system, which says nothing else for it then.
        if os.pwritev(descriptor, pieces, self.tail) != offset - self.tail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if os.pwrite(descriptor, first, self.tail) != _ENTRY.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.tail = offset
        self.entries.extend((key, entry) for (key, _, _), entry in zip(items, entries, strict=True))
        return entries

    def read(self, key: bytes, entry: Entry, scratch: Scratch) -> memoryview | None:
        """The entry's value, lying in `scratch`; None when it is dead or not there. Raises OSError."""
        loaded = self.load(entry.offset, entry_bytes(key, entry.value_bytes), scratch)
        return value_at(loaded, 0, key, entry)

    def load(self, offset: int, size_bytes: int, scratch: Scratch) -> memoryview:
        """Bytes of the file, as many as there are, lying in `scratch`. Raises OSError."""
        view = scratch.view(size_bytes)
        return view[: os.preadv(self._file(), [view], offset)]

    def is_alive(self, entry: Entry) -> bool:
        """Whether the entry has not died. Raises OSError."""
        return os.pread(self._file(), 1, entry.offset) == b"\1"

    def kill(self, entry: Entry) -> None:
        """Only under the store's lock. Raises OSError."""
        os.pwrite(self._file(), bytes([DEAD]), entry.offset)

    def seal(self) -> None:
        """Nothing will be added: give back what is not used. Raises OSError."""
        os.ftruncate(self._file(), self.tail)
        self.is_sealed = True

    def close(self) -> None:
        """Give back the descriptor, and any lock; should the file be needed again, it is opened again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _file(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        return self._descriptor

    def _digest(self, offset: int, key: bytes, value_bytes: int, stamp: int) -> int:
        return xxhash.xxh3_64_intdigest(_BOUND.pack(self.uid, offset, len(key), value_bytes, stamp) + key)
