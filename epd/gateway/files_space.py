"""Directories in which processes write at the same time, and what is needed to do so safely.

A process has a directory of its own, locked for as long as it lives; by the lock others see that it does.
"""

import fcntl
import itertools
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Workspace:
    """A directory below `arriving` that is this process's alone, and locked for as long as it lives."""

    def __init__(self, directory: Path, lock: int) -> None:
        self._directory = directory
        self._lock = lock
        self._numbers = itertools.count()

    @classmethod
    def make(cls, arriving: Path) -> "Workspace":
        while True:
            directory = arriving / secrets.token_hex(16)
            directory.mkdir(mode=0o700)
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between the two lines above another process may have taken it for a dead one's.
                if directory.exists():
                    return cls(directory, lock)
            os.close(lock)

    def new_name(self) -> Path:
        return self._directory / str(next(self._numbers))

    def new_directory(self) -> Path:
        directory = self.new_name()
        directory.mkdir(mode=0o700)
        return directory

    def remove_those_of_the_dead(self) -> None:
        for name in names_in(self._directory.parent):
            directory = self._directory.parent / name
            if directory == self._directory:
                continue
            try:
                lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                # Removed meanwhile, or nothing of ours.
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            except BlockingIOError:
                # Its process lives.
                continue
            finally:
                os.close(lock)

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def write_new(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
