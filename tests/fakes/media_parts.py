"""Videos that the tiny settings cut into several parts, and the rows that each must get."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from encoder.runner import MediumRows, TowerJob, TowerRunner
from preprocess.config import ProcessorConfig
from preprocess.pipeline import prepare
from preprocess.types import PATCH_WIDTH, MediaKey, MediaOptions, MediaPart, Modality, PreparedMedia
from tests.fakes.clips import index_first, make_video, sine

# A pair of frames is 48 patches or 12 rows: parts of two pairs, eight of them.
SMALL_PASS = 100
NUM_PARTS = 8
PART_BYTES = 2 * 48 * PATCH_WIDTH * 4

RowsOf = Callable[[bytes, Modality], tuple[bytes, PreparedMedia]]


def clip_in_parts() -> bytes:
    """Thirty sampled frames and their sound."""
    return make_video(300, size=(96, 128), corner=True, gop=25, sound=sine(25.0, tone_hz=600)[:, 0])


def damaged_clip() -> bytes:
    """Half of its frames are counted and do not decode, which is found while decoding."""
    whole = index_first(make_video(300, size=(96, 128), corner=True, gop=300))
    middle = len(whole) // 2
    return whole[:middle] + np.random.RandomState(0).bytes(len(whole) - middle)


def rows_of_the_whole(runner: TowerRunner, model_dir: Path) -> RowsOf:
    """Rows of a medium that was decoded in one piece and encoded as one part, and what was decoded."""
    processor = ProcessorConfig.from_hf(json.loads((model_dir / "config.json").read_text()))

    def rows_of(content: bytes, modality: Modality) -> tuple[bytes, PreparedMedia]:
        key = MediaKey("k")
        media = prepare(content, modality=modality, options=MediaOptions(), config=processor, key=key)
        rows = MediumRows(key, media.layout, memoryview(bytearray(media.layout.num_rows * runner.row_bytes)))
        jobs = [] if media.patches is None else [TowerJob.of_part(rows, MediaPart(0, media.patches))]
        jobs += [] if media.mel is None else [TowerJob.of_sound(rows, media.mel)]
        assert runner.run_sync(jobs) == [None] * len(jobs)
        return bytes(rows.destination), media

    return rows_of
