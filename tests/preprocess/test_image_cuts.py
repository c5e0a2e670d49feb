"""Pictures that end early, wherever that is: between scans, passes, layers, tiles and chunks as well as within them."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from preprocess import DecodeLimits, MediaUndecodable
from preprocess.image import decode_image
from tests.fakes.media.images import cmyk_jpeg, png_chunk, saved

LIMITS = DecodeLimits()
PICTURE = np.random.default_rng(1).integers(0, 256, (24, 28, 3), dtype=np.uint8).repeat(8, axis=0).repeat(8, axis=1)
VEIL = np.dstack([PICTURE, PICTURE[:, ::-1, 0]])


def interlaced_gif() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PICTURE).convert("P").save(file, "GIF", interlace=1)
    return file.getvalue()


def interlaced_png() -> bytes:
    """Adam7 with a chunk of its own for each pass."""
    pieces, packer = [], zlib.compressobj()
    for left, top, right, down in ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)):
        rows = b"".join(b"\0" + row.tobytes() for row in PICTURE[top::down, left::right])
        pieces.append(packer.compress(rows) + packer.flush(zlib.Z_FULL_FLUSH))
    rows = b"".join(b"\0" + row.tobytes() for row in PICTURE[1::2])
    pieces.append(packer.compress(rows) + packer.flush())
    header = PICTURE.shape[1].to_bytes(4, "big") + PICTURE.shape[0].to_bytes(4, "big") + bytes([8, 2, 0, 0, 1])
    chunks = [(b"IHDR", header), *((b"IDAT", piece) for piece in pieces), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def scan_per_component() -> bytes:
    """A baseline JPEG in three scans, one per colour, as some scanners write them."""
    colours = np.asarray(Image.fromarray(PICTURE).convert("YCbCr"))
    files = [saved(np.ascontiguousarray(colours[:, :, place]), "JPEG") for place in range(3)]
    frame = files[0].index(b"\xff\xc0")
    scans = [file.index(b"\xff\xda") for file in files]
    head = files[0][:frame] + b"\xff\xc0\x00\x11" + files[0][frame + 4 : frame + 9]
    head += b"\x03" + b"\x01\x11\0\x02\x11\0\x03\x11\0" + files[0][frame + 13 : scans[0]]
    bodies = [
        b"\xff\xda\x00\x08\x01" + bytes([place + 1]) + b"\0\0\x3f\0" + file[scan + 10 : -2]
        for place, (file, scan) in enumerate(zip(files, scans, strict=True))
    ]
    return head + b"".join(bodies) + b"\xff\xd9"


MAKERS: dict[str, Callable[[], bytes]] = {
    "baseline.jpg": lambda: saved(PICTURE, "JPEG"),
    "progressive.jpg": lambda: saved(PICTURE, "JPEG", progressive=True),
    "progressive-grey.jpg": lambda: saved(np.ascontiguousarray(PICTURE[:, :, 0]), "JPEG", progressive=True),
    "scan-per-colour.jpg": scan_per_component,
    "cmyk.jpg": lambda: cmyk_jpeg(VEIL, adobe=True),
    "restarts.jpg": lambda: saved(PICTURE, "JPEG", restart_marker_rows=1),
    "lossy.webp": lambda: saved(PICTURE, "WEBP"),
    "alpha.webp": lambda: saved(VEIL, "WEBP"),
    "lossless.webp": lambda: saved(PICTURE, "WEBP", lossless=True),
    "plain.avif": lambda: saved(PICTURE, "AVIF"),
    "alpha.avif": lambda: saved(VEIL, "AVIF"),
    "layers.jp2": lambda: saved(PICTURE, "JPEG2000", quality_layers=[40, 20, 5]),
    "resolutions.j2k": lambda: saved(PICTURE, "JPEG2000", progression="RLCP", no_jp2=True),
    "tiles.j2k": lambda: saved(PICTURE, "JPEG2000", tile_size=(64, 64), no_jp2=True),
    "rows.png": lambda: saved(PICTURE, "PNG"),
    "passes.png": interlaced_png,
    "rows.gif": lambda: saved(Image.fromarray(PICTURE).convert("P"), "GIF"),
    "passes.gif": interlaced_gif,
    "raw.tif": lambda: saved(PICTURE, "TIFF"),
    "strips.tif": lambda: saved(PICTURE, "TIFF", compression="tiff_lzw", strip_size=4096),
    "raw.bmp": lambda: saved(PICTURE, "BMP"),
    "raw.ppm": lambda: saved(PICTURE, "PPM"),
}


@cache
def file_of(name: str) -> bytes:
    return MAKERS[name]()


def decodes(content: bytes) -> NDArray[np.uint8] | None:
    try:
        return decode_image(content, LIMITS)
    except MediaUndecodable:
        return None


@pytest.mark.parametrize("name", MAKERS)
def test_a_file_cut_anywhere_is_refused_or_the_whole_picture(name: str) -> None:
    content = file_of(name)
    whole = decode_image(content, LIMITS)
    # Where structures meet, and in between.
    meets = {match.start() for match in re.finditer(rb"\xff[\xc0-\xff]|IDAT|IEND|mdat|ALPH|VP8", content)}
    meets |= {place + off for place in meets for off in (-4, -2, 2)}
    places = (
        meets | set(range(0, len(content), max(1, len(content) // 60))) | set(range(len(content) - 30, len(content)))
    )
    for end in sorted(place for place in places if 0 < place < len(content)):
        found = decodes(content[:end])
        assert found is None or np.array_equal(found, whole), f"{end} of {len(content)} bytes pass as a picture"


@pytest.mark.parametrize("name", ["baseline.jpg", "progressive.jpg", "progressive-grey.jpg", "scan-per-colour.jpg"])
def test_a_whole_jpeg_needs_no_end_mark(name: str) -> None:
    content = file_of(name)
    np.testing.assert_array_equal(decode_image(content[:-2], LIMITS), decode_image(content, LIMITS))


@pytest.mark.parametrize("name", ["progressive.jpg", "progressive-grey.jpg", "scan-per-colour.jpg"])
def test_a_jpeg_that_ends_between_scans_is_refused(name: str) -> None:
    content = file_of(name)
    scans = [match.start() for match in re.finditer(rb"\xff\xda", content)]
    tables = [match.start() for match in re.finditer(rb"\xff\xc4", content) if match.start() > scans[0]]
    assert len(scans) >= 3
    for end in (*scans[1:], *tables):
        with pytest.raises(MediaUndecodable, match=r"JPEG, .*(truncated|does not decode)"):
            decode_image(content[:end], LIMITS)


def test_scans_that_an_end_mark_vouches_for_are_enough() -> None:
    # Encoders may leave out what would not be seen; whoever wrote the mark was done.
    content = file_of("progressive.jpg")
    last = content.rindex(b"\xff\xda")
    assert decode_image(content[:last] + b"\xff\xd9", LIMITS).shape == PICTURE.shape


def test_tiles_that_are_missing_are_not_grey() -> None:
    content = file_of("tiles.j2k")
    tiles = [match.start() for match in re.finditer(rb"\xff\x90\x00\x0a", content)]
    assert len(tiles) == 12
    for end in (tiles[1], tiles[-1]):
        with pytest.raises(MediaUndecodable, match="of 12 tiles"):
            decode_image(content[:end] + b"\xff\xd9", LIMITS)


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 40), (40, 0)])
def test_a_gif_of_no_size_is_refused(width: int, height: int) -> None:
    content = file_of("rows.gif")
    empty = content[:6] + width.to_bytes(2, "little") + height.to_bytes(2, "little") + content[10:]
    with pytest.raises(MediaUndecodable, match=f"{width} x {height}"):
        decode_image(empty, LIMITS)
