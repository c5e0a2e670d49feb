"""TIFF files with a directory of only what the first picture's pixels need.

    before  [header] ... [directory: pixels, texts, profiles, EXIF, thumbnails, next directory] ...
    after   [header] ... [directory: pixels] the same bytes ...

Values stay where they are, since a directory names places in the file. What the remaining tags claim is checked against
the file and against each other first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from preprocess.config import DecodeLimits
from preprocess.errors import MediaUndecodable
from preprocess.exif import valid_orientation
from preprocess.picture_limits import check_size

_WIDTH: Final = 256
_LENGTH: Final = 257
_ORIENTATION: Final = 274
_TILE_WIDTH: Final = 322
_TILE_LENGTH: Final = 323
_PLACES: Final = frozenset({273, 279, 324, 325})
"""Offsets and sizes of strips and tiles: a value per piece of the picture."""
_NEEDED: Final = frozenset(
    {
        *(_WIDTH, _LENGTH, 258, 259, 262, 266, 277, 278, 284, 292, 293, 317, 320, _TILE_WIDTH, _TILE_LENGTH),
        *(332, 334, 338, 339, 340, 341, 347, *range(512, 522), 529, 530, 531, 532, 50674, *_PLACES),
    }
)
"""Sizes, samples, compression, colour model, predictor, palette, tiles, inks, extra samples, JPEG, YCbCr, LERC."""
_SIZES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes per value, by the type's number."""
_POINTERS: Final = (0x8769, 0x8825, 0xA005)
"""EXIF, GPS, interoperability."""


class _Layout(NamedTuple):
    """Classic TIFF or BigTIFF, either byte order."""

    order: str
    big: bool

    def header(self) -> str:
        return self.order + ("8xQ" if self.big else "4xI")

    def counter(self) -> str:
        return self.order + ("Q" if self.big else "H")

    def entry(self) -> str:
        return self.order + ("HHQ8s" if self.big else "HHI4s")

    def offset(self) -> str:
        return self.order + ("Q" if self.big else "I")


class _Entry(NamedTuple):
    tag: int
    kind: int
    num_values: int
    value: bytes
    """The value itself when it fits, else where it is."""


@dataclass(frozen=True, slots=True)
class ReducedTiff:
    content: bytes
    orientation: int


def reduced_tiff(content: bytes, limits: DecodeLimits) -> ReducedTiff:
    """Raises MediaTooLarge by picture and tile, MediaUndecodable for a directory that claims more than can be, and
    struct.error or ValueError for a damaged one."""
    layout = _layout(content, 0)
    entries = _entries(content, 0, layout)
    numbers = {entry.tag: _number(entry, layout) for entry in reversed(entries)}
    width, height = numbers.get(_WIDTH) or 0, numbers.get(_LENGTH) or 0
    if not width or not height:
        raise ValueError("a TIFF picture without a size")
    check_size(width, height, limits)
    # A tile is allocated whole, however little of it is inside.
    check_size(numbers.get(_TILE_WIDTH, 0), numbers.get(_TILE_LENGTH, 0), limits)
    kept = sorted((entry for entry in entries if entry.tag in _NEEDED), key=lambda entry: entry.tag)
    if sum(_outside(entry, layout) for entry in kept) > len(content):
        raise MediaUndecodable("the TIFF directory claims more than the file holds")
    # Pieces of 32 x 32 pixels, or lines, in four planes: more of them would be no picture.
    most = 64 + 4 * (height + width * height // 1024)
    for entry in kept:
        if entry.tag in _PLACES and entry.num_values > most:
            raise MediaUndecodable(f"TIFF of {width} x {height} pixels in {entry.num_values} pieces")
    return ReducedTiff(
        content=_with_directory(content, kept, layout),
        orientation=valid_orientation(numbers.get(_ORIENTATION)),
    )


def value_bytes(content: bytes, start: int) -> int:
    """What loading all tags of the TIFF structure at `start` would take, EXIF directories included; 0 if there is none.

    Readers load tag by tag, however many of them share the same bytes.
    """
    try:
        layout = _layout(content, start)
        entries = _entries(content, start, layout)
        total = sum(_outside(entry, layout) for entry in entries)
        for entry in entries:
            if entry.tag in _POINTERS and (place := _number(entry, layout)):
                total += sum(_outside(inner, layout) for inner in _directory(content, start, place, layout))
    except (struct.error, ValueError):
        return 0
    return total


def _layout(content: bytes, start: int) -> _Layout:
    order = {b"II": "<", b"MM": ">"}.get(content[start : start + 2])
    if order is None:
        raise ValueError("no TIFF header")
    return _Layout(order, big=struct.unpack_from(order + "H", content, start + 2)[0] == 43)


def _entries(content: bytes, start: int, layout: _Layout) -> list[_Entry]:
    (place,) = struct.unpack_from(layout.header(), content, start)
    return _directory(content, start, place, layout)


def _directory(content: bytes, start: int, place: int, layout: _Layout) -> list[_Entry]:
    at = start + place
    (num_entries,) = struct.unpack_from(layout.counter(), content, at)
    if num_entries > 0xFFFF:
        raise ValueError(f"a directory of {num_entries} tags")
    at += struct.calcsize(layout.counter())
    size = struct.calcsize(layout.entry())
    whole = content[at : at + num_entries * size]
    if len(whole) < num_entries * size:
        raise ValueError("a directory that is cut short")
    return [_Entry(*values) for values in struct.iter_unpack(layout.entry(), whole)]


def _number(entry: _Entry, layout: _Layout) -> int:
    """The first value if it is a whole number that stands in the entry, else 0."""
    code = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}.get(entry.kind)
    if code is None or not entry.num_values or _outside(entry, layout):
        return 0
    number: int = struct.unpack_from(layout.order + code, entry.value)[0]
    return number


def _outside(entry: _Entry, layout: _Layout) -> int:
    """Bytes of the value that do not stand in the entry."""
    size = entry.num_values * _SIZES.get(entry.kind, 0)
    return size if size > len(entry.value) else 0


def _with_directory(content: bytes, entries: list[_Entry], layout: _Layout) -> bytes:
    """The directory in the place of the one that it is a part of.

    At the end of the file it would be read as pixels where those are cut short.
    """
    directory = struct.pack(layout.counter(), len(entries))
    directory += b"".join(struct.pack(layout.entry(), *entry) for entry in entries)
    directory += struct.pack(layout.offset(), 0)
    (place,) = struct.unpack_from(layout.header(), content, 0)
    return content[:place] + directory + content[place + len(directory) :]
