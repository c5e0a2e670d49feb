"""Files as people send them: depths, keys, containers, cut and damaged ones. Expected values follow from the file.

Long, because it is one list of kinds of file.
"""

from __future__ import annotations

import importlib.util
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image

from preprocess import DecodeLimits, MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.image import decode_image
from tests.fakes.clips import blocks, picture_file
from tests.fakes.media.images import apng, gif, png, png_chunk, saved, stored_for, tiff, with_orientation

LIMITS = DecodeLimits()
PIXELS = blocks(40, 56, seed=2)
HEIF = pytest.mark.skipif(importlib.util.find_spec("pillow_heif") is None, reason="pillow-heif is not installed")


def decoded(content: bytes) -> NDArray[np.uint8]:
    return decode_image(content, LIMITS)


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", [0, 1])
def test_tiff_is_turned_once(orientation: int, order: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"compression": "tiff_lzw"} if order else {"big_tiff": True}
    content = saved(stored_for(PIXELS, orientation), "TIFF", exif=exif, **options)
    np.testing.assert_array_equal(decoded(content), PIXELS)


@pytest.mark.parametrize("orientation", [3, 5, 6, 8])
def test_avif_is_turned_once(orientation: int) -> None:
    content = with_orientation(PIXELS, orientation, "AVIF", quality=100, subsampling="4:4:4")
    np.testing.assert_allclose(decoded(content), PIXELS, atol=12)


def test_the_rotation_of_an_avif_container_goes_before_its_xmp() -> None:
    content = saved(PIXELS, "AVIF", quality=100, subsampling="4:4:4", xmp=b'<x tiff:Orientation="6"/>')
    assert decoded(content).shape == PIXELS.shape


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def raw_profile(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    block = exif.tobytes()
    lines = "\n".join(block.hex()[at : at + 72] for at in range(0, 2 * len(block), 72))
    return f"\nexif\n{len(block):8}\n{lines}\n".encode()


@pytest.mark.parametrize(
    "chunk",
    [
        png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
        png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0en\0x\0" + zlib.compress(XMP)),
        png_chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile(6)),
        png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(6))),
    ],
    ids=["XMP", "compressed XMP", "raw profile", "compressed raw profile"],
)
def test_orientation_in_texts_of_a_png(chunk: bytes) -> None:
    content = saved(stored_for(PIXELS, 6), "PNG")
    np.testing.assert_array_equal(decoded(content[:33] + chunk + content[33:]), PIXELS)


def test_orientation_in_xmp_of_a_jpeg_and_exif_first() -> None:
    upright = saved(PIXELS, "JPEG", quality=90)
    body = b"http://ns.adobe.com/xap/1.0/\0" + XMP
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    expected = np.rot90(decoded(upright), -1)
    np.testing.assert_array_equal(decoded(upright[:2] + segment + upright[2:]), expected)
    exif = Image.Exif()
    exif[0x0112] = 3
    both = saved(PIXELS, "JPEG", quality=90, exif=exif)
    np.testing.assert_array_equal(decoded(both[:2] + segment + both[2:]), decoded(upright)[::-1, ::-1])


@pytest.mark.parametrize("cut", [0, 3, 9, 15])
def test_damaged_exif_leaves_the_picture_upright(cut: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = saved(PIXELS, "JPEG", quality=90, exif=exif.tobytes()[: 6 + cut] + b"\xff\xff")
    assert decoded(content).shape == PIXELS.shape


# Depth and transparency


RAMP = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
GREYS = np.arange(256, dtype=np.uint8).reshape(16, 16)


def rows_of(values: NDArray[Any], code: str = ">u2") -> list[bytes]:
    return [row.astype(code).tobytes() for row in values]


@pytest.mark.parametrize(("colour_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bit_png_keeps_the_full_range(colour_type: int, channels: int) -> None:
    samples = np.repeat(RAMP[:, :, None], channels, axis=2)
    if channels in (2, 4):
        samples[:, :, -1] = 65535
    content = png(16, 16, 16, colour_type, rows_of(samples.reshape(16, -1)))
    np.testing.assert_array_equal(decoded(content), np.repeat(GREYS[:, :, None], 3, axis=2))


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_tiff_keeps_the_full_range(channels: int, big_endian: bool) -> None:
    samples = np.repeat(RAMP[:, :, None], channels, axis=2)
    data = samples.astype(">u2" if big_endian else "<u2").tobytes()
    content = tiff(
        16, 16, data, bits=(16,) * channels, photometric=2 if channels == 3 else 1, order=">" if big_endian else "<"
    )
    np.testing.assert_array_equal(decoded(content), np.repeat(GREYS[:, :, None], 3, axis=2))


@pytest.mark.parametrize("peak", [65535, 12_850, 200])
def test_a_dark_16_bit_pgm_stays_dark(peak: int) -> None:
    content = b"P5 2 1 65535\n" + struct.pack(">HH", 0, peak)
    assert decoded(content)[0, :, 0].tolist() == [0, round(peak * 255 / 65535)]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_the_colour_key_of_a_grey_png_has_the_depth_of_the_file(depth: int) -> None:
    values = np.arange(2**depth)[None, :16]
    bits = "".join(f"{value:0{depth}b}" for value in values[0])
    row = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    content = png(values.size, 1, depth, 0, [row], [(b"tRNS", struct.pack(">H", 1))])
    expected = values[0] * 255 // (2**depth - 1)
    expected[1] = 255
    np.testing.assert_array_equal(decoded(content)[0, :, 1], expected)


def test_the_colour_key_of_deep_pngs() -> None:
    grey = np.array([[300, 301, 40_000]])
    content = png(3, 1, 16, 0, rows_of(grey), [(b"tRNS", struct.pack(">H", 301))])
    assert decoded(content)[0, :, 0].tolist() == [1, 255, 156]
    colours = np.array([[[0x1234, 0x5678, 0x9ABC], [0x4444, 0x5678, 0x9ABC]]]).reshape(1, -1)
    content = png(2, 1, 16, 2, rows_of(colours), [(b"tRNS", struct.pack(">HHH", 0x1234, 0x5678, 0x9ABC))])
    assert decoded(content).tolist() == [[[255, 255, 255], [0x44, 0x56, 0x9A]]]


def test_palettes_of_few_bits_with_alpha() -> None:
    palette = bytes([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    content = png(4, 1, 2, 3, [bytes([0b00011011])], [(b"PLTE", palette), (b"tRNS", bytes([255, 0, 128]))])
    assert decoded(content).tolist() == [[[255, 0, 0], [255, 255, 255], [127, 127, 255], [9, 9, 9]]]


def test_premultiplied_alpha_of_a_tiff() -> None:
    # Half transparent red: stored as 128, 0, 0 when multiplied already, as 255, 0, 0 when not.
    for stored, extra in (((128, 0, 0, 128), 1), ((255, 0, 0, 128), 2)):
        image = Image.frombytes("RGBA", (2, 2), bytes(stored * 4))
        whole = saved(image, "TIFF")
        assert struct.pack("<HHIHH", 338, 3, 1, 2, 0) in whole
        content = whole.replace(struct.pack("<HHIHH", 338, 3, 1, 2, 0), struct.pack("<HHIHH", 338, 3, 1, extra, 0))
        np.testing.assert_allclose(decoded(content)[0, 0], (255, 127, 127), atol=1)


def test_a_large_picture_is_the_same_in_every_band() -> None:
    """Conversions work on bands of a million pixels: what lies on both sides of a border fits together."""
    grey = np.add.outer(np.arange(1400), np.arange(1600)).astype(np.uint16) * 20
    content = saved(grey, "PNG", compress_level=1)
    np.testing.assert_array_equal(decoded(content)[:, :, 0], np.rint(grey * (255 / 65535)).astype(np.uint8))
    rgba = np.zeros((1400, 1600, 4), np.uint8)
    rgba[:, :, 0] = grey >> 8
    rgba[:, :, 3] = np.arange(1600) % 2 * 255
    content = saved(rgba, "PNG", compress_level=1)
    expected = np.where(rgba[:, :, 3:] == 255, rgba[:, :, :3], 255)
    np.testing.assert_array_equal(decoded(content), expected)


# Animations and icons


PALETTE = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9))


@pytest.mark.parametrize("transparent", [None, 2])
def test_the_canvas_around_the_first_picture_of_a_gif_is_white(transparent: int | None) -> None:
    small = np.full((4, 6), 1, np.uint8)
    small[0, 0] = 2
    content = gif(
        (16, 12), PALETTE, [(5, 3, 1, small), (0, 0, 1, np.zeros((12, 16), np.uint8))], transparent=transparent
    )
    expected = np.full((12, 16, 3), 255, np.uint8)
    expected[3:7, 5:11] = (0, 255, 0)
    expected[3, 5] = (0, 0, 255) if transparent is None else 255
    np.testing.assert_array_equal(decoded(content), expected)


def test_comments_of_a_gif_are_left_out() -> None:
    content = saved(Image.fromarray(PIXELS).quantize(16), "GIF")
    at = 13 + (3 << (content[10] & 7) + 1)
    # Joined one by one, this would be quadratic: minutes.
    comment = b"!\xfe" + (b"\xff" + bytes(255)) * 50_000 + b"\0"
    np.testing.assert_array_equal(decoded(content[:at] + comment + content[at:]), decoded(content))


def test_animation_of_a_png_keeps_its_default_picture() -> None:
    red, blue = (np.full((8, 12, 4), (*colour, 255), np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    shown = apng((12, 8), [(0, 0, 0, 0, red), (0, 0, 0, 0, blue)], hidden=False)
    assert decoded(shown)[4, 4].tolist() == [255, 0, 0]


def icon(*pictures: tuple[int, int, int, bytes]) -> bytes:
    """(width, height, bits, file) each."""
    head, files = b"", b""
    start = 6 + 16 * len(pictures)
    for width, height, bits, file in pictures:
        head += struct.pack("<BBBBHHII", width % 256, height % 256, 0, 0, 1, bits, len(file), start + len(files))
        files += file
    return struct.pack("<HHH", 0, 1, len(pictures)) + head + files


def test_icons_give_their_largest_picture() -> None:
    small, large = (
        saved(Image.new("RGBA", (side, side), colour), "PNG") for side, colour in ((16, "red"), (48, "blue"))
    )
    result = decoded(icon((16, 16, 32, small), (48, 48, 32, large)))
    assert result.shape == (48, 48, 3)
    assert result[9, 9].tolist() == [0, 0, 255]
    # The deeper of two equal ones, and the bitmap form with its mask.
    for bitmap_format in ("bmp", "png"):
        file = io.BytesIO()
        Image.new("RGBA", (32, 32), (0, 200, 0, 255)).save(file, "ICO", sizes=[(32, 32)], bitmap_format=bitmap_format)
        assert decoded(file.getvalue())[9, 9].tolist() == [0, 200, 0]


# JPEG


def jpeg(**options: Any) -> bytes:
    return saved(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG", **options)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}], ids=str)
def test_an_end_marker_alone_may_be_missing(options: dict[str, Any]) -> None:
    content = jpeg(**options)
    np.testing.assert_array_equal(decoded(content[:-2]), decoded(content))
    # With an end marker that hides the cut, as tools that repair files write it.
    scan = content.rindex(b"\xff\xda")
    for share in (0.1, 0.5, 0.9):
        cut = content[: scan + int((len(content) - scan) * share)]
        for end in (b"", b"\xff\xd9"):
            with pytest.raises(MediaUndecodable, match="truncated"):
                decoded(cut + end)


def test_garbage_between_segments_and_behind_the_picture() -> None:
    content = jpeg()
    expected = decoded(content)
    second = content.index(b"\xff\xdb")
    for garbage in (b"\0\0\0", b"\xff\xff", b"\xff\0"):
        np.testing.assert_array_equal(decoded(content[:second] + garbage + content[second:]), expected)
    np.testing.assert_array_equal(decoded(content + bytes(1000) + content[:300]), expected)


def test_a_cut_thumbnail_does_no_harm() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    block = exif.tobytes() + jpeg()[:500]
    content = jpeg(exif=block)
    np.testing.assert_array_equal(decoded(content), decoded(jpeg())[::-1, ::-1])


@pytest.mark.parametrize("adobe", [0, 1])
def test_three_components_with_a_marker_of_adobe(adobe: int) -> None:
    content = saved(
        np.full((16, 16, 3), (200, 60, 30), np.uint8), "JPEG", quality=100, keep_rgb=not adobe, subsampling=0
    )
    marker = b"\xff\xee" + struct.pack(">H", 14) + b"Adobe\0\x64\0\0\0\0" + bytes([adobe])
    np.testing.assert_allclose(decoded(content[:2] + marker + content[2:])[8, 8], (200, 60, 30), atol=3)


def test_deep_lossless_and_hierarchical_jpegs_are_named() -> None:
    content = jpeg()
    at = content.index(b"\xff\xc0")
    deep = content[: at + 4] + bytes([12]) + content[at + 5 :]
    with pytest.raises(MediaUnsupported, match="12 bits a sample"):
        decoded(deep)
    for kind in (0xC5, 0xCD):
        with pytest.raises(MediaUnsupported, match="hierarchical"):
            decoded(content[: at + 1] + bytes([kind]) + content[at + 2 :])


def test_a_jpeg_without_rows_and_one_of_two_sizes() -> None:
    content = jpeg()
    at = content.index(b"\xff\xc0") + 5
    with pytest.raises(MediaUndecodable, match="64 x 0 pixels"):
        decoded(content[:at] + b"\0\0" + content[at + 2 :])
    with pytest.raises(MediaUndecodable):
        decoded(content[: at - 5] + content[at - 5 : at + 14].replace(b"\0\x40", b"\0\x20") + content[at - 5 :])


def test_a_clip_behind_a_progressive_jpeg_is_not_its_scans() -> None:
    content = jpeg(progressive=True)
    np.testing.assert_array_equal(decoded(content + b"\xff\xda" * 5000), decoded(content))


def test_one_scan_after_the_other_is_refused() -> None:
    content = jpeg(progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    with pytest.raises(MediaTooLarge, match="more than 200 scans"):
        decoded(content[:-2] + last * 300 + content[-2:])


# HEIC


def heic(pixels: NDArray[Any], **options: Any) -> bytes:
    import pillow_heif

    file = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(file, quality=-1, chroma=444, **options)
    return file.getvalue()


@HEIF
@pytest.mark.parametrize("orientation", range(1, 9))
def test_heic_is_turned_once(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = heic(stored_for(PIXELS, orientation), exif=exif.tobytes())
    assert b"irot" in content or b"imir" in content or orientation == 1
    np.testing.assert_allclose(decoded(content), PIXELS, atol=6)


@HEIF
def test_heic_with_alpha_is_over_white() -> None:
    content = heic(np.full((32, 32, 4), (200, 30, 90, 64), np.uint8))
    np.testing.assert_allclose(decoded(content)[9, 9], 255 + (np.array((200, 30, 90)) - 255) * 64 / 255, atol=4)


@HEIF
def test_of_several_heic_pictures_the_primary_one() -> None:
    import pillow_heif

    red, blue = (Image.new("RGB", (64, 64), colour) for colour in ("red", "blue"))
    file = io.BytesIO()
    pictures = pillow_heif.from_pillow(red)
    pictures.add_from_pillow(blue)
    pictures.save(file, primary_index=1)
    np.testing.assert_allclose(decoded(file.getvalue())[9, 9], (0, 0, 255), atol=6)


@HEIF
def test_deep_heic_keeps_the_full_range() -> None:
    import pillow_heif

    pillow_heif.options.SAVE_HDR_TO_12_BIT = False
    samples = np.repeat(RAMP.repeat(4, axis=0).repeat(4, axis=1)[:, :, None], 3, axis=2)
    file = io.BytesIO()
    pillow_heif.from_bytes("RGB;16", (64, 64), samples.tobytes()).save(file, quality=-1, chroma=444)
    greys = GREYS.repeat(4, axis=0).repeat(4, axis=1)
    np.testing.assert_allclose(decoded(file.getvalue())[:, :, 0], greys, atol=4)


@HEIF
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_cut_heic_is_an_error(share: float) -> None:
    content = heic(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    with pytest.raises(MediaUndecodable, match="damaged or truncated"):
        decoded(content[: int(len(content) * share)])


@HEIF
def test_heic_is_refused_by_the_size_of_any_item() -> None:
    content = heic(PIXELS)
    at = content.index(b"ispe") + 8
    with pytest.raises(MediaTooLarge, match="60000 x 60000"):
        decoded(content[:at] + struct.pack(">II", 60_000, 60_000) + content[at + 8 :])


def test_heic_without_its_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MediaUnsupported, match="HEIC images are not decoded by this server") as caught:
        decoded(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
    assert "pip" not in caught.value.message
    assert "pip install 'mimo-epd[heif]'" in caught.value.hint
    assert "pip install -e '.[heif]'" in caught.value.hint


def test_what_pillow_takes_for_a_bomb_is_told_in_numbers() -> None:
    with pytest.raises(MediaTooLarge, match=r"has 4294836225 pixels, allowed are 100000000"):
        decoded(b"P6\n65535 65535\n255\n" + bytes(100))


def test_avif_without_its_codec_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(PIXELS, "AVIF")
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    monkeypatch.setattr("warnings.warn", lambda *arguments, **options: None)
    with pytest.raises(MediaUnsupported, match="AVIF"):
        decoded(content)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(50), "JPEG XL"),
        (b"8BPS\0\1" + bytes(50), "Photoshop document"),
        (b"icns\0\0\1\0" + bytes(50), "ICNS"),
    ],
)
def test_kinds_that_are_not_decoded_are_named(content: bytes, name: str) -> None:
    with pytest.raises(MediaUnsupported, match=f"found {name}"):
        decoded(content)


def test_text_pnm_of_any_length_is_not_read() -> None:
    assert decoded(b"P3\n2 1\n255\n1 2 3 4 5 6\n").tolist() == [[[1, 2, 3], [4, 5, 6]]]
    with pytest.raises(MediaTooLarge, match="PNM as text"):
        decoded(b"P3\n9000 9000\n255\n" + b"1 " * 5_000_000)


def test_picture_file_kinds_are_all_bytes_alike() -> None:
    """The same picture in every lossless kind is the same array."""
    for kind, options in (
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_adobe_deflate"}),
        ("WEBP", {"lossless": True}),
        ("PPM", {}),
        ("JPEG2000", {}),
        ("JPEG2000", {"tile_size": (16, 16)}),
    ):
        np.testing.assert_array_equal(decoded(picture_file(PIXELS, kind, **options)), PIXELS, err_msg=kind)
