"""Picture files cut down to what their first picture is made of, before a general decoder opens them.

Pillow reads everything a file says about a picture, with limits of its own or none: texts that inflate, comments
joined one by one, a thousand tags over the same megabytes. None of that is wanted, so it does not get there; and sizes
that only a later step would look at are collected here, for refusal before anything is allocated.

    PNG        header, palette, transparency, data; orientation from eXIf, raw EXIF profile or XMP
    GIF        colours, the first picture and its control block
    ICO        the largest picture alone
    TIFF       see `preprocess.tiff`
    WebP, JPEG 2000, AVIF, HEIC, PNM
               unchanged; sizes checked, and that no tile is missing
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from preprocess.config import DecodeLimits
from preprocess.errors import MediaTooLarge, MediaUndecodable
from preprocess.exif import orientation
from preprocess.picture_limits import check_size
from preprocess.tiff import reduced_tiff, value_bytes

_PNG_KEPT: Final = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_PNG_TEXTS: Final = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_MAX_TEXT_BYTES: Final = 1024 * 1024
_MAX_PNM_TEXT_BYTES: Final = 8 * 1024 * 1024
_MAX_BLOCKS: Final = 100_000
_XMP_KEYWORD: Final = b"XML:com.adobe.xmp"
_EXIF_KEYWORD: Final = b"Raw profile type exif"
_TIFF_HEADER: Final = re.compile(rb"Exif\0\0(?=II\*\0|MM\0\*)|II\*\0|MM\0\*")


@dataclass(frozen=True, slots=True)
class Essence:
    """A file that holds the same first picture."""

    content: bytes
    orientation: int | None = None
    """None where only the opened picture tells."""


def essence(kind: str, content: bytes, limits: DecodeLimits) -> Essence:
    """`kind` is the sniffed one.

    Raises MediaTooLarge by any size that the file declares, MediaUndecodable, struct.error, ValueError or IndexError
    for damage.
    """
    reduce = _REDUCERS.get(kind)
    return Essence(content) if reduce is None else reduce(content, limits)


def _png(content: bytes, limits: DecodeLimits) -> Essence:
    width, height = struct.unpack_from(">II", content, 16)
    check_size(width, height, limits)
    parts = [memoryview(content)[:8]]
    exif = xmp = None
    at, left_out, num_chunks = 8, False, 0
    most = _MAX_BLOCKS + len(content) // 1024
    while at + 8 <= len(content):
        size, name = struct.unpack_from(">I4s", content, at)
        end = at + 12 + size
        if name in _PNG_KEPT:
            parts.append(memoryview(content)[at:end])
        else:
            left_out = True
            if name == b"eXIf" and exif is None:
                exif = content[at + 8 : end - 4]
            elif name in _PNG_TEXTS:
                keyword, text = _png_text(name, content[at + 8 : min(end - 4, at + 8 + _MAX_TEXT_BYTES)])
                if keyword == _XMP_KEYWORD and xmp is None:
                    xmp = text
                elif keyword == _EXIF_KEYWORD and exif is None:
                    exif = _raw_profile(text)
        num_chunks += 1
        if num_chunks > most:
            raise MediaUndecodable(f"PNG of more than {most} chunks")
        at = end
        if name == b"IEND":
            break
    return Essence(b"".join(parts) if left_out else content, orientation(exif, xmp))


def _png_text(name: bytes, body: bytes) -> tuple[bytes, bytes]:
    """(keyword, text) of the two texts that matter; no text for others."""
    keyword, _, rest = body.partition(b"\0")
    if keyword not in (_XMP_KEYWORD, _EXIF_KEYWORD) or not rest:
        return keyword, b""
    compressed = name == b"zTXt"
    if name == b"iTXt":
        compressed = rest[0] != 0
        rest = rest[2:].split(b"\0", 2)[-1]
    elif compressed:
        rest = rest[1:]
    if not compressed:
        return keyword, rest
    try:
        return keyword, zlib.decompressobj().decompress(rest, _MAX_TEXT_BYTES)
    except zlib.error:
        return keyword, b""


def _raw_profile(text: bytes) -> bytes | None:
    """ImageMagick's form: a name, a length, then hexadecimal lines."""
    try:
        return bytes.fromhex("".join(text.decode("latin-1").split("\n")[3:]))
    except ValueError:
        return None


def _gif(content: bytes, limits: DecodeLimits) -> Essence:
    width, height = struct.unpack_from("<HH", content, 6)
    if not width or not height:
        raise MediaUndecodable(f"GIF of {width} x {height} pixels")
    check_size(width, height, limits)
    at = 13 + _colours_size(content[10])
    control = b""
    for _ in range(_MAX_BLOCKS):
        if content[at] == 0x2C:
            return Essence(content[: 13 + _colours_size(content[10])] + control + content[at:])
        if content[at] != 0x21:
            break
        label, start = content[at + 1], at
        at += 2
        num_blocks = 0
        while content[at]:
            at += 1 + content[at]
            num_blocks += 1
            if num_blocks > _MAX_BLOCKS + len(content) // 64:
                raise MediaUndecodable("GIF with an endless comment")
        at += 1
        if label == 0xF9:
            control = content[start:at]
    raise MediaUndecodable("GIF without a picture")


def _colours_size(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _ico(content: bytes, limits: DecodeLimits) -> Essence:
    (num_entries,) = struct.unpack_from("<H", content, 4)
    # Pillow's order: the largest, and of these the deepest, by the directory.
    best = min(
        (struct.unpack_from("<BBBBHHII", content, 6 + 16 * entry) for entry in range(num_entries)),
        key=lambda entry: (-(entry[0] or 256) * (entry[1] or 256), -entry[5]),
        default=None,
    )
    if best is None:
        raise MediaUndecodable("ICO without a picture")
    picture = content[best[7] : best[7] + best[6]]
    if picture.startswith(b"\x89PNG\r\n\x1a\n"):
        return Essence(_png(picture, limits).content, 1)
    # Twice the height: a mask of one bit a pixel follows the picture.
    width, height = struct.unpack_from("<ii", picture, 4)
    check_size(abs(width), abs(height) // 2, limits)
    entry = struct.pack("<BBBBHHII", *best[:6], len(picture), 22)
    return Essence(b"\0\0\1\0\1\0" + entry + picture, 1)


def _pnm(content: bytes, limits: DecodeLimits) -> Essence:
    """Numbers as text are read slowly; nobody sends large ones."""
    if content[1:2] in b"123" and len(content) > _MAX_PNM_TEXT_BYTES:
        raise MediaTooLarge(
            f"PNM as text of {len(content)} bytes, allowed are {_MAX_PNM_TEXT_BYTES}; send the binary kind"
        )
    return Essence(content)


def _webp(content: bytes, limits: DecodeLimits) -> Essence:
    name = content[12:16]
    if name == b"VP8X":
        width = 1 + int.from_bytes(content[24:27], "little")
        height = 1 + int.from_bytes(content[27:30], "little")
    elif name == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif name == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", content, 26))
    else:
        raise ValueError("WebP without a picture")
    check_size(width, height, limits)
    return Essence(content)


def _jpeg2000(content: bytes, limits: DecodeLimits) -> Essence:
    at = content.find(b"\xff\x4f\xff\x51")
    if at < 0:
        raise ValueError("JPEG 2000 without a codestream")
    right, bottom, left, top, tile_width, tile_height, tiles_left, tiles_top, num_components = struct.unpack_from(
        ">8IH", content, at + 8
    )
    width, height = right - left, bottom - top
    if width <= 0 or height <= 0 or not tile_width or not tile_height or not 1 <= num_components <= 5:
        raise ValueError("JPEG 2000 of no size")
    check_size(width, height, limits)
    num_tiles = -(-(right - tiles_left) // tile_width) * -(-(bottom - tiles_top) // tile_height)
    # A tile costs kilobytes before it has a pixel.
    if num_tiles > 64 + width * height // 1024:
        raise MediaUndecodable(f"JPEG 2000 of {width} x {height} pixels in {num_tiles} tiles")
    num_there = len(_tiles_there(content, at))
    if num_there < num_tiles:
        # The decoder would leave them grey.
        raise MediaUndecodable(f"truncated JPEG 2000: of {num_tiles} tiles {num_there} are there")
    return Essence(content)


def _tiles_there(content: bytes, start: int) -> set[int]:
    """Numbers of the tiles of which a codestream has at least a part."""
    at = start + 2
    while content[at : at + 2] not in (b"\xff\x90", b""):
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    tiles = set()
    while content[at : at + 2] == b"\xff\x90":
        tile, size = struct.unpack_from(">HI", content, at + 4)
        tiles.add(tile)
        # 0: up to the end of the codestream.
        if size < 14:
            break
        at += size
    return tiles


def _heif(content: bytes, limits: DecodeLimits) -> Essence:
    """AVIF and HEIC: the size properties of all items, the tiles of a grid among them."""
    for match in _TIFF_HEADER.finditer(content):
        if value_bytes(content, match.end() if match.group().startswith(b"Exif") else match.start()) > len(content):
            raise MediaUndecodable("the picture's EXIF block claims more than the file holds")
    for width, height in _size_properties(content):
        check_size(width, height, limits)
    return Essence(content)


def _size_properties(content: bytes) -> Iterator[tuple[int, int]]:
    at = content.find(b"ispe\0\0\0\0")
    while 0 <= at <= len(content) - 16:
        if content[at - 4 : at] == b"\0\0\0\x14":
            width, height = struct.unpack_from(">II", content, at + 8)
            yield width, height
        at = content.find(b"ispe\0\0\0\0", at + 1)


def _tiff(content: bytes, limits: DecodeLimits) -> Essence:
    reduced = reduced_tiff(content, limits)
    return Essence(reduced.content, reduced.orientation)


_REDUCERS: Final[dict[str, Callable[[bytes, DecodeLimits], Essence]]] = {
    "PNG": _png,
    "GIF": _gif,
    "ICO": _ico,
    "TIFF": _tiff,
    "PNM": _pnm,
    "WebP": _webp,
    "JPEG 2000": _jpeg2000,
    "AVIF": _heif,
    "HEIC": _heif,
}
