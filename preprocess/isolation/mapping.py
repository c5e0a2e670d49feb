"""Shared memory that is mapped and holds no descriptor: as many results may live as memory allows.

Python's own `mmap.mmap` keeps a duplicate of the descriptor for as long as the mapping lives.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Mapping:
    """All of a memfd, readable and writable. `np.asarray` makes bytes of it, which keep it alive.

    It is unmapped when the last of these arrays, and of the views of them, is gone.
    """

    __slots__ = ("__weakref__", "_address", "size_bytes")

    def __init__(self, fd: int, size_bytes: int) -> None:
        """The descriptor stays the caller's and may be closed at once. Raises OSError."""
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address: int = address
        self.size_bytes = size_bytes
        # Arrays take no part in cyclic garbage collection, so this cannot happen while one is still in use.
        weakref.finalize(self, _libc.munmap, address, size_bytes).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size_bytes,), "data": (self._address, False)}
