"""Arrays in anonymous shared memory, handed from a worker process to its parent by descriptor.

A memfd has no name: nothing is left behind in /dev/shm however either process ends, and its memory is freed with the
last mapping. `put_arrays` writes, `map_arrays` maps what was written without copying.

The side that maps trusts nothing it is told: sizes are checked against the memory, and memory that its writer could
still shrink, which would end the reader with SIGBUS, is refused.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

_ALIGNMENT: Final = 64
_MAX_DIMENSIONS: Final = 4


class ArrayPlace(msgspec.Struct, frozen=True):
    """Where one array lies in the memory: `offset` bytes from its start, in C order."""

    dtype: Literal["uint8", "float32"]
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * (1 if self.dtype == "uint8" else 4)


def put_bytes(content: bytes | memoryview) -> int:
    """A memfd that holds the content; the caller closes it. Raises OSError when there is no memory."""
    fd = os.memfd_create("mimo-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(fd, memoryview(content))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_bytes(fd: int) -> bytes:
    """All that a memfd holds."""
    size_bytes = os.fstat(fd).st_size
    pieces = []
    at = 0
    while at < size_bytes:
        pieces.append(os.pread(fd, size_bytes - at, at))
        at += len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def put_arrays(arrays: Sequence[NDArray[Any]], *, max_bytes: int) -> tuple[int, tuple[ArrayPlace, ...]]:
    """A memfd that holds the arrays, and where they lie in it; the caller closes it.

    Written with `write`, not through a mapping: that spares clearing the pages and a fault for each.
    Raises MemoryError beyond `max_bytes`.
    """
    places: list[ArrayPlace] = []
    end = 0
    for array in arrays:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(ArrayPlace(dtype=_dtype_of(array), shape=array.shape, offset=offset))
        end = offset + array.nbytes
    if end > max_bytes:
        raise MemoryError(f"the result takes {end} bytes, allowed are {max_bytes}")
    fd = os.memfd_create("mimo-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for array, place in zip(arrays, places, strict=True):
            if array.size:
                _write(fd, np.ascontiguousarray(array).data.cast("B"), place.offset)
        os.ftruncate(fd, end)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd, tuple(places)


def map_arrays(fd: int, places: Sequence[ArrayPlace]) -> tuple[NDArray[Any], ...]:
    """The arrays, writable, in memory that lives as long as any of them. The descriptor stays the caller's.

    Raises ValueError when the places do not fit the memory, or its writer can still shrink it.
    """
    size_bytes = os.fstat(fd).st_size
    for place in places:
        if len(place.shape) > _MAX_DIMENSIONS or min((*place.shape, place.offset)) < 0 or place.offset % _ALIGNMENT:
            raise ValueError(f"{place} is no array")
        if place.offset + place.size_bytes > size_bytes:
            raise ValueError(f"{place} lies outside {size_bytes} bytes of shared memory")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the shared memory is not sealed")
    if size_bytes == 0:
        return tuple(np.empty(place.shape, dtype=place.dtype) for place in places)
    # Private: should anyone write into an array, it gets pages of its own.
    memory = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return tuple(
        np.frombuffer(memory, dtype=place.dtype, count=math.prod(place.shape), offset=place.offset).reshape(place.shape)
        for place in places
    )


def _dtype_of(array: NDArray[Any]) -> Literal["uint8", "float32"]:
    if array.dtype == np.uint8:
        return "uint8"
    if array.dtype == np.float32:
        return "float32"
    raise TypeError(f"an array of {array.dtype} is not handed over, only uint8 and float32 are")


def _write(fd: int, content: memoryview, offset: int = 0) -> None:
    at = 0
    while at < len(content):
        at += os.pwrite(fd, content[at:], offset + at)
