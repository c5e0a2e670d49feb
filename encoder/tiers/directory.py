"""Records as files of one directory, which several processes may use at the same time.

    ROOT/3f/3f9c...e1.emb        one record; written beside its place and renamed into it, so never seen half
    ROOT/.partial-PID-...        a write under way; those of a crash go an hour later

Size is bounded by `max_bytes`: the longest unread go first. Who writes looks how much is there each time it has added a
twentieth of the bound, so N processes pass it by N twentieths at most.

What stands where a record belongs and is none, a directory for instance, is a damaged record, and goes when somebody
writes there. A root that was removed is made again by the next write.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from encoder.tiers.base import Buffer, TierFailed
from encoder.tiers.record import RecordDamaged
from preprocess.types import MediaKey

_THREADS: Final = 2
_LEFT_OVER_S: Final = 3600.0
_KEPT_SHARE: Final = 0.9
_SCANS_PER_BOUND: Final = 20
_SUFFIX: Final = ".emb"
_PARTIAL: Final = ".partial-"

# What opening says of a thing that is no file: the fault of one record, not of the tier.
_NO_FILE: Final = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)

_T = TypeVar("_T")


class DirectoryTier:
    """Owner of nothing but its threads: the directory may be shared."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        """Makes the directory. Raises TierFailed when it cannot be written to."""
        self._root = root
        self._max_bytes = max_bytes
        self._unscanned_bytes = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="embedding-store")
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._partial()
            probe.write_bytes(b"")
            probe.unlink()
            self._remove_left_over()
            self._make_room()
        except OSError as error:
            self._threads.shutdown()
            raise TierFailed(f"the directory {root} cannot be used: {error.strerror}") from error

    @property
    def name(self) -> str:
        return str(self._root)

    async def get(self, key: MediaKey) -> bytes | None:
        return await self._run(lambda: self._read(key))

    async def put(self, key: MediaKey, record: Sequence[Buffer]) -> None:
        await self._run(lambda: self._write(key, record))

    async def discard(self, key: MediaKey) -> None:
        await self._run(lambda: self._clear(key))

    async def close(self) -> None:
        """Waits for what is under way."""
        await asyncio.to_thread(self._threads.shutdown, wait=True)

    async def _run(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except OSError as error:
            raise TierFailed(f"the directory {self._root}: {error.strerror}") from error

    def _path(self, key: MediaKey) -> Path:
        return self._root / key[:2] / f"{key}{_SUFFIX}"

    def _partial(self) -> Path:
        return self._root / f"{_PARTIAL}{os.getpid()}-{uuid.uuid4().hex}"

    def _read(self, key: MediaKey) -> bytes | None:
        path = self._path(key)
        try:
            # Who opens a pipe without this waits for its other end.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NO_FILE and self._root.is_dir():
                raise RecordDamaged(f"{path} is no file: {error.strerror}") from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RecordDamaged(f"{path} is no file")
        with os.fdopen(descriptor, "rb") as file:
            content = file.read()
        # Read last, evicted last.
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return content

    def _write(self, key: MediaKey, record: Sequence[Buffer]) -> None:
        path, partial = self._path(key), self._partial()
        size_bytes = sum(map(len, record))
        if size_bytes > self._max_bytes:
            return
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for piece in record:
                    file.write(piece)
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                partial.replace(path)
            except (FileExistsError, IsADirectoryError, NotADirectoryError):
                self._clear(key)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._unscanned_bytes += size_bytes
        if self._unscanned_bytes * _SCANS_PER_BOUND >= self._max_bytes:
            self._make_room()

    def _clear(self, key: MediaKey) -> None:
        """Nothing stands in the place of this record afterwards, nor where its directory belongs."""
        path = self._path(key)
        try:
            _remove(path)
        except NotADirectoryError:
            if self._root.is_dir():
                _remove(path.parent)

    def _make_room(self) -> None:
        """Look at everything there is; over the bound, let the longest unread go."""
        self._unscanned_bytes = 0
        found: list[tuple[float, int, Path]] = []
        for path in self._root.glob(f"??/*{_SUFFIX}"):
            # Another process may be evicting, too.
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found.append((status.st_mtime, status.st_size, path))
        total_bytes = sum(size_bytes for _, size_bytes, _ in found)
        if total_bytes <= self._max_bytes:
            return
        for _, size_bytes, path in sorted(found):
            _remove(path)
            total_bytes -= size_bytes
            if total_bytes <= self._max_bytes * _KEPT_SHARE:
                return

    def _remove_left_over(self) -> None:
        for path in self._root.glob(f"{_PARTIAL}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _LEFT_OVER_S:
                    _remove(path)


def _remove(path: Path) -> None:
    """Whatever it is, and if it is there."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
