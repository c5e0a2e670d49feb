"""Animated pictures sent as video: all frames, composited, with their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from preprocess.errors import MediaUnsupported
from preprocess.types import Modality
from tests.fakes.media.barcode import barcode_picture
from tests.fakes.media.case import Cartoon, Case, Clip, Expectation, Mark, Refusal
from tests.fakes.media.images import BLUE, GREEN, RED, WHITE, YELLOW, apng, gif, quarters, saved, webp_animation
from tests.fakes.media.video_cases import by_time, evenly
from tests.fakes.media.videos import clip, clip_of_pictures


def animation_cases() -> list[Case]:
    return list(_cases())


def _video(name: str, make: Callable[[], bytes], expect: Expectation) -> Case:
    return Case(name, Modality.VIDEO, make, expect)


def _numbered(colour_tolerance: int) -> Clip:
    return Clip(160, 96, **evenly(20), colour_tolerance=colour_tolerance)


def _middle(colour: tuple[int, int, int]) -> tuple[Mark, ...]:
    return ((0.5, 0.5, colour),)


def _cases() -> Iterator[Case]:
    width, height = 64, 32
    left, right = (0.5, 0.25), (0.5, 0.75)
    expect = Cartoon(
        width,
        height,
        frames=(
            ((*left, RED), (*right, RED)),
            ((*left, GREEN), (*right, RED)),
            ((*left, WHITE), (*right, BLUE)),
            ((*left, WHITE), (*right, RED)),
        ),
        times_s=(0.0, 0.1, 0.2, 0.3),
    )
    palette = (WHITE, RED, GREEN, BLUE)
    # Red everywhere; green on the left, then cleared; blue on the right, then put back; something that changes nothing.
    block = np.ones((24, 24), np.uint8)
    frames = [
        (0, 0, 1, np.full((height, width), 1, np.uint8)),
        (4, 4, 2, 2 * block),
        (36, 4, 3, 3 * block),
        (0, 0, 1, np.ones((2, 2), np.uint8)),
    ]
    yield _video("disposal.gif", partial(gif, (width, height), palette, frames, transparent=0), expect)
    red, clear = _rgba(RED, height, width), _rgba(WHITE, 2, 2)
    places = [
        (0, 0, 0, 0, red),
        (4, 4, 1, 0, _rgba(GREEN, 24, 24)),
        (36, 4, 2, 0, _rgba(BLUE, 24, 24)),
        (0, 0, 0, 1, clear),
    ]
    yield _video("disposal.apng.png", partial(apng, (width, height), places, hidden=False), expect)
    yield _video("hidden-default-as-video.apng.png", partial(apng, (width, height), places, hidden=True), expect)
    # Nothing is put back here, so the blue stays.
    shown = (*expect.frames[:3], expect.frames[2])
    webp = Cartoon(width, height, shown, expect.times_s)
    drawn = [(0, 0, 2, red), (4, 4, 3, _rgba(GREEN, 24, 24)), (36, 4, 2, _rgba(BLUE, 24, 24)), (0, 0, 0, clear)]
    yield _video("disposal.webp", partial(webp_animation, (width, height), drawn), webp)
    zero = partial(gif, (width, height), palette, frames, transparent=0, delay_cs=0)
    yield _video("zero-delay.gif", zero, expect)
    half = [np.dstack([quarters(96, 160), _left_half()]) for _ in range(4)]
    marks = ((0.25, 0.25, RED), (0.25, 0.75, WHITE), (0.75, 0.25, BLUE), (0.75, 0.75, WHITE))
    transparent = partial(clip_of_pictures, [saved(picture, "PNG") for picture in half], "mov", "png", alpha=True)
    yield _video("transparent.mov", transparent, Cartoon(160, 96, (marks,) * 4, (0.0, 0.1, 0.2, 0.3)))
    numbered = partial(clip, range(20), codec="gif", container="gif", pixel_format="rgb8")
    yield _video("numbered.gif", numbered, _numbered(60))
    numbered = partial(clip, range(20), codec="apng", container="apng", pixel_format="rgb24")
    yield _video("numbered.apng", numbered, _numbered(30))
    for kind, options in (("WEBP", {"lossless": True}), ("GIF", {"disposal": 1})):
        extension = kind.lower()
        yield _video(f"pillow.{extension}", partial(_saved_all, kind, [100] * 20, options), _numbered(40))
        delays_ms = [100] * 6 + [2000] + [100] * 5
        times_s = [sum(delays_ms[:at]) / 1000 for at in range(len(delays_ms))]
        uneven = Clip(160, 96, **by_time(times_s), colour_tolerance=40)
        yield _video(f"pillow-uneven.{extension}", partial(_saved_all, kind, delays_ms, options), uneven)
    # Not decoded as video, and refused by name.
    sequence = partial(_saved_all, "AVIF", [100] * 4, {})
    yield _video("pillow.avif", sequence, Refusal(MediaUnsupported, "expected a video, found AVIF"))
    one = partial(gif, (width, height), (RED, YELLOW), [(0, 0, 0, np.ones((height, width), np.uint8))])
    yield _video("still.gif", one, Cartoon(width, height, (_middle(YELLOW),), (0.0,)))
    slow = [(0, 0, 0, np.full((height, width), colour, np.uint8)) for colour in (0, 1)]
    yield _video(
        "slow.gif",
        partial(gif, (width, height), (RED, YELLOW), slow, delay_cs=200),
        Cartoon(width, height, (_middle(RED), _middle(YELLOW)), (0.0, 2.0)),
    )


def _saved_all(kind: str, delays_ms: list[int], options: dict[str, Any]) -> bytes:
    stills = [Image.fromarray(barcode_picture(number)) for number in range(len(delays_ms))]
    return saved(stills[0], kind, save_all=True, append_images=stills[1:], duration=delays_ms, **options)


def _left_half() -> NDArray[np.uint8]:
    alpha = np.zeros((96, 160), np.uint8)
    alpha[:, :80] = 255
    return alpha


def _rgba(colour: tuple[int, int, int], height: int, width: int) -> NDArray[np.uint8]:
    """Opaque, but for white, which is clear."""
    alpha = 0 if colour == WHITE else 255
    return np.full((height, width, 4), (*colour, alpha), np.uint8)
