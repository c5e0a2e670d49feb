"""Video task: say which way a coloured shape moves, or describe the whole scene."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil

from training.tasks.image import (
    COLOUR_NAMES,
    SHAPES,
    article,
    draw_shape,
    ground_colour,
    shade,
)
from training.tasks.types import Clip, Part, Sample, Turn, generator, pick, pick_system

TASK = "video"
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
DIRECTION_NAMES = tuple(DIRECTIONS)
DIRECTION_QUESTIONS = (
    "Which way does it move?",
    "In which direction does the shape move?",
    "Where does the object go?",
    "In which direction does it move?",
    "What is the direction of the motion?",
)
SCENE_QUESTIONS = (
    "What happens in the video?",
    "Describe the video.",
    "What moves, and where?",
    "What do you see in the clip?",
)
SIZES = ((96, 96), (96, 96), (96, 128), (128, 96))
MIN_FRAMES = 8


def timeline(rng: np.random.Generator) -> tuple[int, float, NDArray[np.int64]]:
    """Frame count, rate in frames per second and sampled indices, as the processor picks them at 1 fps."""
    rate = float(rng.choice((4.0, 6.0, 8.0, 8.0, 10.0, 12.0, 15.0, 24.0, 25.0, 30.0)))
    seconds = float(rng.uniform(0.7, 8.0))
    num_frames = int(max(MIN_FRAMES, min(round(rate * seconds), 9.9 * rate)))
    wanted = min(max(num_frames / rate, MIN_FRAMES), num_frames)
    count = int(wanted) // 2 * 2
    return num_frames, rate, np.unique(np.linspace(0, num_frames - 1, count).astype(np.int64))


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


def render(
    rng: np.random.Generator,
    shape: str,
    colour: str,
    direction: str,
    height: int,
    width: int,
    fractions_T: NDArray[np.float64],
) -> NDArray[np.uint8]:
    """Frames of one straight motion, `[T, H, W, 3]` uint8; `fractions_T` gives the progress of each frame, 0..1."""
    ink = shade(rng, colour)
    ground = ground_colour(rng, ink)
    radius = float(rng.uniform(0.13, 0.24)) * min(height, width)
    step_x, step_y = DIRECTIONS[direction]
    margin_x, margin_y = radius * 1.1, radius * 1.1
    room_x, room_y = width - 2 * margin_x, height - 2 * margin_y
    room = room_x if step_x else room_y
    travel = float(rng.uniform(0.6, 1.0)) * room
    slack = float(rng.uniform(0, room - travel))
    start = slack if step_x + step_y > 0 else room - slack
    across = float(rng.uniform(0, room_y if step_x else room_x))
    turn = float(rng.uniform(-0.15, 0.15))
    frames = []
    for fraction in fractions_T:
        along = start + (step_x + step_y) * travel * float(fraction)
        offset_x, offset_y = (along, across) if step_x else (across, along)
        canvas = Pil.new("RGB", (width * 2, height * 2), ground)
        draw_shape(canvas, shape, ink, (margin_x + offset_x, margin_y + offset_y), radius, turn)
        frames.append(np.array(canvas.reduce(2), dtype=np.uint8))
    return np.stack(frames)


def full_clip(seed: int, index: int) -> tuple[NDArray[np.uint8], float]:
    """All frames of a sample's clip as a camera would give them, `[N, H, W, 3]`, and the rate in frames per second."""
    rng = generator("video", seed, index)
    shape, colour, direction = pick(rng, SHAPES), pick(rng, COLOUR_NAMES), pick(rng, DIRECTION_NAMES)
    height, width = SIZES[int(rng.integers(len(SIZES)))]
    num_frames, rate, _ = timeline(rng)
    return render(rng, shape, colour, direction, height, width, np.arange(num_frames) / (num_frames - 1)), rate


def sample(seed: int, index: int) -> Sample:
    """One question about one clip."""
    rng = generator("video", seed, index)
    shape, colour, direction = pick(rng, SHAPES), pick(rng, COLOUR_NAMES), pick(rng, DIRECTION_NAMES)
    height, width = SIZES[int(rng.integers(len(SIZES)))]
    num_frames, rate, indices = timeline(rng)
    frames = render(rng, shape, colour, direction, height, width, indices / (num_frames - 1))
    if rng.random() < 0.5:
        frames = compress(rng, frames)
    clip = Clip(frames, indices.astype(np.float32) / np.float32(rate))
    if rng.random() < 0.6:
        question, answer = pick(rng, DIRECTION_QUESTIONS), direction
    else:
        question, answer = pick(rng, SCENE_QUESTIONS), f"{article(colour)} {colour} {shape} moves {direction}"
    parts: tuple[Part, ...] = (clip, question) if rng.random() < 0.6 else (question, clip)
    labels = (SHAPES.index(shape), COLOUR_NAMES.index(colour), DIRECTION_NAMES.index(direction))
    return Sample("video", (Turn(parts, answer),), pick_system(rng), labels)
