"""The slow truth about a video's frames: decode everything from the start, in one thread, keep all of it."""

from __future__ import annotations

import io

import av
import numpy as np
from numpy.typing import NDArray


def all_frames(clip: bytes) -> list[NDArray[np.uint8]]:
    """Every frame of the first video stream, [H, W, 3] RGB, in the order the decoder gives them."""
    frames: list[NDArray[np.uint8]] = []
    with av.open(io.BytesIO(clip), mode="r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            frames.append(np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8))
    return frames
