"""Local stores seen from outside, for people: what is in them, and emptying them. No server needs to run, and none that
runs is disturbed: reports only read, and a cleared store gives misses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from epd.cache.l3.base import NodeTimedOut
from epd.cache.l3.open import SHARED_MEMORY, cold_root, hot_root, noted_directory
from epd.cache.l3.segment import SUFFIX, Segment, SegmentDamaged
from epd.cache.l3.shelf import StoreLock

__all__ = ["LocalStoreReport", "clear_local_store", "local_store_reports", "remove_local_store"]

_LOCK: Final = "lock"
_LOCK_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class LocalStoreReport:
    """One store. Bytes are those its files take; a record that is both in memory and on disk counts once."""

    directory: str
    memory_directory: str
    disk_directory: str
    memory_bytes: int
    disk_bytes: int
    num_records: int
    num_memory_records: int
    num_disk_records: int
    num_damaged_files: int
    oldest_put_age_s: float | None
    newest_put_age_s: float | None
    """None for an empty store."""


def local_store_reports(directories: Sequence[Path], *, others: bool = True) -> tuple[LocalStoreReport, ...]:
    """Of the stores in these directories and, with `others`, of all of this user that have something in shared memory.

    Directories without a store are passed over. Raises OSError for one that cannot be read.
    """
    known = {str(hot_root(directory)): directory for directory in directories}
    pattern = f"{hot_root(Path('/')).name.rpartition('-')[0]}-*"
    for root in sorted(SHARED_MEMORY.glob(pattern)) if others else ():
        directory = noted_directory(root)
        if directory is not None and str(hot_root(directory)) == str(root):
            known.setdefault(str(root), directory)
    found = (_report(directory) for directory in known.values() if _is_store(directory))
    return tuple(found)


def clear_local_store(directory: Path) -> int:
    """Forget everything in the store of this directory; returns the bytes that its files took.

    Servers that use it find nothing there and go on. Raises OSError, TimeoutError among others when one of them keeps
    the store's lock.
    """
    if not _is_store(directory):
        return 0
    roots, freed_bytes = (hot_root(directory), cold_root(directory)), 0
    with _locked(hot_root(directory)):
        for root in roots:
            for path in _segments(root):
                with contextlib.suppress(FileNotFoundError):
                    freed_bytes += _size_bytes(path)
                    path.unlink()
    if not os.path.lexists(directory):
        # Somebody threw the directory away, and nobody will ask for its memory.
        shutil.rmtree(hot_root(directory), ignore_errors=True)
    return freed_bytes


def remove_local_store(directory: Path) -> None:
    """Clear it, and leave nothing of it, in shared memory either: for directories that are thrown away. Raises
    OSError."""
    clear_local_store(directory)
    for root in (hot_root(directory), cold_root(directory)):
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """A store that has nothing in memory has no lock, and nobody who uses it."""
    if not root.is_dir():
        yield
        return
    lock = StoreLock(root / _LOCK)
    try:
        with lock.hold(_LOCK_WAIT_S):
            yield
    except NodeTimedOut as error:
        raise TimeoutError(errno.ETIMEDOUT, str(error), str(root)) from error
    finally:
        lock.close()


def _is_store(directory: Path) -> bool:
    return hot_root(directory).is_dir() or cold_root(directory).is_dir()


def _segments(root: Path) -> list[Path]:
    return sorted(root.glob(f"[0-9]*{SUFFIX}")) if root.is_dir() else []


def _report(directory: Path) -> LocalStoreReport:
    hot, cold = hot_root(directory), cold_root(directory)
    keys: dict[bool, set[bytes]] = {True: set(), False: set()}
    size_bytes = {True: 0, False: 0}
    stamps_ns: list[int] = []
    num_damaged = 0
    for is_hot, root in ((True, hot), (False, cold)):
        for path in _segments(root):
            # Gone meanwhile: moved or evicted, and then seen elsewhere or not at all.
            with contextlib.suppress(FileNotFoundError):
                try:
                    size_bytes[is_hot] += _size_bytes(path)
                    for key, stamp_ns in _alive(path, is_hot=is_hot):
                        keys[is_hot].add(key)
                        stamps_ns.append(stamp_ns)
                except SegmentDamaged:
                    num_damaged += 1
    now_ns = time.time_ns()
    return LocalStoreReport(
        directory=str(directory),
        memory_directory=str(hot),
        disk_directory=str(cold),
        memory_bytes=size_bytes[True],
        disk_bytes=size_bytes[False],
        num_records=len(keys[True] | keys[False]),
        num_memory_records=len(keys[True]),
        num_disk_records=len(keys[False]),
        num_damaged_files=num_damaged,
        oldest_put_age_s=(now_ns - min(stamps_ns)) / 1e9 if stamps_ns else None,
        newest_put_age_s=(now_ns - max(stamps_ns)) / 1e9 if stamps_ns else None,
    )


def _alive(path: Path, *, is_hot: bool) -> Iterator[tuple[bytes, int]]:
    """Keys and stamps. Raises FileNotFoundError, SegmentDamaged, OSError."""
    segment = Segment.attach(path, is_hot=is_hot)
    try:
        for key, entry, is_alive in segment.scan():
            if is_alive:
                yield key, entry.stamp
    finally:
        segment.close()


def _size_bytes(path: Path) -> int:
    """What it takes; in memory, what is not written yet takes nothing. Raises FileNotFoundError."""
    found = os.stat(path)
    return min(found.st_size, found.st_blocks * 512) if path.is_relative_to(SHARED_MEMORY) else found.st_size
