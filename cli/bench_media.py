"""The cases of `mimo bench media`: fetching and decoding, up to what a tower takes, with MiMo-V2.5's own settings."""

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from cli import bench_plain
from cli.bench_case import Bars, Case, Contest, Setting, timed
from cli.bench_inputs import pictures, song
from cli.bench_server import SameEverywhere, slow_server
from cli.bench_video import VIDEO_CASES, processor
from preprocess.config import DecodeSettings, FetchLimits, ProcessorConfig
from preprocess.types import MediaKey, MediaOptions, MediaSource, Modality

if TYPE_CHECKING:
    pass

PACKAGES = ("av", "decord", "torch", "numpy", "pillow", "simplejpeg", "soundfile", "soxr", "aiohttp")
"""Whose versions matter for the figures."""

_ONE_FPS = MediaOptions(fps=1.0)
# What an encoder takes at a time: a hundred megabytes of float32.
_PATCHES_PER_PART = 16_384
_MEMORY_BOUND_MB = 1536.0
_KEY = MediaKey("0" * 32)


# Pictures


@contextmanager
def _pictures(
    setting: Setting, bars: Bars, *, kind: str, batch: int, width: int, height: int, **options: Any
) -> Iterator[Contest]:
    if setting.quick:
        batch, width, height = 4, 400, 300
    # A file met again costs what it cost before; an eighth of the files keeps the cache small.
    files = pictures(setting.cache_dir, bars, kind=kind, num_files=min(batch, 8), width=width, height=height, **options)
    contents = [files[index % len(files)] for index in range(batch)]
    config = processor()
    size = _resized(height, width, config)
    asyncio.run(_prepare_all(contents[:1], config, setting.num_threads))
    bench_plain.picture_patches(contents[0], size)
    yield Contest(
        detail=f"{batch} {kind} files of {width} x {height} ({len(files)} different), "
        f"{sum(map(len, contents)) / batch / 1e6:.2f} MB each, to {size[1]} x {size[0]}",
        ours=timed(lambda: asyncio.run(_prepare_all(contents, config, setting.num_threads))),
        baseline=timed(lambda: [bench_plain.picture_patches(content, size).shape for content in contents]),
        limit=timed(partial(_decode_all, _DECODERS[kind], contents, setting.num_threads)),
    )


def _resized(height: int, width: int, config: ProcessorConfig) -> tuple[int, int]:
    from preprocess.resize import smart_resize

    budget = config.image_budget(MediaOptions())
    return smart_resize(height, width, min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)


async def _prepare_all(contents: Sequence[bytes], config: ProcessorConfig, num_threads: int) -> int:
    """Through the pool, each result dropped as it comes. Patches in all."""
    from preprocess.pool import DecodePool

    pool = DecodePool(DecodeSettings(num_threads=num_threads))

    async def prepare(content: bytes) -> int:
        prepared = await pool.prepare(content, modality=Modality.IMAGE, options=MediaOptions(), config=config, key=_KEY)
        return 0 if prepared.patches is None else len(prepared.patches.pixel_values)

    try:
        return sum(await asyncio.gather(*map(prepare, contents)))
    finally:
        pool.close()


def _decode_all(decode: Callable[[bytes], object], contents: Sequence[bytes], num_threads: int) -> None:
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(decode, contents):
            pass


def _jpeg_pixels(content: bytes) -> object:
    import simplejpeg

    return simplejpeg.decode_jpeg(content).shape


def _pillow_pixels(content: bytes) -> object:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        image.load()
        return image.size


_DECODERS = {"JPEG": _jpeg_pixels, "PNG": _pillow_pixels, "WEBP": _pillow_pixels}


# Fetching


@contextmanager
def _urls(setting: Setting, bars: Bars) -> Iterator[Contest]:
    count, delay_s = (10, 0.02) if setting.quick else (100, 0.2)
    (content,) = pictures(setting.cache_dir, bars, kind="JPEG", num_files=1, width=400, height=300, quality=90)
    with slow_server(SameEverywhere(content), delay_s) as base_url:
        urls = [f"{base_url}/{index}.jpg" for index in range(count)]
        uvloop.run(_fetch_all(urls[:1]))
        yield Contest(
            detail=f"{count} URLs of one server that waits {delay_s * 1000:.0f} ms, {len(content)} bytes each",
            # On the event loop that the gateway fetches on.
            ours=timed(lambda: uvloop.run(_fetch_all(urls))),
            baseline=timed(lambda: bench_plain.fetched_one_by_one(urls)),
            limit=delay_s,
        )


async def _fetch_all(urls: Sequence[str]) -> int:
    """By a fetcher that was just started: no connection stands yet. Bytes in all."""
    from preprocess.fetch import Fetcher

    limits = FetchLimits(allow_private_addresses=True, max_concurrency=len(urls), max_concurrency_per_request=len(urls))
    async with Fetcher(limits) as fetcher:
        fetches: list[Awaitable[bytes]] = [
            fetcher.fetch(MediaSource(Modality.IMAGE, url), asker="bench") for url in urls
        ]
        return sum(map(len, await asyncio.gather(*fetches)))


# Sound


@contextmanager
def _sound(setting: Setting, bars: Bars, *, kind: str) -> Iterator[Contest]:
    import torch

    # The products are small: a second thread of torch's own spends several times the CPU on waiting for the first.
    torch.set_num_threads(1)
    duration_s = 5 if setting.quick else 600
    path = song(setting.cache_dir, bars, duration_s=duration_s, kind=kind)
    config = processor()
    audio = config.audio
    short = song(setting.cache_dir, bars, duration_s=5, kind=kind)
    _mel_of(short, config, setting.num_threads)
    mel = {"rate_hz": audio.rate_hz, "num_fft": audio.num_fft, "hop": audio.hop_length, "num_mels": audio.num_mels}
    bench_plain.log_mel(short, **mel)
    yield Contest(
        detail=f"{duration_s} s of 48 kHz stereo {kind}, {path.stat().st_size / 1e6:.1f} MB",
        ours=timed(partial(_mel_of, path, config, setting.num_threads)),
        baseline=timed(lambda: bench_plain.log_mel(path, **mel)),
        limit=timed(partial(bench_plain.decoded_sound, path)),
    )


def _mel_of(path: Path, config: ProcessorConfig, num_threads: int) -> int:
    from preprocess.crew import Crew
    from preprocess.pipeline import open_media

    crew = Crew(num_threads - 1)
    try:
        opened = open_media(
            path.read_bytes(), modality=Modality.AUDIO, options=MediaOptions(), config=config, key=_KEY, crew=crew
        )
        return 0 if opened.mel is None else len(opened.mel.log_mel)
    finally:
        crew.close()


CASES: tuple[Case, ...] = (
    *VIDEO_CASES,
    Case(
        name="media.jpeg12mp_batch64",
        unit="s",
        ours="file to patches in the decode pool",
        baseline="Pillow and numpy, one file after another",
        limit="simplejpeg decoding and nothing else, same threads",
        open=partial(_pictures, kind="JPEG", batch=64, width=4000, height=3000, quality=90, subsampling=2),
    ),
    Case(
        name="media.png4mp_batch16",
        unit="s",
        ours="file to patches in the decode pool",
        baseline="Pillow and numpy, one file after another",
        limit="Pillow decoding and nothing else, same threads",
        open=partial(_pictures, kind="PNG", batch=16, width=2560, height=1600, compress_level=6),
    ),
    Case(
        name="media.webp4mp_batch16",
        unit="s",
        ours="file to patches in the decode pool",
        baseline="Pillow and numpy, one file after another",
        limit="Pillow decoding and nothing else, same threads",
        open=partial(_pictures, kind="WEBP", batch=16, width=2560, height=1600, quality=85),
    ),
    Case(
        name="media.urls100_200ms",
        unit="s",
        ours="100 URLs at a time, connections opened for it",
        baseline="one after another over one connection",
        limit="one delay of the server",
        open=_urls,
    ),
    Case(
        name="media.audio_10min",
        unit="s",
        ours="mp3 to log-mel",
        baseline="soundfile, soxr and numpy on the whole file at once",
        limit="soundfile decoding and nothing else, one thread",
        open=partial(_sound, kind="mp3"),
    ),
    Case(
        name="media.audio_10min_m4a",
        unit="s",
        ours="AAC to log-mel",
        baseline="PyAV, soxr and numpy on the whole file at once",
        limit="PyAV decoding and nothing else, one thread",
        open=partial(_sound, kind="m4a"),
    ),
)
