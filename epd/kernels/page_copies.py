"""The compiled copier of pages: `page_copies.cpp`, built once per machine, called by ctypes.

Its thread needs nothing of Python while it copies, so a copy begins at once, whoever holds the interpreter's lock, and
pages that lie apart cost no more calls than pages that lie together.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from epd.kernels.native import load_library

_SOURCE = Path(__file__).with_name("page_copies.cpp")


@dataclass(frozen=True, slots=True)
class PartAddress:
    """One layer's keys or values on both sides: where those of page 0 are, and how many bytes on those of the next.

    `pool` is 0 or 1: which list of pages is meant for it.
    """

    device: int
    host: int
    device_stride: int
    host_stride: int
    size_bytes: int
    pool: int


class _Part(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("device_stride", "host_stride", "size_bytes", "pool")),
    )


class NativeCopy:
    """A copy under way. Whoever started it keeps this object until all parts are done: the thread writes into it."""

    __slots__ = ("_address", "_copies", "_num_done")

    def __init__(self, copies: NativeCopies) -> None:
        self._copies = copies
        self._num_done = ctypes.c_int64(0)
        self._address = ctypes.addressof(self._num_done)

    @property
    def address(self) -> int:
        """Of the count of parts."""
        return self._address

    def num_done(self) -> int:
        """Parts whose bytes have arrived."""
        return int(self._copies.library.quick.mimo_copies_num_done(self._address))

    def wait(self, num_parts: int) -> None:
        """Return when so many have. The interpreter's lock is free meanwhile."""
        self._copies.wait(self._address, num_parts)


class NativeCopies:
    """One thread that copies between the same two memories, which must outlive it."""

    def __init__(self, library: CopyLibrary, parts: Sequence[PartAddress]) -> None:
        """`parts` in the order in which they are wanted."""
        self.library = library
        table = (_Part * len(parts))(
            *(
                _Part(part.device, part.host, part.device_stride, part.host_stride, part.size_bytes, part.pool)
                for part in parts
            )
        )
        self._handle = library.slow.mimo_copies_new(table, len(parts))
        # Not by `close`: somebody may still be on his way out of `wait`. At the end of the process the thread is alive.
        weakref.finalize(self, library.slow.mimo_copies_delete, self._handle).atexit = False
        self._thread = threading.Thread(
            target=library.slow.mimo_copies_run, args=(self._handle,), name="KV copies", daemon=True
        )
        self._thread.start()

    def start(self, *, is_load: bool, pairs: NDArray[np.int64], counts: Sequence[int]) -> NativeCopy:
        """Copy pages in the background; loads go before saves.

        `pairs` [n, 2] are pages (source, target): first `counts[0]` of pool 0, then `counts[1]` of pool 1, both between
        host and device, then `counts[2]` of pool 1 from device to device. All pages must be there: nobody looks.
        """
        copy = NativeCopy(self)
        self.library.slow.mimo_copies_start(
            self._handle, int(is_load), pairs.ctypes.data, (ctypes.c_int64 * 3)(*counts), copy.address
        )
        return copy

    def wait(self, address: int, num_parts: int) -> None:
        self.library.slow.mimo_copies_wait(self._handle, address, num_parts)

    def close(self) -> None:
        """End the thread when everything is copied. Nothing may be started afterwards. Without this it never ends."""
        self.library.slow.mimo_copies_close(self._handle)
        self._thread.join()


class CopyLibrary:
    """The loaded library: `slow` calls let go of the interpreter's lock, `quick` ones are over too soon for that."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.slow = library
        self.quick = ctypes.PyDLL(library._name, handle=library._handle)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for calls in (self.slow, self.quick):
            for name, result, arguments in (
                ("new", pointer, [pointer, number]),
                ("run", None, [pointer]),
                ("start", None, [pointer, ctypes.c_int, pointer, pointer, pointer]),
                ("num_done", number, [pointer]),
                ("wait", None, [pointer, pointer, number]),
                ("close", None, [pointer]),
                ("delete", None, [pointer]),
            ):
                function = getattr(calls, f"mimo_copies_{name}")
                function.restype = result
                function.argtypes = arguments


@cache
def copy_library() -> CopyLibrary | str:
    """The library, or the reason why there is none."""
    library = load_library(_SOURCE)
    return library if isinstance(library, str) else CopyLibrary(library)
