"""The values that travel through the media path. Light: numpy and msgspec only, no torch.

Shape letters: T frames, H height, W width, C colour channels, P patches, N audio samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import OptionInvalid

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


UNIT_PIXELS: Final = (PATCH_SIZE * MERGE_SIZE) ** 2
"""Pixels of one merged patch, 32 x 32 = 1024: the smallest picture that the tower sees."""
LOW_DETAIL_PIXELS: Final = 512 * 512
"""What `detail: low` allows a picture."""

Detail = Literal["auto", "low", "high"]
_DETAILS: Final[tuple[Detail, ...]] = ("auto", "low", "high")
_MAX_FPS: Final = 240
_MAX_FRAMES: Final = 100_000
_MAX_PIXELS: Final = 2**31 - 1
# Frames come in pairs: fewer than two cannot be asked for. An upper bound below one unit could not be kept.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "fps": (0.001, _MAX_FPS),
    "max_frames": (TEMPORAL_PATCH_SIZE, _MAX_FRAMES),
    "min_frames": (1, _MAX_FRAMES),
    "num_frames": (TEMPORAL_PATCH_SIZE, _MAX_FRAMES),
    "min_pixels": (1, _MAX_PIXELS),
    "max_pixels": (UNIT_PIXELS, _MAX_PIXELS),
}
_ORDERED: Final = (
    ("min_frames", "max_frames"),
    ("min_frames", "num_frames"),
    ("num_frames", "max_frames"),
    ("min_pixels", "max_pixels"),
)


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request may say about one medium; None means the processor's own setting.

    Raises OptionInvalid naming field, value and what is allowed. Ceilings of the server are applied later, by
    `ProcessorConfig.image_budget` and its siblings.
    """

    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    num_frames: int | None = None
    """Instead of a frame rate. Odd numbers go to the even neighbour that is a multiple of four, as published."""
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Of a picture or of one frame, after resizing."""
    use_audio: bool | None = None
    """None: the audio track of a video is used if there is one. True requires one."""
    detail: Detail | None = None
    """low: at most `LOW_DETAIL_PIXELS`. auto and high: the processor's own limit."""

    def __post_init__(self) -> None:
        for field, (lowest, highest) in _RANGES.items():
            value = getattr(self, field)
            # `not (a <= b)` and not `a > b`: NaN must fail.
            if value is not None and not (lowest <= value <= highest):
                # Rates have no other bounds. Of the rest one side only: a model's own ceiling is below the one here.
                bound = f"at most {highest}" if value > highest else f"at least {lowest}"
                bound = f"{lowest} to {highest}" if field == "fps" else bound
                raise OptionInvalid(field, f"{field} is {value}, allowed is {bound}")
        if self.fps is not None and self.num_frames is not None:
            raise OptionInvalid(
                "num_frames",
                f"fps is {self.fps} and num_frames is {self.num_frames}; they exclude each other, give one",
            )
        for low_field, high_field in _ORDERED:
            low, high = getattr(self, low_field), getattr(self, high_field)
            if low is not None and high is not None and low > high:
                raise OptionInvalid(
                    low_field, f"{low_field} is {low}, allowed is at most {high_field}, which is {high}"
                )
        if self.min_frames is not None and self.min_frames == self.max_frames and self.min_frames % TEMPORAL_PATCH_SIZE:
            raise OptionInvalid(
                "min_frames",
                f"min_frames and max_frames are both {self.min_frames}; frames come in pairs, allowed is even",
            )
        self._check_detail()

    def _check_detail(self) -> None:
        if self.detail is None:
            return
        if self.detail not in _DETAILS:
            raise OptionInvalid("detail", f"detail is {self.detail}, allowed is {', '.join(_DETAILS)}")
        for field in ("min_pixels", "max_pixels"):
            value = getattr(self, field)
            if self.detail == "low" and value is not None and value > LOW_DETAIL_PIXELS:
                raise OptionInvalid(
                    field, f"{field} is {value} and detail is low, which allows at most {LOW_DETAIL_PIXELS}; give one"
                )

    def given(self) -> tuple[str, ...]:
        """Names of the fields that are set, in declaration order."""
        return tuple(field for field in self.__struct_fields__ if getattr(self, field) is not None)

    def applying_to(self, modality: Modality) -> MediaOptions:
        """These options without those that say nothing about the modality."""
        kept = OPTIONS_OF[modality]
        return MediaOptions(**{field: getattr(self, field) for field in self.given() if field in kept})


OPTIONS_OF: Final[dict[Modality, frozenset[str]]] = {
    Modality.IMAGE: frozenset({"min_pixels", "max_pixels", "detail"}),
    Modality.VIDEO: frozenset(MediaOptions.__struct_fields__) - {"detail"},
    Modality.AUDIO: frozenset(),
}
"""The options that mean something for each modality."""


class MediaSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one medium comes from: an http, https, data or file URL, and what the request asked for it.

    Raises OptionInvalid when an option does not apply to the modality.
    """

    modality: Modality
    url: str
    options: MediaOptions = MediaOptions()

    def __post_init__(self) -> None:
        allowed = OPTIONS_OF[self.modality]
        for field in self.options.given():
            if field not in allowed:
                names = ", ".join(sorted(allowed)) or "none"
                raise OptionInvalid(field, f"{field} does not apply to {self.modality}; allowed options: {names}")


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
class Pixels:
    """Decoded pictures, upright and not yet resized, for a tower's device to turn into `Patches`."""

    frames: tuple[NDArray[np.uint8], ...]
    """An even number, each [H, W, 3] RGB and C-contiguous; sizes may differ. An image is the same array twice, and so
    is the last frame of a video with an odd count."""
    height: int
    """To resize to, like `width`: pixels, a multiple of 32."""
    width: int

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """Patches along time, height, width, before merging."""
        return (len(self.frames) // TEMPORAL_PATCH_SIZE, self.height // PATCH_SIZE, self.width // PATCH_SIZE)


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A run of frame pairs of one medium: pairs `[first_pair, first_pair + t)` of its grid."""

    first_pair: int
    pictures: Patches | Pixels
    """Its grid's t is the number of pairs in this part, h and w are the medium's."""


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
