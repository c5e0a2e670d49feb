"""Writers of picture files: through Pillow where it can, by hand where it cannot or where it would hide a mistake."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.fakes.media.case import Colour, Mark

RED: Final = (200, 40, 40)
GREEN: Final = (40, 180, 60)
BLUE: Final = (40, 60, 200)
YELLOW: Final = (230, 210, 40)
WHITE: Final = (255, 255, 255)
QUARTERS: Final[tuple[Mark, ...]] = ((0.25, 0.25, RED), (0.25, 0.75, GREEN), (0.75, 0.25, BLUE), (0.75, 0.75, YELLOW))
"""Marks of `quarters`."""


def quarters(height: int, width: int) -> NDArray[np.uint8]:
    """[height, width, 3]: red and green above, blue and yellow below."""
    picture = np.empty((height, width, 3), dtype=np.uint8)
    picture[: height // 2, : width // 2] = RED
    picture[: height // 2, width // 2 :] = GREEN
    picture[height // 2 :, : width // 2] = BLUE
    picture[height // 2 :, width // 2 :] = YELLOW
    return picture


def saved(pixels: NDArray[Any] | Image.Image, kind: str, **options: Any) -> bytes:
    """An array or a Pillow picture as a file."""
    file = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, kind, **options)
    return file.getvalue()


# EXIF 2.3, tag 0x0112: (side where row 0 lies, side where column 0 lies).
_SIDES: Final = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def stored_for(displayed: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The rows and columns that a camera stores so that `orientation` shows `displayed`."""
    row_side, column_side = _SIDES[orientation]
    stored = displayed
    if row_side in ("left", "right"):
        if row_side == "right":
            stored = stored[:, ::-1]
        if column_side == "bottom":
            stored = stored[::-1]
        return np.ascontiguousarray(stored.swapaxes(0, 1))
    if row_side == "bottom":
        stored = stored[::-1]
    if column_side == "right":
        stored = stored[:, ::-1]
    return np.ascontiguousarray(stored)


def with_orientation(displayed: NDArray[np.uint8], orientation: int, kind: str, **options: Any) -> bytes:
    """`displayed` stored turned, with the tag that turns it back."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(stored_for(displayed, orientation), kind, exif=exif, **options)


def cmyk_jpeg(ink: NDArray[np.uint8], *, adobe: bool) -> bytes:
    """[H, W, 4] ink. Pillow inverts what it is given and says so by Adobe's marker; without the marker, ink is ink."""
    if adobe:
        return saved(Image.fromarray(ink, mode="CMYK"), "JPEG", quality=95)
    return without_segment(saved(Image.fromarray(255 - ink, mode="CMYK"), "JPEG", quality=95), 0xEE)


def ycck_jpeg(ink: NDArray[np.uint8]) -> bytes:
    """[H, W, 4] ink as Adobe's transform 2: its complement in YCbCr, and black inverted."""
    ycc = np.asarray(Image.fromarray(np.ascontiguousarray(ink[:, :, :3])).convert("YCbCr"))
    stored = np.dstack([ycc, 255 - ink[:, :, 3]])
    content = bytearray(saved(Image.fromarray(255 - stored, mode="CMYK"), "JPEG", quality=95))
    content[content.index(b"Adobe") + 11] = 2
    return bytes(content)


def without_segment(jpeg: bytes, marker: int) -> bytes:
    """The JPEG without its header segments FF `marker`."""
    kept, at = bytearray(jpeg[:2]), 2
    while jpeg[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if jpeg[at + 1] != marker:
            kept += jpeg[at:end]
        at = end
    return bytes(kept + jpeg[at:])


PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_rows(rows: Sequence[bytes]) -> bytes:
    """Compressed rows, without filters."""
    return zlib.compress(b"".join(b"\0" + row for row in rows))


def png(
    width: int,
    height: int,
    depth: int,
    colour_type: int,
    rows: Sequence[bytes],
    chunks: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    """A PNG of packed rows; `chunks` go between header and data."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", png_rows(rows)), (b"IEND", b"")]
    return PNG_SIGNATURE + b"".join(png_chunk(kind, body) for kind, body in parts)


def apng(
    size: tuple[int, int], frames: Sequence[tuple[int, int, int, int, NDArray[np.uint8]]], *, hidden: bool
) -> bytes:
    """(x, y, dispose, blend, [h, w, 4]) per frame, 100 ms each, on a canvas of (width, height).

    `hidden` puts a picture in front that is no part of the animation: all green.
    """
    width, height = size
    out = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0))
    out += png_chunk(b"acTL", struct.pack(">II", len(frames), 0))
    sequence = 0
    if hidden:
        out += png_chunk(b"IDAT", png_rows([bytes((*GREEN, 255)) * width] * height))
    for index, (x, y, dispose, blend, pixels) in enumerate(frames):
        control = struct.pack(">IIIIIHHBB", sequence, pixels.shape[1], pixels.shape[0], x, y, 1, 10, dispose, blend)
        data = png_rows([row.tobytes() for row in pixels])
        out += png_chunk(b"fcTL", control)
        sequence += 1
        if index == 0 and not hidden:
            out += png_chunk(b"IDAT", data)
            continue
        out += png_chunk(b"fdAT", struct.pack(">I", sequence) + data)
        sequence += 1
    return PNG_SIGNATURE + out + png_chunk(b"IEND", b"")


def gif(
    size: tuple[int, int],
    palette: Sequence[Colour],
    frames: Sequence[tuple[int, int, int, NDArray[np.uint8]]],
    *,
    transparent: int | None = None,
    delay_cs: int = 10,
) -> bytes:
    """(x, y, disposal, [h, w] palette indices) per frame on a canvas of (width, height). Background is colour 0."""
    bits = max(2, (len(palette) - 1).bit_length())
    table = b"".join(bytes(colour) for colour in palette).ljust(3 << bits, b"\0")
    out = b"GIF89a" + struct.pack("<HHBBB", *size, 0xF0 | bits - 1, 0, 0) + table
    for x, y, disposal, indices in frames:
        flags = disposal << 2 | (transparent is not None)
        out += b"\x21\xf9\4" + struct.pack("<BHB", flags, delay_cs, transparent or 0) + b"\0"
        out += b"\x2c" + struct.pack("<HHHHB", x, y, indices.shape[1], indices.shape[0], 0)
        out += bytes([bits]) + _sub_blocks(_lzw(indices.ravel().tolist(), bits)) + b"\0"
    return out + b"\x3b"


def _lzw(indices: Sequence[int], bits: int) -> bytes:
    """Codes that never grow: the table is cleared before the decoder would widen them."""
    clear, width = 1 << bits, bits + 1
    codes = []
    for at, index in enumerate(indices):
        if at % (clear - 2) == 0:
            codes.append(clear)
        codes.append(index)
    codes.append(clear + 1)
    packed = sum(code << width * at for at, code in enumerate(codes))
    return packed.to_bytes(-(-width * len(codes) // 8), "little")


def _sub_blocks(data: bytes) -> bytes:
    return b"".join(bytes([len(data[at : at + 255])]) + data[at : at + 255] for at in range(0, len(data), 255))


def webp_animation(size: tuple[int, int], frames: Sequence[tuple[int, int, int, NDArray[np.uint8]]]) -> bytes:
    """(x, y, flags, [h, w, 4]) per frame, 100 ms each, lossless. Flags: 1 clears the frame's place after it was shown,
    2 replaces instead of blending."""
    width, height = size
    body = riff_chunk(b"VP8X", struct.pack("<I", 0x12) + _three(width - 1) + _three(height - 1))
    body += riff_chunk(b"ANIM", struct.pack("<IH", 0, 0))
    for x, y, flags, pixels in frames:
        still = saved(pixels, "WEBP", lossless=True, exact=True)
        place = _three(x // 2) + _three(y // 2) + _three(pixels.shape[1] - 1) + _three(pixels.shape[0] - 1)
        body += riff_chunk(b"ANMF", place + _three(100) + bytes([flags]) + still[still.index(b"VP8L") :])
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def riff_chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def _three(value: int) -> bytes:
    return value.to_bytes(3, "little")


def tiff(
    width: int,
    height: int,
    data: bytes,
    *,
    bits: Sequence[int],
    photometric: int,
    order: str = "<",
    sample_format: int = 1,
    tags: Sequence[tuple[int, int, int]] = (),
) -> bytes:
    """One uncompressed strip. `tags` are more (tag, type 3 or 4, value); `order` is struct's."""
    entries = [(256, 4, width), (257, 4, height), (259, 3, 1), (262, 3, photometric), (277, 3, len(bits))]
    entries += [(278, 4, height), (279, 4, len(data)), (339, 3, sample_format), *tags]
    num_entries = len(entries) + 2
    depths_at = 8 + 2 + 12 * num_entries + 4
    data_at = depths_at + 2 * len(bits)
    entries.append((273, 4, data_at))
    directory = {tag: _tiff_entry(order, tag, kind, 1, value) for tag, kind, value in entries}
    depth = _tiff_entry(order, 258, 3, 1, bits[0])
    if len(bits) > 2:
        depth = struct.pack(f"{order}HHII", 258, 3, len(bits), depths_at)
    directory[258] = depth
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, num_entries)
    body = b"".join(directory[tag] for tag in sorted(directory)) + struct.pack(f"{order}I", 0)
    return head + body + struct.pack(f"{order}{len(bits)}H", *bits) + data


def _tiff_entry(order: str, tag: int, kind: int, count: int, value: int) -> bytes:
    packed = struct.pack(f"{order}H", value) + b"\0\0" if kind == 3 else struct.pack(f"{order}I", value)
    return struct.pack(f"{order}HHI", tag, kind, count) + packed


def huge_header(kind: str, width: int, height: int) -> bytes:
    """The head of a small file that claims to be `width` x `height` pixels."""
    match kind:
        case "PNG":
            header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
            data = zlib.compress(b"\0" * 5000)
            return PNG_SIGNATURE + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
        case "GIF":
            picture = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\2\2\x4c\1\0"
            return b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF1, 0, 0) + bytes(12) + picture + b"\x3b"
        case "WEBP":
            still = saved(np.zeros((16, 16, 3), np.uint8), "WEBP")
            body = riff_chunk(b"VP8X", bytes(4) + _three(width - 1) + _three(height - 1)) + still[12:]
            return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
        case "BMP":
            info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 2835, 2835, 0, 0)
            return b"BM" + struct.pack("<IHHI", 54 + 600, 0, 0, 54) + info + bytes(600)
        case "TIFF":
            return tiff(width, height, bytes(600), bits=(8, 8, 8), photometric=2)
        case "JPEG":
            small = saved(np.zeros((16, 16, 3), np.uint8), "JPEG")
            at = small.index(b"\xff\xc0") + 5
            return small[:at] + struct.pack(">HH", height, width) + small[at + 4 :]
        case "PPM":
            return b"P6 %d %d 255\n" % (width, height) + bytes(600)
        case "JPEG2000":
            small = saved(np.zeros((16, 16, 3), np.uint8), "JPEG2000", no_jp2=True)
            # One tile as large as the picture.
            at = small.index(b"\xff\x51") + 6
            size = struct.pack(">II", width, height)
            return small[:at] + size + bytes(8) + size + small[at + 24 :]
        case "ICO":
            inner = huge_header("PNG", width, height)
            return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(inner), 22) + inner
        case _:
            raise ValueError(f"no header is made here for {kind}")
