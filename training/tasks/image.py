"""Image task: name the shape and the colour of one object on a plain or shaded ground."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil
from PIL import ImageDraw

from training.tasks.types import Image, Part, Sample, Turn, generator, pick, pick_system

TASK = "image"
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "orange": (250, 140, 20),
    "yellow": (245, 225, 40),
    "green": (30, 160, 50),
    "blue": (35, 70, 220),
    "purple": (135, 40, 170),
    "black": (15, 15, 15),
    "white": (248, 248, 248),
}
COLOUR_NAMES = tuple(COLOURS)
QUESTIONS = (
    "What is in the picture?",
    "What is in this image?",
    "Name the shape and its colour.",
    "Which shape is it, and which colour?",
    "What do you see?",
    "Describe the image.",
    "What is this?",
    "What shape and color is shown?",
)
SIDES = (96, 96, 128, 128, 128, 160)


def article(word: str) -> str:
    """`a` or `an`, by the first letter."""
    return "an" if word[0] in "aeiou" else "a"


def outline(shape: str, radius: float, turn: float) -> NDArray[np.float64]:
    """Corner points around the origin, `[P, 2]` as (x, y); a circle is a fine polygon."""
    if shape == "circle":
        angles, radii = np.linspace(0, 2 * math.pi, 48, endpoint=False), np.full(48, radius)
    elif shape == "square":
        angles, radii = np.arange(4) * math.pi / 2 + math.pi / 4, np.full(4, radius * 1.2)
    elif shape == "diamond":
        angles, radii = np.arange(4) * math.pi / 2, np.array([0.8, 1.25, 0.8, 1.25]) * radius
    elif shape == "triangle":
        angles, radii = np.arange(3) * 2 * math.pi / 3 - math.pi / 2, np.full(3, radius * 1.2)
    elif shape == "star":
        angles = np.arange(10) * math.pi / 5 - math.pi / 2
        radii = np.where(np.arange(10) % 2 == 0, radius * 1.25, radius * 0.5)
    elif shape == "cross":
        arm = radius * 0.36
        corners = [(arm, radius), (arm, arm), (radius, arm)]
        points = [
            (sx * x, sy * y)
            for sx, sy, order in ((1, 1, 1), (1, -1, -1), (-1, -1, 1), (-1, 1, -1))
            for x, y in corners[::order]
        ]
        cross = np.array(points, dtype=np.float64)
        cos, sin = math.cos(turn), math.sin(turn)
        return cross @ np.array([[cos, sin], [-sin, cos]])
    else:
        raise ValueError(f"unknown shape {shape!r}")
    angles = angles + turn
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def shade(rng: np.random.Generator, colour: str) -> tuple[int, int, int]:
    """The named colour with a little play in each channel."""
    base = np.array(COLOURS[colour]) + rng.integers(-14, 15, 3)
    red, green, blue = np.clip(base, 0, 255)
    return int(red), int(green), int(blue)


def ground_colour(rng: np.random.Generator, ink: tuple[int, int, int]) -> tuple[int, int, int]:
    """A background that differs clearly from the ink: grey, white, black or any soft colour."""
    while True:
        kind = rng.random()
        if kind < 0.3:
            base = np.full(3, 255)
        elif kind < 0.4:
            base = np.full(3, rng.integers(0, 12))
        elif kind < 0.65:
            base = np.full(3, rng.integers(40, 240))
        else:
            base = rng.integers(0, 256, 3)
        if float(np.abs(base - np.array(ink)).sum()) > 170:
            return int(base[0]), int(base[1]), int(base[2])


def draw_shape(
    canvas: Pil.Image, shape: str, ink: tuple[int, int, int], centre: tuple[float, float], radius: float, turn: float
) -> None:
    """Paint one shape on a canvas that is twice the final size; `centre` and `radius` are in final pixels."""
    points = (outline(shape, radius, turn) + np.array(centre)) * 2
    ImageDraw.Draw(canvas).polygon([(float(x), float(y)) for x, y in points], fill=ink)


def render(rng: np.random.Generator, shape: str, colour: str, height: int, width: int) -> NDArray[np.uint8]:
    """One picture, `[H, W, 3]` uint8."""
    ink = shade(rng, colour)
    ground = ground_colour(rng, ink)
    canvas = Pil.new("RGB", (width * 2, height * 2), ground)
    radius = float(rng.uniform(0.15, 0.36)) * min(height, width)
    margin = radius * 1.1
    centre = float(rng.uniform(margin, width - margin)), float(rng.uniform(margin, height - margin))
    draw_shape(canvas, shape, ink, centre, radius, float(rng.uniform(-0.18, 0.18)))
    pixels = np.array(canvas.reduce(2), dtype=np.uint8)
    if rng.random() < 0.35:
        noise = rng.standard_normal(pixels.shape, dtype=np.float32) * float(rng.uniform(1, 9))
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return pixels


def sample(seed: int, index: int) -> Sample:
    """One question about one picture."""
    rng = generator("image", seed, index)
    shape, colour = pick(rng, SHAPES), pick(rng, COLOUR_NAMES)
    height, width = int(rng.choice(SIDES)), int(rng.choice(SIDES))
    if rng.random() < 0.06:  # off the grid: the processor has to resize
        height, width = int(rng.integers(90, 170)), int(rng.integers(90, 170))
    picture = Image(render(rng, shape, colour, height, width))
    question = pick(rng, QUESTIONS)
    parts: tuple[Part, ...] = (picture, question) if rng.random() < 0.6 else (question, picture)
    answer = f"{article(colour)} {colour} {shape}"
    labels = (SHAPES.index(shape), COLOUR_NAMES.index(colour))
    return Sample("image", (Turn(parts, answer),), pick_system(rng), labels)
