"""Names what a file is from its first bytes, for choosing a decoder and for error messages a person can act on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

IMAGE_KINDS: Final = frozenset({"JPEG", "PNG", "GIF", "WebP", "BMP", "TIFF", "AVIF", "HEIC", "ICO", "PNM", "JPEG 2000"})
_TEXT_SAMPLE_BYTES: Final = 4096

_MAGIC: Final[tuple[tuple[int, bytes, str], ...]] = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xffO\xffQ", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"icns", "ICNS"),
    (0, b"\0\0\2\0", "cursor"),
    (0, b"8BPS", "Photoshop document"),
    (0, b"v/1\1", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"),
    (0, b"DDS ", "DDS"),
    (0, b"qoif", "QOI"),
    (0, b"P7\n", "PAM"),
    (0, b"\xd7\xcd\xc6\x9a", "WMF"),
    (40, b" EMF", "EMF"),
    (0, b"\x1aE\xdf\xa3", "Matroska"),
    (0, b"FLV\1", "FLV"),
    (0, b"\0\0\1\xba", "MPEG-PS"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "ASF"),
    (0, b"fLaC", "FLAC"),
    (0, b"OggS", "Ogg"),
    (0, b"ID3", "MP3"),
    (0, b"caff", "CAF"),
    (0, b"riff\x2e\x91\xcf\x11", "Wave64"),
    (0, b"#!AMR", "AMR"),
    (0, b"\x0bw", "AC-3"),
    (0, b"\x7f\xfe\x80\1", "DTS"),
    (0, b"\xfe\x7f\1\x80", "DTS"),
    (0, b"\x1f\xff\xe8\0", "DTS"),
    (0, b"\xff\x1f\0\xe8", "DTS"),
    (0, b".snd", "AU"),
    (0, b"%PDF-", "PDF document"),
    (0, b"PK\3\4", "ZIP archive"),
    (0, b"\x1f\x8b", "gzip archive"),
    (0, b"%!PS", "PostScript document"),
    (0, b"\x7fELF", "ELF program"),
    (0, b"#EXTM3U", "HLS playlist"),
)
_JSON: Final = re.compile(r"\{\s*[\"}]|\[\s*([\"{\[\]-]|\d|true\b|false\b|null\b)")
"""Subtitles and settings have brackets in front too, around a title."""
_RIFF: Final = {b"WEBP": "WebP", b"AVI ": "AVI", b"WAVE": "WAV"}
_SHARED_BRANDS: Final = frozenset({b"mif1", b"mif2", b"msf1"})
"""Of containers that hold AVIF or HEIC pictures."""
_HEIF_BRANDS: Final = _SHARED_BRANDS | {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}


def sniff(content: bytes) -> str:
    """What the content looks like: a kind such as "PNG", "MP4" or "WAV", or words such as "text", "empty file".

    A kind is a guess from the head of the file, not a promise that the rest decodes.
    """
    if not content:
        return "empty file"
    for detect in _DETECTORS:
        kind = detect(content)
        if kind is not None:
            return kind
    return "unknown data"


def describe(content: bytes) -> str:
    """The sniffed kind with the size, for error messages."""
    return "an empty file" if not content else f"{sniff(content)}, {len(content)} bytes"


def _by_magic(content: bytes) -> str | None:
    for offset, magic, kind in _MAGIC:
        if content.startswith(magic, offset):
            return kind
    return None


def _by_container(content: bytes) -> str | None:
    if content[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64"):
        return _RIFF.get(content[8:12])
    if content[:4] == b"FORM" and content[8:12] in (b"AIFF", b"AIFC"):
        return "AIFF"
    if content[4:8] == b"ftyp":
        brand = content[8:12]
        if brand in (b"avif", b"avis"):
            return "AVIF"
        if brand in _HEIF_BRANDS:
            if brand not in _SHARED_BRANDS:
                return "HEIC"
            # The compatible brands tell.
            compatible = content[16 : int.from_bytes(content[:4], "big")]
            return "AVIF" if b"avif" in compatible or b"avis" in compatible else "HEIC"
        return "M4A" if brand.startswith(b"M4A") else "MP4"
    if content[4:8] in (b"moov", b"mdat", b"wide", b"free", b"moof"):
        return "MP4"
    if content[:2] in (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6") and content[2:3].isspace():
        return "PNM"
    return None


def _by_sync(content: bytes) -> str | None:
    if content[0:1] == b"G" and content[188:189] in (b"G", b"") and content[376:377] in (b"G", b""):
        return "MPEG-TS" if len(content) >= 188 else None
    # FF FE is also how UTF-16 text starts, and MPEG layer I, the other reading, is not met in practice.
    if len(content) > 2 and content[0] == 0xFF and content[1] & 0xE0 == 0xE0 and content[1] != 0xFE:
        return "AAC" if content[1] & 0x06 == 0 else "MP3"
    return None


def _by_text(content: bytes) -> str | None:
    head = content[:_TEXT_SAMPLE_BYTES]
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None
    try:
        text = head.decode("utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8")
    except UnicodeDecodeError as error:
        # A character cut by the sample's end is still text.
        if error.start < len(head) - 3:
            return None
        text = head[: error.start].decode("utf-8", "replace")
    start = text.lstrip("\ufeff \t\r\n").lower()
    if "<svg" in start and start.startswith("<"):
        return "SVG"
    if start.startswith(("<!doctype html", "<html", "<head", "<body")):
        return "HTML page"
    if _JSON.match(start):
        return "JSON text"
    return "XML text" if start.startswith("<?xml") else "text"


# Containers first: the length in front of their name may look like the number of another kind.
_DETECTORS: Final[tuple[Callable[[bytes], str | None], ...]] = (_by_container, _by_magic, _by_sync, _by_text)
