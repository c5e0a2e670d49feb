"""Any picture Pillow opens to 8-bit RGB on white.

    alpha            composited over white, also premultiplied and per palette entry
    colour key       exactly the key's pixels are white
    CMYK, palettes   Pillow's conversion
    16 bits and more scaled to 8, keeping the full range; see `_to_8_bits`

Bands of rows, so that there is never a second whole picture of four bytes or a float per pixel.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from preprocess.errors import MediaUnsupported

_BAND_PIXELS: Final = 1024 * 1024
_GREY: Final = ("1", "L")
_16_BITS: Final = 65535
_32_BITS: Final = 2**31 - 1

ColourKey = tuple[int, ...]
"""Samples that stand for transparent, on the scale of the opened picture: one for grey, three for RGB."""


def on_white(image: Image.Image, *, key: ColourKey | None = None, full_scale: int | None = None) -> NDArray[np.uint8]:
    """[H, W, 3] RGB.

    `full_scale` is the value of white in a grey picture of more than 8 bits, where the format fixes it. Raises
    MediaUnsupported for a colour model without a conversion, and what Pillow raises for damage.
    """
    image.load()
    if image.mode in ("LAB", "HSV"):
        raise MediaUnsupported(f"pictures in the colour model {image.mode} are not decoded here; send RGB")
    width, height = image.size
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    deep = image.mode.startswith("I") or image.mode == "F"
    scale = _scale(image, full_scale) if deep else None
    step = max(1, _BAND_PIXELS // max(width, 1))
    for top in range(0, height, step):
        band = image.crop((0, top, width, min(top + step, height)))
        target = pixels[top : top + step]
        if scale is not None:
            values = np.asarray(band)
            target[...] = _to_8_bits(values, scale)[:, :, None]
            if key is not None:
                target[values == key[0]] = 255
        else:
            target[...] = _rgb(band)
            if key is not None:
                target[(target == np.array(key, dtype=np.int64)).all(axis=2)] = 255
    return pixels


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or (image.mode == "P" and "transparency" in image.info):
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        image = white
    elif "transparency" in image.info:
        # A colour key: the caller's business, and Pillow warns where a conversion cannot keep it.
        image = image.copy()
        del image.info["transparency"]
    return np.asarray(image.convert("RGB"))


def _scale(image: Image.Image, full_scale: int | None) -> float:
    """What 8 bits are of the picture's values.

    Where the depth is not recorded with the pixels, the range decides: up to 1 is a unit scale (floats only), up to 255
    is 8 bits as it stands, up to 65535 is 16 bits, above that full 32 bits. 16-bit storage is always 16 bits.
    """
    if full_scale is not None:
        return 255 / full_scale
    if image.mode.startswith("I;16"):
        return 255 / _16_BITS
    peak = _peak(image)
    if image.mode == "F" and peak <= 1:
        return 255.0
    if peak <= 255:
        return 1.0
    return 255 / (_16_BITS if peak <= _16_BITS else _32_BITS)


def _peak(image: Image.Image) -> float:
    step = max(1, _BAND_PIXELS // max(image.width, 1))
    peak = 0.0
    for top in range(0, image.height, step):
        values = np.asarray(image.crop((0, top, image.width, min(top + step, image.height)))).astype(np.float64)
        peak = max(peak, float(np.max(values, initial=0.0, where=np.isfinite(values))))
    return peak


def _to_8_bits(values: NDArray[np.generic], scale: float) -> NDArray[np.uint8]:
    """[H, W] grey of any depth to 0..255; what is not a number is black."""
    grey = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip(np.rint(grey * scale), 0, 255).astype(np.uint8)
