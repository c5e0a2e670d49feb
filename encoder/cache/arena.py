"""One shared-memory segment of an encoder process: page extents handed out first-fit, readable by name elsewhere.

The segment is a file in the kernel's shared-memory file system. It is opened here by path instead of through
`multiprocessing.shared_memory`, whose resource tracker would unlink it when the first *reader* exits. All its memory is
reserved at creation, so a host without enough shared memory is told at start, not by SIGBUS in the middle of a request.

    pages    0 1 2 3 4 5 6 7 8 9
    used     A A . B B B . . C .      free extents [2,3) [6,8) [9,10), adjacent ones always merged
"""

import bisect
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from encoder.errors import ArenaUnavailable

SHM_DIR = Path("/dev/shm")
# Start of every extent; what vector loads and DMA engines like.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """Pages `[start, stop)` of an arena."""

    start: int
    stop: int

    @property
    def num_pages(self) -> int:
        return self.stop - self.start


class PageAllocator:
    """First-fit over contiguous page runs. Pure bookkeeping."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._free = [Extent(0, num_pages)] if num_pages else []

    def reserve(self, num_pages: int) -> Extent | None:
        """The lowest run of `num_pages` (at least 1), or None if no free run is long enough."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, must be at least 1")
        for index, extent in enumerate(self._free):
            if extent.num_pages >= num_pages:
                taken = Extent(extent.start, extent.start + num_pages)
                rest = Extent(taken.stop, extent.stop)
                self._free[index : index + 1] = [rest] if rest.num_pages else []
                self.num_free -= num_pages
                return taken
        return None

    def free(self, extent: Extent) -> None:
        """Give a reserved extent back. Raises ValueError if any of its pages is free already or out of range."""
        index = bisect.bisect_left(self._free, extent.start, key=lambda e: e.start)
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        overlaps = (before is not None and before.stop > extent.start) or (
            after is not None and after.start < extent.stop
        )
        if overlaps or not 0 <= extent.start < extent.stop <= self.num_pages:
            raise ValueError(f"{extent} was not reserved")
        low, high, start, stop = index, index, extent.start, extent.stop
        if before is not None and before.stop == start:
            low, start = index - 1, before.start
        if after is not None and after.start == stop:
            high, stop = index + 1, after.stop
        self._free[low:high] = [Extent(start, stop)]
        self.num_free += extent.num_pages

    @property
    def free_extents(self) -> tuple[Extent, ...]:
        """Free runs in ascending order, none adjacent to the next."""
        return tuple(self._free)


class Arena:
    """A created segment with its allocator. The creator writes and unlinks; others read through `attach`."""

    def __init__(self, name: str, *, size_bytes: int, page_bytes: int) -> None:
        """Create the segment `name`, replacing one left by a dead process. Raises ArenaUnavailable."""
        if page_bytes % ALIGNMENT_BYTES or size_bytes < page_bytes:
            raise ValueError(f"page_bytes {page_bytes} must be a multiple of {ALIGNMENT_BYTES} within {size_bytes}")
        self.name = name
        self.page_bytes = page_bytes
        self.pages = PageAllocator(size_bytes // page_bytes)
        self.size_bytes = self.pages.num_pages * page_bytes
        self._path = segment_path(name)
        self._map = _create(self._path, self.size_bytes)

    def pages_for(self, size_bytes: int) -> int:
        """Pages that hold `size_bytes`."""
        return -(-size_bytes // self.page_bytes)

    def offset_bytes(self, extent: Extent) -> int:
        """Where the extent begins, counted from the start of the segment."""
        return extent.start * self.page_bytes

    def view(self, extent: Extent, size_bytes: int) -> memoryview:
        """Writable bytes at the start of an extent."""
        start = self.offset_bytes(extent)
        return memoryview(self._map)[start : start + size_bytes]

    def close(self) -> None:
        """Unlink the name; memory goes when the last process that mapped it lets go. May be called twice."""
        self._path.unlink(missing_ok=True)


def segment_path(name: str) -> Path:
    """The file behind a segment name. Raises ValueError for a name that would leave the directory."""
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is not a segment name")
    return SHM_DIR / name


def attach(name: str) -> mmap.mmap:
    """Map an existing segment. Raises FileNotFoundError when its encoder has stopped.

    The mapping is private copy-on-write: pages nobody writes to are the shared ones, so this costs no copy, the buffer
    counts as writable for libraries that insist, and no reader can damage the arena.
    """
    descriptor = os.open(segment_path(name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def checksum(content: memoryview | bytearray | bytes) -> int:
    """xxh3-64 of an embedding's bytes, as references carry it."""
    return xxhash.xxh3_64_intdigest(content)


def _create(path: Path, size_bytes: int) -> mmap.mmap:
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        needed = f"{size_bytes / 2**20:.0f} MiB of shared memory in {path.parent} ({error.strerror})"
        remedy = "lower encoder.arena_bytes, or give the host or container more (docker run --shm-size)"
        raise ArenaUnavailable(f"the embedding arena needs {needed}; {remedy}") from error
