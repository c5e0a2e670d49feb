"""HEIC pictures, where pillow-heif is installed. Importing this module does not need it.

libheif applies rotation, mirroring and cropping as the container tells, so the EXIF orientation, which repeats it, is
not looked at. Depth maps, thumbnails and further pictures are left alone.
"""

from __future__ import annotations

import importlib.util

import numpy as np
from numpy.typing import NDArray

from preprocess.colour import on_white
from preprocess.config import DecodeLimits
from preprocess.errors import MediaUnsupported
from preprocess.picture_limits import check_size


def decode_heif(content: bytes, limits: DecodeLimits) -> NDArray[np.uint8]:
    """[H, W, 3] RGB of the primary picture, upright.

    Raises MediaUnsupported without the library, MediaTooLarge, and what the library raises for damage: ValueError,
    EOFError, SyntaxError, RuntimeError, OSError.
    """
    if importlib.util.find_spec("pillow_heif") is None:
        raise MediaUnsupported(
            "HEIC images are not decoded by this server; send JPEG, PNG or WebP",
            hint="HEIC needs pillow-heif: pip install 'mimo-epd[heif]' (from a checkout: pip install -e '.[heif]')",
        )
    import pillow_heif

    # Pictures are decoded side by side; threads within one would be too many.
    pillow_heif.options.DECODE_THREADS = 1
    opened = pillow_heif.open_heif(content, convert_hdr_to_8bit=True)
    picture = opened[opened.primary_index]
    check_size(*picture.size, limits)
    return on_white(picture.to_pillow())
