"""Transparent frames over white, without a second whole frame in between.

Decoders of GIF, APNG and WebP give four bytes a pixel whether anything is transparent or not. Bands of rows are looked
at first: opaque ones are only copied, and what must be computed stays in the processor's cache.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BAND_PIXELS: Final = 64 * 1024
_OPAQUE: Final = 255
_PLACES: Final = {"rgba": (0, 1, 2, 3), "bgra": (2, 1, 0, 3), "argb": (1, 2, 3, 0), "abgr": (3, 2, 1, 0)}
"""Where red, green, blue and alpha are among the four bytes of a pixel."""


def has_alpha(frame: Any) -> bool:
    """Whether its pixels may be transparent."""
    return any(component.is_alpha for component in frame.format.components)


def frame_over_white(frame: Any) -> NDArray[np.uint8]:
    """[H, W, 3] of a decoded frame that has alpha, on a white background where it is transparent."""
    plane = frame.planes[0]
    places = _PLACES.get(frame.format.name)
    if places is None or plane.line_size < 4 * frame.width:
        # One thread: the scaler would start as many as there are cores, beside decoders that have their own.
        return over_white(frame.to_ndarray(format="rgba", threads=1))
    lines = np.frombuffer(plane, dtype=np.uint8, count=plane.line_size * frame.height)
    # As the decoder left it: converting would take two more frames.
    pixels = lines.reshape(frame.height, plane.line_size)[:, : 4 * frame.width].reshape(frame.height, frame.width, 4)
    return over_white(pixels, places)


def over_white(pixels: NDArray[np.uint8], places: tuple[int, int, int, int] = _PLACES["rgba"]) -> NDArray[np.uint8]:
    """[H, W, 3] of a picture [H, W, 4] whose pixels are four bytes side by side, on a white background.

    `places` of red, green, blue and alpha among the four. Rounded to the nearest of 255 steps.
    """
    height, width = pixels.shape[:2]
    *colours, alpha = places
    over = np.empty((height, width, 3), dtype=np.uint8)
    step = max(1, _BAND_PIXELS // max(width, 1))
    for top in range(0, height, step):
        band, target = pixels[top : top + step], over[top : top + step]
        # The bits that all pixels share: as words it takes a tenth of the time.
        shared = np.bitwise_and.reduce(band.view(np.uint32), axis=None)
        if shared.tobytes()[alpha] == _OPAQUE:
            for channel, place in enumerate(colours):
                target[:, :, channel] = band[:, :, place]
            continue
        weight = band[:, :, alpha].astype(np.uint16)
        white = (_OPAQUE - weight) * np.uint16(_OPAQUE) + np.uint16(_OPAQUE // 2)
        for channel, place in enumerate(colours):
            mixed = band[:, :, place] * weight
            mixed += white
            mixed //= np.uint16(_OPAQUE)
            target[:, :, channel] = mixed
    return over
