"""JPEG files: what the segments in front of the picture say, and the picture.

One or three components of 8 bits go through simplejpeg, which is several times faster than Pillow and decodes to the
same bits. Four components, and what simplejpeg objects to, go through Pillow, without the segments that are not needed:
it would read all metadata.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from preprocess.colour import on_white
from preprocess.config import DecodeLimits
from preprocess.errors import MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.exif import orientation

_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE: Final = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_USUAL: Final = frozenset({0xC0, 0xC1, 0xC2})
"""Baseline, extended and progressive with Huffman codes. Others (lossless, arithmetic) are up to the library."""
_START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
_APP0: Final = 0xE0
_APP1: Final = 0xE1
_APP14: Final = 0xEE
_APP15: Final = 0xEF
_COMMENT: Final = 0xFE
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD8)})
_NUM_COEFFICIENTS: Final = 64
_XMP: Final = b"http://ns.adobe.com/xap/1.0/\0"
_MAX_SEGMENTS: Final = 10_000
_MAX_SCANS: Final = 200
"""Every scan goes over the whole picture again; encoders write about ten."""
_MARKER: Final = re.compile(rb"\xff+[^\0\xd0-\xd7\xff]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class JpegHead:
    """What is known before the first scan."""

    width: int
    height: int
    components: bytes
    """A number for each, by which scans name it."""
    bits: int
    frame: int
    """Second byte of the frame header's marker: 0xC0 for baseline."""
    has_adobe: bool
    orientation: int
    essential: tuple[tuple[int, int], ...]
    """(start, end) of the segments that the picture needs."""
    scan: int
    """Where the first scan starts."""


def jpeg_head(content: bytes) -> JpegHead:
    """Raises ValueError where there is no readable head."""
    at, essential = 2, []
    frame: tuple[int, bytes] | None = None
    exif = xmp = None
    has_adobe = False
    for _ in range(_MAX_SEGMENTS):
        at = content.find(b"\xff", at)
        while content[at + 1 : at + 2] == b"\xff":
            at += 1
        if at < 0 or at + 4 > len(content):
            raise ValueError("the file ends before the picture begins")
        marker = content[at + 1]
        if marker == _START_OF_SCAN:
            break
        if marker == 0 or marker in _WITHOUT_LENGTH:
            at += 2
            continue
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        body = content[at + 4 : end]
        if marker in _FRAMES and frame is None:
            frame = (marker, body)
        elif marker == _APP1 and exif is None and body.startswith(b"Exif\0"):
            exif = body[6:]
        elif marker == _APP1 and xmp is None and body.startswith(_XMP):
            xmp = body
        elif marker == _APP14 and body.startswith(b"Adobe"):
            has_adobe = True
        if not (_APP0 < marker <= _APP15 or marker == _COMMENT) or marker == _APP14:
            essential.append((at, end))
        at = end
    else:
        raise ValueError(f"more than {_MAX_SEGMENTS} segments before the picture")
    if frame is None or len(frame[1]) < 6:
        raise ValueError("no frame header before the first scan")
    marker, body = frame
    return JpegHead(
        width=int.from_bytes(body[3:5], "big"),
        height=int.from_bytes(body[1:3], "big"),
        components=body[6 : 6 + 3 * body[5] : 3],
        bits=body[0],
        frame=marker,
        has_adobe=has_adobe,
        orientation=orientation(exif, xmp),
        essential=tuple(essential),
        scan=at,
    )


def decode_jpeg(content: bytes, head: JpegHead, limits: DecodeLimits) -> NDArray[np.uint8]:
    """[H, W, 3] RGB as it is stored, not turned.

    Raises MediaTooLarge, MediaUnsupported, and what Pillow raises for damage.
    """
    if not head.width or not head.height:
        raise MediaUndecodable(f"JPEG of {head.width} x {head.height} pixels")
    if head.bits != 8:
        raise MediaUnsupported(f"JPEG images of {head.bits} bits a sample are not decoded here; send 8 bits, or PNG")
    if head.frame in _PROGRESSIVE:
        _check_scans(content, head)
    try:
        pixels = _by_simplejpeg(content, head, limits) if len(head.components) in (1, 3) else None
        return _by_pillow(content, head) if pixels is None else pixels
    except (OSError, SyntaxError) as error:
        if head.frame in _USUAL:
            raise
        raise MediaUnsupported(
            f"this kind of JPEG (frame type {head.frame - 0xC0}: lossless, hierarchical or arithmetic) is not decoded "
            "here, or it is damaged; send a baseline or progressive JPEG, or PNG"
        ) from error


def _has_all_scans(content: bytes, head: JpegHead) -> bool:
    """Whether scans tell every coefficient of every component to its last bit.

    A file that ends between two scans decodes without complaint: coarser, or without some of its colours. It is only
    asked where the end marker is missing, with which an encoder vouches for what it left out.
    """
    missing = {component: set(range(_NUM_COEFFICIENTS)) for component in head.components}
    at = head.scan
    while (match := _MARKER.search(content, at)) is not None and content[match.end() - 1] != _END_OF_IMAGE:
        at = match.end() + int.from_bytes(content[match.end() : match.end() + 2], "big")
        if content[match.end() - 1] != _START_OF_SCAN:
            continue
        header = content[match.end() + 2 : at]
        num_components = header[0] if header else 0
        if len(header) < 4 + 2 * num_components:
            return False
        first, last, bits = header[1 + 2 * num_components : 4 + 2 * num_components]
        if head.frame not in _PROGRESSIVE:
            first, last, bits = 0, _NUM_COEFFICIENTS - 1, 0
        # The lower four bits are the place of the lowest bit that this scan tells.
        if not bits & 0x0F:
            for component in header[1 : 1 + 2 * num_components : 2]:
                missing.get(component, set()).difference_update(range(first, last + 1))
    return not any(missing.values())


def _check_scans(content: bytes, head: JpegHead) -> None:
    if content.count(b"\xff\xda", head.scan) <= _MAX_SCANS:
        return
    # Perhaps these are in a trailer, a clip for example, and not scans: walk.
    at, num_scans = head.scan, 0
    while (match := _MARKER.search(content, at)) is not None and content[match.end() - 1] != _END_OF_IMAGE:
        num_scans += content[match.end() - 1] == _START_OF_SCAN
        if num_scans > _MAX_SCANS:
            raise MediaTooLarge(f"the JPEG has more than {_MAX_SCANS} scans, each over the whole picture")
        at = match.end() + int.from_bytes(content[match.end() : match.end() + 2], "big")


def _by_simplejpeg(content: bytes, head: JpegHead, limits: DecodeLimits) -> NDArray[np.uint8] | None:
    """None for the JPEGs that Pillow must judge. Raises OSError where part of the picture is missing."""
    try:
        height, width, colour_space, _ = simplejpeg.decode_jpeg_header(content)
        if colour_space not in ("YCbCr", "Gray") or height * width > limits.max_image_pixels:
            return None
        return _strictly(content)
    except ValueError as error:
        message = str(error)
    if "Premature end of JPEG file" in message:
        if not _has_all_scans(content, head):
            raise OSError("truncated JPEG: it ends before its last scan")
        # Some cameras leave out the end marker; with it, a whole picture decodes without complaint.
        try:
            return _strictly(content + bytes([0xFF, _END_OF_IMAGE]))
        except ValueError as error:
            message = str(error)
    if "remature end" in message:
        # Pillow would fill with grey where an end marker hides that data are missing.
        raise OSError(f"truncated JPEG: {message}")
    return None


def _strictly(content: bytes) -> NDArray[np.uint8]:
    """Raises ValueError for what the library would only warn of."""
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(content, colorspace="RGB", strict=True)
    return pixels


def _by_pillow(content: bytes, head: JpegHead) -> NDArray[np.uint8]:
    whole = memoryview(content)
    parts = [whole[:2], *(whole[start:end] for start, end in head.essential), whole[head.scan :]]
    with Image.open(io.BytesIO(b"".join(parts)), formats=("JPEG",)) as image:
        if (image.width, image.height) != (head.width, head.height):
            raise MediaUndecodable("the JPEG's headers contradict each other about its size")
        image.load()
        if image.mode == "CMYK" and not head.has_adobe:
            # Pillow takes every CMYK JPEG for Adobe's inverted kind.
            return on_white(Image.fromarray(255 - np.asarray(image), mode="CMYK"))
        return on_white(image)
