"""Isolated decoders: whatever a medium does to its worker costs that medium, and nobody is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from PIL import Image

from preprocess import (
    DecoderCrashed,
    DecoderUnavailable,
    DecodeSettings,
    MediaDecodeTimeout,
    MediaKey,
    MediaOptions,
    MediaTooLarge,
    MediaUndecodable,
    Modality,
    PreparedMedia,
    ProcessorConfig,
)
from preprocess.config import AudioBudget
from preprocess.isolation.media import IsolatedMedia
from preprocess.pool import DecodePool
from preprocess.types import MediaPart
from tests.fakes.clips import blocks, make_video, picture_file, sine, sound_file
from tests.fakes.process_tree import children, command, gone

KEY = MediaKey("0" * 32)
SETTINGS = DecodeSettings(num_threads=2, isolation="processes", max_worker_bytes=128 * 1024**2)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes need memfd and pidfd"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    # Other tests of this process may have left multiprocessing's own helper.
    before = set(children(os.getpid()))
    pool = DecodePool(SETTINGS)
    await pool.warm_up()
    yield pool
    pool.close()
    assert set(children(os.getpid())) <= before


@pytest.fixture(scope="module")
def clip() -> bytes:
    return make_video(100, corner=True)


def nurseries() -> set[int]:
    return {pid for pid in children(os.getpid()) if b"preprocess.isolation.child" in command(pid)}


async def picture(pool: DecodePool, config: ProcessorConfig, timeout_s: float = 60.0) -> PreparedMedia:
    return await pool.prepare(
        picture_file(blocks(64, 64, 0)),
        modality=Modality.IMAGE,
        options=MediaOptions(),
        config=config,
        key=KEY,
        timeout_s=timeout_s,
    )


class Busy:
    """A medium that keeps a worker at work until it is let go."""

    def __init__(self, pool: DecodePool, config: ProcessorConfig, clip: bytes) -> None:
        self._pool, self._config, self._clip = pool, config, clip
        self.go = asyncio.Event()
        self._begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self, timeout_s: float = 60.0) -> int:
        """Returns the worker's pid once it decodes."""
        self.decoding = asyncio.create_task(self._decode(timeout_s))
        return await self._begun

    async def _decode(self, timeout_s: float) -> None:
        with await self._pool.open(
            self._clip, modality=Modality.VIDEO, options=MediaOptions(), config=self._config, key=KEY
        ) as medium:
            assert isinstance(medium.source, IsolatedMedia)
            pid = medium.source.worker_pid
            assert pid is not None

            async def put(part: MediaPart) -> None:
                if not self._begun.done():
                    self._begun.set_result(pid)
                await self.go.wait()

            await self._pool.decode(medium, put, patches_per_part=1, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("death", "kind", "reason"),
    [
        (signal.SIGSEGV, DecoderCrashed, "killed by SIGSEGV"),
        (signal.SIGABRT, DecoderCrashed, "killed by SIGABRT"),
        (signal.SIGTERM, DecoderCrashed, "killed by SIGTERM"),
        # What the kernel does to it when the machine runs out of memory.
        (signal.SIGKILL, MediaTooLarge, None),
    ],
)
async def test_a_worker_that_dies_costs_its_medium(
    pool: DecodePool,
    tiny: ProcessorConfig,
    clip: bytes,
    death: signal.Signals,
    kind: type[MediaUndecodable | MediaTooLarge],
    reason: str | None,
) -> None:
    victim, other = Busy(pool, tiny, clip), Busy(pool, tiny, clip)
    pid, other_pid = await victim.start(), await other.start()
    assert pid != other_pid
    os.kill(pid, death)
    with pytest.raises(kind) as caught:
        await victim.decoding
    if isinstance(caught.value, DecoderCrashed):
        assert caught.value.reason.splitlines()[0] == reason
        # Python's own last words say where.
        assert ("child.py" in caught.value.reason) == (death in (signal.SIGSEGV, signal.SIGABRT))
        assert caught.value.status == 422
    other.go.set()
    await other.decoding
    for _ in range(3):
        await picture(pool, tiny)


async def test_a_worker_that_hangs_is_killed_at_its_deadline(
    pool: DecodePool, tiny: ProcessorConfig, clip: bytes
) -> None:
    busy = Busy(pool, tiny, clip)
    pid = await busy.start(timeout_s=0.5)
    os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(MediaDecodeTimeout):
        await busy.decoding
    assert time.monotonic() - started_s < 1.5
    assert gone([pid])
    await picture(pool, tiny)
    assert pool.num_stuck == 0


async def test_the_wall(pool: DecodePool, tiny: ProcessorConfig) -> None:
    """A small file that decodes to 256 MB, with 128 MiB allowed; the declared size is within the limits."""
    file = io.BytesIO()
    Image.new("RGB", (8000, 8000), (1, 2, 3)).save(file, "PNG")
    with pytest.raises(MediaTooLarge, match="128 MiB, a limit of this server"):
        await pool.prepare(
            file.getvalue(), modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY, timeout_s=60.0
        )
    await picture(pool, tiny)


async def test_the_ceiling(tiny: ProcessorConfig, caplog: pytest.LogCaptureFixture) -> None:
    """143 MB are above the ceiling and below the wall: the pool sees it, and ends it."""
    async with running_pool(SETTINGS) as pool:
        await over_the_ceiling(pool, tiny)
    assert f"max_worker_bytes is {SETTINGS.max_worker_bytes}" in caplog.text


async def over_the_ceiling(pool: DecodePool, tiny: ProcessorConfig) -> None:
    large = picture_file(Image.new("RGB", (6900, 6900), (1, 2, 3)), "JPEG")
    before = pool.counters.get("out_of_memory", 0)

    async def put(part: MediaPart) -> None:
        await asyncio.sleep(60.0)

    with (
        pytest.raises(MediaTooLarge, match="more memory than one medium may take, 128 MiB"),
        await pool.open(
            large, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY, timeout_s=60.0
        ) as medium,
    ):
        await pool.decode(medium, put, timeout_s=60.0)
    assert pool.counters["out_of_memory"] == before + 1
    assert "killed" not in pool.counters, "nobody tries again"
    await picture(pool, tiny)


async def test_what_nobody_foresaw(pool: DecodePool, tiny: ProcessorConfig) -> None:
    """An exception that is no MediaError is reported with its traceback, and costs the worker."""
    broken = dataclasses.replace(tiny, audio=AudioBudget(hop_length=0))
    with pytest.raises(DecoderCrashed) as caught:
        await pool.prepare(
            sound_file(sine(0.5)), modality=Modality.AUDIO, options=MediaOptions(), config=broken, key=KEY
        )
    assert "Traceback" in caught.value.reason
    assert "Traceback" not in caught.value.message
    await picture(pool, tiny)


async def test_workers_that_die_idle_are_replaced(pool: DecodePool, tiny: ProcessorConfig) -> None:
    await picture(pool, tiny)
    (mother,) = nurseries()
    idle = children(mother)
    for pid in idle:
        os.kill(pid, signal.SIGKILL)
    assert gone(idle)
    await picture(pool, tiny)


async def test_a_nursery_that_dies_is_replaced(tiny: ProcessorConfig, clip: bytes) -> None:
    """Its workers end with it, so media at work are lost; those that come after are not."""
    before = nurseries()
    async with running_pool(SETTINGS) as pool:
        busy = Busy(pool, tiny, clip)
        await busy.start()
        (mother,) = nurseries() - before
        os.kill(mother, signal.SIGKILL)
        with pytest.raises((DecoderCrashed, MediaTooLarge)):
            await busy.decoding
        await picture(pool, tiny)
        assert pool.counters["nurseries"] == 2


async def test_workers_are_renewed_after_so_many_media(tiny: ProcessorConfig) -> None:
    async with running_pool(dataclasses.replace(SETTINGS, num_threads=1, max_worker_items=3)) as pool:
        for _ in range(8):
            await picture(pool, tiny)
        assert pool.counters["recycled"] == 2


async def test_no_workers_at_all(tiny: ProcessorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nursery that cannot start is tried again, ever more rarely; callers hear of it before their deadline."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with running_pool(SETTINGS, warm=False) as pool:
        started_s = time.monotonic()
        with pytest.raises((DecoderUnavailable, MediaDecodeTimeout)):
            await picture(pool, tiny, timeout_s=2.0)
        assert time.monotonic() - started_s < 3.0
        assert 2 <= pool.counters["nurseries"] <= 5


@contextlib.asynccontextmanager
async def running_pool(settings: DecodeSettings, *, warm: bool = True) -> AsyncIterator[DecodePool]:
    pool = DecodePool(settings)
    try:
        if warm:
            await pool.warm_up()
        yield pool
    finally:
        pool.close()
