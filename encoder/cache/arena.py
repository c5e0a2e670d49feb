"""One shared-memory segment of a host: raw pages by name, mapped by everyone; who has which is the index's to say.

The segment is a file in the kernel's shared-memory file system. It is opened here by path instead of through
`multiprocessing.shared_memory`, whose resource tracker would unlink it when the first *reader* exits. All its memory is
reserved at creation, so a host without enough shared memory is told at start, not by SIGBUS in the middle of a request.

    /dev/shm/NAME                  pages 0 1 2 3 4 5 ...
    /dev/shm/NAME.index[-wal|-shm] entries, leases, reservations, free runs (see `encoder.cache.index`)
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from encoder.errors import ArenaUnavailable

SHM_DIR = Path("/dev/shm")
INDEX_SUFFIX = ".index"
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


class Segment:
    """An existing segment, mapped for reading and writing. What is written in it, and where, the index decides."""

    def __init__(self, name: str, *, page_bytes: int) -> None:
        """Map the segment `name`. Raises ArenaUnavailable when there is none."""
        self.name = name
        self.page_bytes = page_bytes
        try:
            descriptor = os.open(segment_path(name), os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ArenaUnavailable(f"there is no embedding arena {name}: {error.strerror}") from error
        self.num_pages = len(self._map) // page_bytes
        self.size_bytes = self.num_pages * page_bytes

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


def segment_path(name: str) -> Path:
    """The file behind a segment name. Raises ValueError for a name that would leave the directory."""
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is not a segment name")
    return SHM_DIR / name


def index_path(name: str) -> Path:
    """The index beside a segment; its journal lies beside it. Raises ValueError as `segment_path`."""
    return segment_path(name).with_name(name + INDEX_SUFFIX)


def create_segment(name: str, size_bytes: int) -> None:
    """Make a segment of zeros, replacing one of that name. Raises ArenaUnavailable."""
    path = segment_path(name)
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        needed = f"{size_bytes / 2**20:.0f} MiB of shared memory in {path.parent} ({error.strerror})"
        remedy = "lower encoder.arena_bytes, or give the host or container more (docker run --shm-size)"
        raise ArenaUnavailable(f"the embedding arena needs {needed}; {remedy}") from error


def remove_arena(name: str) -> None:
    """Unlink a segment and its index; memory goes when the last process that mapped it lets go. May be called twice."""
    for suffix in (INDEX_SUFFIX, f"{INDEX_SUFFIX}-wal", f"{INDEX_SUFFIX}-shm", f"{INDEX_SUFFIX}-new", ""):
        segment_path(name).with_name(name + suffix).unlink(missing_ok=True)


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
