"""Reading task: a word or a number printed in a picture, in wide-set characters."""

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
HEIGHTS = (64, 64, 96)


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
    pitch = float(rng.uniform(33, 39))
    size = int(rng.integers(32, 43))
    height = HEIGHTS[int(rng.integers(len(HEIGHTS)))]
    width = 32 * int(np.ceil((pitch * len(text) + 10) / 32 + rng.uniform(0, 1)))
    ink = shade(rng, pick(rng, COLOUR_NAMES))
    canvas = Pil.new("RGB", (width * 2, height * 2), ground_colour(rng, [ink]))
    pen = ImageDraw.Draw(canvas)
    left = float(rng.uniform(4, max(4.1, width - pitch * len(text) - 4))) + pitch / 2
    middle = float(rng.uniform(27, height - 27))
    marks = []
    for place, character in enumerate(text):
        x, y = left + place * pitch, middle + float(rng.uniform(-1.5, 1.5))
        # Every line box has the same height, so letters keep their descenders and small letters stay low.
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
