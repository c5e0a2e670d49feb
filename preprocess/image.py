"""Image bytes to one upright RGB picture on white.

One function for every format, so that orientation, alpha and depth mean the same whichever library decodes:

    EXIF orientation   applied, all eight
    alpha, tRNS        composited over white (RGBA, LA, PA, palettes, colour keys)
    CMYK, YCCK         inverted when the file carries Adobe's marker, as Adobe writes them, and not otherwise
    16 bits and more   scaled to 8, keeping the full range; see `_to_8_bits`
    animation          first frame, composited
    SVG, HEIC          refused by name

JPEG of one or three components goes through simplejpeg, which is several times faster and decodes to the same bits;
everything else, and any JPEG it objects to, through Pillow.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Final

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from preprocess.config import DecodeLimits
from preprocess.errors import MediaTooLarge, MediaUndecodable, MediaUnsupported
from preprocess.sniff import IMAGE_KINDS, describe, sniff

# Pillow would also open documents, fonts' bitmaps and PostScript (by running Ghostscript); only pictures are let in.
_WANTED_FORMATS: Final = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "AVIF", "ICO", "PPM", "JPEG2000")
Image.init()
_FORMATS: Final = tuple(name for name in _WANTED_FORMATS if name in Image.OPEN)
# What Pillow's plugins raise for damaged files; UserWarning is theirs where a process turns warnings into errors.
_DAMAGE: Final = (
    *(OSError, SyntaxError, ValueError, EOFError, TypeError, KeyError, IndexError, OverflowError),
    *(RuntimeError, UserWarning, struct.error, zlib.error),
)
_ORIENTATION_TAG: Final = 0x0112


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
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_size(image.width, image.height, limits)
            orientation = _orientation(image)
            pixels = _fast_jpeg(content) if image.format in ("JPEG", "MPO") else None
            if pixels is None:
                pixels = _to_rgb(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaTooLarge(
            f"the image's header promises more pixels than are decoded here ({describe(content)})"
        ) from error
    except UnidentifiedImageError as error:
        if kind == "HEIC":
            raise MediaUnsupported("HEIC images are not decoded here; send JPEG, PNG or WebP") from error
        raise MediaUndecodable(f"damaged image ({describe(content)}): its header cannot be read") from error
    except _DAMAGE as error:
        raise MediaUndecodable(f"damaged or truncated image ({describe(content)}): it does not decode") from error
    return _upright(pixels, orientation)


def _check_size(width: int, height: int, limits: DecodeLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"image has {width} x {height} = {width * height} pixels, allowed are {limits.max_image_pixels}"
        )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8; 1 when absent, out of range, or the EXIF block is damaged (the picture may be whole)."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _DAMAGE:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Orientation 5..8 lie on their side: transpose first, then the flips are those of the standing picture."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _fast_jpeg(content: bytes) -> NDArray[np.uint8] | None:
    """[H, W, 3], or None for the JPEGs that Pillow must judge."""
    try:
        _, _, colour_space, _ = simplejpeg.decode_jpeg_header(content)
        if colour_space not in ("YCbCr", "Gray"):
            return None
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(content, colorspace="RGB", strict=True)
    except ValueError:
        return None
    return pixels


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    image.load()
    if image.mode.startswith("I") or image.mode == "F":
        grey = _to_8_bits(np.asarray(image))
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        # Pillow takes every CMYK JPEG for Adobe's inverted kind.
        image = Image.fromarray(255 - np.asarray(image), mode="CMYK")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        if image.mode == "1":
            image = image.convert("L")
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        image = white
    return np.array(image.convert("RGB"))


def _to_8_bits(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """[H, W] grey of any depth to 0..255.

    The depth is not recorded with the pixels, so the range decides: up to 1 is a unit scale (float only), up to 255
    is 8 bits as it stands, up to 65535 is 16 bits, above that full 32 bits. 16-bit storage is always 16 bits.
    """
    grey = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    peak = float(grey.max(initial=0.0))
    if values.dtype.itemsize == 2:
        scale = 255 / 65535
    elif values.dtype.kind == "f" and peak <= 1:
        scale = 255.0
    elif peak <= 255:
        scale = 1.0
    elif peak <= 65535:
        scale = 255 / 65535
    else:
        scale = 255 / (2**31 - 1)
    return np.clip(np.rint(grey * scale), 0, 255).astype(np.uint8)
