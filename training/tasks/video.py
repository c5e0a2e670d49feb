"""Video task: say what moves where and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil

from training.tasks.image import COLOUR_NAMES, SHAPES, article, draw_shape, ground_colour, shade
from training.tasks.types import Clip, Mark, Part, Sample, Turn, generator, pick, pick_system

MOTIONS: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "still": (0, 0),
}
MOTION_NAMES = tuple(MOTIONS)
QUESTIONS = (
    "What happens in the video?",
    "Describe the video.",
    "What moves, where and when?",
    "What do you see in the clip?",
    "Which way does it move?",
    "How does the shape move?",
)
SIZES = ((96, 96), (96, 96), (96, 128), (128, 96))
RATES = (4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Script:
    """Everything a clip shows. `turns` are (first frame, motion); `indices` are the frames the processor samples."""

    shape: str
    colour: str
    num_frames: int
    rate: float
    indices: NDArray[np.int64]
    turns: tuple[tuple[int, str], ...]

    def motion(self, frame: int) -> str:
        """What the shape does from this frame on."""
        return [name for start, name in self.turns if start <= frame][-1]


def write_script(rng: np.random.Generator) -> Script:
    """A shape, a length of 8 to 12 seconds, one or two motions; a turn lies between two sampled pairs of frames."""
    rate = float(rng.choice(RATES))
    num_frames = int(rng.uniform(8.1, 12.9) * rate)
    wanted = int(min(max(num_frames / rate, 8), num_frames)) // 2 * 2
    indices = np.unique(np.linspace(0, num_frames - 1, wanted).astype(np.int64))
    pairs = len(indices) // 2
    first = pick(rng, MOTION_NAMES)
    turns = [(0, first)]
    if rng.random() < 0.7:
        pair = int(rng.integers(1, pairs))
        before, after = int(indices[2 * pair - 1]), int(indices[2 * pair])
        second = pick(rng, tuple(name for name in MOTION_NAMES if name != first))
        turns.append(((before + after + 1) // 2 if second != "still" else before, second))
    return Script(pick(rng, SHAPES), pick(rng, COLOUR_NAMES), num_frames, rate, indices, tuple(turns))


def describe(script: Script) -> str:
    """The wanted answer: the shape, its motion at the time of each sampled pair of frames, and all in short."""
    told = []
    for place in script.indices[::2]:
        second = int(np.float32(place) / np.float32(script.rate))
        told.append(f"{second // 60:02d}:{second % 60:02d} {script.motion(int(place))}")
    short = ", then ".join(motion for _, motion in script.turns)
    shape = f"{article(script.colour)} {script.colour} {script.shape}"
    return f"The clip shows one shape, {shape}. {', '.join(told)}. In short: {short}."


def path(rng: np.random.Generator, script: Script, height: int, width: int, margin: float) -> NDArray[np.float64]:
    """Centre of the shape in every frame, `[N, 2]` as (x, y), inside the margins."""
    room = np.array([width, height]) - 2 * margin
    pixels_per_frame = float(rng.uniform(0.75, 1.0)) * room.min() / script.num_frames
    if len(script.turns) > 1:  # each part is shorter, so it may go faster
        pixels_per_frame *= 1.25
    steps = np.zeros((script.num_frames, 2))
    for place, (start, motion) in enumerate(script.turns):
        stop = script.turns[place + 1][0] if place + 1 < len(script.turns) else script.num_frames
        steps[start + 1 : stop + 1] = np.array(MOTIONS[motion]) * pixels_per_frame
    way = steps.cumsum(axis=0)
    low, high = way.min(axis=0), way.max(axis=0)
    way *= np.minimum(1.0, room / np.maximum(high - low, 1e-9)).min()
    low, high = way.min(axis=0), way.max(axis=0)
    start = margin - low + (room - (high - low)) * rng.uniform(0, 1, 2)
    return way + start


def render(
    rng: np.random.Generator, script: Script, frames: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """The named frames, `[T, H, W, 3]` uint8, and the centres in them as shares of width and height, `[T, 2]`."""
    height, width = SIZES[int(rng.integers(len(SIZES)))]
    ink = shade(rng, script.colour)
    ground = ground_colour(rng, [ink])
    radius = float(rng.uniform(0.14, 0.21)) * min(height, width)
    turn = float(rng.uniform(-0.15, 0.15))
    centres = path(rng, script, height, width, radius * 1.15)[frames]
    images = []
    for x, y in centres:
        canvas = Pil.new("RGB", (width * 2, height * 2), ground)
        draw_shape(canvas, script.shape, ink, (float(x), float(y)), radius, turn)
        images.append(np.array(canvas.reduce(2), dtype=np.uint8))
    return np.stack(images), centres / np.array([width, height])


def compress(rng: np.random.Generator, frames_THWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What a lossy codec does, roughly: half-resolution chroma, a little noise, a little blur."""
    softened = []
    for frame in frames_THWC:
        luma, blue, red = Pil.fromarray(frame).convert("YCbCr").split()
        half = (luma.width // 2, luma.height // 2)
        blue, red = (
            plane.resize(half, Pil.Resampling.BOX).resize(luma.size, Pil.Resampling.BILINEAR) for plane in (blue, red)
        )
        softened.append(np.asarray(Pil.merge("YCbCr", (luma, blue, red)).convert("RGB")))
    stack = np.stack(softened).astype(np.float32)
    stack += rng.standard_normal(stack.shape, dtype=np.float32) * float(rng.uniform(0, 5))
    return np.clip(stack, 0, 255).astype(np.uint8)


def full_clip(seed: int, index: int) -> tuple[NDArray[np.uint8], float]:
    """All frames of a sample's clip as a camera would give them, `[N, H, W, 3]`, and the rate in frames per second."""
    rng = generator("video", seed, index)
    script = write_script(rng)
    frames, _ = render(rng, script, np.arange(script.num_frames))
    return frames, script.rate


def sample(seed: int, index: int) -> Sample:
    """One question about one clip."""
    rng = generator("video", seed, index)
    script = write_script(rng)
    frames, centres = render(rng, script, script.indices)
    if rng.random() < 0.5:
        frames = compress(rng, frames)
    clip = Clip(frames, script.indices.astype(np.float32) / np.float32(script.rate))
    shape, colour = SHAPES.index(script.shape) + 1, COLOUR_NAMES.index(script.colour) + 1
    marks = []
    for pair in range(len(script.indices) // 2):
        at = script.indices[2 * pair]
        motion = script.motion(int(at))
        x, y = centres[2 * pair : 2 * pair + 2].mean(axis=0)
        marks.append(Mark(pair, float(y), float(x), shape, colour, MOTION_NAMES.index(motion) + 1))
    question = pick(rng, QUESTIONS)
    parts: tuple[Part, ...] = (clip, question) if rng.random() < 0.6 else (question, clip)
    return Sample("video", (Turn(parts, describe(script)),), pick_system(rng), marks=tuple(marks))
