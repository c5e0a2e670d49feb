"""A worker that others kill before it has handed anything over: its medium is tried once more, and only once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from preprocess import (
    DecodeSettings,
    MediaKey,
    MediaOptions,
    MediaTooLarge,
    Modality,
    PreparedMedia,
    ProcessorConfig,
)
from preprocess.isolation.media import IsolatedMedia
from preprocess.pipeline import prepare
from preprocess.pool import DecodePool
from preprocess.types import MediaPart, Patches
from tests.fakes.clips import blocks, picture_file
from tests.fakes.process_tree import children, command, gone

KEY = MediaKey("5" * 32)
PICTURE = picture_file(blocks(64, 64, 0))

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes need memfd and pidfd"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    pool = DecodePool(DecodeSettings(num_threads=2, isolation="processes"))
    await pool.warm_up()
    yield pool
    pool.close()


async def picture(pool: DecodePool, config: ProcessorConfig) -> PreparedMedia:
    return await pool.prepare(PICTURE, modality=Modality.IMAGE, options=MediaOptions(), config=config, key=KEY)


async def stopped(pool: DecodePool, config: ProcessorConfig) -> list[int]:
    """The two idle workers, stopped: whichever gets a medium stays at work on it."""
    await asyncio.gather(picture(pool, config), picture(pool, config))
    (mother,) = [pid for pid in children(os.getpid()) if b"preprocess.isolation.child" in command(pid)]
    async with asyncio.timeout(30):
        # One that an earlier test has killed may not be replaced yet.
        while len(workers := children(mother)) < 2:  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    return workers


def at_work(pool: DecodePool, workers: list[int]) -> int:
    """The one of them that is not idle."""
    assert pool._nursery is not None
    idle = {worker.pid for worker in pool._nursery._idle}
    (pid,) = [pid for pid in workers if pid not in idle]
    return pid


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
async def test_another_worker_tries(
    pool: DecodePool, tiny: ProcessorConfig, caplog: pytest.LogCaptureFixture, death: signal.Signals
) -> None:
    before = pool.counters.get("killed", 0)
    workers = await stopped(pool, tiny)
    call = asyncio.create_task(picture(pool, tiny))
    await asyncio.sleep(0.3)
    victim = at_work(pool, workers)
    os.kill(victim, death)
    for pid in workers:
        if pid != victim or death != signal.SIGKILL:
            os.kill(pid, signal.SIGCONT)
    prepared = await call
    assert prepared.layout.num_rows == 9
    assert pool.counters["killed"] == before + 1
    assert f"died at work on medium {KEY}; another worker tries: killed by {death.name}" in caplog.text


async def test_not_a_third_one(pool: DecodePool, tiny: ProcessorConfig) -> None:
    workers = await stopped(pool, tiny)
    call = asyncio.create_task(picture(pool, tiny))
    await asyncio.sleep(0.3)
    first = at_work(pool, workers)
    os.kill(first, signal.SIGKILL)
    assert gone([first])
    await asyncio.sleep(0.3)
    (second,) = [pid for pid in workers if pid != first]
    os.kill(second, signal.SIGKILL)
    with pytest.raises(MediaTooLarge, match="killed twice"):
        await call
    await picture(pool, tiny)


async def test_an_open_medium_is_opened_again(pool: DecodePool, tiny: ProcessorConfig) -> None:
    plain = prepare(PICTURE, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY)
    rows = []

    async def put(part: MediaPart) -> None:
        assert isinstance(part.pictures, Patches)
        rows.append(part.pictures.pixel_values)

    with await pool.open(PICTURE, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY) as medium:
        assert isinstance(medium.source, IsolatedMedia)
        pid = medium.source.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert gone([pid])
        await pool.decode(medium, put)
        assert medium.source.worker_pid != pid
        assert medium.layout == plain.layout
    assert plain.patches is not None
    np.testing.assert_array_equal(np.concatenate(rows), plain.patches.pixel_values)
