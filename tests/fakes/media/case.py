"""What one generated file must come out as, written down from how it was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from preprocess.errors import MediaError
from preprocess.types import Modality

Colour = tuple[int, int, int]
Mark = tuple[float, float, Colour]
"""(y, x, RGB): a point as fractions of displayed height and width, and its colour."""


@dataclass(frozen=True)
class Picture:
    """One picture: displayed size in pixels and the colour at marked points, within `tolerance` grey levels."""

    width: int
    height: int
    marks: tuple[Mark, ...]
    tolerance: int = 2
    num_levels: int = 1
    """Different greys that the decoded picture has at least."""
    grid: tuple[int, int] | None = None
    """Patches down and across after resizing to 1024 pixels at least and 4,194,304 at most; None: displayed size / 16,
    for sizes that resizing leaves alone; checked only where both are multiples of 32."""


@dataclass(frozen=True)
class Tone:
    """A sine in a video's audio track."""

    duration_s: float
    tone_hz: float
    tolerance_s: float = 0.07
    """Codecs pad to whole frames."""


@dataclass(frozen=True)
class Clip:
    """A video of barcode pictures."""

    width: int
    height: int
    numbers: tuple[int, ...]
    """Barcodes of the sampled frames, without the repetition that fills the last pair."""
    times_s: tuple[float, ...]
    """Of the same frames."""
    tone: Tone | None = None
    warning: str | None = None
    """A pattern that a warning must match; None: there may be none."""
    colour_tolerance: int | None = 30
    """Grey levels that the four colour marks may be off; None: the codec keeps no colour."""


@dataclass(frozen=True)
class DamagedClip:
    """A video of `num_frames` barcode pictures of which some cannot be right. Those that can must be."""

    width: int
    height: int
    num_frames: int
    rate_fps: float
    lost: range
    """Numbers of the frames that may be missing, or look like anything."""
    first: int = field(default=0, kw_only=True)
    """Number of the file's first frame, at 0 s."""
    num_readable: int
    """Different numbers that must be found at least."""
    warning: str | None
    """A pattern that a warning must match; None: nothing tells that the file is damaged."""


@dataclass(frozen=True)
class Cartoon:
    """An animation whose frames are told by colours: per sampled frame the marks, and the time."""

    width: int
    height: int
    frames: tuple[tuple[Mark, ...], ...]
    times_s: tuple[float, ...]
    tolerance: int = 10


@dataclass(frozen=True)
class Sound:
    """Sound of sines: one frequency per channel, all of one amplitude."""

    rate_hz: int
    duration_s: float
    tones_hz: tuple[float, ...]
    """One per channel; 0 is silence."""
    amplitude: float = 0.5
    tolerance: float = 0.01
    """Of the amplitude, as a fraction of full scale."""
    tolerance_s: float = 1e-4
    onset_s: float = 0.0
    """Silence until here."""


@dataclass(frozen=True)
class Refusal:
    """The error, and a pattern its message must match."""

    error: type[MediaError]
    words: str


Expectation = Picture | Clip | DamagedClip | Cartoon | Sound | Refusal


@dataclass(frozen=True)
class Case:
    """One generated file, sent as `modality`."""

    name: str
    """Unique; a file name with the extension that a user would give it, which may be a lie."""
    modality: Modality
    make: Callable[[], bytes]
    expect: Expectation
    num_frames: int = 8
    """Frames asked for, when it is sent as video."""
    fps: float | None = None
    """Asked for instead."""
