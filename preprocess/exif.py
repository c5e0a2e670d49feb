"""Which way up a picture is, read from EXIF and XMP blocks without trusting them.

General readers load every tag of a block. A block of a few kilobytes can name a thousand tags that each hold all of it,
so only the one entry that matters is looked at here.
"""

from __future__ import annotations

import re
import struct
from typing import Final

_ORIENTATION_TAG: Final = 0x0112
_SHORT: Final = 3
_LONG: Final = 4
_XMP_ORIENTATION: Final = re.compile(rb'tiff:Orientation(?:\s*=\s*["\']|>)\s*([1-8])\b')
_XMP_MAX_BYTES: Final = 1024 * 1024


def orientation(exif: bytes | None, xmp: bytes | None = None) -> int:
    """1..8; 1 (upright) when neither block says anything that makes sense. EXIF goes first.

    `exif` is a TIFF structure, with or without the word Exif in front.
    """
    found = None if exif is None else _exif_orientation(exif)
    if found is None and xmp is not None:
        match = _XMP_ORIENTATION.search(xmp[:_XMP_MAX_BYTES])
        found = None if match is None else int(match.group(1))
    return found or 1


def valid_orientation(value: int | None) -> int:
    """1 for anything that is no orientation."""
    return value if value is not None and 1 <= value <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    try:
        if order is None:
            return None
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (num_entries,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * num_entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
            if tag == _ORIENTATION_TAG and count == 1 and kind in (_SHORT, _LONG):
                (value,) = struct.unpack_from(order + ("H" if kind == _SHORT else "I"), exif, entry + 8)
                return value if 1 <= value <= 8 else None
    except struct.error:
        # Cut short or pointing nowhere: the picture itself may be whole.
        return None
    return None
