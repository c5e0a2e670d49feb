"""Who died lately, for processes that have read the entry's mark before: a ring in a file that all of them look at.

    number of deaths ever, u64 | zeros, 8 bytes | slots: uid of the segment, 8 bytes | offset, u64

Death n stands in slot n modulo the number of slots. A killer marks the entries first and writes here afterwards, so one
that is killed in between leaves entries that are taken to be there until somebody reads them: no harm.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["Deaths"]

_TOTAL: Final = struct.Struct("<Q")
_SLOT: Final = struct.Struct("<8sQ")
_NUM_SLOTS: Final = 1 << 12


class Deaths:
    """What this process has not yet read of them."""

    def __init__(self, path: Path) -> None:
        """Those until now are no news. Raises OSError."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._seen = self._total()

    def note(self, dead: Sequence[tuple[bytes, int]]) -> None:
        """Uid and offset of each; under the store's lock. Raises OSError."""
        total = self._total()
        for number, (uid, offset) in enumerate(dead, total):
            os.pwrite(self._descriptor, _SLOT.pack(uid, offset), _place(number))
        os.pwrite(self._descriptor, _TOTAL.pack(total + len(dead)), 0)

    def news(self) -> list[tuple[bytes, int]] | None:
        """Uid and offset of those since the last time; None when there were more than can be told. Raises OSError."""
        total, seen = self._total(), self._seen
        if total == seen:
            return []
        self._seen = total
        if not 0 < total - seen <= _NUM_SLOTS // 2:
            return None
        slots = [os.pread(self._descriptor, _SLOT.size, _place(number)) for number in range(seen, total)]
        # Meanwhile others may have died in their place.
        if self._total() - seen > _NUM_SLOTS or any(len(slot) < _SLOT.size for slot in slots):
            return None
        return [_SLOT.unpack(slot) for slot in slots]

    def close(self) -> None:
        os.close(self._descriptor)

    def _total(self) -> int:
        content = os.pread(self._descriptor, _TOTAL.size, 0)
        return int(_TOTAL.unpack(content)[0]) if len(content) == _TOTAL.size else 0


def _place(number: int) -> int:
    return (1 + number % _NUM_SLOTS) * _SLOT.size
