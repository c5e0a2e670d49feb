"""Names for what a file is."""

from __future__ import annotations

import numpy as np
import pytest

from preprocess.sniff import describe, sniff
from tests.fakes.clips import make_video, picture_file, sine, sound_file

PIXELS = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (picture_file(PIXELS, "JPEG"), "JPEG"),
        (picture_file(PIXELS, "PNG"), "PNG"),
        (picture_file(PIXELS, "GIF"), "GIF"),
        (picture_file(PIXELS, "WEBP"), "WebP"),
        (picture_file(PIXELS, "BMP"), "BMP"),
        (picture_file(PIXELS, "TIFF"), "TIFF"),
        (picture_file(PIXELS, "PPM"), "PNM"),
        (make_video(2), "MP4"),
        (make_video(2, container="matroska"), "Matroska"),
        (make_video(2, container="avi", codec="mpeg4"), "AVI"),
        (make_video(9, container="mpegts"), "MPEG-TS"),
        (make_video(2, container="flv", codec="flv"), "FLV"),
        (sound_file(sine(0.1)), "WAV"),
        (sound_file(sine(0.1), kind="FLAC"), "FLAC"),
        (sound_file(sine(0.1), kind="OGG"), "Ogg"),
        (sound_file(sine(0.1), kind="MP3"), "MP3"),
        (sound_file(sine(0.1), kind="AIFF"), "AIFF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "AVIF"),
        (b"\0\0\0\x18ftypheix\0\0\0\0avifavif", "HEIC"),
        (b"\0\0\0\x50ftypmif1\0\0\0\0" + b"miaf" * 15 + b"avif", "AVIF"),
        (b"\0\0\0\x14ftypmif1\0\0\0\0mif1\0\0\0\x20avif", "HEIC"),
        (b"\0\0\0\x18ftypmsf1\0\0\0\0avismsf1", "AVIF"),
        (b"\0\0\1\0free" + bytes(248), "MP4"),
        (b"\xff\x0a\x12\x34", "JPEG XL"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"icns\0\0\1\0", "ICNS"),
        (b"8BPS\0\1", "Photoshop document"),
        (b"P7\nWIDTH 4\n", "PAM"),
        (b"P6 4 4 255\n", "PNM"),
        (b"\0\0\2\0\1\0", "cursor"),
        (b"\1\0\0\0" + bytes(36) + b" EMF", "EMF"),
        (b"\0\0\0\x18ftypM4A \0\0\0\0isom", "M4A"),
        (b"\xff\xf1\x50\x80", "AAC"),
        (b"plain words", "text"),
        ("caf\u00e9 ".encode() * 1000, "text"),
        ("text".encode("utf-16"), "text"),
        (b"\xef\xbb\xbf  <svg>", "SVG"),
        (b" <!DOCTYPE HTML>", "HTML page"),
        (b'{"error": 1}', "JSON text"),
        (b' [ {"error": 1}]', "JSON text"),
        (b"[1, 2]", "JSON text"),
        (b"[]", "JSON text"),
        (b"{ }", "JSON text"),
        (b"[Script Info]\nScriptType: v4.00+\n", "text"),
        (b"\xef\xbb\xbf[V4+ Styles]\n", "text"),
        (b"{not json}", "text"),
        (b"\x7f\xfe\x80\1" + bytes(92), "DTS"),
        (b"\xff\x1f\0\xe8" + bytes(92), "DTS"),
        (b"\x0bw" + bytes(92), "AC-3"),
        (b"", "empty file"),
        (b"\0\1\2\3", "unknown data"),
    ],
)
def test_kinds(content: bytes, kind: str) -> None:
    assert sniff(content) == kind


def test_descriptions_carry_the_size() -> None:
    assert describe(b"") == "an empty file"
    assert describe(b"words") == "text, 5 bytes"
