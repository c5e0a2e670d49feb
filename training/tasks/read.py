"""Reading task: a word or a number printed in a picture, set wide, as on a display with a cell per character."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image as Pil
from PIL import ImageDraw, ImageFont

from training.tasks.image import COLOUR_NAMES, finish, ground_colour, shade
from training.tasks.types import Image, Mark, Part, Sample, Turn, generator, pick, pick_system

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
WORD_LIST = """
    amber apple arrow beacon birch bottle bridge butter cactus candle castle cedar cherry circle clover comet copper
    coral cotton dagger daisy desert dragon eagle ember falcon fern flint forest fossil garden ginger hammer harbor
    hazel heron honey island ivory jade jungle kettle lemon lily linen magnet maple marble meadow mint mirror moss
    needle nickel olive onyx orchid otter oyster paper pearl pepper piano pine planet poppy quartz quill rabbit
    raven reed ribbon river robin rocket rose ruby saddle sage salmon sand shadow silver spruce stone storm summer
    sunset swan temple tiger topaz tulip tunnel turtle valley velvet violet walnut water willow winter wolf zephyr"""
WORDS = tuple(WORD_LIST.split())
QUESTIONS = (
    "What is written in the picture?",
    "What does the picture say?",
    "Read the picture.",
    "What do you read?",
    "Read what is printed in the image.",
    "Which word or number is printed?",
)
PITCH = 32
"""Pixels from character to character: one of the tower's 32 x 32 units each, off its centre by a few pixels."""


@functools.cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The typeface that comes with Pillow, at twice the final size."""
    return ImageFont.load_default(size * 2)


def draw_text(rng: np.random.Generator) -> str:
    """A number of three to six digits, or a word of the list."""
    if rng.random() < 0.5:
        return "".join(str(int(digit)) for digit in rng.integers(0, 10, int(rng.integers(3, 7))))
    return pick(rng, WORDS)


def describe(text: str) -> str:
    """The wanted answer: character by character, then the whole, then its length."""
    whole, kind = ("number", "digits") if text.isdigit() else ("word", "letters")
    return f"I read {' '.join(text)}. That makes the {whole} {text}, which has {len(text)} {kind}."


def render(rng: np.random.Generator, text: str) -> tuple[Image, tuple[Mark, ...]]:
    """The picture, and the place of each character."""
    size = int(rng.integers(26, 37))
    columns, rows = len(text) + int(rng.integers(0, 3)), int(rng.integers(2, 4))
    ink = shade(rng, pick(rng, COLOUR_NAMES))
    width, height = columns * PITCH, rows * PITCH
    canvas = Pil.new("RGB", (width * 2, height * 2), ground_colour(rng, [ink]))
    pen = ImageDraw.Draw(canvas)
    left = (int(rng.integers(columns - len(text) + 1)) + 0.5) * PITCH + float(rng.uniform(-4, 4))
    middle = (int(rng.integers(rows)) + 0.5) * PITCH + float(rng.uniform(-4, 4))
    marks = []
    for place, character in enumerate(text):
        x, y = left + place * PITCH + float(rng.uniform(-2, 2)), middle + float(rng.uniform(-1.5, 1.5))
        pen.text((x * 2, y * 2), character, font=font(size), fill=ink, anchor="mm")
        marks.append(Mark(0, y / height, x / width, letter=CHARACTERS.index(character) + 1))
    return Image(finish(rng, canvas)), tuple(marks)


def sample(seed: int, index: int) -> Sample:
    """One question about one printed line."""
    rng = generator("read", seed, index)
    text = draw_text(rng)
    picture, marks = render(rng, text)
    question = pick(rng, QUESTIONS)
    parts: tuple[Part, ...] = (picture, question) if rng.random() < 0.6 else (question, picture)
    return Sample("read", (Turn(parts, describe(text)),), pick_system(rng), marks=marks)
