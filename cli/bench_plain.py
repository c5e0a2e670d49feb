"""The plain ways: what most serving code does today, one item after another, with the usual libraries.

Written to be what it stands for and not to lose: no needless copies, no needless precision.
"""

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.types import MERGE_SIZE, PATCH_SIZE, TEMPORAL_PATCH_SIZE

_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
_STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)


def decord_frames(path: Path, indices: Sequence[int], num_threads: int) -> int:
    """All frames as one array at full size, as `get_batch` gives them. Their number."""
    import decord

    reader = decord.VideoReader(str(path), ctx=decord.cpu(0), num_threads=num_threads)
    return int(reader.get_batch(list(indices)).shape[0])


def scanned_frames(path: Path, indices: Sequence[int], num_threads: int) -> int:
    """Decodes the file from its beginning and turns the wanted frames into RGB, one at a time. Their number."""
    import av

    wanted = frozenset(indices)
    num_taken = 0
    with av.open(str(path)) as container:
        stream: Any = container.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = num_threads
        for index, frame in enumerate(container.decode(stream)):
            if index in wanted:
                num_taken += len(frame.to_ndarray(format="rgb24")) > 0
    return num_taken


def picture_patches(content: bytes, size: tuple[int, int]) -> NDArray[np.float32]:
    """Pillow and numpy, as the slow image processors do it; `size` is (height, width) to resize to. [P, 1536]."""
    from PIL import Image

    height, width = size
    with Image.open(io.BytesIO(content)) as image:
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(resized, dtype=np.float32) / 255.0
    pixels = (pixels - _MEAN) / _STD
    frames = np.stack([pixels] * TEMPORAL_PATCH_SIZE).transpose(0, 3, 1, 2)
    h, w = height // PATCH_SIZE, width // PATCH_SIZE
    cells = frames.reshape(
        *(1, TEMPORAL_PATCH_SIZE, 3),
        *(h // MERGE_SIZE, MERGE_SIZE, PATCH_SIZE, w // MERGE_SIZE, MERGE_SIZE, PATCH_SIZE),
    )
    return cells.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(h * w, -1)


def decoded_sound(path: Path) -> tuple[NDArray[np.float32], int]:
    """[N, channels] of the whole file, and its rate in Hz."""
    if path.suffix == ".m4a":
        return _decoded_by_ffmpeg(path)
    import soundfile

    samples, rate_hz = soundfile.read(str(path), dtype="float32", always_2d=True)
    return samples, int(rate_hz)


def _decoded_by_ffmpeg(path: Path) -> tuple[NDArray[np.float32], int]:
    import av

    with av.open(str(path)) as container:
        stream: Any = container.streams.audio[0]
        # Planes of float32, as the AAC decoder gives them.
        planes = [frame.to_ndarray() for frame in container.decode(stream)]
        return np.concatenate(planes, axis=1).T, int(stream.rate)


def log_mel(path: Path, *, rate_hz: int, num_fft: int, hop: int, num_mels: int) -> NDArray[np.float32]:
    """[frames, num_mels]: the whole file at once, resampled at high quality, spectra by numpy."""
    import soxr

    samples, source_hz = decoded_sound(path)
    mono = soxr.resample(samples, source_hz, rate_hz, quality="HQ").mean(axis=1)
    padded = np.pad(mono, num_fft // 2, mode="reflect")
    framed = np.lib.stride_tricks.sliding_window_view(padded, num_fft)[::hop]
    spectrum = np.abs(np.fft.rfft(framed * np.hanning(num_fft + 1)[:-1].astype(np.float32), axis=1))
    return np.log(np.maximum(spectrum @ _mel_bank(rate_hz, num_fft, num_mels), 1e-7)).astype(np.float32)


def _mel_bank(rate_hz: int, num_fft: int, num_mels: int) -> NDArray[np.float64]:
    """[bins, num_mels] triangles, evenly spaced on the mel scale."""
    edges_mel = np.linspace(0, 2595 * np.log10(1 + rate_hz / 2 / 700), num_mels + 2)
    edges_hz = 700 * (10 ** (edges_mel / 2595) - 1)
    bins_hz = np.fft.rfftfreq(num_fft, 1 / rate_hz)[:, None]
    rising = (bins_hz - edges_hz[:-2]) / (edges_hz[1:-1] - edges_hz[:-2])
    falling = (edges_hz[2:] - bins_hz) / (edges_hz[2:] - edges_hz[1:-1])
    return np.maximum(0.0, np.minimum(rising, falling))


def fetched_one_by_one(urls: Sequence[str]) -> int:
    """One session, one request after another. Bytes in all."""
    import aiohttp

    async def fetch_all() -> int:
        num_bytes = 0
        async with aiohttp.ClientSession() as session:
            for url in urls:
                async with session.get(url) as response:
                    num_bytes += len(await response.read())
        return num_bytes

    return asyncio.run(fetch_all())
