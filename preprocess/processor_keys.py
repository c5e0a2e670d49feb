"""The keys of a checkpoint's `processor_config`: fallbacks, required values, and what every number may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from preprocess.ranges import Range, Real, Whole, shown_value
from preprocess.types import MERGE_SIZE, PATCH_SIZE, TEMPORAL_PATCH_SIZE, UNIT_PIXELS

AudioResampler = Literal["published", "soxr_hq"]

# Engines' own defaults, used where a checkpoint's key is missing or null.
_FALLBACKS: Final[Mapping[str, Any]] = {
    "image_min_pixels": 4 * UNIT_PIXELS,
    "image_max_pixels": 4096 * UNIT_PIXELS,
    "video_min_pixels": 4 * UNIT_PIXELS,
    "video_max_pixels": 4096 * UNIT_PIXELS,
    "video_total_max_pixels": 16384 * UNIT_PIXELS,
    "fps": 2.0,
    "max_frames": 256,
    "min_frames": 8,
    "num_frames": None,
    "audio_sampling_rate": 24_000,
    "audio_nfft": 960,
    "audio_window_size": 960,
    "audio_hop_length": 240,
    "audio_n_mels": 128,
    "audio_fmin": 0,
    "audio_fmax": None,
    "audio_input_id_per_second": 25.0,
    "audio_group_size": 4,
    # Ours, not the published processor's.
    "audio_resampler": "published",
    "video_audio_interleave_length": 0.0,
}
_MEDIA: Final = ("image", "video")
_PIXELS: Final = Whole(1, 2**40)
_FRAMES: Final = Whole(1, 1_000_000)
# Every number of the section that is read. The limits are far beyond what a checkpoint could mean.
PROCESSOR_RANGES: Final[Mapping[str, Range]] = {
    "image_min_pixels": Whole(0, 2**40),
    "image_max_pixels": _PIXELS,
    "video_min_pixels": Whole(0, 2**40),
    "video_max_pixels": _PIXELS,
    "video_total_max_pixels": _PIXELS,
    "fps": Real(0, 1000, above=True),
    "max_frames": Whole(TEMPORAL_PATCH_SIZE, 1_000_000),
    "min_frames": _FRAMES,
    "num_frames": _FRAMES,
    "audio_sampling_rate": Whole(1000, 768_000),
    "audio_nfft": Whole(2, 2**16),
    "audio_window_size": Whole(2, 2**16),
    "audio_hop_length": Whole(1, 2**16),
    "audio_n_mels": Whole(1, 4096),
    "audio_fmin": Real(0, 384_000),
    "audio_fmax": Real(0, 384_000, above=True),
    "audio_input_id_per_second": Real(0, 1e5, above=True),
    "audio_group_size": Whole(1, 1024),
    # -1 keeps a video's sound in one run.
    "video_audio_interleave_length": Real(-1, 86_400),
}
# Values the arithmetic here is written for. A checkpoint that says otherwise is refused, not approximated.
_REQUIRED: Final[Mapping[str, Any]] = {
    "patch_size": PATCH_SIZE,
    "merge_size": MERGE_SIZE,
    "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    "temporal_compression_ratio": 1,
    "use_video_timestamps": True,
    "use_per_grid_t_timestamps": False,
    "audio_stride_size": 2,
    "audio_avg_pooler": 2,
    "audio_group_size": 4,
}


class ProcessorKeys:
    """Typed reads of `processor_config`, with the fallbacks for missing and null keys. Failures are ValueErrors."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def _read(self, key: str) -> object:
        found = self._values.get(key)
        return _FALLBACKS[key] if found is None else found

    def resampler(self, key: str) -> AudioResampler:
        found = self._read(key)
        if found == "published" or found == "soxr_hq":
            return found
        raise ValueError(f"processor_config.{key} is {shown_value(found)}, allowed is 'published' or 'soxr_hq'")

    def optional_number(self, key: str) -> float | None:
        found = self._read(key)
        return None if found is None else float(self._checked(key, found))

    def number(self, key: str) -> float:
        return float(self._checked(key, self._read(key)))

    def optional_integer(self, key: str) -> int | None:
        found = self._read(key)
        return None if found is None else self.integer(key)

    def integer(self, key: str) -> int:
        found = self._read(key)
        # Some files write counts as 8.0.
        return int(self._checked(key, int(found) if isinstance(found, float) and found.is_integer() else found))

    def interleave_s(self, key: str) -> float:
        found = self.number(key)
        if found < 0 and found != -1:
            raise ValueError(f"processor_config.{key} is {found!r}, allowed is -1, 0 or a number of seconds")
        return found

    def check_required(self) -> None:
        """Values that are not for a checkpoint to choose."""
        for key, required in _REQUIRED.items():
            found = self._values.get(key)
            if found is not None and (found != required or isinstance(found, bool) is not isinstance(required, bool)):
                raise ValueError(f"processor_config.{key} is {shown_value(found)}, allowed is {required!r}")

    def check_orders(self) -> None:
        """Bounds that only mean something together."""
        pairs: list[tuple[str, float, float]] = [
            (f"{of}_pixels", self.integer(f"{of}_min_pixels"), self.integer(f"{of}_max_pixels")) for of in _MEDIA
        ]
        pairs.append(("frames", self.integer("min_frames"), self.integer("max_frames")))
        pairs.append(("audio_window_size, audio_nfft", self.integer("audio_window_size"), self.integer("audio_nfft")))
        rate_hz = self.integer("audio_sampling_rate")
        fmax_hz = self.optional_number("audio_fmax")
        pairs.append(("audio_fmin, audio_fmax", self.number("audio_fmin"), rate_hz / 2 if fmax_hz is None else fmax_hz))
        pairs.append(("audio_fmax, half of audio_sampling_rate", fmax_hz or 0.0, rate_hz / 2))
        for names, lower, upper in pairs:
            if lower > upper:
                raise ValueError(f"processor_config: {names}: the lower bound is {lower:g}, above the upper, {upper:g}")

    def _checked(self, key: str, found: object) -> float:
        allowed = PROCESSOR_RANGES[key]
        if not isinstance(found, int | float) or found not in allowed:
            shown = "null" if found is None else shown_value(found)
            raise ValueError(f"processor_config.{key} is {shown}, allowed is {allowed}")
        return found
