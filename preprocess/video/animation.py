"""Animated WebP as video, which FFmpeg does not decode: frames by Pillow, times from the file's own chunks."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from preprocess.config import DecodeLimits
from preprocess.errors import MediaUndecodable
from preprocess.sniff import describe
from preprocess.video.alpha import over_white
from preprocess.video.index import VideoIndex
from preprocess.video.scan import Emit, FewerFrames
from preprocess.video.stream import check_frame_size, check_length, check_total, pixels_allowed

_HEADER_BYTES: Final = 12
_MS: Final = 1000
_BAND_PIXELS: Final = 1024 * 1024


def is_animated_webp(content: bytes) -> bool:
    """Whether the file says that it is an animation."""
    return content[:4] == b"RIFF" and content[8:16] == b"WEBPVP8X" and len(content) > 20 and bool(content[20] & 2)


def read_animation_index(content: bytes, limits: DecodeLimits) -> VideoIndex:
    """Counts the frames from the chunks. Raises MediaUndecodable or MediaTooLarge."""
    durations_ms: list[int] = []
    canvas = (0, 0)
    at = _HEADER_BYTES
    while at + 8 <= len(content):
        kind, size = content[at : at + 4], struct.unpack_from("<I", content, at + 4)[0]
        payload = content[at + 8 : at + 8 + min(size, 16)]
        if kind == b"VP8X" and len(payload) >= 10:
            width, height = (int.from_bytes(payload[start : start + 3], "little") + 1 for start in (4, 7))
            check_frame_size(width, height, limits)
            canvas = max(canvas, (width, height), key=math.prod)
        elif kind == b"ANMF" and len(payload) >= 16 and at + 8 + size <= len(content):
            durations_ms.append(int.from_bytes(payload[12:15], "little"))
        at += 8 + size + size % 2
    num_frames = len(durations_ms)
    if not num_frames:
        raise MediaUndecodable(f"the animation has no frames ({describe(content)})")
    check_total(num_frames, *canvas, pixels_allowed("webp", len(content), limits))
    starts_ms = np.concatenate([[0], np.cumsum(durations_ms)]).astype(np.int64)
    length_s = float(starts_ms[-1]) / _MS
    check_length(num_frames, length_s, limits)
    numbers = np.arange(num_frames)
    is_timed = min(durations_ms) > 0
    return VideoIndex(
        pts=starts_ms[:-1],
        dts=starts_ms[:-1],
        size_bytes=np.zeros(num_frames, dtype=np.int64),
        is_start=numbers == 0,
        is_marked=numbers == 0,
        shown=numbers.astype(np.int64),
        times_s=starts_ms[:-1] / _MS if is_timed else None,
        # Without durations, as fast as browsers show such files.
        rate_fps=num_frames / length_s if length_s else 10.0,
        scan_reason="an animation",
        may_skip=False,
    )


def decode_animation(
    content: bytes, wanted: Sequence[tuple[int, int]], emit: Emit, *, check_deadline: Callable[[], None]
) -> None:
    """Emits the frames `wanted`, (place, frame number) pairs with both ascending; raises FewerFrames."""
    num_decoded = 0
    try:
        with Image.open(io.BytesIO(content), formats=["WEBP"]) as image:
            for place, number in wanted:
                # Each frame is drawn on the ones before it, so Pillow decodes all of them.
                for passed in range(num_decoded, number + 1):
                    check_deadline()
                    image.seek(passed)
                    image.load()
                    num_decoded = passed + 1
                emit(place, _over_white(image))
    except (OSError, EOFError, ValueError) as error:
        raise FewerFrames(num_decoded) from error


def _over_white(image: Image.Image) -> NDArray[np.uint8]:
    """[H, W, 3], without a second whole picture of four bytes a pixel."""
    over = np.empty((image.height, image.width, 3), dtype=np.uint8)
    step = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, step):
        band = image.crop((0, top, image.width, min(top + step, image.height)))
        over[top : top + step] = over_white(np.asarray(band.convert("RGBA")))
    return over
