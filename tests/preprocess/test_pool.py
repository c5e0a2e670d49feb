"""The decode pool in both modes: results, parts, back pressure, errors, deadlines, bounded threads, no growth.

Long, because both modes run the same tests.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from preprocess import (
    DecodeSettings,
    MediaDecodeTimeout,
    MediaError,
    MediaInvalid,
    MediaKey,
    MediaOptions,
    MediaUndecodable,
    MediaUnsupported,
    Modality,
    ProcessorConfig,
)
from preprocess.config import Isolation
from preprocess.pipeline import prepare
from preprocess.pool import DecodePool, MediaChanged, PooledMedia
from preprocess.types import MediaPart, Patches, Pixels
from tests.fakes.clips import blocks, index_first, make_video, picture_file, sine, sound_file
from tests.oracles.effort import scaled

KEY = MediaKey("0" * 32)
NUM_MORE = scaled(1800, least=900)
MODES: tuple[Isolation, ...] = ("threads", "processes")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[DecodePool]:
    pool = DecodePool(DecodeSettings(num_threads=2, isolation=request.param))
    await pool.warm_up()
    yield pool
    assert pool.num_pending == 0
    pool.close()


@pytest.fixture(scope="module")
def clip() -> bytes:
    """10 s of sound and pictures, which the tiny settings sample as 8 frames or more."""
    return make_video(100, corner=True, sound=sine(10.0)[:, 0])


async def opened(pool: DecodePool, content: bytes, config: ProcessorConfig, **more: Any) -> PooledMedia:
    return await pool.open(
        content, modality=Modality.VIDEO, options=MediaOptions(), config=config, key=KEY, timeout_s=60.0, **more
    )


async def prepare_picture(pool: DecodePool, config: ProcessorConfig) -> None:
    """The pool is in order: a picture goes through."""
    picture = picture_file(blocks(64, 64, 0))
    prepared = await pool.prepare(
        picture, modality=Modality.IMAGE, options=MediaOptions(), config=config, key=KEY, timeout_s=60.0
    )
    assert prepared.layout.num_rows == 9


async def test_the_same_as_without_a_pool(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    media = (
        (picture_file(blocks(150, 70, 1)), Modality.IMAGE),
        (clip, Modality.VIDEO),
        (sound_file(sine(2.5)), Modality.AUDIO),
    )
    for content, modality in media:
        plain = prepare(content, modality=modality, options=MediaOptions(), config=tiny, key=KEY)
        pooled = await pool.prepare(content, modality=modality, options=MediaOptions(), config=tiny, key=KEY)
        assert (pooled.key, pooled.layout, pooled.warnings) == (plain.key, plain.layout, plain.warnings)
        assert (pooled.patches is None, pooled.mel is None) == (plain.patches is None, plain.mel is None)
        if plain.patches is not None and pooled.patches is not None:
            assert pooled.patches.grid_thw == plain.patches.grid_thw
            np.testing.assert_array_equal(pooled.patches.pixel_values, plain.patches.pixel_values)
            assert pooled.patches.pixel_values.flags.writeable
        if plain.mel is not None and pooled.mel is not None:
            assert pooled.mel.duration_s == plain.mel.duration_s
            np.testing.assert_array_equal(pooled.mel.log_mel, plain.mel.log_mel)


async def test_parts_together_are_the_whole(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    plain = prepare(clip, modality=Modality.VIDEO, options=MediaOptions(), config=tiny, key=KEY)
    assert plain.patches is not None
    t, h, w = plain.patches.grid_thw
    rows = np.full_like(plain.patches.pixel_values, np.nan)

    async def put(part: MediaPart) -> None:
        assert isinstance(part.pictures, Patches)
        assert part.pictures.grid_thw == (1, h, w)
        start = part.first_pair * h * w
        assert np.isnan(rows[start : start + h * w]).all()
        rows[start : start + h * w] = part.pictures.pixel_values

    with await opened(pool, clip, tiny) as medium:
        assert medium.layout == plain.layout
        assert medium.mel is not None
        await pool.decode(medium, put, patches_per_part=1)
    assert t > 3
    np.testing.assert_array_equal(rows, plain.patches.pixel_values)


async def test_raw_pictures(pool: DecodePool, tiny: ProcessorConfig) -> None:
    pixels = blocks(90, 60, 3)
    parts: list[Pixels] = []

    async def put(part: MediaPart) -> None:
        assert isinstance(part.pictures, Pixels)
        parts.append(part.pictures)

    with await pool.open(
        picture_file(pixels), modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY
    ) as medium:
        await pool.decode(medium, put, raw=True)
    (picture,) = parts
    assert picture.grid_thw == medium.layout.grid_thw
    first, second = picture.frames
    assert first is second
    np.testing.assert_array_equal(first, pixels)


async def test_a_blocked_taker_stops_the_decoder(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    """Memory is that of the parts under way: none is made while as many wait as there are threads."""
    gate, begun = asyncio.Event(), asyncio.Event()
    started: list[int] = []

    async def put(part: MediaPart) -> None:
        started.append(part.first_pair)
        begun.set()
        await gate.wait()

    with await opened(pool, clip, tiny) as medium:
        decoding = asyncio.create_task(pool.decode(medium, put, patches_per_part=1))
        await begun.wait()
        await asyncio.sleep(0.3)
        assert len(started) <= pool.settings.num_threads
        gate.set()
        await decoding
        assert medium.layout.grid_thw is not None
        assert sorted(started) == list(range(medium.layout.grid_thw[0]))


async def test_what_the_taker_raises_comes_back(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    async def put(part: MediaPart) -> None:
        raise LookupError("no room")

    with await opened(pool, clip, tiny) as medium, pytest.raises(LookupError, match="no room"):
        await pool.decode(medium, put, patches_per_part=1)
    await prepare_picture(pool, tiny)


async def test_a_caller_that_goes_away(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    started = asyncio.Event()
    ended: list[bool] = []

    async def put(part: MediaPart) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def call() -> None:
        with await opened(pool, clip, tiny) as medium:
            await pool.decode(medium, put, patches_per_part=1)

    calling = asyncio.create_task(call())
    await started.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended
    for _ in range(3):
        await prepare_picture(pool, tiny)
    async with asyncio.timeout(10):
        while pool.num_stuck:  # noqa: ASYNC110 -- a counter rings no bell
            await asyncio.sleep(0.01)


async def test_opened_and_closed_without_decoding(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    for _ in range(5):
        medium = await opened(pool, clip, tiny)
        medium.close()
        medium.close()
    with pytest.raises(ValueError, match="closed"):
        await pool.decode(medium, lambda part: asyncio.sleep(0))
    await prepare_picture(pool, tiny)


async def test_a_medium_is_decoded_once(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    async def refuse(part: MediaPart) -> None:
        raise LookupError("no room")

    with await opened(pool, clip, tiny) as medium:
        await pool.decode(medium, lambda part: asyncio.sleep(0))
        with pytest.raises(ValueError, match="decoded already"):
            await pool.decode(medium, lambda part: asyncio.sleep(0))
    with await opened(pool, clip, tiny) as medium:
        with pytest.raises(LookupError):
            await pool.decode(medium, refuse, patches_per_part=1)
        with pytest.raises(ValueError, match=r"decoded already|being decoded"):
            await pool.decode(medium, lambda part: asyncio.sleep(0))
    await prepare_picture(pool, tiny)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_content_may_be_any_bytes(
    pool: DecodePool, tiny: ProcessorConfig, kind: type[bytearray | memoryview]
) -> None:
    content = kind(picture_file(blocks(64, 64, 0)))
    how: Any = {"modality": Modality.IMAGE, "options": MediaOptions(), "config": tiny, "key": KEY}
    assert (await pool.prepare(content, **how)).layout.num_rows == 9
    with await pool.open(content, **how) as medium:
        await pool.decode(medium, lambda part: asyncio.sleep(0))
    text: Any = "no bytes"
    with pytest.raises(TypeError):
        await pool.prepare(text, **how)


async def test_operators_are_told_once_what_they_could_change(
    pool: DecodePool, tiny: ProcessorConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(tiny, video_backend="decord")
    for _ in range(2):
        with pytest.raises(MediaUnsupported) as caught:
            await pool.prepare(
                make_video(8, container="avi"), modality=Modality.VIDEO, options=MediaOptions(), config=config, key=KEY
            )
        assert "pyav" not in caught.value.message
    assert caplog.text.count("video_backend 'pyav' decodes what") == 1


async def test_damage_changes_the_layout(pool: DecodePool, tiny: ProcessorConfig) -> None:
    """Frames that are counted and do not decode are found out while decoding: another layout, said so."""
    whole = index_first(make_video(60, size=(96, 128), corner=True, gop=60))
    middle = len(whole) // 2
    damaged = whole[:middle] + np.random.RandomState(0).bytes(len(whole) - middle)
    plain = prepare(damaged, modality=Modality.VIDEO, options=MediaOptions(), config=tiny, key=KEY)
    assert plain.warnings
    assert plain.patches is not None
    rows: dict[int, Any] = {}

    async def put(part: MediaPart) -> None:
        assert isinstance(part.pictures, Patches)
        rows[part.first_pair] = part.pictures.pixel_values

    with await opened(pool, damaged, tiny) as medium:
        changes = 0
        while True:
            rows.clear()
            try:
                await pool.decode(medium, put, patches_per_part=1)
                break
            except MediaChanged:
                changes += 1
        assert changes > 0
        assert medium.layout == plain.layout
        # How much else is said depends on which thread found the damage first.
        assert medium.warnings[0] == plain.warnings[0]
    whole_rows = np.concatenate([rows[first] for first in sorted(rows)])
    np.testing.assert_array_equal(whole_rows, plain.patches.pixel_values)
    pooled = await pool.prepare(damaged, modality=Modality.VIDEO, options=MediaOptions(), config=tiny, key=KEY)
    assert pooled.layout == plain.layout


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


async def test_an_error_keeps_its_field(pool: DecodePool, tiny: ProcessorConfig) -> None:
    options = MediaOptions(max_pixels=2**31 - 1)
    with pytest.raises(MediaInvalid) as caught:
        await pool.prepare(
            picture_file(blocks(64, 64, 0)), modality=Modality.IMAGE, options=options, config=tiny, key=KEY
        )
    assert caught.value.field == "max_pixels"


async def test_the_deadline_answers_and_stops_the_work(pool: DecodePool, tiny: ProcessorConfig) -> None:
    content = make_video(400, size=(240, 320), corner=True)
    for _ in range(3):
        with pytest.raises(MediaDecodeTimeout) as caught:
            await pool.prepare(
                content, modality=Modality.VIDEO, options=MediaOptions(), config=tiny, key=KEY, timeout_s=0.02
            )
        assert caught.value.status == 504
    await prepare_picture(pool, tiny)


async def test_the_deadline_of_a_blocked_taker(pool: DecodePool, tiny: ProcessorConfig, clip: bytes) -> None:
    async def put(part: MediaPart) -> None:
        await asyncio.sleep(3600)

    with await opened(pool, clip, tiny) as medium, pytest.raises(MediaDecodeTimeout):
        await pool.decode(medium, put, patches_per_part=1, timeout_s=0.3)
    await prepare_picture(pool, tiny)


async def test_the_longest_time_holds_where_the_caller_gives_none(tiny: ProcessorConfig) -> None:
    pool = DecodePool(DecodeSettings(num_threads=1, max_item_s=0.01))
    with pytest.raises(MediaDecodeTimeout):
        await pool.prepare(
            make_video(400, size=(240, 320)), modality=Modality.VIDEO, options=MediaOptions(), config=tiny, key=KEY
        )
    pool.close()


async def test_a_stuck_thread_keeps_its_place(tiny: ProcessorConfig) -> None:
    """A picture has no checks within: its thread is busy for longer than its caller waits, and is counted so."""
    pool = DecodePool(DecodeSettings(num_threads=1))
    slow = picture_file(np.random.RandomState(0).randint(0, 256, (3000, 3000, 3)).astype(np.uint8), compress_level=1)
    with pytest.raises(MediaDecodeTimeout):
        await pool.prepare(slow, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY, timeout_s=0.03)
    assert pool.num_stuck == 1
    with pytest.raises(MediaDecodeTimeout):
        await pool.prepare(slow, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY, timeout_s=0.03)
    assert pool.num_stuck == 1, "the second call waited for a place, and its thread never began"
    await prepare_picture(pool, tiny)
    assert pool.num_stuck == 0
    pool.close()


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


async def test_closing_ends_what_runs(tiny: ProcessorConfig, clip: bytes) -> None:
    for mode in MODES:
        pool = DecodePool(DecodeSettings(num_threads=1, isolation=mode))
        await pool.warm_up()
        begun = asyncio.Event()

        async def put(part: MediaPart, begun: asyncio.Event = begun) -> None:
            begun.set()
            await asyncio.sleep(3600)

        with await opened(pool, clip, tiny) as medium:
            decoding = asyncio.create_task(pool.decode(medium, put, patches_per_part=1))
            await begun.wait()
            pool.close()
            with pytest.raises(MediaError):
                await decoding
        with pytest.raises(MediaError, match="closed"):
            await opened(pool, clip, tiny)


async def test_nothing_grows_over_many_media(pool: DecodePool, tiny: ProcessorConfig) -> None:
    """Descriptors and memory of this process, and of the workers, after 200 and after many more, failures included."""
    cheap = [
        (picture_file(blocks(40, 40, 0)), Modality.IMAGE),
        (picture_file(blocks(64, 48, 1), "JPEG"), Modality.IMAGE),
        (picture_file(blocks(64, 48, 1), "JPEG")[:300], Modality.IMAGE),
        (b"nothing at all", Modality.VIDEO),
        (sound_file(sine(0.2)), Modality.AUDIO),
        (make_video(4, size=(32, 32)), Modality.VIDEO),
        (make_video(4, size=(32, 32))[:600], Modality.VIDEO),
    ]

    async def send(count: int) -> None:
        stream = itertools.islice(itertools.cycle(cheap), count)

        async def work() -> None:
            for content, modality in stream:
                try:
                    await pool.prepare(
                        content, modality=modality, options=MediaOptions(), config=tiny, key=KEY, timeout_s=60.0
                    )
                except MediaError:
                    continue

        await asyncio.gather(*(work() for _ in range(4)))
        gc.collect()

    await send(200)
    before = held()
    await send(NUM_MORE)
    after = held()
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["processes"] == before["processes"]
    assert after["threads"] <= before["threads"] + 1
    # Heaps breathe; a leak of one small picture per medium would be 30 MB and more.
    assert after["rss_bytes"] <= before["rss_bytes"] + 24 * 1024**2, (before, after)


def held() -> dict[str, int]:
    """What this process and its descendants hold."""
    pids = [os.getpid()]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += [int(child) for child in (task / "children").read_text().split()]
    pages = [(Path(f"/proc/{pid}/statm").read_text().split()) for pid in pids]
    return {
        "processes": len(pids),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        "rss_bytes": sum(int(page[1]) - int(page[2]) for page in pages) * os.sysconf("SC_PAGE_SIZE"),
    }


async def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        DecodeSettings(num_threads=0)
    with pytest.raises(ValueError, match="isolation is 'fibres'"):
        DecodeSettings(isolation="fibres")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="video_threads is 0"):
        DecodeSettings(video_threads=0)
    with pytest.raises(ValueError, match="max_item_s is nan"):
        DecodeSettings(max_item_s=float("nan"))
    with pytest.raises(ValueError, match="max_worker_bytes is 1"):
        DecodeSettings(max_worker_bytes=1)


@pytest.mark.parametrize("step", [0, 1, 2, 3])
async def test_a_call_that_is_given_up_as_it_ends(
    pool: DecodePool, tiny: ProcessorConfig, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Cancelled in the very moment, or a step of the loop later: the medium is closed, and nothing counts as stuck."""
    closed: list[PooledMedia] = []
    close = PooledMedia.close

    def counted(medium: PooledMedia) -> None:
        closed.append(medium)
        close(medium)

    content = picture_file(blocks(64, 64, 0))
    loop = asyncio.get_running_loop()
    begin = loop.run_in_executor
    for _ in range(3):
        ended: asyncio.Future[None] = loop.create_future()

        def watched(*call: Any, heard: asyncio.Future[None] = ended) -> asyncio.Future[Any]:
            running: asyncio.Future[Any] = begin(*call)
            running.add_done_callback(lambda _: heard.set_result(None))
            return running

        with monkeypatch.context() as patched:
            patched.setattr(loop, "run_in_executor", watched)
            patched.setattr(PooledMedia, "close", counted)
            call = asyncio.create_task(
                pool.open(content, modality=Modality.IMAGE, options=MediaOptions(), config=tiny, key=KEY)
            )
            await ended
            for _ in range(step):
                await asyncio.sleep(0)
            call.cancel()
            (result,) = await asyncio.gather(call, return_exceptions=True)
            if isinstance(result, PooledMedia):
                result.close()
    assert len(closed) == 3
    assert pool.num_stuck == 0
    await prepare_picture(pool, tiny)
