"""Arrays in anonymous shared memory, handed from a worker process to its parent without a copy.

A memfd has no name: nothing is left behind in /dev/shm however either process ends, and its memory is freed with the
last mapping. Fresh memory is dear, though: to clear and map 100 MB takes longer than to copy them. So a worker keeps
its buffers, and the parent gives each back when the last array in it is gone:

    worker   Writer.put     copies arrays into a spare buffer, or a new one, whose descriptor then travels along
    parent   Reader.take    the arrays, views of the buffer
    parent   Reader.given_back, told to the worker with the next message
    worker   Writer.recycle

The parent trusts nothing it is told: places are checked against the memory, a buffer that is still lent out is refused,
and so is memory that its writer could still shrink, which would end the reader with SIGBUS.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.isolation.mapping import Mapping

_ALIGNMENT: Final = 64
_MAX_DIMENSIONS: Final = 4
_ROUND_BYTES: Final = 64 * 1024
_SMALL_BYTES: Final = 1024 * 1024
"""Any spare buffer up to this size will do, however little is put into it."""


class ArrayPlace(msgspec.Struct, frozen=True):
    """Where one array lies in the memory: `offset` bytes from its start, in C order."""

    dtype: Literal["uint8", "float32"]
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * (1 if self.dtype == "uint8" else 4)


class Handover(msgspec.Struct, frozen=True):
    """Arrays in one buffer. `fresh`: the parent does not know it yet, its descriptor comes along."""

    buffer: int
    fresh: bool
    places: tuple[ArrayPlace, ...]


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


class Writer:
    """A worker's buffers. Thread-safe."""

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes` bounds one hand-over."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._memories: dict[int, Mapping] = {}
        self._spare: set[int] = set()
        self._next_number = 0

    def put(self, arrays: Sequence[NDArray[Any]]) -> tuple[Handover, int | None]:
        """Copies the arrays into a buffer. The descriptor is there where the buffer is new; the caller closes it.

        Raises MemoryError beyond the bound, OSError where the system has no memory or no descriptor for it.
        """
        places: list[ArrayPlace] = []
        end = 0
        for array in arrays:
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            places.append(ArrayPlace(dtype=_dtype_of(array), shape=array.shape, offset=offset))
            end = offset + array.nbytes
        if end > self._max_bytes:
            raise MemoryError(f"the result takes {end} bytes, allowed are {self._max_bytes}")
        number, memory, fd = self._buffer(end)
        whole = np.asarray(memory)
        for array, place in zip(arrays, places, strict=True):
            np.copyto(_array_at(whole, place), array)
        return Handover(buffer=number, fresh=fd is not None, places=tuple(places)), fd

    def recycle(self, kept: Sequence[int], dropped: Sequence[int]) -> None:
        """Buffers that the parent has given back, for use again or to be freed."""
        with self._lock:
            self._spare.update(kept)
            for number in dropped:
                del self._memories[number]

    def _buffer(self, size_bytes: int) -> tuple[int, Mapping, int | None]:
        """The smallest spare buffer that fits without being far too large, or a new one."""
        with self._lock:
            largest = max(_SMALL_BYTES, 2 * size_bytes)
            fitting = [number for number in self._spare if size_bytes <= self._memories[number].size_bytes <= largest]
            if fitting:
                number = min(fitting, key=lambda number: self._memories[number].size_bytes)
                self._spare.remove(number)
                return number, self._memories[number], None
            number = self._next_number
            self._next_number += 1
        rounded = max(1, -(-size_bytes // _ROUND_BYTES)) * _ROUND_BYTES
        fd = os.memfd_create("mimo-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, rounded)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = Mapping(fd, rounded)
        except OSError:
            os.close(fd)
            raise
        with self._lock:
            self._memories[number] = memory
        return number, memory, fd


class Reader:
    """The parent's view of one worker's buffers. Thread-safe, and arrays may die in any thread."""

    def __init__(self, *, max_spare_bytes: int) -> None:
        """`max_spare_bytes` of buffers that hold nothing are kept for the next results."""
        self._max_spare_bytes = max_spare_bytes
        self._lock = threading.Lock()
        self._spare_bytes = 0
        self._memories: dict[int, Mapping] = {}
        self._lent: set[int] = set()
        # Filled by finalizers, which may run in any thread at any moment: they must not lock.
        self._dead: deque[int] = deque()
        self._closed = False

    def take(self, handover: Handover, fd: int | None) -> tuple[NDArray[Any], ...]:
        """The arrays, writable. Their buffer is theirs until the last of them, and of the views of them, is gone.

        The descriptor may be closed at once. Raises ValueError when what the worker said cannot be, OSError where the
        system maps no more memory.
        """
        with self._lock:
            memory = self._lend(handover, fd)
        # Numpy keeps this one alive as long as any array that is made from it.
        whole: NDArray[np.uint8] = np.asarray(memory)
        weakref.finalize(whole, self._dead.append, handover.buffer).atexit = False
        return tuple(_array_at(whole, place) for place in handover.places)

    def given_back(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Buffers whose arrays have died since the last call: those to keep, and those to free."""
        kept: list[int] = []
        dropped: list[int] = []
        with self._lock:
            while self._dead and not self._closed:
                number = self._dead.popleft()
                self._lent.remove(number)
                size_bytes = self._memories[number].size_bytes
                if self._spare_bytes + size_bytes <= self._max_spare_bytes:
                    self._spare_bytes += size_bytes
                    kept.append(number)
                else:
                    del self._memories[number]
                    dropped.append(number)
        return tuple(kept), tuple(dropped)

    def close(self) -> None:
        """Lets go of all buffers. Arrays that live keep theirs."""
        with self._lock:
            self._closed = True
            self._memories.clear()

    def _lend(self, handover: Handover, fd: int | None) -> Mapping:
        number = handover.buffer
        if fd is not None:
            if number in self._memories:
                raise ValueError(f"buffer {number} exists already")
            self._memories[number] = _mapped(fd)
        elif number not in self._memories or number in self._lent:
            raise ValueError(f"buffer {number} is not there to be used")
        else:
            self._spare_bytes -= self._memories[number].size_bytes
        memory = self._memories[number]
        _check_places(handover.places, memory.size_bytes)
        self._lent.add(number)
        return memory


def _mapped(fd: int) -> Mapping:
    size_bytes = os.fstat(fd).st_size
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the shared memory is not sealed")
    if not size_bytes:
        raise ValueError("the shared memory is empty")
    return Mapping(fd, size_bytes)


def _check_places(places: Sequence[ArrayPlace], size_bytes: int) -> None:
    for place in places:
        if len(place.shape) > _MAX_DIMENSIONS or min((*place.shape, place.offset)) < 0 or place.offset % _ALIGNMENT:
            raise ValueError(f"{place} is no array")
        if place.offset + place.size_bytes > size_bytes:
            raise ValueError(f"{place} lies outside {size_bytes} bytes of shared memory")


def _array_at(whole: NDArray[np.uint8], place: ArrayPlace) -> NDArray[Any]:
    return whole[place.offset : place.offset + place.size_bytes].view(place.dtype).reshape(place.shape)


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
