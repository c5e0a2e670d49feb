"""Video bytes to sampled, patchified frames.

Sequential and exact: count the frames by reading packets without decoding, choose indices by the published rule, decode
from the start, and shrink each chosen frame as it leaves the decoder. Frames that are not chosen are never converted to
RGB. Memory is the patches plus a handful of decoder frames.

What the container says about its frame count is not believed. Packets are counted; should the decoder then deliver
fewer frames than packets (damage, hidden frames), the indices are chosen again over the frames that really come out.

Timestamps are index / average rate, as in the published processor, also where the frame rate varies.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from av.stream import Disposition
from numpy.typing import NDArray

from preprocess.config import DecodeLimits, VideoBackend, VideoBudget
from preprocess.container import FrameReader, PacketReader, open_container
from preprocess.errors import MediaTooLarge, MediaUndecodable
from preprocess.patchify import PatchWriter
from preprocess.resize import frame_indices, frame_max_pixels, num_sampled_frames, smart_resize
from preprocess.sniff import describe
from preprocess.types import Patches

# Frame threads give 1.5x on one stream; more would multiply with the pool's own threads.
_CODEC_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class SampledVideo:
    """Chosen frames of one video, ready for the tower."""

    patches: Patches
    indices: tuple[int, ...]
    """Of the chosen frames in display order, without the repeated last one."""
    timestamps_s: NDArray[np.float32]
    """Of the same frames."""
    warnings: tuple[str, ...]


class VideoReader(Protocol):
    """One way of getting frames out of a file."""

    num_frames: int
    """An estimate that is exact for undamaged files."""
    rate_fps: float
    warnings: tuple[str, ...]

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """The frames at strictly increasing indices, each [H, W, 3] RGB, upright, over white.

        Raises FewerFrames when the file ends before the last of them.
        """
        ...


class FewerFrames(Exception):
    """The decoder delivered `num_frames` frames in all, fewer than were counted."""

    def __init__(self, num_frames: int) -> None:
        super().__init__(f"only {num_frames} frames decode")
        self.num_frames = num_frames


def sample_video(
    content: bytes,
    *,
    budget: VideoBudget,
    limits: DecodeLimits,
    backend: VideoBackend = "pyav",
    check_deadline: Callable[[], None] = lambda: None,
) -> SampledVideo:
    """Decodes, samples and patchifies. `check_deadline` is called at every decoded frame and may raise.

    Raises MediaUndecodable, MediaUnsupported or MediaTooLarge.
    """
    reader: VideoReader
    if backend == "decord":
        reader = DecordReader(content, limits, check_deadline)
    else:
        reader = PyAvReader(content, limits, check_deadline)
    num_frames = reader.num_frames
    found: tuple[str, ...] = ()
    while True:
        try:
            sampled = _sample(reader, num_frames, budget)
        except FewerFrames as error:
            if error.num_frames >= num_frames or error.num_frames == 0:
                raise MediaUndecodable(f"no frame of the video decodes ({describe(content)})") from error
            found = (f"{num_frames} frames were counted, {error.num_frames} decode; sampled over those",)
            num_frames = error.num_frames
        else:
            return SampledVideo(*sampled, warnings=reader.warnings + found)


def _sample(
    reader: VideoReader, num_frames: int, budget: VideoBudget
) -> tuple[Patches, tuple[int, ...], NDArray[np.float32]]:
    indices = frame_indices(num_frames, num_sampled_frames(num_frames, reader.rate_fps, budget))
    timestamps_s = indices.astype(np.float32) / np.float32(reader.rate_fps)
    padded = len(indices) + len(indices) % 2
    writer: PatchWriter | None = None
    for position, pixels in enumerate(reader.frames(indices.tolist())):
        if writer is None:
            # The first frame decides: it is upright, which the container's own size is not.
            height, width = smart_resize(
                pixels.shape[0],
                pixels.shape[1],
                min_pixels=budget.min_pixels,
                max_pixels=frame_max_pixels(len(indices), budget),
            )
            writer = PatchWriter(num_frames=padded, height=height, width=width)
        writer.put(position, pixels)
    if writer is None:
        raise FewerFrames(0)
    if padded > len(indices):
        writer.repeat(padded - 1)
    return writer.patches(), tuple(indices.tolist()), timestamps_s


class PyAvReader:
    """Sequential decoding with PyAV, which got through every clean file it was tried on."""

    def __init__(self, content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]) -> None:
        self._content = content
        self._limits = limits
        self._check_deadline = check_deadline
        self.warnings: tuple[str, ...] = ()
        with open_container(content, "a video") as container:
            stream = pick_video_stream(container, content)
            context = stream.codec_context
            _check_frame_size(context.width, context.height, limits)
            packets = PacketReader(container, stream)
            # Edit lists mark packets that are needed as references and never shown.
            self.num_frames = sum(1 for packet in packets if packet.size and not packet.is_discard)
            self.rate_fps = _rate_fps(container, stream, self.num_frames)
            self._shortfall = _shortfall(stream, self.num_frames)
        if self.num_frames == 0:
            raise MediaUndecodable(f"the video has no frames ({describe(content)})")
        _check_length(self.num_frames, self.rate_fps, limits)

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        with open_container(self._content, "a video") as container:
            stream = pick_video_stream(container, self._content)
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = _CODEC_THREADS
            reader = FrameReader(container, stream)
            wanted = iter(indices)
            target = next(wanted, None)
            num_decoded = 0
            for frame in reader:
                self._check_deadline()
                if num_decoded == target:
                    _check_frame_size(frame.width, frame.height, self._limits)
                    yield _upright_rgb(frame)
                    target = next(wanted, None)
                num_decoded += 1
                if target is None:
                    break
            self.warnings = self._shortfall + reader.warnings
            if target is not None:
                raise FewerFrames(num_decoded)


class DecordReader:
    """Decoding with decord. Applies rotation itself; no AV1, and off by one in HEVC files with leading pictures."""

    def __init__(self, content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]) -> None:
        import decord

        self._check_deadline = check_deadline
        self.warnings: tuple[str, ...] = ()
        # decord trusts what it is given; PyAV looks first, under the same rules as everywhere.
        with open_container(content, "a video") as container:
            context = pick_video_stream(container, content).codec_context
            _check_frame_size(context.width, context.height, limits)
        try:
            self._reader = decord.VideoReader(io.BytesIO(content), num_threads=_CODEC_THREADS)
        except RuntimeError as error:
            raise MediaUndecodable(f"decord cannot open the video ({describe(content)})") from error
        self.num_frames = len(self._reader)
        if self.num_frames == 0:
            raise MediaUndecodable(f"the video has no frames ({describe(content)})")
        self.rate_fps = float(self._reader.get_avg_fps())
        _check_length(self.num_frames, self.rate_fps, limits)

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        for index in indices:
            self._check_deadline()
            try:
                pixels: NDArray[np.uint8] = self._reader[index].asnumpy()
            except RuntimeError as error:
                raise MediaUndecodable(f"decord cannot decode frame {index}") from error
            yield pixels


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


def _shortfall(stream: Any, num_frames: int) -> tuple[str, ...]:
    """A warning when the file announces more frames than it holds, as one cut short does."""
    if stream.frames > num_frames:
        return (f"the file announces {stream.frames} frames and holds {num_frames}",)
    return ()


def _rate_fps(container: Any, stream: Any, num_frames: int) -> float:
    for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate):
        if rate:
            return float(rate)
    if container.duration and container.duration > 0:
        return num_frames * 1_000_000 / float(container.duration)
    raise MediaUndecodable("the video has neither a frame rate nor a duration")


def _check_frame_size(width: int, height: int, limits: DecodeLimits) -> None:
    if width * height > limits.max_frame_pixels:
        raise MediaTooLarge(
            f"video frames have {width} x {height} = {width * height} pixels, allowed are {limits.max_frame_pixels}"
        )


def _check_length(num_frames: int, rate_fps: float, limits: DecodeLimits) -> None:
    if num_frames > limits.max_video_frames:
        raise MediaTooLarge(f"video has {num_frames} frames, allowed are {limits.max_video_frames}")
    if num_frames / rate_fps > limits.max_duration_s:
        raise MediaTooLarge(f"video lasts {num_frames / rate_fps:.0f} s, allowed are {limits.max_duration_s:.0f} s")


def _upright_rgb(frame: Any) -> NDArray[np.uint8]:
    if any(component.is_alpha for component in frame.format.components):
        rgba = frame.to_ndarray(format="rgba").astype(np.uint16)
        alpha = rgba[:, :, 3:]
        pixels = ((rgba[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    else:
        pixels = frame.to_ndarray(format="rgb24")
    return _apply_display_matrix(pixels, _display_matrix(frame))


def _display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """(a, b, c, d) of the container's transform x' = a x + c y, y' = b x + d y, in 16.16 fixed point."""
    side_data = frame.side_data.get("DISPLAYMATRIX")
    if side_data is None:
        return (1, 0, 0, 1)
    matrix = np.frombuffer(bytes(side_data), dtype="<i4" if _LITTLE_ENDIAN else ">i4", count=9)
    return (int(matrix[0]), int(matrix[1]), int(matrix[3]), int(matrix[4]))


_LITTLE_ENDIAN: Final = np.little_endian


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
