"""Frames by decord. Applies rotation itself; no AV1, and off by one in HEVC files with leading pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import MediaUndecodable
from preprocess.sniff import describe
from preprocess.video.scan import Emit, FewerFrames


def decode_with_decord(
    content: bytes,
    wanted: Sequence[tuple[int, int]],
    emit: Emit,
    *,
    num_threads: int,
    check_deadline: Callable[[], None],
) -> None:
    """Emits the frames `wanted`, (place, frame number) pairs with both ascending.

    Raises MediaUndecodable, and FewerFrames when decord counts fewer frames.
    """
    import decord

    # Its own errors are no RuntimeErrors.
    faults = (RuntimeError, decord.DECORDError, decord.DECORDLimitReachedError)
    try:
        reader = decord.VideoReader(io.BytesIO(content), num_threads=num_threads)
    except faults as error:
        raise MediaUndecodable(f"decord cannot open the video ({describe(content)})") from error
    for place, number in wanted:
        check_deadline()
        if number >= len(reader):
            raise FewerFrames(len(reader))
        try:
            pixels: NDArray[np.uint8] = reader[number].asnumpy()
        except faults as error:
            raise MediaUndecodable(f"decord cannot decode frame {number}") from error
        emit(place, pixels)
