"""The video stream of a container: which one it is, how fast it runs, what is refused, its frames as upright RGB."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from av.stream import Disposition
from numpy.typing import NDArray

from preprocess.config import DecodeLimits
from preprocess.errors import MediaTooLarge, MediaUndecodable
from preprocess.sniff import describe

_QUARTER_TURNS: Final = ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0))
"""Display matrices by the number of quarter turns against the clock."""
_NATIVE_INT32: Final = "<i4" if np.little_endian else ">i4"


def pick_video_stream(container: Any, content: bytes) -> Any:
    """The container's default video stream, else its first; cover art is not video.

    Raises MediaUndecodable when there is none.
    """
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not streams:
        cover = " besides cover art" if container.streams.video else ""
        raise MediaUndecodable(f"no video stream{cover} in the file ({describe(content)})")
    for stream in streams:
        if stream.codec_context is None:
            raise MediaUndecodable(f"the video's codec is not known here ({describe(content)})")
    return next((stream for stream in streams if stream.disposition & Disposition.default), streams[0])


def stream_rate_fps(container: Any, stream: Any, num_frames: int) -> float:
    """Frames per second as the container has it. Raises MediaUndecodable when it tells neither rate nor duration."""
    for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate):
        if rate:
            return float(rate)
    if container.duration and container.duration > 0:
        return num_frames * 1_000_000 / float(container.duration)
    raise MediaUndecodable("the video has neither a frame rate nor a duration")


def check_frame_size(width: int, height: int, limits: DecodeLimits) -> None:
    """Raises MediaTooLarge."""
    if width * height > limits.max_frame_pixels:
        raise MediaTooLarge(
            f"video frames have {width} x {height} = {width * height} pixels, allowed are {limits.max_frame_pixels}"
        )


def check_length(num_frames: int, duration_s: float, limits: DecodeLimits) -> None:
    """Raises MediaTooLarge."""
    if num_frames > limits.max_video_frames:
        raise MediaTooLarge(f"video has {num_frames} frames, allowed are {limits.max_video_frames}")
    if duration_s > limits.max_duration_s:
        raise MediaTooLarge(f"video lasts {duration_s:.0f} s, allowed are {limits.max_duration_s:.0f} s")


def upright_rgb(frame: Any) -> NDArray[np.uint8]:
    """[H, W, 3] as it is shown: turned by the display matrix, over white where it is transparent."""
    # One thread: the scaler would start as many as there are cores, beside decoders that have their own.
    if has_alpha(frame):
        pixels = over_white(frame.to_ndarray(format="rgba", threads=1))
    else:
        pixels = frame.to_ndarray(format="rgb24", threads=1)
    return _apply_display_matrix(pixels, display_matrix(frame))


def has_alpha(frame: Any) -> bool:
    """Whether its pixels may be transparent."""
    return any(component.is_alpha for component in frame.format.components)


def over_white(rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[H, W, 3] of a picture [H, W, 4], on a white background where it is transparent."""
    colour, alpha = rgba[:, :, :3].astype(np.uint16), rgba[:, :, 3:].astype(np.uint16)
    return ((colour * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """(a, b, c, d) of the container's transform x' = a x + c y, y' = b x + d y, in 16.16 fixed point."""
    try:
        side_data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:
        # PyAV cannot list kinds that are newer than itself (a camera's notes); then it tells the angle at least.
        return _QUARTER_TURNS[round(frame.rotation / 90) % 4]
    if side_data is None:
        return (1, 0, 0, 1)
    matrix = np.frombuffer(bytes(side_data), dtype=_NATIVE_INT32, count=9)
    return (int(matrix[0]), int(matrix[1]), int(matrix[3]), int(matrix[4]))


def _apply_display_matrix(pixels: NDArray[np.uint8], matrix: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Quarter turns and mirrors. Angles in between are rounded to the nearest quarter turn, as players do."""
    a, b, c, d = matrix
    if abs(a) + abs(d) >= abs(b) + abs(c):
        mirror_x, mirror_y = a < 0, d < 0
    else:
        # x' follows y and y' follows x: the picture lies on its side.
        pixels = pixels.transpose(1, 0, 2)
        mirror_x, mirror_y = c < 0, b < 0
    if mirror_x:
        pixels = pixels[:, ::-1]
    if mirror_y:
        pixels = pixels[::-1]
    return pixels
