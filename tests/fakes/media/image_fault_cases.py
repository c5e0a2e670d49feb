"""Damaged pictures, pictures that claim too much, and things sent as pictures that are none."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import MediaError, MediaInvalid, MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.types import Modality
from tests.fakes.media.case import Case, Refusal
from tests.fakes.media.image_cases import HAS_HEIF
from tests.fakes.media.images import huge_header, saved


def image_fault_cases() -> list[Case]:
    return [case for part in (_cut, _strips, _bombs, _others) for case in part()]


def _refused(name: str, make: Callable[[], bytes], error: type[MediaError], words: str) -> Case:
    return Case(name, Modality.IMAGE, make, Refusal(error, words))


def _cut() -> Iterator[Case]:
    noise = np.random.default_rng(1).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    for kind, extension, options in (
        ("JPEG", "jpg", {}),
        ("JPEG", "progressive.jpg", {"progressive": True}),
        ("PNG", "png", {}),
        ("WEBP", "webp", {}),
        ("GIF", "gif", {}),
        ("TIFF", "tif", {}),
        ("BMP", "bmp", {}),
        ("AVIF", "avif", {}),
        ("JPEG2000", "jp2", {}),
    ):
        for percent in (10, 50, 95):
            make = partial(_first_percent, noise, kind, percent, options)
            yield _refused(f"cut-{percent}.{extension}", make, MediaUndecodable, "truncated|damaged")
    whole = saved(noise, "PNG")
    yield _refused("cut-in-signature.png", lambda: whole[:6], MediaUndecodable, "found|damaged")
    yield _refused("cut-in-header.png", lambda: whole[:20], MediaUndecodable, "truncated|damaged")
    yield _refused("noise-in-data.png", lambda: whole[:3000] + bytes(300) + whole[3300:], MediaUndecodable, "damaged")
    yield _refused("signature-only.jpg", lambda: b"\xff\xd8\xff\xe0", MediaUndecodable, "truncated|damaged")


def _strips() -> Iterator[Case]:
    yield _refused(
        "ratio-over-200.png",
        partial(saved, np.zeros((40, 8040, 3), np.uint8), "PNG"),
        MediaInvalid,
        "8040 x 40.*aspect ratio",
    )
    yield _refused(
        "ratio-over-200-down.jpg",
        partial(saved, np.zeros((9000, 40, 3), np.uint8), "JPEG"),
        MediaInvalid,
        "40 x 9000.*aspect ratio",
    )


def _first_percent(pixels: NDArray[np.uint8], kind: str, percent: int, options: Mapping[str, bool]) -> bytes:
    content = saved(pixels, kind, **options)
    return content[: len(content) * percent // 100]


def _bombs() -> Iterator[Case]:
    for kind, extension, side in (
        ("PNG", "png", 60_000),
        ("GIF", "gif", 65_535),
        ("WEBP", "webp", 16_384),
        ("BMP", "bmp", 60_000),
        ("TIFF", "tif", 60_000),
        ("JPEG", "jpg", 65_500),
        ("PPM", "ppm", 60_000),
        ("JPEG2000", "j2k", 60_000),
        ("ICO", "ico", 60_000),
    ):
        yield _refused(f"bomb.{extension}", partial(huge_header, kind, side, side), MediaTooLarge, "pixels")
    # Just over the limit, where the libraries' own guards say nothing yet.
    yield _refused("just-too-large.png", partial(huge_header, "PNG", 10_001, 10_000), MediaTooLarge, "10001 x 10000")
    yield _refused("just-too-large.jpg", partial(huge_header, "JPEG", 10_001, 10_000), MediaTooLarge, "10001 x 10000")


def _others() -> Iterator[Case]:
    svg = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect/></svg>'
    if not HAS_HEIF:
        head = struct.pack(">I4s4sI4s", 24, b"ftyp", b"heic", 0, b"mif1")
        yield _refused("no-codec.heic", lambda: head + bytes(300), MediaUnsupported, "HEIC")
    for name, content, error, words in (
        ("drawing.svg", svg, MediaUnsupported, "SVG"),
        ("drawing-renamed.png", svg, MediaUnsupported, "SVG"),
        ("page.html", b"<!DOCTYPE html><html><body>403 Forbidden</body></html>", MediaUnsupported, "HTML"),
        ("page-renamed.jpg", b"\n\n <html><head></head></html>", MediaUnsupported, "HTML"),
        ("document.pdf", b"%PDF-1.7\n" + bytes(200), MediaUnsupported, "PDF"),
        ("drawing.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", MediaUnsupported, "PostScript"),
        ("archive.zip", b"PK\3\4" + bytes(100), MediaUnsupported, "ZIP"),
        ("words.txt", b"access denied", MediaUndecodable, "text"),
        ("answer.json", b'{"error": "not found"}', MediaUnsupported, "JSON"),
        ("empty.png", b"", MediaUndecodable, "empty"),
        ("zeros.jpg", bytes(1000), MediaUndecodable, "unknown data"),
    ):
        yield _refused(name, partial(bytes, content), error, words)
