"""What a video's first frame looks like, to notice a library that shows it otherwise than we do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from preprocess.video.alpha import has_alpha
from preprocess.video.stream import display_matrix, upright_rgb

_CELLS: Final = 8
# On average. Scalers of other versions differ by less than one level; a picture that is turned, of another stream or of
# other colours differs by ten and more.
_MAX_DIFFERENCE: Final = 3.0


@dataclass(frozen=True, slots=True)
class FirstLook:
    """Of the first frame, upright and over white."""

    size: tuple[int, int]
    """(height, width)"""
    cells: NDArray[np.float64]
    """[8, 8, 3] mean colours, or fewer where the picture has fewer pixels."""
    oddity: str | None
    """What other libraries leave out when they show such a picture; None for ordinary ones."""

    @classmethod
    def of(cls, frame: Any) -> Self:
        """Of a frame as the decoder gives it."""
        pixels = upright_rgb(frame)
        return cls((pixels.shape[0], pixels.shape[1]), mean_colours(pixels), _oddity(frame))

    def resembles(self, pixels: NDArray[np.uint8]) -> bool:
        """Whether [H, W, 3] is the same picture, but for the rounding of another scaler."""
        if pixels.shape[:2] != self.size:
            return False
        return bool(np.abs(mean_colours(pixels) - self.cells).mean() <= _MAX_DIFFERENCE)


def mean_colours(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[8, 8, 3], or fewer, of a picture [H, W, 3]."""
    height, width = pixels.shape[:2]
    rows = np.linspace(0, height, min(_CELLS, height), endpoint=False).astype(np.int64)
    columns = np.linspace(0, width, min(_CELLS, width), endpoint=False).astype(np.int64)
    sums = np.add.reduceat(np.add.reduceat(pixels, rows, axis=0, dtype=np.uint32), columns, axis=1, dtype=np.uint64)
    heights, widths = np.diff(rows, append=height), np.diff(columns, append=width)
    return np.asarray(sums / (heights[:, None, None] * widths[None, :, None]), dtype=np.float64)


def _oddity(frame: Any) -> str | None:
    a, b, c, d = display_matrix(frame)
    if has_alpha(frame):
        return "its frames are transparent"
    if a * d - b * c < 0:
        return "its frames are mirrored"
    if (a or d) and (b or c):
        return "its frames are turned by other than a quarter"
    return None
