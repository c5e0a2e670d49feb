"""The cases of `mimo bench media`: fetching and decoding, up to what a tower takes, with MiMo-V2.5's own settings."""

import asyncio
import io
import json
import multiprocessing
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from cli import bench_plain
from cli.bench_case import Bars, BenchFailed, Case, Contender, Contest, Setting, timed
from cli.bench_inputs import Clip, LongClip, pictures, song
from cli.bench_server import slow_server
from cli.load import CONFIGS
from preprocess.config import DecodeSettings, FetchLimits, ProcessorConfig
from preprocess.types import MediaKey, MediaOptions, MediaSource, Modality

if TYPE_CHECKING:
    from preprocess.pipeline import OpenMedia

PACKAGES = ("av", "decord", "torch", "numpy", "pillow", "simplejpeg", "soundfile", "soxr", "aiohttp")
"""Whose versions matter for the figures."""

_ONE_FPS = MediaOptions(fps=1.0)
# What an encoder takes at a time: a hundred megabytes of float32.
_PATCHES_PER_PART = 16_384
_MEMORY_BOUND_MB = 1536.0
_KEY = MediaKey("0" * 32)


def processor() -> ProcessorConfig:
    """MiMo-V2.5's, as published."""
    return ProcessorConfig.from_hf(json.loads((CONFIGS / "models" / "mimo-v2.5" / "config.json").read_text()))


# Video


def _clip(setting: Setting, gop: int) -> Clip:
    if setting.quick:
        return Clip(duration_s=10, width=320, height=180, gop=gop)
    return Clip(duration_s=600, width=1280, height=720, gop=gop)


@contextmanager
def _video(
    setting: Setting, bars: Bars, *, gop: int, plain: Callable[[Path, Sequence[int], int], int], raw: bool = False
) -> Iterator[Contest]:
    clip = _clip(setting, gop)
    path = clip.path(setting.cache_dir, bars)
    config = processor()
    indices = _sampled_indices(clip, config)
    num_sampled = _num_sampled(path, config)
    if num_sampled != len(indices):
        raise BenchFailed(f"{path.name}: {num_sampled} frames are sampled, the plain way takes {len(indices)}")
    small = _clip(replace(setting, quick=True), gop).path(setting.cache_dir, bars)
    _pairs_of(small, config, setting.num_threads, raw=raw)
    plain(small, range(4), setting.num_threads)
    yield Contest(
        detail=f"{clip.duration_s} s of {clip.width} x {clip.height} H.264, a key frame every {gop} frames, "
        f"{path.stat().st_size / 1e6:.1f} MB; {len(indices)} frames taken",
        ours=timed(partial(_pairs_of, path, config, setting.num_threads, raw=raw)),
        baseline=timed(partial(plain, path, indices, setting.num_threads)),
        limit=_null_decode(path, setting.num_threads),
    )


def _sampled_indices(clip: Clip, config: ProcessorConfig) -> list[int]:
    from preprocess.resize import frame_indices, num_sampled_frames

    num_frames = clip.duration_s * 25
    wanted = num_sampled_frames(num_frames, 25.0, config.video_budget(_ONE_FPS))
    return [int(index) for index in frame_indices(num_frames, wanted)]


def _num_sampled(path: Path, config: ProcessorConfig) -> int:
    from preprocess.pipeline import open_media

    content = path.read_bytes()
    layout = open_media(content, modality=Modality.VIDEO, options=_ONE_FPS, config=config, key=_KEY).layout
    return 0 if layout.grid_thw is None else 2 * layout.grid_thw[0]


def _pairs_of(path: Path, config: ProcessorConfig, num_threads: int, *, raw: bool = False) -> int:
    """From file to patches (decoded pictures when `raw`), part by part, each dropped as a tower would. Pairs seen."""
    from preprocess.crew import Crew
    from preprocess.pipeline import LayoutChanged, open_media

    crew = Crew(num_threads - 1)
    try:
        content = path.read_bytes()
        opened = open_media(content, modality=Modality.VIDEO, options=_ONE_FPS, config=config, key=_KEY, crew=crew)
        while True:
            try:
                return _count_pairs(opened, raw=raw)
            except LayoutChanged as change:
                opened = change.opened
    finally:
        crew.close()


def _count_pairs(opened: "OpenMedia", *, raw: bool) -> int:
    pairs: list[int] = []
    opened.decode(lambda part: pairs.append(part.pictures.grid_thw[0]), patches_per_part=_PATCHES_PER_PART, raw=raw)
    return sum(pairs)


def _null_decode(path: Path, num_threads: int) -> Contender | None:
    """ffmpeg decoding every frame and doing nothing with it; None where there is no ffmpeg."""
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        return None
    command = [ffmpeg, "-v", "error", "-nostdin", "-threads", str(num_threads), "-i", str(path)]
    command += ["-map", "0:v:0", "-f", "null", "-"]

    def run() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchFailed(f"ffmpeg: {done.stderr.strip()[-300:] or f'exit code {done.returncode}'}")

    return timed(run)


@contextmanager
def _video_memory(setting: Setting, bars: Bars) -> Iterator[Contest]:
    # Under the 256 MB that a fetch may bring: the file itself is part of the memory.
    clip = LongClip(replace(_clip(setting, 250), crf=33, duration_s=10 if setting.quick else 300), num_times=12)
    path = clip.path(setting.cache_dir, bars)
    yield Contest(
        detail=f"{clip.duration_s} s of {clip.clip.width} x {clip.clip.height} at 1 fps; the file, "
        f"{path.stat().st_size / 1e6:.0f} MB, is part of the memory",
        ours=partial(_peak_mb_alone, path, setting.num_threads),
        baseline=_MEMORY_BOUND_MB,
    )


def _peak_mb_alone(path: Path, num_threads: int) -> float:
    """In a fresh process, whose peak is this work's."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_peak_mb, path, num_threads).result()
        except BrokenProcessPool as error:
            raise BenchFailed(f"the process that decoded {path.name} died") from error


def _peak_mb(path: Path, num_threads: int) -> float:
    _pairs_of(path, processor(), num_threads)
    for line in Path("/proc/self/status").read_text().splitlines():
        # Not the rusage's figure: that one remembers the process before its exec.
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise BenchFailed("the system does not tell the peak memory of a process")


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
    with slow_server(content, delay_s) as base_url:
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


_NULL_DECODE = "ffmpeg decoding every frame into nothing, same threads"
CASES: tuple[Case, ...] = (
    Case(
        name="media.video_gop250_1fps",
        unit="s",
        ours="file to patches, one frame a second",
        baseline="decord get_batch of the same frames, same threads, decoded only and not turned into patches",
        limit=_NULL_DECODE,
        open=partial(_video, gop=250, plain=bench_plain.decord_frames),
    ),
    Case(
        name="media.video_gop250_1fps_decode",
        unit="s",
        ours="file to decoded pictures, one frame a second: what a device takes that resizes by itself",
        baseline="decord get_batch of the same frames, same threads",
        limit=_NULL_DECODE,
        open=partial(_video, gop=250, plain=bench_plain.decord_frames, raw=True),
    ),
    Case(
        name="media.video_gop25_1fps",
        unit="s",
        ours="file to patches, one frame a second",
        baseline="PyAV decoding from the beginning, same threads, wanted frames to RGB and not turned into patches",
        limit=_NULL_DECODE,
        open=partial(_video, gop=25, plain=bench_plain.scanned_frames),
    ),
    Case(
        name="media.video_1h_memory",
        unit="MB",
        ours="peak resident memory of a fresh process, file to patches part by part",
        baseline="the bound of 1536 MB",
        limit="none",
        open=_video_memory,
        max_runs=1,
    ),
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
