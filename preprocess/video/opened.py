"""One video, looked at but not yet decoded: its frames are chosen, its size is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from preprocess.config import DecodeLimits, VideoBackend, VideoBudget
from preprocess.container import FrameReader, open_container
from preprocess.crew import Crew, Teamwork
from preprocess.errors import MediaUndecodable
from preprocess.resize import choose_frames, frame_max_pixels, smart_resize
from preprocess.sniff import describe
from preprocess.types import PATCH_SIZE, PATCH_WIDTH, TEMPORAL_PATCH_SIZE
from preprocess.video.animation import decode_animation, is_animated_webp, read_animation_index
from preprocess.video.decord import decode_with_decord
from preprocess.video.guests import Guest, admit
from preprocess.video.index import VideoIndex, read_index
from preprocess.video.look import FirstLook
from preprocess.video.parts import PartAssembly, Put
from preprocess.video.planned import Unproven, decode_planned
from preprocess.video.scan import FewerFrames, scan
from preprocess.video.stream import check_declared_size, check_frame_size, pick_video_stream, upright_size

# What parts that are begun and not taken may hold, unless two of them need more.
_OPEN_PARTS_BYTES: Final = 256 * 1024 * 1024
# What the frames of all decoders at work on one video may take, unless one needs more.
_DECODERS_BYTES: Final = 2 * 1024 * 1024 * 1024
# Of one decoder: some five pictures that others are made from, as levels allow, and one as RGB twice.
_DECODER_BYTES_PER_PIXEL: Final = 16
# What is not resized here is handed over before it takes more than this, unless one pair does.
_RAW_PART_BYTES: Final = 128 * 1024 * 1024
# A file whose end decodes differently every time would be sampled without end.
_MAX_CHANGES: Final = 2


class VideoChanged(Exception):
    """Damage made another choice of frames necessary. `video` has it; parts handed over so far are void."""

    def __init__(self, video: OpenVideo) -> None:
        super().__init__("the video was sampled again over the frames that decode")
        self.video = video


@dataclass(slots=True)
class OpenVideo:
    """What was chosen of a video. `warnings` grows until `decode` returns."""

    content: bytes
    index: VideoIndex
    budget: VideoBudget
    limits: DecodeLimits
    backend: VideoBackend
    frame_size: tuple[int, int]
    """(height, width) of the first frame, upright."""
    look: FirstLook | None = None
    """Of the first frame, for backends other than the default."""
    num_changes: int = 0
    """How often the frames were chosen again."""
    max_open_parts: int | None = None
    """Parts begun and not taken at a time; None: by their size."""
    indices: NDArray[np.int64] = field(init=False)
    """Numbers of the chosen frames, in display order, without the repeated last one."""
    timestamps_s: NDArray[np.float32] = field(init=False)
    """Of the same frames."""
    height: int = field(init=False)
    """To resize to, like `width`."""
    width: int = field(init=False)
    warnings: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        index = self.index
        self.indices, self.timestamps_s = choose_frames(index.num_frames, index.rate_fps, index.times_s, self.budget)
        self.height, self.width = smart_resize(
            *self.frame_size,
            min_pixels=self.budget.min_pixels,
            max_pixels=frame_max_pixels(len(self.indices), self.budget),
        )
        self.warnings = index.warnings

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """Patches along time, height, width, before merging."""
        num_pairs = -(-len(self.indices) // TEMPORAL_PATCH_SIZE)
        return (num_pairs, self.height // PATCH_SIZE, self.width // PATCH_SIZE)

    def decode(
        self,
        put: Put,
        *,
        patches_per_part: int | None,
        raw: bool,
        crew: Crew,
        check_deadline: Callable[[], None],
    ) -> None:
        """Hands the chosen frames over, part by part. Raises MediaError, or VideoChanged."""
        pairs_per_part = self._pairs_per_part(patches_per_part, raw)
        parts = PartAssembly(
            num_frames=len(self.indices),
            height=self.height,
            width=self.width,
            put=put,
            pairs_per_part=pairs_per_part,
            raw=raw,
            max_open_parts=self._parts_at_once(pairs_per_part, raw),
        )
        try:
            self._decode_into(parts, crew, check_deadline)
        except FewerFrames as error:
            if error.num_frames == 0 or error.num_frames >= self.index.num_frames:
                raise MediaUndecodable(f"no frame of the video decodes ({describe(self.content)})") from error
            raise VideoChanged(self._cut_to(error.num_frames)) from error

    def _decode_into(self, parts: PartAssembly, crew: Crew, check_deadline: Callable[[], None]) -> None:
        team = Teamwork()

        def emit(place: int, pixels: NDArray[np.uint8]) -> None:
            parts.wait_for_room(place, stop=team.stop, check_deadline=check_deadline)
            parts.store(place, pixels)

        height, width = self.frame_size
        max_decoders = max(1, _DECODERS_BYTES // (_DECODER_BYTES_PER_PIXEL * height * width))
        num_threads = min(crew.num_threads + 1, max_decoders)
        if is_animated_webp(self.content):
            decode_animation(self.content, self._wanted(parts), emit, check_deadline=check_deadline)
            return
        if self.backend == "decord":
            decode_with_decord(
                self._guest(), self._wanted(parts), emit, num_threads=num_threads, check_deadline=check_deadline
            )
            return
        if self.backend == "torchcodec":
            from preprocess.video.torchcodec import decode_with_torchcodec

            try:
                decode_with_torchcodec(
                    self._guest(),
                    self._wanted(parts),
                    emit,
                    limits=self.limits,
                    crew=crew,
                    team=team,
                    max_frames_ahead=parts.max_frames_ahead,
                    max_decoders=max_decoders,
                    check_deadline=check_deadline,
                )
            except Unproven as doubt:
                self.warnings += (f"not decoded by torchcodec, or not wholly: {doubt}",)
                team = Teamwork()
            else:
                return
        if self.index.scan_reason is None:
            try:
                decode_planned(
                    self.content,
                    self.index,
                    self._wanted(parts),
                    emit,
                    limits=self.limits,
                    crew=crew,
                    team=team,
                    max_frames_ahead=parts.max_frames_ahead,
                    max_decoders=max_decoders,
                    check_deadline=check_deadline,
                )
            except Unproven:
                # All workers have stopped; what they emitted is right, and the scan does the rest.
                team = Teamwork()
            else:
                return
        found = scan(
            self.content,
            self.index,
            self._wanted(parts),
            emit,
            limits=self.limits,
            num_threads=num_threads,
            check_deadline=check_deadline,
            fill_end=self.num_changes >= _MAX_CHANGES,
        )
        self.warnings += tuple(warning for warning in found if warning not in self.warnings)

    def _guest(self) -> Guest | str:
        if self.look is None:
            return "it was opened for another backend"
        return admit(self.content, self.index, self.look)

    def _wanted(self, parts: PartAssembly) -> list[tuple[int, int]]:
        return [(place, int(self.indices[place])) for place in parts.missing()]

    def _cut_to(self, num_frames: int) -> OpenVideo:
        warning = f"{self.index.num_frames} frames were counted, {num_frames} decode; sampled over those"
        cut = self.index.cut_to(num_frames, warning)
        return OpenVideo(
            self.content,
            cut,
            self.budget,
            self.limits,
            self.backend,
            self.frame_size,
            self.look,
            num_changes=self.num_changes + 1,
        )

    def _pairs_per_part(self, patches_per_part: int | None, raw: bool) -> int:
        num_pairs, h, w = self.grid_thw
        if patches_per_part is None:
            return num_pairs
        pairs = max(1, patches_per_part // (h * w))
        return max(1, min(pairs, _RAW_PART_BYTES // self._pair_bytes(raw))) if raw else pairs

    def _pair_bytes(self, raw: bool) -> int:
        if raw:
            return TEMPORAL_PATCH_SIZE * 3 * self.frame_size[0] * self.frame_size[1]
        _, h, w = self.grid_thw
        return h * w * PATCH_WIDTH * np.dtype(np.float32).itemsize

    def _parts_at_once(self, pairs_per_part: int, raw: bool) -> int:
        """How many parts may be begun and not taken: two, and more if they are small."""
        if self.max_open_parts is not None:
            return self.max_open_parts
        return max(2, _OPEN_PARTS_BYTES // (pairs_per_part * self._pair_bytes(raw)))


def open_video(
    content: bytes,
    *,
    budget: VideoBudget,
    limits: DecodeLimits,
    backend: VideoBackend,
    check_deadline: Callable[[], None],
) -> OpenVideo:
    """Reads the packets, decodes the first frame and chooses. Raises MediaError."""
    if is_animated_webp(content):
        return _open_animation(content, budget, limits, backend, check_deadline)
    check_declared_size(content, limits)
    index = read_index(content, limits, check_deadline)
    # The first frame decides on the size: it is upright, which the container's own size is not.
    frame = _first_frame(content, limits, check_deadline)
    look = None if backend == "pyav" else FirstLook.of(frame)
    return OpenVideo(content, index, budget, limits, backend, upright_size(frame), look)


def _open_animation(
    content: bytes,
    budget: VideoBudget,
    limits: DecodeLimits,
    backend: VideoBackend,
    check_deadline: Callable[[], None],
) -> OpenVideo:
    index = read_animation_index(content, limits)
    sizes: list[tuple[int, int]] = []
    try:
        decode_animation(
            content,
            [(0, 0)],
            lambda _, pixels: sizes.append((pixels.shape[0], pixels.shape[1])),
            check_deadline=check_deadline,
        )
    except FewerFrames as error:
        raise MediaUndecodable(f"no frame of the animation decodes ({describe(content)})") from error
    return OpenVideo(content, index, budget, limits, backend, sizes[0])


def _first_frame(content: bytes, limits: DecodeLimits, check_deadline: Callable[[], None]) -> Any:
    with open_container(content, "a video") as container:
        stream = pick_video_stream(container, content)
        stream.codec_context.thread_count = 1
        for frame in FrameReader(container, stream, check_deadline):
            check_deadline()
            check_frame_size(frame.width, frame.height, limits)
            return frame
    raise MediaUndecodable(f"no frame of the video decodes ({describe(content)})")
