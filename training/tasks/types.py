"""What a training sample is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # whoever only renders samples does not pay for torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Image:
    """A still picture, `[H, W, 3]` uint8 RGB."""

    pixels_HWC: NDArray[np.uint8]  # noqa: N815


@dataclass(frozen=True, slots=True)
class Clip:
    """Sampled frames of a video, `[T, H, W, 3]` uint8 RGB, with the time of each frame in seconds, float32."""

    frames_THWC: NDArray[np.uint8]  # noqa: N815
    timestamps_s: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sound:
    """Mono samples at 24 kHz, `[N]` float32 in -1..1."""

    samples_N: NDArray[np.float32]  # noqa: N815


@dataclass(frozen=True, slots=True)
class Codes:
    """A sound that is already tokenised, `[G, 4, Q]` int64."""

    groups_GSQ: Tensor  # noqa: N815


Part = str | Image | Clip | Sound | Codes


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, as the parts of a user message, and the wanted answer."""

    question: tuple[Part, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What is to be seen at one place of a picture, for the vision tower's helper loss.

    `slice_index` counts frame pairs; `y` and `x` are shares of the height and the width. Labels: 0 is none.
    """

    slice_index: int
    y: float
    x: float
    shape: int = 0
    colour: int = 0
    motion: int = 0
    letter: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation. `system` None means the template's default line.

    `marks` are of the picture or clip, `labels` of the sound (key, start, stop and so on); both only help in training.
    """

    task: str
    turns: tuple[Turn, ...]
    system: str | None = None
    labels: tuple[int, ...] = ()
    marks: tuple[Mark, ...] = ()


HELD_OUT_SEED = 1_000_003
"""Seeds at or above this number are never used for training."""

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Be precise.",
    "You are MiMo.",
    "Reply with the answer only.",
)


def generator(task: str, seed: int, index: int) -> np.random.Generator:
    """The random stream of one sample."""
    digest = sum(ord(letter) * 131**place for place, letter in enumerate(task)) % 2**31
    return np.random.default_rng((digest, seed, index))


def pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    """One of the options, uniformly."""
    return options[int(rng.integers(len(options)))]


def pick_system(rng: np.random.Generator) -> str | None:
    """The default system line most of the time."""
    return pick(rng, SYSTEM_LINES) if rng.random() < 0.12 else None
