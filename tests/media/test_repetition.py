"""The same file many times over: memory, descriptors and threads stay where they were."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from preprocess import MediaError, MediaKey, MediaOptions, ProcessorConfig
from preprocess.crew import Crew
from preprocess.pipeline import prepare
from preprocess.types import Modality
from tests.fakes.media.images import quarters, saved
from tests.fakes.media.sounds import encoded, sines
from tests.fakes.media.videos import Track, clip, cut_after, with_noise
from tests.oracles.effort import scaled

NUM_RUNS, NUM_WARM_UP_RUNS = scaled(240), 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# One decoded frame of 320 x 192 leaked per run would come to 11 MB in 60 runs.
MAX_GROWTH_BYTES = 6 * 1024 * 1024

FILES: list[tuple[str, Modality, Callable[[], bytes]]] = [
    ("clip.mp4", Modality.VIDEO, partial(clip, range(20), size=(192, 320), tracks=(Track(1.0),))),
    (
        "clip.webm",
        Modality.VIDEO,
        partial(
            clip,
            range(10),
            container="webm",
            codec="libvpx-vp9",
            codec_options={"deadline": "realtime", "cpu-used": "8"},
        ),
    ),
    ("damaged.mkv", Modality.VIDEO, lambda: with_noise(clip(range(24), size=(192, 320), container="matroska"), 13, 15)),
    ("cut-before-index.mp4", Modality.VIDEO, lambda: cut_after(clip(range(10)), 50)),
    ("picture.jpg", Modality.IMAGE, partial(saved, quarters(192, 320), "JPEG")),
    ("picture.png", Modality.IMAGE, partial(saved, quarters(192, 320), "PNG")),
    ("picture.webp", Modality.IMAGE, partial(saved, quarters(192, 320), "WEBP")),
    ("cut.jpg", Modality.IMAGE, lambda: cut_after(saved(quarters(192, 320), "JPEG"), 50)),
    ("sound.m4a", Modality.AUDIO, lambda: encoded(sines((440.0,), 44_100, 0.3), 44_100, "ipod", "aac")),
    ("sound.mp3", Modality.AUDIO, lambda: encoded(sines((440.0,), 44_100, 0.3), 44_100, "mp3", "libmp3lame")),
]


def usage() -> tuple[int, int, int]:
    """(resident bytes, descriptors, threads)."""
    gc.collect()
    # What is free goes back first, so that only what is held counts. glibc has this, others need it less.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return resident, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize(("name", "modality", "make"), FILES, ids=[name for name, _, _ in FILES])
def test_nothing_grows(name: str, modality: Modality, make: Callable[[], bytes], config: ProcessorConfig) -> None:
    content = make()
    crew = Crew(1)
    try:
        for run in range(NUM_RUNS):
            if run == NUM_WARM_UP_RUNS:
                before = usage()
            try:
                prepare(
                    content, modality=modality, options=MediaOptions(), config=config, key=MediaKey("0" * 32), crew=crew
                )
            except MediaError:
                assert "cut" in name
        after = usage()
    finally:
        crew.close()
    assert after[0] - before[0] <= MAX_GROWTH_BYTES
    assert after[1] <= before[1]
    assert after[2] <= before[2]
