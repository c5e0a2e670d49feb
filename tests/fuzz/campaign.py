"""Damaged files through an isolated decode pool: what became of each, and what must never become of any.

An item is a number: with the campaign's seed it decides format, damage, how it is asked for and how it is decoded, so
that any item can be made again. What may come out is a result or a MediaError, soon after the deadline at the latest.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, get_args

from preprocess.config import (
    AudioBudget,
    DecodeLimits,
    DecodeSettings,
    ImageBudget,
    ProcessorConfig,
    VideoBackend,
    VideoBudget,
)
from preprocess.errors import DecoderCrashed, DecoderUnavailable, MediaDecodeTimeout, MediaError
from preprocess.pool import DecodePool, MediaChanged
from preprocess.types import MediaKey, MediaOptions, MediaPart, Modality
from tests.fuzz.mutations import mutate
from tests.fuzz.seeds import Seed, seeds

DEADLINE_S: Final = 10.0
SLACK_S: Final = 2.0
"""For the answer, past the deadline, on a busy machine."""
SETTINGS: Final = DecodeSettings(
    num_threads=2, isolation="processes", max_worker_bytes=1024**3, max_worker_growth_bytes=128 * 1024**2
)
CONFIG: Final = ProcessorConfig(
    image=ImageBudget(min_pixels=4 * 1024, max_pixels=64 * 1024),
    video=VideoBudget(
        min_pixels=4 * 1024,
        max_pixels=16 * 1024,
        total_max_pixels=256 * 1024,
        fps=2.0,
        min_frames=4,
        max_frames=32,
        num_frames=None,
        use_audio=None,
    ),
    audio=AudioBudget(),
    limits=DecodeLimits(),
)
_KEY: Final = MediaKey("0" * 32)
_MODALITIES: Final = tuple(Modality)
_BACKENDS: Final[tuple[VideoBackend, ...]] = get_args(VideoBackend)


@dataclass(frozen=True)
class Item:
    """One damaged file, and how it is asked for."""

    number: int
    seed: Seed
    content: bytes
    modality: Modality
    backend: VideoBackend
    in_parts: bool
    raw: bool

    @property
    def name(self) -> str:
        """The format, the kind that it was asked for as where that is another, and the reader where that matters."""
        kind = "" if self.modality is self.seed.modality else f" as {self.modality}"
        return self.seed.name + kind + (f" by {self.backend}" if self.modality is Modality.VIDEO else "")


@dataclass(frozen=True)
class Outcome:
    """`kind`: ok, the name of a MediaError, or one of the four that have `words` for a log:

    fault      an exception in our own code that is no MediaError (a traceback from the worker)
    crash      the worker died
    late       no answer in time
    forbidden  anything but a MediaError reached the caller
    """

    item: Item
    kind: str
    seconds: float
    words: str = ""

    @property
    def bad(self) -> bool:
        """Never allowed. A crash is a library's fault: counted, reported, and contained."""
        return self.kind in ("fault", "late", "forbidden")


def make_item(seed_number: int, number: int, all_seeds: tuple[Seed, ...]) -> Item:
    """Item `number` of the campaign `seed_number`."""
    rng = random.Random(f"{seed_number}:{number}")
    seed = rng.choice(all_seeds)
    modality = seed.modality if rng.random() < 0.9 else rng.choice(_MODALITIES)
    others = [other.content for other in rng.sample(all_seeds, 3)]
    return Item(
        number=number,
        seed=seed,
        content=mutate(rng, seed.content, others),
        modality=modality,
        backend="pyav" if rng.random() < 0.7 else rng.choice(_BACKENDS),
        in_parts=rng.random() < 0.25,
        raw=rng.random() < 0.5,
    )


async def try_item(pool: DecodePool, item: Item) -> Outcome:
    """Sends one item through the pool."""
    started_s = time.monotonic()
    kind, words = "ok", ""
    try:
        if item.in_parts:
            await _in_parts(pool, item)
        else:
            await pool.prepare(
                item.content,
                modality=item.modality,
                options=MediaOptions(),
                config=replace(CONFIG, video_backend=item.backend),
                key=_KEY,
                timeout_s=DEADLINE_S,
            )
    except DecoderCrashed as error:
        kind, words = ("fault" if "Traceback" in error.reason else "crash"), error.reason
    except DecoderUnavailable as error:
        kind, words = "forbidden", error.message
    except MediaError as error:
        kind = type(error).__name__
        # An answer that comes with its own deadline is in time.
        words = error.message if isinstance(error, MediaDecodeTimeout) else ""
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        kind, words = "forbidden", repr(error)
    seconds = time.monotonic() - started_s
    if seconds > DEADLINE_S + SLACK_S:
        return Outcome(item, "late", seconds, f"{kind} after {seconds:.1f} s")
    return Outcome(item, kind, seconds, words)


async def _in_parts(pool: DecodePool, item: Item) -> None:
    async def put(part: MediaPart) -> None:
        if part.pictures.grid_thw[0] < 1:
            raise AssertionError("a part without pictures")

    stop_s = time.monotonic() + DEADLINE_S
    config = replace(CONFIG, video_backend=item.backend)
    with await pool.open(
        item.content, modality=item.modality, options=MediaOptions(), config=config, key=_KEY, timeout_s=DEADLINE_S
    ) as medium:
        for _ in range(20):
            try:
                remaining_s = max(0.001, stop_s - time.monotonic())
                await pool.decode(medium, put, patches_per_part=64, raw=item.raw, timeout_s=remaining_s)
                return
            except MediaChanged:
                continue
        raise AssertionError("the layout never settled")


async def campaign(
    seed_number: int,
    numbers: Iterable[int],
    *,
    report: Callable[[Outcome], None],
    stop_after_s: float | None = None,
) -> Counter[tuple[str, str]]:
    """Tries items until they or the time are used up; `report` hears of each. Returns counts by format and kind.

    Raises AssertionError when workers are still held at the end.
    """
    counts: Counter[tuple[str, str]] = Counter()
    all_seeds = seeds()
    for seed in all_seeds:
        # Made now: encoders would hold up the loop, and answers with it.
        _ = seed.content
    pool = DecodePool(SETTINGS)
    queue = iter(numbers)
    stop_s = None if stop_after_s is None else time.monotonic() + stop_after_s

    async def work() -> None:
        for number in queue:
            outcome = await try_item(pool, make_item(seed_number, number, all_seeds))
            counts[outcome.item.seed.name, outcome.kind] += 1
            report(outcome)
            if stop_s is not None and time.monotonic() > stop_s:
                return

    try:
        await pool.warm_up()
        await asyncio.gather(*(work() for _ in range(SETTINGS.num_threads + 1)))
        for _ in itertools.repeat(None, 40):
            if pool.num_stuck == 0:
                break
            await asyncio.sleep(0.1)
        assert pool.num_stuck == 0, f"{pool.num_stuck} calls never ended"
        assert pool.num_pending == 0
    finally:
        pool.close()
    return counts
