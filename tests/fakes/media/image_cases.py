"""Picture files and what they must come out as. Longer than most files: it is a list."""

from __future__ import annotations

import importlib.util
import io
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from preprocess.types import Modality
from tests.fakes.media.case import Case, Colour, Mark, Picture
from tests.fakes.media.images import (
    BLUE,
    GREEN,
    QUARTERS,
    RED,
    WHITE,
    YELLOW,
    apng,
    cmyk_jpeg,
    gif,
    png,
    quarters,
    saved,
    stored_for,
    tiff,
    webp_animation,
    with_orientation,
    without_segment,
    ycck_jpeg,
)

HAS_HEIF: Final = importlib.util.find_spec("pillow_heif") is not None
_H, _W = 96, 160


def image_cases() -> list[Case]:
    parts = (_orientation, _jpegs, _depths, _alpha, _indexed, _animations, _containers, _shapes)
    return [case for part in parts for case in part()]


def _image(name: str, make: Callable[[], bytes], expect: Picture) -> Case:
    return Case(name, Modality.IMAGE, make, expect)


def _whole(tolerance: int = 2, height: int = _H, width: int = _W) -> Picture:
    """The expectation for `quarters`."""
    return Picture(width, height, QUARTERS, tolerance)


def _filled(colour: Colour, *, height: int = _H, width: int = _W, tolerance: int = 2) -> Picture:
    return Picture(width, height, tuple((y, x, colour) for y in (0.1, 0.5, 0.9) for x in (0.1, 0.5, 0.9)), tolerance)


def _orientation() -> Iterator[Case]:
    """Displayed, the picture is always upright and wider than high."""
    for orientation in range(1, 9):
        for kind, extension, tolerance in (
            ("JPEG", "jpg", 8),
            ("PNG", "png", 1),
            ("WEBP", "webp", 12),
            ("TIFF", "tif", 1),
        ):
            make = partial(with_orientation, quarters(_H, _W), orientation, kind)
            yield _image(f"exif-{orientation}.{extension}", make, _whole(tolerance))
    for orientation in (1, 3, 5, 6, 8):
        make = partial(with_orientation, quarters(_H, _W), orientation, "AVIF", quality=90)
        yield _image(f"turned-{orientation}.avif", make, _whole(12))
    # A grey JPEG and one that the fast decoder leaves to the general one turn the same way.
    yield _image("exif-6-cmyk.jpg", _turned_cmyk, _whole(14))
    yield _image("exif-6-thin.png", partial(with_orientation, quarters(32, 320), 6, "PNG"), _whole(1, 32, 320))
    yield _image("exif-garbage.jpg", _garbage_exif, _whole(8))


def _turned_cmyk() -> bytes:
    ink = 255 - np.rot90(quarters(_H, _W), 1)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.fromarray(np.ascontiguousarray(np.dstack([ink, 0 * ink[:, :, 0]])), mode="CMYK")
    return saved(picture, "JPEG", quality=95, exif=exif)


def _garbage_exif() -> bytes:
    return saved(quarters(_H, _W), "JPEG", quality=95, exif=b"Exif\0\0II*\0\xff\xff\xff\x7fgarbage")


def _ink() -> NDArray[np.uint8]:
    """Ink that a device without colour profile shows as `quarters`: the complement, no black."""
    rgb = quarters(_H, _W)
    return np.dstack([255 - rgb, np.zeros((_H, _W), np.uint8)])


def _black_ink() -> NDArray[np.uint8]:
    ink = np.zeros((_H, _W, 4), np.uint8)
    ink[:, :, 3] = 155
    return ink


def _jpegs() -> Iterator[Case]:
    yield _image("cmyk-adobe.jpg", lambda: cmyk_jpeg(_ink(), adobe=True), _whole(14))
    yield _image("cmyk-plain.jpg", lambda: cmyk_jpeg(_ink(), adobe=False), _whole(14))
    yield _image(
        "cmyk-black-adobe.jpg", lambda: cmyk_jpeg(_black_ink(), adobe=True), _filled((100, 100, 100), tolerance=4)
    )
    yield _image(
        "cmyk-black-plain.jpg", lambda: cmyk_jpeg(_black_ink(), adobe=False), _filled((100, 100, 100), tolerance=4)
    )
    yield _image("ycck-adobe.jpg", lambda: ycck_jpeg(_ink()), _whole(14))
    yield _image("ycck-black-adobe.jpg", lambda: ycck_jpeg(_black_ink()), _filled((100, 100, 100), tolerance=4))
    jpeg = partial(saved, quarters(_H, _W), "JPEG", quality=90)
    yield _image("progressive.jpg", partial(jpeg, progressive=True), _whole(10))
    yield _image("subsampling-444.jpg", partial(jpeg, subsampling=0), _whole(8))
    yield _image("restart-markers.jpg", partial(jpeg, restart_marker_blocks=2), _whole(10))
    yield _image("optimised.jpg", partial(jpeg, optimize=True), _whole(10))
    yield _image("no-jfif-header.jpg", lambda: without_segment(jpeg(), 0xE0), _whole(10))
    yield _image("trailing-bytes.jpg", lambda: jpeg() + b"\0" * 500 + b"trailer", _whole(10))
    grey = np.asarray(Image.fromarray(quarters(_H, _W)).convert("L"))
    marks = tuple((y, x, _grey(colour)) for y, x, colour in QUARTERS)
    yield _image("grey.jpg", partial(saved, grey, "JPEG", quality=95), Picture(_W, _H, marks, 4))
    yield _image("rgb-adobe.jpg", partial(jpeg, keep_rgb=True), _whole(8))
    yield _image("two-pictures.mpo", partial(_mpo), _whole(10))


def _mpo() -> bytes:
    other = Image.new("RGB", (_W, _H), BLUE)
    return saved(Image.fromarray(quarters(_H, _W)), "MPO", save_all=True, append_images=[other])


def _grey(colour: Colour) -> Colour:
    level = round(0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2])
    return (level, level, level)


def _ramp() -> NDArray[np.uint16]:
    """[32, 256]: column x is x in 8 bits, spread over 16."""
    return np.tile(np.arange(256, dtype=np.uint16) * 257, (32, 1))


def _levels(num_levels: int = 256) -> Picture:
    step = 256 // num_levels
    columns = range(step // 2, 256, step)
    marks = tuple((0.5, (x + 0.5) / 256, (_level(x, num_levels),) * 3) for x in columns)
    return Picture(256, 32, marks, 1, num_levels)


def _level(x: int, num_levels: int) -> int:
    return round((x * num_levels // 256) * 255 / (num_levels - 1))


def _rows(ramp: NDArray[np.generic]) -> list[bytes]:
    return [row.tobytes() for row in ramp]


def _packed(depth: int) -> list[bytes]:
    """The ramp in rows of 1, 2 or 4 bits a pixel."""
    values = (np.arange(256) >> (8 - depth)).astype(np.uint8)
    bits = (values[:, None] >> np.arange(depth - 1, -1, -1)) & 1
    return [np.packbits(bits.ravel()).tobytes()] * 32


def _depths() -> Iterator[Case]:
    ramp = _ramp()
    rgb = np.stack([ramp, ramp, ramp], axis=2)
    yield _image("grey-16.png", lambda: png(256, 32, 16, 0, _rows(ramp.astype(">u2"))), _levels())
    yield _image("rgb-16.png", lambda: png(256, 32, 16, 2, _rows(rgb.astype(">u2"))), _levels())
    opaque = np.dstack([rgb, np.full_like(ramp, 65535)])
    yield _image("rgba-16.png", lambda: png(256, 32, 16, 6, _rows(opaque.astype(">u2"))), _levels())
    grey_alpha = np.dstack([ramp, np.full_like(ramp, 65535)])
    yield _image("grey-alpha-16.png", lambda: png(256, 32, 16, 4, _rows(grey_alpha.astype(">u2"))), _levels())
    for depth in (1, 2, 4):
        yield _image(f"grey-{depth}.png", partial(png, 256, 32, depth, 0, _packed(depth)), _levels(1 << depth))
    for order, name in (("<", "little"), (">", "big")):
        data = ramp.astype(f"{order}u2").tobytes()
        yield _image(
            f"grey-16-{name}.tif", partial(tiff, 256, 32, data, bits=(16,), photometric=1, order=order), _levels()
        )
        data = rgb.astype(f"{order}u2").tobytes()
        make = partial(tiff, 256, 32, data, bits=(16, 16, 16), photometric=2, order=order)
        yield _image(f"rgb-16-{name}.tif", make, _levels())
    signed = (ramp // 257).astype("<i4").tobytes()
    make = partial(tiff, 256, 32, signed, bits=(32,), photometric=1, sample_format=2)
    yield _image("grey-32-holding-bytes.tif", make, _levels())
    unit = (ramp / 65535).astype("<f4").tobytes()
    make = partial(tiff, 256, 32, unit, bits=(32,), photometric=1, sample_format=3)
    yield _image("grey-float.tif", make, _levels())
    white_is_zero = (255 - ramp // 257).astype(np.uint8).tobytes()
    yield _image("grey-white-is-zero.tif", partial(tiff, 256, 32, white_is_zero, bits=(8,), photometric=0), _levels())
    ink = _ink()
    make = partial(tiff, _W, _H, ink.tobytes(), bits=(8, 8, 8, 8), photometric=5)
    yield _image("cmyk.tif", make, _whole(4))
    bits = np.indices((_H, _W)).sum(axis=0) // 32 % 2 == 0
    halves = tuple((y, x, WHITE if bits[int(y * _H), int(x * _W)] else (0, 0, 0)) for y, x, _ in QUARTERS)
    for kind, extension in (("PNG", "png"), ("TIFF", "tif"), ("PPM", "pbm"), ("BMP", "bmp")):
        yield _image(f"one-bit.{extension}", partial(saved, Image.fromarray(bits), kind), Picture(_W, _H, halves))


# Garbage colour under full transparency must not show; half transparent is half white.
_VEILED: Final[tuple[Mark, ...]] = (
    (0.25, 0.25, RED),
    (0.25, 0.75, WHITE),
    (0.75, 0.25, (148, 158, 228)),
    (0.75, 0.75, YELLOW),
)


def _veil() -> NDArray[np.uint8]:
    """[H, W] alpha of the quarters: opaque, clear, half, opaque."""
    alpha = np.full((_H, _W), 255, np.uint8)
    alpha[: _H // 2, _W // 2 :] = 0
    alpha[_H // 2 :, : _W // 2] = 128
    return alpha


def _alpha() -> Iterator[Case]:
    rgba = np.dstack([quarters(_H, _W), _veil()])
    for kind, extension, tolerance, options in (
        ("PNG", "png", 2, {}),
        ("WEBP", "webp", 2, {"lossless": True, "exact": True}),
        ("TIFF", "tif", 2, {}),
        ("AVIF", "avif", 12, {"quality": 95}),
        ("ICO", "ico", 2, {"sizes": [(_W, _H)]}),
    ):
        yield _image(f"rgba.{extension}", partial(saved, rgba, kind, **options), Picture(_W, _H, _VEILED, tolerance))
    dark = np.full((_H, _W), 20, np.uint8)
    grey_marks = ((0.25, 0.25, (20,) * 3), (0.25, 0.75, WHITE), (0.75, 0.25, (137,) * 3))
    for kind in ("PNG", "TIFF"):
        make = partial(saved, Image.fromarray(np.dstack([dark, _veil()]), mode="LA"), kind)
        yield _image(f"la.{kind.lower()}", make, Picture(_W, _H, grey_marks))
    yield _image(
        "colour-key.png", _colour_key, Picture(_W, _H, ((0.25, 0.25, RED), (0.25, 0.75, WHITE), (0.75, 0.25, BLUE)))
    )
    key = struct.pack(">H", 7)
    grey = np.full((_H, _W), 90, np.uint8)
    grey[: _H // 2] = 7
    make = partial(png, _W, _H, 8, 0, _rows(grey), [(b"tRNS", key)])
    yield _image("grey-key.png", make, Picture(_W, _H, ((0.25, 0.5, WHITE), (0.75, 0.5, (90, 90, 90)))))
    wide = np.full((_H, _W), 0x5A5A, ">u2")
    wide[: _H // 2] = 0x0707
    make = partial(png, _W, _H, 16, 0, _rows(wide), [(b"tRNS", struct.pack(">H", 0x0707))])
    yield _image("grey-16-key.png", make, Picture(_W, _H, ((0.25, 0.5, WHITE), (0.75, 0.5, (90, 90, 90)))))
    bits = [bytes([255] * (_W // 8))] * (_H // 2) + [bytes(_W // 8)] * (_H // 2)
    make = partial(png, _W, _H, 1, 0, bits, [(b"tRNS", struct.pack(">H", 0))])
    yield _image("one-bit-key.png", make, _filled(WHITE))


def _colour_key() -> bytes:
    chunks = [(b"tRNS", struct.pack(">HHH", *GREEN))]
    return png(_W, _H, 8, 2, _rows(quarters(_H, _W)), chunks)


_PALETTE: Final = (RED, GREEN, BLUE, YELLOW)


def _indices(height: int = _H, width: int = _W) -> NDArray[np.uint8]:
    """[height, width]: 0 and 1 above, 2 and 3 below, the quarters of `_PALETTE`."""
    indices = np.zeros((height, width), np.uint8)
    indices[:, width // 2 :] += 1
    indices[height // 2 :] += 2
    return indices


def _paletted() -> Image.Image:
    image = Image.fromarray(_indices(), mode="P")
    image.putpalette([value for colour in _PALETTE for value in colour])
    return image


def _indexed() -> Iterator[Case]:
    table = (b"PLTE", b"".join(bytes(colour) for colour in _PALETTE))
    rows = _rows(_indices())
    yield _image("palette.png", partial(png, _W, _H, 8, 3, rows, [table]), _whole())
    veil = (b"tRNS", bytes([255, 0, 128]))
    yield _image("palette-trns.png", partial(png, _W, _H, 8, 3, rows, [table, veil]), Picture(_W, _H, _VEILED))
    fours = [bytes(left << 4 | right for left, right in zip(row[::2], row[1::2], strict=True)) for row in rows]
    yield _image("palette-4-trns.png", partial(png, _W, _H, 4, 3, fours, [table, veil]), Picture(_W, _H, _VEILED))
    for kind, extension in (("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif")):
        yield _image(f"palette.{extension}", partial(saved, _paletted(), kind), _whole())
    one_clear = Picture(_W, _H, ((0.25, 0.25, RED), (0.25, 0.75, WHITE), (0.75, 0.25, BLUE)))
    yield _image("transparent.gif", lambda: saved(_paletted(), "GIF", transparency=1), one_clear)
    yield _image("pa.tif", _palette_alpha, Picture(_W, _H, _VEILED))


def _palette_alpha() -> bytes:
    """Palette indices and alpha, interleaved; the palette is a tag of 3 x 256 words."""
    pixels = np.dstack([_indices(), _veil()]).tobytes()
    channels = [[colour[channel] * 257 for colour in _PALETTE] + [0] * 252 for channel in range(3)]
    words = [word for channel in channels for word in channel]
    plain = tiff(
        _W, _H, pixels + struct.pack("<768H", *words), bits=(8, 8), photometric=3, tags=((338, 3, 2), (320, 3, 0))
    )
    # The strip is the pixels alone, and the palette's entry points behind it.
    content = plain.replace(
        struct.pack("<HHII", 279, 4, 1, len(pixels) + 1536), struct.pack("<HHII", 279, 4, 1, len(pixels))
    )
    where = struct.pack("<HHII", 320, 3, 768, len(plain) - 1536)
    return content.replace(struct.pack("<HHIHH", 320, 3, 1, 0, 0), where)


def _block(colour: Colour, height: int, width: int, alpha: int = 255) -> NDArray[np.uint8]:
    return np.full((height, width, 4), (*colour, alpha), np.uint8)


def _animations() -> Iterator[Case]:
    """Sent as pictures: the first frame, composited on the canvas."""
    offset = ((0.1, 0.1, WHITE), (0.5, 0.5, RED), (0.9, 0.9, WHITE))
    palette = (WHITE, RED, GREEN, BLUE)
    small = np.full((32, 64), 1, np.uint8)
    full = np.full((_H, _W), 2, np.uint8)
    frames = [(48, 32, 1, small), (0, 0, 1, full)]
    make = partial(gif, (_W, _H), palette, frames, transparent=0)
    yield _image("first-frame-offset.gif", make, Picture(_W, _H, offset))
    whole = [(0, 0, 2, np.full((_H, _W), 1, np.uint8)), (0, 0, 1, full)]
    yield _image("animated.gif", partial(gif, (_W, _H), palette, whole), _filled(RED))
    red, green = _block(RED, _H, _W), _block(GREEN, _H, _W)
    yield _image("animated.webp", partial(webp_animation, (_W, _H), [(0, 0, 2, red), (0, 0, 2, green)]), _filled(RED))
    frame = _block(RED, 32, 64)
    make = partial(webp_animation, (_W, _H), [(48, 32, 0, frame), (0, 0, 2, green)])
    yield _image("first-frame-offset.webp", make, Picture(_W, _H, offset))
    make = partial(apng, (_W, _H), [(0, 0, 0, 0, red), (10, 10, 0, 0, _block(BLUE, 20, 20))], hidden=False)
    yield _image("animated.apng.png", make, _filled(RED))
    stills = [Image.new("RGB", (_W, _H), colour) for colour in (RED, BLUE)]
    for kind, extension in (("AVIF", "avif"), ("TIFF", "tif")):
        make = partial(saved, stills[0], kind, save_all=True, append_images=stills[1:])
        yield _image(f"two-pictures.{extension}", make, _filled(RED, tolerance=4))
    # The picture in front is what a reader of pictures shows.
    make = partial(apng, (_W, _H), [(0, 0, 0, 0, red), (0, 0, 0, 0, _block(BLUE, _H, _W))], hidden=True)
    yield _image("hidden-default.apng.png", make, _filled(GREEN))


def _containers() -> Iterator[Case]:
    rgb = quarters(_H, _W)
    yield _image("plain.png", partial(saved, rgb, "PNG"), _whole())
    yield _image("many-sizes.ico", partial(saved, rgb, "ICO", sizes=[(16, 16), (64, 32), (_W, _H)]), _whole())
    yield _image("interlaced.png", _interlaced, _whole())
    yield _image("lossless.webp", partial(saved, rgb, "WEBP", lossless=True), _whole())
    yield _image("lossy.webp", partial(saved, rgb, "WEBP", quality=80), _whole(12))
    yield _image("plain.avif", partial(saved, rgb, "AVIF", quality=90), _whole(12))
    yield _image("plain.bmp", partial(saved, rgb, "BMP"), _whole())
    yield _image("top-down.bmp", _top_down_bmp, _whole())
    yield _image("plain.ppm", partial(saved, rgb, "PPM"), _whole())
    yield _image("plain.jp2", partial(saved, rgb, "JPEG2000"), _whole(4))
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        tolerance = 12 if compression == "jpeg" else 1
        yield _image(f"{compression}.tif", partial(saved, rgb, "TIFF", compression=compression), _whole(tolerance))
    if HAS_HEIF:
        for orientation in (1, 3, 5, 6, 7, 8):
            yield _image(f"turned-{orientation}.heic", partial(heic, orientation), _whole(12))
    # What a file is, its bytes say.
    yield _image("png-inside.jpg", partial(saved, quarters(_H, _W), "PNG"), _whole())
    yield _image("jpeg-inside.png", partial(saved, quarters(_H, _W), "JPEG", quality=95), _whole(8))
    yield _image("webp-inside.gif", partial(saved, quarters(_H, _W), "WEBP", lossless=True), _whole())


def heic(orientation: int) -> bytes:
    import pillow_heif

    # Written without registering anything with Pillow: that is the decoder's business.
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = pillow_heif.from_pillow(Image.fromarray(stored_for(quarters(_H, _W), orientation)))
    file = io.BytesIO()
    picture.save(file, quality=90, exif=exif.tobytes())
    return file.getvalue()


def _interlaced() -> bytes:
    """Adam7, in its seven passes."""
    rgb = quarters(_H, _W)
    rows: list[bytes] = []
    for x, y, step_x, step_y in (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ):
        rows += _rows(rgb[y::step_y, x::step_x])
    content = png(_W, _H, 8, 2, rows)
    header = struct.pack(">IIBBBBB", _W, _H, 8, 2, 0, 0, 0)
    return content.replace(_chunk_tail(header), _chunk_tail(header[:-1] + b"\1"))


def _chunk_tail(header: bytes) -> bytes:
    import zlib

    return header + struct.pack(">I", zlib.crc32(b"IHDR" + header))


def _top_down_bmp() -> bytes:
    rows = quarters(_H, _W)[:, :, ::-1].tobytes()
    info = struct.pack("<IiiHHIIiiII", 40, _W, -_H, 1, 24, 0, len(rows), 2835, 2835, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(rows), 0, 0, 54) + info + rows


def _shapes() -> Iterator[Case]:
    one = np.array([[RED]], np.uint8)
    yield _image("1x1.png", partial(saved, one, "PNG"), Picture(1, 1, ((0.5, 0.5, RED),), grid=(2, 2)))
    yield _image("1x1.jpg", partial(saved, one, "JPEG", quality=95), Picture(1, 1, ((0.5, 0.5, RED),), 6, grid=(2, 2)))
    yield _image(
        "1x1.gif",
        partial(gif, (1, 1), (RED, GREEN), [(0, 0, 0, np.zeros((1, 1), np.uint8))]),
        Picture(1, 1, ((0.5, 0.5, RED),), grid=(2, 2)),
    )
    # 3 rows, 3 columns, 3 by 3, and 4: sizes that a channel count is mistaken for.
    yield _image("3-rows.png", partial(saved, _halves(3, 64), "PNG"), _two_halves(3, 64, (2, 42)))
    yield _image(
        "3-columns.png", partial(saved, _halves(3, 64).swapaxes(0, 1), "PNG"), _two_halves_down(64, 3, (42, 2))
    )
    yield _image(
        "3x3.png",
        partial(saved, np.full((3, 3, 3), GREEN, np.uint8), "PNG"),
        Picture(3, 3, ((0.5, 0.5, GREEN),), grid=(2, 2)),
    )
    yield _image(
        "4-rows-rgba.png", partial(saved, _block(BLUE, 4, 40), "PNG"), Picture(40, 4, ((0.5, 0.5, BLUE),), grid=(2, 20))
    )
    yield _image(
        "grey-3-rows.png",
        partial(saved, np.full((3, 30), 99, np.uint8), "PNG"),
        Picture(30, 3, ((0.5, 0.5, (99,) * 3),), grid=(2, 20)),
    )
    yield _image(
        "odd-size.jpg",
        partial(saved, quarters(97, 163), "JPEG", quality=95),
        Picture(163, 97, QUARTERS, 8, grid=(6, 10)),
    )
    yield _image("ratio-200.png", partial(saved, _halves(40, 8000), "PNG"), _two_halves(40, 8000, (2, 500)))


def _halves(height: int, width: int) -> NDArray[np.uint8]:
    picture = np.full((height, width, 3), RED, np.uint8)
    picture[:, width // 2 :] = BLUE
    return picture


def _two_halves(height: int, width: int, grid: tuple[int, int]) -> Picture:
    return Picture(width, height, ((0.5, 0.25, RED), (0.5, 0.75, BLUE)), grid=grid)


def _two_halves_down(height: int, width: int, grid: tuple[int, int]) -> Picture:
    return Picture(width, height, ((0.25, 0.5, RED), (0.75, 0.5, BLUE)), grid=grid)
