"""The video stream of a container: which one it is, how fast it runs, what is refused, its frames as upright RGB."""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from av.sidedata.sidedata import SideDataContainer
from av.stream import Disposition
from numpy.typing import NDArray

from preprocess.config import DecodeLimits
from preprocess.errors import MediaTooLarge, MediaUndecodable
from preprocess.sniff import describe, sniff
from preprocess.video.alpha import frame_over_white, has_alpha

_QUARTER_TURNS: Final = ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0))
"""Display matrices by the number of quarter turns against the clock."""
_PREDICTING: Final = frozenset(
    {"h264", "hevc", "vvc", "av1", "vp8", "vp9", "vp7", "vp6", "vp6f", "vp5", "vp3", "theora", "dirac", "cavs"}
    | {"mpeg4", "mpeg2video", "mpeg1video", "h261", "h263", "h263i", "h263p", "flv1", "vc1", "wmv1", "wmv2", "wmv3"}
    | {"msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "rv10", "rv20", "rv30", "rv40", "svq1", "svq3"}
)
"""Codecs whose encoders run at a video's rate, and write a picture that is as the last one was in a few bytes."""
_side_data_of: Final[Any] = SideDataContainer
"""Its stubs do not know that it takes a frame."""
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


def check_total(num_frames: int, width: int, height: int, max_pixels: int) -> None:
    """`max_pixels` is what `pixels_allowed` gives. Raises MediaTooLarge."""
    num_pixels = num_frames * width * height
    if num_pixels > max_pixels:
        raise MediaTooLarge(
            f"video has {num_frames} frames of {width} x {height}, together {num_pixels} pixels; allowed for a file of "
            f"its size are {max_pixels}"
        )


def pixels_allowed(codec: str, size_bytes: int, limits: DecodeLimits) -> int:
    """Pixels that the frames of a file of `size_bytes` may have together; see `DecodeLimits.max_free_pixels`.

    `codec` is FFmpeg's name of the format, "h264" whichever library decodes it.
    """
    per_byte = limits.max_video_pixels_per_byte if codec in _PREDICTING else limits.max_animation_pixels_per_byte
    return limits.max_free_pixels + size_bytes * per_byte


class PixelMeter:
    """Counts what is decoded, since pictures may become larger on the way."""

    def __init__(self, stream: Any, content: bytes, limits: DecodeLimits) -> None:
        self._max_pixels = pixels_allowed(stream.codec_context.codec.canonical_name, len(content), limits)
        self._num_pixels = 0

    def count(self, frame: Any) -> None:
        """Raises MediaTooLarge."""
        self._num_pixels += frame.width * frame.height
        if self._num_pixels > self._max_pixels:
            raise MediaTooLarge(
                f"the video's frames have over {self._max_pixels} pixels together, which is the limit for a file of "
                "its size"
            )


def check_declared_size(content: bytes, limits: DecodeLimits) -> None:
    """Of GIF and PNG, which FFmpeg opens as videos without a size, or not at all, when their size is absurd.

    Raises MediaTooLarge, or MediaUndecodable for no pixels at all.
    """
    kind = sniff(content)
    if kind == "GIF" and len(content) >= 10:
        width, height = struct.unpack_from("<HH", content, 6)
    elif kind == "PNG" and len(content) >= 24:
        width, height = struct.unpack_from(">II", content, 16)
    else:
        return
    if not width or not height:
        raise MediaUndecodable(f"{kind} of {width} x {height} pixels")
    check_frame_size(width, height, limits)


def check_length(num_frames: int, duration_s: float, limits: DecodeLimits) -> None:
    """Raises MediaTooLarge."""
    if num_frames > limits.max_video_frames:
        raise MediaTooLarge(f"video has {num_frames} frames, allowed are {limits.max_video_frames}")
    if duration_s > limits.max_duration_s:
        raise MediaTooLarge(f"video lasts {duration_s:.0f} s, allowed are {limits.max_duration_s:.0f} s")


def upright_rgb(frame: Any) -> NDArray[np.uint8]:
    """[H, W, 3] as it is shown: turned by the display matrix, over white where it is transparent."""
    if has_alpha(frame):
        pixels = frame_over_white(frame)
    else:
        # One thread: the scaler would start as many as there are cores, beside decoders that have their own.
        pixels = frame.to_ndarray(format="rgb24", threads=1)
    return _apply_display_matrix(pixels, display_matrix(frame))


def upright_size(frame: Any) -> tuple[int, int]:
    """(height, width) as it is shown."""
    a, b, c, d = display_matrix(frame)
    lies = abs(a) + abs(d) < abs(b) + abs(c)
    return (frame.width, frame.height) if lies else (frame.height, frame.width)


def display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """(a, b, c, d) of the container's transform x' = a x + c y, y' = b x + d y, in 16.16 fixed point."""
    try:
        # Not `frame.side_data`, which the frame keeps: it would hold its pixels until the interpreter looks for cycles.
        side_data = _side_data_of(frame).get("DISPLAYMATRIX")
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
