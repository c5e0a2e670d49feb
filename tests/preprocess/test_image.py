"""Image decoding: orientation, alpha, depth, colour models, damage. Pillow is the reference where there is one."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from preprocess import DecodeLimits, MediaError, MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.image import decode_image
from tests.fakes.clips import blocks, make_video, picture_file

LIMITS = DecodeLimits()
PIXELS = blocks(37, 53, seed=1)


def by_pillow(content: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "PPM", "JPEG"])
def test_formats_equal_pillow(kind: str) -> None:
    content = picture_file(PIXELS, kind)
    np.testing.assert_array_equal(decode_image(content, LIMITS), by_pillow(content))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("grey", [False, True])
def test_jpeg_equals_pillow_bit_for_bit(subsampling: int, progressive: bool, grey: bool) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    pixels = noise[:, :, 0] if grey else noise
    options = {} if grey else {"subsampling": subsampling}
    content = picture_file(pixels, "JPEG", quality=85, progressive=progressive, **options)
    np.testing.assert_array_equal(decode_image(content, LIMITS), by_pillow(content))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation(orientation: int, kind: str) -> None:
    image = Image.fromarray(PIXELS)
    exif = image.getexif()
    exif[0x0112] = orientation
    content = picture_file(image, kind, exif=exif)
    decoded = decode_image(content, LIMITS)
    np.testing.assert_array_equal(decoded, by_pillow(content))
    assert decoded.shape[:2] == ((37, 53) if orientation < 5 else (53, 37))


def test_out_of_range_orientation_is_upright() -> None:
    image = Image.fromarray(PIXELS)
    exif = image.getexif()
    exif[0x0112] = 9
    np.testing.assert_array_equal(decode_image(picture_file(image, exif=exif), LIMITS), PIXELS)


def over_white(colour: tuple[int, int, int], alpha: int) -> NDArray[np.float64]:
    return np.array(colour) * alpha / 255 + 255 * (1 - alpha / 255)


@pytest.mark.parametrize("alpha", [0, 64, 255])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_over_white(alpha: int, kind: str) -> None:
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    image = Image.new("RGBA", (20, 10), (200, 30, 90, alpha))
    decoded = decode_image(picture_file(image, kind, **options), LIMITS)
    np.testing.assert_allclose(decoded[5, 5], over_white((200, 30, 90), alpha), atol=1)


def test_grey_with_alpha_over_white() -> None:
    decoded = decode_image(picture_file(Image.new("LA", (20, 10), (40, 128))), LIMITS)
    np.testing.assert_allclose(decoded[5, 5], over_white((40, 40, 40), 128), atol=1)


def test_palette_with_alpha_entries_over_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putdata([0, 1])
    decoded = decode_image(picture_file(image, transparency=bytes([0, 255])), LIMITS)
    assert decoded.tolist() == [[[255, 255, 255], [0, 255, 0]]]


def test_colour_key_over_white() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    decoded = decode_image(picture_file(image, transparency=(1, 2, 3)), LIMITS)
    assert decoded.tolist() == [[[255, 255, 255], [9, 9, 9]]]


def test_grey_colour_key_and_one_bit() -> None:
    grey = Image.new("L", (2, 1), 7)
    grey.putpixel((1, 0), 50)
    assert decode_image(picture_file(grey, transparency=7), LIMITS).tolist() == [[[255] * 3, [50] * 3]]
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert decode_image(picture_file(bits), LIMITS).tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_all_levels(kind: str) -> None:
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    decoded = decode_image(picture_file(ramp, kind), LIMITS)
    np.testing.assert_array_equal(decoded[:, :, 0].ravel(), np.arange(256))
    np.testing.assert_array_equal(decoded[:, :, 0], decoded[:, :, 2])


def test_float_and_32_bit_tiff() -> None:
    unit = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    np.testing.assert_array_equal(decode_image(picture_file(unit, "TIFF"), LIMITS)[:, :, 0].ravel(), np.arange(256))
    whole = np.arange(256, dtype=np.int32).reshape(16, 16)
    np.testing.assert_array_equal(decode_image(picture_file(whole, "TIFF"), LIMITS)[:, :, 0].ravel(), np.arange(256))


def cmyk_jpeg() -> bytes:
    # Pillow writes an Adobe marker and inverted samples.
    return picture_file(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)


def test_adobe_cmyk_is_red_not_its_negative() -> None:
    np.testing.assert_allclose(decode_image(cmyk_jpeg(), LIMITS)[8, 8], (255, 0, 0), atol=6)


def test_cmyk_without_adobe_marker_is_not_inverted() -> None:
    content = cmyk_jpeg()
    marker = content.index(b"\xff\xee")
    length = struct.unpack(">H", content[marker + 2 : marker + 4])[0]
    plain = content[:marker] + content[marker + 2 + length :]
    decoded = decode_image(plain, LIMITS)
    # The stored samples are the inverse of Adobe's red: cyan ink and black.
    np.testing.assert_allclose(decoded[8, 8], (0, 0, 0), atol=6)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_gives_its_first_frame(kind: str) -> None:
    first, second = Image.new("RGB", (12, 8), (255, 0, 0)), Image.new("RGB", (12, 8), (0, 0, 255))
    options = {"lossless": True} if kind == "WEBP" else {}
    content = picture_file(first, kind, save_all=True, append_images=[second], duration=100, **options)
    assert decode_image(content, LIMITS)[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (3, 200)])
def test_tiny_pictures(size: tuple[int, int]) -> None:
    assert decode_image(picture_file(blocks(*size, seed=0)), LIMITS).shape == (*size, 3)


def test_the_header_alone_decides_about_size() -> None:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(MediaTooLarge, match="60000 x 60000"):
        decode_image(bomb + b"\0\0\0\0IDAT", LIMITS)
    with pytest.raises(MediaTooLarge, match="53 x 37"):
        decode_image(picture_file(PIXELS), DecodeLimits(max_image_pixels=1000))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_pictures_are_errors(kind: str, share: float) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = picture_file(noise, kind)
    with pytest.raises(MediaUndecodable, match=r"^damaged (or truncated )?image \([A-Za-z]+, \d+ bytes\): it"):
        decode_image(content[: int(len(content) * share)], LIMITS)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", MediaUndecodable, "an empty file"),
        (b"this is a text file named .png\n", MediaUndecodable, "found text, 31 bytes"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", MediaUnsupported, "SVG"),
        (b"<?xml version='1.0'?><!-- x --><svg/>", MediaUnsupported, "SVG"),
        (b"<!DOCTYPE html><title>403</title>", MediaUnsupported, "HTML page"),
        (b"%PDF-1.7 ...", MediaUnsupported, "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", MediaUnsupported, "PostScript"),
        (b"\0\1\2\3" * 20, MediaUndecodable, "unknown data"),
        (b"\x89PNG\r\n\x1a\n", MediaUndecodable, "damaged"),
        (b"\xff\xd8\xff\xe0", MediaUndecodable, "damaged"),
    ],
)
def test_other_things_are_named(content: bytes, error: type[MediaError], words: str) -> None:
    with pytest.raises(error, match=words):
        decode_image(content, LIMITS)


def test_a_video_in_an_image_slot_is_named() -> None:
    with pytest.raises(MediaUnsupported, match="found MP4"):
        decode_image(make_video(2), LIMITS)
