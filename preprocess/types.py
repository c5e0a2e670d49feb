"""The values that travel through the media path. Light: numpy and msgspec only, no torch.

Shape letters: T frames, H height, W width, C colour channels, P patches, N audio samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

PATCH_SIZE: Final = 16
MERGE_SIZE: Final = 2
TEMPORAL_PATCH_SIZE: Final = 2
PATCH_WIDTH: Final = 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE * PATCH_SIZE
"""Values in one patch: 3 channels x 2 frames x 16 x 16 = 1536."""

MediaKey = NewType("MediaKey", str)
"""Identity of prepared content: 32 lowercase hexadecimal digits. See `preprocess.keys`."""


class Modality(StrEnum):
    """What a medium is used as. A GIF sent as IMAGE is one picture, sent as VIDEO it is all its frames."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


_MAX_FPS: Final = 240
_MAX_FRAMES: Final = 100_000
_MAX_PIXELS: Final = 2**31 - 1


def _require_range(field: str, value: float | None, lowest: float, highest: float) -> None:
    # `not (a <= b)` and not `a > b`: NaN must fail.
    if value is not None and not (lowest <= value <= highest):
        raise ValueError(f"{field} is {value}, allowed is {lowest} to {highest}")


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request may say about one medium; None means the processor's own setting.

    Raises ValueError naming field, value and allowed range. Ceilings of the server are applied later, by
    `ProcessorConfig.image_budget` and its siblings.
    """

    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    use_audio: bool | None = None

    def __post_init__(self) -> None:
        _require_range("fps", self.fps, 0.001, _MAX_FPS)
        for field in ("max_frames", "min_frames", "num_frames"):
            _require_range(field, getattr(self, field), 1, _MAX_FRAMES)
        for field in ("min_pixels", "max_pixels"):
            _require_range(field, getattr(self, field), 1, _MAX_PIXELS)
        if self.fps is not None and self.num_frames is not None:
            raise ValueError(f"fps ({self.fps}) and num_frames ({self.num_frames}) exclude each other; give one")
        _require_order("min_frames", self.min_frames, "max_frames", self.max_frames)
        _require_order("min_pixels", self.min_pixels, "max_pixels", self.max_pixels)

    def given(self) -> tuple[str, ...]:
        """Names of the fields that are set, in declaration order."""
        return tuple(field for field in self.__struct_fields__ if getattr(self, field) is not None)


def _require_order(low_field: str, low: int | None, high_field: str, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        raise ValueError(f"{low_field} is {low}, allowed is at most {high_field}, which is {high}")


_OPTIONS_OF: Final[dict[Modality, frozenset[str]]] = {
    Modality.IMAGE: frozenset({"min_pixels", "max_pixels"}),
    Modality.VIDEO: frozenset(MediaOptions.__struct_fields__),
    Modality.AUDIO: frozenset(),
}


class MediaSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one medium comes from: an http, https, data or file URL, and what the request asked for it.

    Raises ValueError when an option does not apply to the modality.
    """

    modality: Modality
    url: str
    options: MediaOptions = MediaOptions()

    def __post_init__(self) -> None:
        allowed = _OPTIONS_OF[self.modality]
        for field in self.options.given():
            if field not in allowed:
                names = ", ".join(sorted(allowed)) or "none"
                raise ValueError(f"{field} does not apply to {self.modality}; allowed options: {names}")


@dataclass(frozen=True, slots=True)
class Frames:
    """Decoded pictures in display order, upright, RGB. An image is one frame at 0 s."""

    pixels: NDArray[np.uint8]
    """[T, H, W, C], C = 3."""
    timestamps_s: NDArray[np.float32]
    """[T], of the sampled frames."""


@dataclass(frozen=True, slots=True)
class Waveform:
    """Decoded sound, not resampled and not mixed."""

    samples: NDArray[np.float32]
    """[channels, N], full scale is 1.0; float sources may exceed it."""
    rate_hz: int

    @property
    def duration_s(self) -> float:
        return float(self.samples.shape[1]) / self.rate_hz


@dataclass(frozen=True, slots=True)
class Patches:
    """Input of the vision tower."""

    pixel_values: NDArray[np.float32]
    """[P, 1536]; rows in merge order, columns channel, frame, row, column."""
    grid_thw: tuple[int, int, int]
    """Patches along time, height, width, before merging; their product is P."""

    @property
    def num_tokens(self) -> int:
        t, h, w = self.grid_thw
        return t * h * w // (MERGE_SIZE * MERGE_SIZE)


@dataclass(frozen=True, slots=True)
class MelFrames:
    """Input of the audio tower: natural-log mel magnitudes of the whole clip."""

    log_mel: NDArray[np.float32]
    """[frames, 128], 100 frames per second."""
    duration_s: float
    """Of the sound itself, without padding."""

    @property
    def num_tokens(self) -> int:
        return num_audio_tokens(self.log_mel.shape[0])


def num_audio_tokens(num_mel_frames: int) -> int:
    """Embeddings the audio tower makes of a clip: two halvings and groups of four, each rounded up."""
    return -(-num_mel_frames // 16)


class MediaLayout(msgspec.Struct, frozen=True):
    """How the embedding rows of one medium are arranged, and what a prompt needs to know to hold them.

    Rows of the medium's embedding tensor:

        [0, num_vision_tokens)                      vision, pair after pair (an image is one pair)
        [num_vision_tokens, num_rows)               audio rows kept, slice after slice

    A plain audio clip has no vision rows, keeps all its audio rows and has no slices.
    """

    modality: Modality
    grid_thw: tuple[int, int, int] | None = None
    timestamps_s: tuple[float, ...] = ()
    """First frame of each pair; every value is exact in float32. Empty unless VIDEO."""
    audio_slices: tuple[tuple[int, int], ...] = ()
    """(start, length) into the rows of the clip's whole audio track, one per pair; empty when there is no audio.
    A length of 0 means that the track had ended (or not reached one row) there."""
    num_audio_rows: int = 0

    @property
    def num_vision_tokens(self) -> int:
        if self.grid_thw is None:
            return 0
        t, h, w = self.grid_thw
        return t * h * w // (MERGE_SIZE * MERGE_SIZE)

    @property
    def num_rows(self) -> int:
        return self.num_vision_tokens + self.num_audio_rows


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """One medium, ready for the towers."""

    key: MediaKey
    layout: MediaLayout
    patches: Patches | None
    mel: MelFrames | None
    warnings: tuple[str, ...] = ()
    """What was repaired or left out, in words for a person; empty for a clean file."""
