"""Image task: name, count and place one to four coloured shapes on a plain ground."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil
from PIL import ImageDraw

from training.tasks.types import Image, Mark, Part, Sample, Turn, generator, pick, pick_system

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
CELLS = (
    "top left",
    "top centre",
    "top right",
    "middle left",
    "centre",
    "middle right",
    "bottom left",
    "bottom centre",
    "bottom right",
)
QUESTIONS = (
    "What is in the picture?",
    "What is in this image?",
    "Which shapes do you see, and where?",
    "Name, count and place the shapes.",
    "What do you see?",
    "Describe the image.",
    "Describe the picture.",
    "How many shapes are there, and where are they?",
)
SIDE = 160
"""Pictures are square and of one size: the tower knows no absolute place, so the text model counts units in rows of
five."""


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


def ground_colour(rng: np.random.Generator, inks: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """A background that differs clearly from every ink: grey, white, black or any soft colour."""
    clear = 170
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
        if min(float(np.abs(base - np.array(ink)).sum()) for ink in inks) > clear:
            return int(base[0]), int(base[1]), int(base[2])
        clear = max(110, clear - 4)  # four inks can leave no room for a wide margin


def draw_shape(
    canvas: Pil.Image, shape: str, ink: tuple[int, int, int], centre: tuple[float, float], radius: float, turn: float
) -> None:
    """Paint one shape on a canvas that is twice the final size; `centre` and `radius` are in final pixels."""
    points = (outline(shape, radius, turn) + np.array(centre)) * 2
    ImageDraw.Draw(canvas).polygon([(float(x), float(y)) for x, y in points], fill=ink)


def finish(rng: np.random.Generator, canvas: Pil.Image) -> NDArray[np.uint8]:
    """Halve the canvas, sometimes add grain; `[H, W, 3]` uint8."""
    pixels = np.array(canvas.reduce(2), dtype=np.uint8)
    if rng.random() < 0.35:
        noise = rng.standard_normal(pixels.shape, dtype=np.float32) * float(rng.uniform(1, 9))
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return pixels


def scene(
    rng: np.random.Generator, side: int, num_shapes: int
) -> tuple[NDArray[np.uint8], list[tuple[int, str, str]], list[Mark]]:
    """A picture, its (cell, colour, shape) in reading order, and marks."""
    cells = sorted(int(cell) for cell in rng.choice(9, num_shapes, replace=False))
    found = [(cell, pick(rng, COLOUR_NAMES), pick(rng, SHAPES)) for cell in cells]
    inks = [shade(rng, colour) for _, colour, _ in found]
    canvas = Pil.new("RGB", (side * 2, side * 2), ground_colour(rng, inks))
    cell_side = side / 3
    marks = []
    for (cell, colour, shape), ink in zip(found, inks, strict=True):
        radius = float(rng.uniform(0.28, 0.4)) * cell_side
        y = (cell // 3 + 0.5 + float(rng.uniform(-0.12, 0.12))) * cell_side
        x = (cell % 3 + 0.5 + float(rng.uniform(-0.12, 0.12))) * cell_side
        draw_shape(canvas, shape, ink, (x, y), radius, float(rng.uniform(-0.18, 0.18)))
        marks.append(Mark(0, y / side, x / side, SHAPES.index(shape) + 1, COLOUR_NAMES.index(colour) + 1))
    return finish(rng, canvas), found, marks


def describe(found: list[tuple[int, str, str]]) -> str:
    """The wanted answer: places in reading order, then the number."""
    lines = [
        f"At the {CELLS[cell]} of the picture there is {article(colour)} {colour} {shape}."
        for cell, colour, shape in found
    ]
    return " ".join(lines) + f" That makes {len(found)} shape{'s' if len(found) > 1 else ''} in all."


def sample(seed: int, index: int) -> Sample:
    """One question about one picture."""
    rng = generator("shapes", seed, index)
    side = SIDE
    if rng.random() < 0.08:  # off the grid: the processor has to resize
        side = int(rng.integers(145, 176))
    pixels, found, marks = scene(rng, side, 1 + int(rng.integers(4)))
    question = pick(rng, QUESTIONS)
    parts: tuple[Part, ...] = (Image(pixels), question) if rng.random() < 0.6 else (question, Image(pixels))
    return Sample("shapes", (Turn(parts, describe(found)),), pick_system(rng), marks=tuple(marks))
