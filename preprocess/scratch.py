"""Working memory that is used again: fresh memory costs a page fault per 4 KiB, more than the arithmetic done in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MAX_KEPT_BYTES: Final = 32 * 1024 * 1024


class Scratch:
    """Named arrays of 4-byte values, each as large as the largest that was asked for by its name."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint32]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """Contents are left over from earlier uses. The same name gives the same memory."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, dtype=np.uint32)
        return held[:size].view(dtype).reshape(shape)

    @property
    def size_bytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())


_free: list[Scratch] = []


@contextmanager
def scratch() -> Iterator[Scratch]:
    """Memory for one call of one thread. As many are kept as calls ran at once; very large ones are given up."""
    try:
        found = _free.pop()
    except IndexError:
        found = Scratch()
    try:
        yield found
    finally:
        if found.size_bytes <= _MAX_KEPT_BYTES:
            _free.append(found)
