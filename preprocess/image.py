"""Image bytes to one upright RGB picture on white.

One function for every format, so that orientation, alpha and depth mean the same whichever library decodes:

    orientation        EXIF's eight, and what AVIF and HEIC containers say instead; applied once
    alpha, tRNS        composited over white (RGBA, LA, PA, palettes, colour keys)
    CMYK, YCCK         inverted when the file carries Adobe's marker, as Adobe writes them, and not otherwise
    16 bits and more   scaled to 8, keeping the full range
    animation          first frame, composited
    several pictures   the first, or the one marked as primary; of icons the largest
    SVG and others     refused by name

A file goes through three steps: sizes are read and refused, what is not the picture is left out (`preprocess.essence`,
`preprocess.jpeg`), then a library decodes: simplejpeg, pillow-heif, or Pillow.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, UnidentifiedImageError

from preprocess import exif
from preprocess.colour import ColourKey, on_white
from preprocess.config import DecodeLimits
from preprocess.errors import MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.essence import Essence, essence
from preprocess.heif import decode_heif
from preprocess.jpeg import decode_jpeg, jpeg_head
from preprocess.picture_limits import check_size
from preprocess.sniff import IMAGE_KINDS, describe, sniff

# Pillow would also open documents, fonts' bitmaps and PostScript (by running Ghostscript); only pictures are let in.
_WANTED_FORMATS: Final = ("PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "AVIF", "ICO", "PPM", "JPEG2000")
Image.init()
_FORMATS: Final = tuple(name for name in _WANTED_FORMATS if name in Image.OPEN)
# The limits here are our own and stricter; what is within them is nothing to warn of.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Pictures are decoded side by side; threads within one would be too many.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
# What Pillow's plugins raise for damaged files; UserWarning is theirs where a process turns warnings into errors.
_DAMAGE: Final = (
    *(OSError, SyntaxError, ValueError, EOFError, TypeError, KeyError, IndexError, OverflowError, AttributeError),
    *(RuntimeError, UserWarning, struct.error, zlib.error),
)
_16_BITS: Final = 65535


def decode_image(content: bytes, limits: DecodeLimits) -> NDArray[np.uint8]:
    """[H, W, 3] RGB.

    Raises MediaUnsupported for a kind that is not a picture or not decoded here, MediaTooLarge from the header alone,
    MediaUndecodable for a damaged or truncated file.
    """
    kind = sniff(content)
    if kind not in IMAGE_KINDS:
        error = MediaUndecodable if kind in ("text", "empty file", "unknown data") else MediaUnsupported
        raise error(f"expected an image, found {describe(content)}")
    try:
        return _decode(kind, content, limits)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(str(error), limits) from error
    except MemoryError as error:
        raise MediaTooLarge(
            f"decoding the image ({describe(content)}) takes more memory than the server has for it; send a smaller one"
        ) from error
    except UnidentifiedImageError as error:
        if kind == "AVIF" and not AvifImagePlugin.SUPPORTED:
            raise MediaUnsupported("AVIF images are not decoded by this build of Pillow; send JPEG or PNG") from error
        raise MediaUndecodable(f"damaged image ({describe(content)}): its header cannot be read") from error
    except _DAMAGE as error:
        raise MediaUndecodable(f"damaged or truncated image ({describe(content)}): it does not decode") from error


def _too_many_pixels(words: str, limits: DecodeLimits) -> MediaTooLarge:
    """Pillow's own limit may be below ours where ours was raised."""
    pillows = 2 * Image.MAX_IMAGE_PIXELS if Image.MAX_IMAGE_PIXELS else limits.max_image_pixels
    found = re.search(r"\d+", words)
    return MediaTooLarge(
        f"image has {found[0] if found else 'too many'} pixels, allowed are {min(pillows, limits.max_image_pixels)}"
    )


def _decode(kind: str, content: bytes, limits: DecodeLimits) -> NDArray[np.uint8]:
    if kind == "JPEG":
        head = jpeg_head(content)
        check_size(head.width, head.height, limits)
        return _upright(decode_jpeg(content, head, limits), head.orientation)
    reduced = essence(kind, content, limits)
    if kind == "HEIC":
        return decode_heif(reduced.content, limits)
    with Image.open(io.BytesIO(reduced.content), formats=_FORMATS) as image:
        check_size(image.width, image.height, limits)
        orientation = _orientation(image, reduced)
        # Read before loading, which uses the tiles up.
        covered = image.tile[0][1] if kind == "GIF" and image.tile else None
        full_scale = _16_BITS if kind == "PNM" else None
        pixels = on_white(image, key=_colour_key(kind, content, image), full_scale=full_scale)
    if covered is not None:
        _clear_outside(pixels, covered)
    return _upright(pixels, orientation)


def _orientation(image: Image.Image, reduced: Essence) -> int:
    if reduced.orientation is not None:
        return reduced.orientation
    # In AVIF the container's rotation counts, which Pillow hands over as EXIF; XMP says nothing there.
    xmp = image.info.get("xmp") if image.format != "AVIF" else None
    return exif.orientation(image.info.get("exif"), xmp if isinstance(xmp, bytes) else None)


def _colour_key(kind: str, content: bytes, image: Image.Image) -> ColourKey | None:
    """Of a PNG or GIF, on the scale of the opened picture."""
    key = image.info.get("transparency")
    if image.mode not in ("1", "L", "RGB", "I;16") or not isinstance(key, int | tuple):
        return None
    samples = key if isinstance(key, tuple) else (key,)
    if kind != "PNG":
        return samples
    depth = content[24]
    if depth == 16:
        # Of deep colours Pillow keeps the upper halves.
        return samples if image.mode == "I;16" else tuple(sample >> 8 for sample in samples)
    return tuple(sample * 255 // ((1 << depth) - 1) for sample in samples)


def _clear_outside(pixels: NDArray[np.uint8], covered: tuple[int, int, int, int] | None) -> None:
    """A GIF's canvas is empty where its first picture is not."""
    if covered is None:
        return
    left, top, right, bottom = covered
    pixels[:top] = 255
    pixels[bottom:] = 255
    pixels[:, :left] = 255
    pixels[:, right:] = 255


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Orientation 5..8 lie on their side: transpose first, then the flips are those of the standing picture."""
    if orientation == 1:
        return pixels
    # A pixel as one item of three bytes: copied twice as fast as byte by byte.
    items: NDArray[np.void] = pixels.view("V3")[:, :, 0]
    if orientation >= 5:
        items = items.T
    if orientation in (2, 3, 6, 7):
        items = items[:, ::-1]
    if orientation in (3, 4, 7, 8):
        items = items[::-1]
    return np.ascontiguousarray(items).view(np.uint8).reshape(*items.shape, 3)
