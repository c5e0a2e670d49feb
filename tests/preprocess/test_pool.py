"""The decode pool: results, errors, bounded threads, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from preprocess import (
    DecodeSettings,
    MediaDecodeTimeout,
    MediaKey,
    MediaOptions,
    MediaUndecodable,
    Modality,
    ProcessorConfig,
)
from preprocess.pool import DecodePool
from tests.fakes.clips import blocks, make_video, picture_file, sine

KEY = MediaKey("0" * 32)


@pytest.fixture
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(DecodeSettings(num_threads=2))
    yield pool
    pool.close()


async def test_many_at_once_and_a_bad_one_fails_alone(pool: DecodePool, tiny: ProcessorConfig) -> None:
    contents = [picture_file(blocks(64 + seed, 64, seed)) for seed in range(6)]
    contents[3] = contents[3][:200]
    calls = [
        pool.prepare(content, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY)
        for content in contents
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[3], MediaUndecodable)
    assert sum(isinstance(result, BaseException) for result in results) == 1
    assert pool.num_pending == 0


async def test_the_deadline_answers_and_stops_the_thread(pool: DecodePool, tiny: ProcessorConfig) -> None:
    content = make_video(400, size=(240, 320), corner=True)
    for _ in range(3):
        with pytest.raises(MediaDecodeTimeout) as caught:
            await pool.prepare(
                content, modality=Modality.VIDEO, options=MediaOptions(), config=tiny, key=KEY, timeout_s=0.02
            )
        assert caught.value.status == 504
    picture = picture_file(blocks(64, 64, 0))
    prepared = await pool.prepare(
        picture, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY, timeout_s=30.0
    )
    assert prepared.layout.num_rows == 9


async def test_threads_do_not_disturb_each_other(tiny: ProcessorConfig) -> None:
    pool = DecodePool(DecodeSettings(num_threads=4))
    content = make_video(40, corner=True, sound=sine(4.0)[:, 0])
    calls = [
        pool.prepare(content, modality=Modality.VIDEO, options=MediaOptions(), config=tiny, key=KEY) for _ in range(8)
    ]
    first, *others = await asyncio.gather(*calls)
    pool.close()
    assert first.patches is not None
    assert first.mel is not None
    for other in others:
        assert other.layout == first.layout
        assert other.patches is not None
        assert other.mel is not None
        np.testing.assert_array_equal(other.patches.pixel_values, first.patches.pixel_values)
        np.testing.assert_array_equal(other.mel.log_mel, first.mel.log_mel)


def test_thread_count_is_checked() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        DecodePool(DecodeSettings(num_threads=0))
