"""The video cases of `mimo bench media`: long clips, up to what a tower takes, with MiMo-V2.5's own settings."""

import json
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cli import bench_plain
from cli.bench_case import Bars, BenchFailed, Case, Contender, Contest, Setting, timed
from cli.bench_inputs import Clip, LongClip
from cli.load import CONFIGS
from cli.signals import deaf_children
from cli.stage import die_with_parent
from preprocess.config import ProcessorConfig
from preprocess.types import MediaKey, MediaOptions, Modality

if TYPE_CHECKING:
    from preprocess.pipeline import OpenMedia

# What an encoder takes at a time: a hundred megabytes of float32.
_PATCHES_PER_PART = 16_384
_MEMORY_BOUND_MB = 1536.0
_KEY = MediaKey("0" * 32)


def processor() -> ProcessorConfig:
    """MiMo-V2.5's, as published."""
    return ProcessorConfig.from_hf(json.loads((CONFIGS / "models" / "mimo-v2.5" / "config.json").read_text()))


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What is asked of a clip of `duration_s`: one frame a second, or as many frames, each of them a key frame."""

    gop: int
    on_keys: bool = False

    def clip(self, setting: Setting) -> Clip:
        # The published rule takes first and last frame; only without the last few do its even steps meet key frames.
        last_frames_off = self.gop - 1 if self.on_keys else 0
        if setting.quick:
            return Clip(duration_s=10, width=320, height=180, gop=self.gop, last_frames_off=last_frames_off)
        return Clip(duration_s=600, width=1280, height=720, gop=self.gop, last_frames_off=last_frames_off)

    def options(self, clip: Clip) -> MediaOptions:
        return MediaOptions(num_frames=clip.duration_s) if self.on_keys else MediaOptions(fps=1.0)

    def indices(self, clip: Clip, config: ProcessorConfig) -> list[int]:
        from preprocess.resize import frame_indices, num_sampled_frames

        wanted = num_sampled_frames(clip.num_frames, clip.rate_fps, config.video_budget(self.options(clip)))
        return [int(index) for index in frame_indices(clip.num_frames, wanted)]


@contextmanager
def _video(
    setting: Setting,
    bars: Bars,
    *,
    sampling: _Sampling,
    plain: Callable[[Path, Sequence[int], int], int],
    raw: bool = False,
) -> Iterator[Contest]:
    clip = sampling.clip(setting)
    path = clip.path(setting.cache_dir, bars)
    config, options = processor(), sampling.options(clip)
    indices = sampling.indices(clip, config)
    num_sampled = _num_sampled(path, config, options)
    if num_sampled != len(indices):
        raise BenchFailed(f"{path.name}: {num_sampled} frames are sampled, the plain way takes {len(indices)}")
    small = sampling.clip(replace(setting, quick=True)).path(setting.cache_dir, bars)
    _pairs_of(small, config, MediaOptions(num_frames=10), setting.num_threads, raw=raw)
    plain(small, range(4), setting.num_threads)
    yield Contest(
        detail=f"{clip.num_frames / clip.rate_fps:.0f} s of {clip.width} x {clip.height} H.264, a key frame every "
        f"{clip.gop} frames, {path.stat().st_size / 1e6:.1f} MB; {len(indices)} frames taken",
        ours=timed(partial(_pairs_of, path, config, options, setting.num_threads, raw=raw)),
        baseline=timed(partial(plain, path, indices, setting.num_threads)),
        limit=_null_decode(path, setting.num_threads),
    )


def _num_sampled(path: Path, config: ProcessorConfig, options: MediaOptions) -> int:
    from preprocess.pipeline import open_media

    content = path.read_bytes()
    layout = open_media(content, modality=Modality.VIDEO, options=options, config=config, key=_KEY).layout
    return 0 if layout.grid_thw is None else 2 * layout.grid_thw[0]


def _pairs_of(
    path: Path, config: ProcessorConfig, options: MediaOptions, num_threads: int, *, raw: bool = False
) -> int:
    """From file to patches (decoded pictures when `raw`), part by part, each dropped as a tower would. Pairs seen."""
    from preprocess.crew import Crew
    from preprocess.pipeline import LayoutChanged, open_media

    crew = Crew(num_threads - 1)
    try:
        content = path.read_bytes()
        opened = open_media(content, modality=Modality.VIDEO, options=options, config=config, key=_KEY, crew=crew)
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
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=partial(die_with_parent, os.getpid())
        )
        if done.returncode:
            raise BenchFailed(f"ffmpeg: {done.stderr.strip()[-300:] or f'exit code {done.returncode}'}")

    return timed(run)


@contextmanager
def _video_memory(setting: Setting, bars: Bars) -> Iterator[Contest]:
    # Under the 256 MB that a fetch may bring: the file itself is part of the memory.
    clip = LongClip(
        replace(_Sampling(250).clip(setting), crf=33, duration_s=10 if setting.quick else 300), num_times=12
    )
    path = clip.path(setting.cache_dir, bars)
    yield Contest(
        detail=f"{clip.duration_s} s of {clip.clip.width} x {clip.clip.height} at 1 fps; the file, "
        f"{path.stat().st_size / 1e6:.0f} MB, is part of the memory",
        ours=partial(_peak_mb_alone, path, setting.num_threads),
        baseline=_MEMORY_BOUND_MB,
    )


def _peak_mb_alone(path: Path, num_threads: int) -> float:
    """In a fresh process, whose peak is this work's."""
    context, parent_pid = multiprocessing.get_context("spawn"), os.getpid()
    with ProcessPoolExecutor(1, context, initializer=die_with_parent, initargs=(parent_pid,)) as pool:
        try:
            with deaf_children():
                peak = pool.submit(_peak_mb, path, num_threads)
            return peak.result()
        except BrokenProcessPool as error:
            raise BenchFailed(f"the process that decoded {path.name} died") from error


def _peak_mb(path: Path, num_threads: int) -> float:
    _pairs_of(path, processor(), MediaOptions(fps=1.0), num_threads)
    for line in Path("/proc/self/status").read_text().splitlines():
        # Not the rusage's figure: that one remembers the process before its exec.
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise BenchFailed("the system does not tell the peak memory of a process")


_NULL_DECODE = "ffmpeg decoding every frame into nothing, same threads"
VIDEO_CASES: tuple[Case, ...] = (
    Case(
        name="media.video_gop250_1fps",
        unit="s",
        ours="file to patches, one frame a second",
        baseline="decord get_batch of the same frames, same threads, decoded only and not turned into patches",
        limit=_NULL_DECODE,
        open=partial(_video, sampling=_Sampling(250), plain=bench_plain.decord_frames),
    ),
    Case(
        name="media.video_gop250_1fps_decode",
        unit="s",
        ours="file to decoded pictures, one frame a second: what a device takes that resizes by itself",
        baseline="decord get_batch of the same frames, same threads",
        limit=_NULL_DECODE,
        open=partial(_video, sampling=_Sampling(250), plain=bench_plain.decord_frames, raw=True),
    ),
    Case(
        name="media.video_gop25_1fps",
        unit="s",
        ours="file to patches, one frame a second",
        baseline="PyAV decoding from the beginning, same threads, wanted frames to RGB and not turned into patches",
        limit=_NULL_DECODE,
        open=partial(_video, sampling=_Sampling(25), plain=bench_plain.scanned_frames),
    ),
    Case(
        name="media.video_gop25_1fps_decode",
        unit="s",
        ours="file to decoded pictures, one frame a second, which falls anywhere between two key frames",
        baseline="PyAV decoding from the beginning, same threads, wanted frames to RGB",
        limit=_NULL_DECODE,
        open=partial(_video, sampling=_Sampling(25), plain=bench_plain.scanned_frames, raw=True),
    ),
    Case(
        name="media.video_gop25_keys_decode",
        unit="s",
        ours="file to decoded pictures, as many, each a key frame",
        baseline="PyAV decoding from the beginning, same threads, wanted frames to RGB",
        limit=_NULL_DECODE,
        open=partial(_video, sampling=_Sampling(25, on_keys=True), plain=bench_plain.scanned_frames, raw=True),
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
)
