"""One directory of segments, bounded in bytes, and the lock that orders what processes do to its files.

ROOT/00001764...-3f9c.seg    a segment; names sort by age
ROOT/.new-...                one that is being made; what a crash leaves of these goes when it is nobody's
ROOT/damaged                 the last file that stood in a segment's place and was none
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from epd.cache.l3.base import NodeFailed, NodeTimedOut
from epd.cache.l3.segment import SUFFIX, Segment, SegmentDamaged

__all__ = ["Shelf", "StoreLock", "make_private"]

logger = logging.getLogger(__name__)

_NEW: Final = ".new-"
_NAME: Final = re.compile(r"\d{20}-[0-9a-f]{8}" + re.escape(SUFFIX))
_DAMAGED: Final = "damaged"
# Two changes of a directory within one tick of the kernel's clock leave one time of change.
_TICK_NS: Final = 50_000_000
_ASK_AGAIN_S: Final = 0.001


def make_private(root: Path) -> None:
    """A directory that is ours alone. Raises NodeFailed when it is somebody else's, OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise NodeFailed(f"{root} is not a directory of this user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        root.chmod(0o700)


class StoreLock:
    """Held for what must not happen twice at once: making, moving and evicting segments, and killing entries.

    The kernel lets go of it when its holder dies.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextlib.contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        """Raises NodeTimedOut when another process keeps it longer: one that was stopped, for instance."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_s:
                    raise NodeTimedOut("another process holds the lock of the local KV store") from None
                time.sleep(_ASK_AGAIN_S)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)


class Shelf:
    """The segments of a directory as last looked at."""

    def __init__(self, root: Path, *, max_bytes: int, is_hot: bool) -> None:
        """Raises NodeFailed, OSError for a directory that cannot be used."""
        self.root = root
        self.max_bytes = max_bytes
        self.is_hot = is_hot
        self.segments: dict[str, Segment] = {}
        self.used_bytes = 0
        self.old_before_ns = 0
        self.num_damaged = 0
        self._changed_ns = -1
        self._is_sure = False
        self._refused: set[str] = set()
        make_private(root)
        self._inode = self.root.stat().st_ino

    def look(self) -> set[str] | None:
        """Names there are now; None when nothing has changed since the last look.

        Raises OSError, FileNotFoundError for a directory that is gone or is another one.
        """
        looked_ns = time.time_ns()
        status = os.stat(self.root)
        if status.st_ino != self._inode:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
        changed_ns = status.st_mtime_ns
        if changed_ns == self._changed_ns and self._is_sure:
            return None
        names = self._read()
        self._changed_ns, self._is_sure = changed_ns, looked_ns - changed_ns > _TICK_NS
        ages = sorted(names)
        is_filling = self.used_bytes > self.max_bytes // 2
        self.old_before_ns = int(ages[len(ages) // 2].split("-")[0]) if ages and is_filling else 0
        return names - self._refused

    def look_anew(self) -> None:
        """Take nothing for known: the next look looks."""
        self._changed_ns = -1

    def attach(self, name: str) -> Segment | None:
        """A segment of the last look; None for what is none, which is set aside. Raises FileNotFoundError."""
        try:
            segment = Segment.attach(self.root / name, is_hot=self.is_hot)
        except FileNotFoundError:
            raise
        except (SegmentDamaged, OSError) as error:
            logger.warning("a file of the local KV store is set aside: %s", error)
            self.num_damaged += 1
            # Should that fail, too, it is passed over from now on.
            self._refused.add(name)
            with contextlib.suppress(OSError):
                (self.root / name).replace(self.root / _DAMAGED)
            return None
        self.segments[name] = segment
        return segment

    def measure(self) -> int:
        """Bytes of all files, those being made included. Raises OSError."""
        self._read()
        return self.used_bytes

    def by_age(self) -> list[Segment]:
        """The oldest first."""
        return [self.segments[name] for name in sorted(self.segments)]

    def make(self, capacity_bytes: int) -> Segment:
        """A new segment under a name that is not looked at, locked. Raises OSError."""
        created_ns = time.time_ns()
        uid = secrets.token_hex(4)
        partial = self.root / f"{_NEW}{created_ns:020d}-{uid}{SUFFIX}"
        return Segment.create(partial, created_ns, capacity_bytes, is_hot=self.is_hot)

    def show(self, segment: Segment) -> None:
        """Give a new one its name; under the store's lock. Raises OSError."""
        name = segment.path.name.removeprefix(_NEW)
        segment.path = segment.path.replace(self.root / name)
        self.segments[name] = segment

    def remove(self, segment: Segment) -> None:
        """Under the store's lock. Raises OSError."""
        segment.path.unlink(missing_ok=True)
        self.segments.pop(segment.path.name, None)

    def sweep(self) -> None:
        """Remove what crashes left half made; under the store's lock. Raises OSError."""
        for path in self.root.glob(f"{_NEW}*"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    pass
                finally:
                    os.close(descriptor)

    def _read(self) -> set[str]:
        """Names of the segments; sets `used_bytes`, to which those in the making belong."""
        names: set[str] = set()
        used_bytes = 0
        with os.scandir(self.root) as found:
            for file in found:
                is_segment = _NAME.fullmatch(file.name) is not None
                if is_segment or file.name.startswith(_NEW):
                    with contextlib.suppress(FileNotFoundError):
                        used_bytes += file.stat(follow_symlinks=False).st_size
                if is_segment:
                    names.add(file.name)
        self.used_bytes = used_bytes
        return names
