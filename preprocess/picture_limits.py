"""The limit on a picture's size, in the words of its error."""

from __future__ import annotations

from preprocess.config import DecodeLimits
from preprocess.errors import MediaTooLarge


def check_size(width: int, height: int, limits: DecodeLimits) -> None:
    """Raises MediaTooLarge for more pixels than are decoded here."""
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"image has {width} x {height} = {width * height} pixels, allowed are {limits.max_image_pixels}"
        )
