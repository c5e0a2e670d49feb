"""Small files that would unfold to gigabytes or hours: refused, or the picture alone, within little memory."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from preprocess import DecodeLimits, MediaTooLarge, MediaUndecodable
from preprocess.essence import essence
from preprocess.image import decode_image
from preprocess.tiff import value_bytes
from tests.fakes.media.images import huge_header, png, png_chunk, riff_chunk, saved

PICTURE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
SHAPE = [64, 64, 3]


def exif_of_many_tags(num_tags: int, size: int) -> bytes:
    """Every tag's value is the same `size` bytes: together `num_tags` times the block."""
    tags = b"".join(struct.pack("<HHII", 1000 + tag, 7, size, 8) for tag in range(num_tags))
    block = struct.pack("<2sHIH", b"II", 42, 8, num_tags) + tags + bytes(4)
    return block.ljust(size + 8, b"\0")


def jpeg_with_exif() -> bytes:
    content, block = saved(PICTURE, "JPEG"), exif_of_many_tags(20_000, 1_000_000)
    parts = [b"Exif\0\0" + block[at : at + 60_000] for at in range(0, len(block), 60_000)]
    return content[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts) + content[2:]


def tiff_directory(content: bytes, *more: tuple[int, int, int, int]) -> bytes:
    """The TIFF with more tags, or others in their place, in a directory at its end."""
    (at,) = struct.unpack_from("<I", content, 4)
    (num_tags,) = struct.unpack_from("<H", content, at)
    found = {
        struct.unpack_from("<H", content, at + 2 + 12 * n)[0]: content[at + 2 + 12 * n :][:12] for n in range(num_tags)
    }
    found |= {tag[0]: struct.pack("<HHII", *tag) for tag in more}
    content += b"\0" * (len(content) % 2)
    directory = b"".join(found[tag] for tag in sorted(found))
    return (
        content[:4]
        + struct.pack("<I", len(content))
        + content[8:]
        + struct.pack("<H", len(found))
        + directory
        + bytes(4)
    )


def tiff_of_many_tags() -> bytes:
    long = saved(PICTURE, "TIFF") + bytes(1_000_000)
    return tiff_directory(long, *((40_000 + tag, 7, 1_000_000, 8) for tag in range(20_000)))


def tiff_of_many_pieces() -> bytes:
    long = saved(PICTURE, "TIFF") + bytes(4_000_000)
    return tiff_directory(long, (273, 4, 500_000, 8), (279, 4, 400_000, 8))


def gif_of_a_long_comment() -> bytes:
    content = saved(Image.fromarray(PICTURE).quantize(16), "GIF")
    at = 13 + (3 << (content[10] & 7) + 1)
    return content[:at] + b"!\xfe" + (b"\xff" + bytes(255)) * 40_000 + b"\0" + content[at:]


def png_with(*chunks: bytes) -> bytes:
    content = saved(PICTURE, "PNG")
    return content[:33] + b"".join(chunks) + content[33:]


def png_of_many_data_chunks() -> bytes:
    content = saved(PICTURE, "PNG")
    at = content.index(b"IDAT") - 4
    return content[:at] + png_chunk(b"IDAT", b"") * 200_000 + content[at:]


def icon(file: bytes, bits: int) -> bytes:
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 64, 64, 0, 0, 1, bits, len(file), 22) + file


def icon_of_a_real_picture() -> bytes:
    """Not only the header: the whole picture is there, in a few kilobytes."""
    return icon(png(12_000, 12_000, 1, 0, [bytes(1500)] * 12_000), 32)


def jpeg2000_of_many_tiles() -> bytes:
    content = bytearray(saved(PICTURE, "JPEG2000", no_jp2=True))
    struct.pack_into(">II", content, content.index(b"\xff\x51") + 22, 1, 1)
    return bytes(content)


def jpeg2000_of_two_sizes() -> bytes:
    """The box says 64 x 64, the codestream what a decoder would go by."""
    content = bytearray(saved(PICTURE, "JPEG2000"))
    struct.pack_into(">II", content, content.index(b"\xff\x4f\xff\x51") + 8, 60_000, 60_000)
    return bytes(content)


def avif_of_many_tags() -> bytes:
    bomb = exif_of_many_tags(20_000, 1_000_000)
    # Pillow, which writes the file, would set the bomb off.
    harmless = struct.pack("<2sHIH", b"II", 42, 8, 0).ljust(len(bomb), b"\0")
    content = saved(PICTURE, "AVIF", exif=harmless)
    assert harmless in content
    return content.replace(harmless, bomb)


def tiff_of_one_tag_many_times() -> bytes:
    content = saved(PICTURE, "TIFF") + bytes(1_000_000)
    content += b"\0" * (len(content) % 2)
    (at,) = struct.unpack_from("<I", content, 4)
    (num_tags,) = struct.unpack_from("<H", content, at)
    directory = content[at + 2 : at + 2 + 12 * num_tags] + struct.pack("<HHII", 347, 7, 1_000_000, 8) * 20_000
    head = content[:4] + struct.pack("<I", len(content)) + content[8:]
    return head + struct.pack("<H", len(directory) // 12) + directory + bytes(4)


def webp_canvas() -> bytes:
    side = (16_383).to_bytes(3, "little")
    body = b"WEBP" + riff_chunk(b"VP8X", b"\2\0\0\0" + side + side) + riff_chunk(b"ANIM", bytes(6))
    return b"RIFF" + struct.pack("<I", len(body)) + body


BOMBS: Final[dict[str, tuple[Callable[[], bytes], list[int] | str]]] = {
    "exif.jpg": (jpeg_with_exif, SHAPE),
    "exif.png": (lambda: saved(PICTURE, "PNG", exif=exif_of_many_tags(20_000, 1_000_000)), SHAPE),
    "exif.webp": (lambda: saved(PICTURE, "WEBP", exif=exif_of_many_tags(20_000, 1_000_000)), SHAPE),
    "exif.avif": (avif_of_many_tags, "MediaUndecodable"),
    "tags.tif": (tiff_of_many_tags, SHAPE),
    "one-tag.tif": (tiff_of_one_tag_many_times, "MediaUndecodable"),
    "pieces.tif": (tiff_of_many_pieces, "MediaUndecodable"),
    "tile.tif": (
        lambda: tiff_directory(
            saved(PICTURE, "TIFF", compression="tiff_adobe_deflate"),
            *((322, 4, 1, 40_000), (323, 4, 1, 40_000), (324, 4, 1, 8), (325, 4, 1, 100)),
        ),
        "MediaTooLarge",
    ),
    "strip.tif": (
        lambda: tiff_directory(
            saved(PICTURE, "TIFF", compression="tiff_adobe_deflate"), (278, 4, 1, 2**31), (279, 4, 1, 2**31)
        ),
        "MediaUndecodable",
    ),
    "comment.gif": (gif_of_a_long_comment, SHAPE),
    "texts.png": (
        lambda: png_with(
            png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(20_000_000))),
            *[png_chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(2_000_000)))] * 50,
            png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(20_000_000))),
            png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(20_000_000))),
            png_chunk(b"tEXt", b"Comment\0" + bytes(5_000_000)),
        ),
        SHAPE,
    ),
    "chunks.png": (lambda: png_with(png_chunk(b"prVt", b"") * 200_000), "MediaUndecodable"),
    "data-chunks.png": (png_of_many_data_chunks, "MediaUndecodable"),
    "segments.jpg": (lambda: saved(PICTURE, "JPEG")[:2] + b"\xff\xfe\0\2" * 500_000, "MediaUndecodable"),
    "inner-png.ico": (icon_of_a_real_picture, "MediaTooLarge"),
    "inner-header.ico": (lambda: icon(huge_header("PNG", 60_000, 60_000), 32), "MediaTooLarge"),
    "inner-bitmap.ico": (
        lambda: icon(struct.pack("<IiiHHIIiiII", 40, 12_000, 24_000, 1, 1, 0, 0, 0, 0, 0, 0) + bytes(99), 1),
        "MediaTooLarge",
    ),
    "tiles.j2k": (jpeg2000_of_many_tiles, "MediaUndecodable"),
    "two-sizes.jp2": (jpeg2000_of_two_sizes, "MediaTooLarge"),
    "canvas.webp": (webp_canvas, "MediaTooLarge"),
    "canvas.gif": (lambda: huge_header("GIF", 65_535, 65_535), "MediaTooLarge"),
    "header.bmp": (lambda: huge_header("BMP", 60_000, 60_000), "MediaTooLarge"),
    "header.j2k": (lambda: huge_header("JPEG2000", 60_000, 60_000), "MediaTooLarge"),
    "header.ppm": (lambda: huge_header("PPM", 60_000, 60_000), "MediaTooLarge"),
}
MEMORY_BYTES: Final = 120 * 1024 * 1024
CHILD: Final = """
import json, pathlib, resource, sys, warnings
from preprocess import DecodeLimits, MediaError
from preprocess.image import decode_image
warnings.simplefilter("error")
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), resource.RLIM_INFINITY))
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    content = path.read_bytes()
    try:
        result = decode_image(content, DecodeLimits()).shape
    except MediaError as error:
        result = type(error).__name__
        assert "more memory than the server has" not in str(error), path
    print(json.dumps([path.name, result]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited and measured as Linux does it")
def test_bombs_do_not_go_off(tmp_path: Path) -> None:
    for name, (make, _) in BOMBS.items():
        (tmp_path / name).write_bytes(make())
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(MEMORY_BYTES)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    results = dict(json.loads(line) for line in child.stdout.splitlines())
    assert results == {name: expected for name, (_, expected) in BOMBS.items()}, child.stderr
    assert child.returncode == 0, child.stderr


def test_what_is_left_of_a_png() -> None:
    content = png_with(png_chunk(b"tEXt", b"a\0b"), png_chunk(b"pHYs", bytes(9)), png_chunk(b"eXIf", b"MM"))
    assert essence("PNG", content, DecodeLimits()).content == saved(PICTURE, "PNG")
    plain = saved(PICTURE, "PNG")
    assert essence("PNG", plain, DecodeLimits()).content is plain


def test_what_is_left_of_a_tiff() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "a maker"
    content = saved(PICTURE, "TIFF", exif=exif, compression="tiff_lzw")
    reduced = essence("TIFF", content, DecodeLimits())
    assert reduced.orientation == 6
    with Image.open(io.BytesIO(reduced.content)) as image:
        assert not {0x0112, 0x010F} & set(image.getexif())
        np.testing.assert_array_equal(np.asarray(image), PICTURE)


def test_an_avif_with_too_large_an_exif_block_is_not_opened() -> None:
    with pytest.raises(MediaUndecodable, match="EXIF block claims more than the file holds"):
        essence("AVIF", avif_of_many_tags(), DecodeLimits())


def test_what_the_tags_of_a_block_take() -> None:
    assert value_bytes(exif_of_many_tags(50, 1000), 0) == 50_000
    assert value_bytes(b"no TIFF structure", 0) == 0
    assert value_bytes(exif_of_many_tags(50, 1000)[:100], 0) == 0
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif.get_ifd(0x8769)[0x9003] = "2026:11:30 08:00:00"
    block = exif.tobytes().removeprefix(b"Exif\0\0")
    assert len("a maker\0") + 20 <= value_bytes(block, 0) <= len(block)


ICON = {"sizes": [(64, 64)]}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG2000", "AVIF", "JPEG", "PPM")),
        ("ICO", ICON),
        ("ICO", ICON | {"bitmap_format": "bmp"}),
    ],
)
def test_a_picture_one_pixel_over_the_limit_is_refused(kind: str, options: dict[str, Any]) -> None:
    content = saved(PICTURE, kind, **options)
    assert decode_image(content, DecodeLimits(max_image_pixels=64 * 64)).shape == (64, 64, 3)
    with pytest.raises(MediaTooLarge, match="64 x 64 = 4096 pixels, allowed are 4095"):
        decode_image(content, DecodeLimits(max_image_pixels=64 * 64 - 1))
