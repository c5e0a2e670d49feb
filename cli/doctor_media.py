"""Checks of the decoders: a tiny sample of every format is made in memory and decoded as a request's would be."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cli.doctor_check import Check
from cli.doctor_software import installed_version
from cli.load import BUILTIN_MODELS
from preprocess import MediaError, MediaOptions, Modality, ProcessorConfig, media_key, prepare

_SIDE: Final = 64
_NUM_FRAMES: Final = 4
_RATE_HZ: Final = 16_000
_PICTURES: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
_SOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "WAV": ("WAV", "PCM_16"),
    "FLAC": ("FLAC", "PCM_16"),
    "MP3": ("MP3", "MPEG_LAYER_III"),
    "Ogg": ("OGG", "VORBIS"),
    "Opus": ("OGG", "OPUS"),
}
_FILMS: Final[Mapping[str, tuple[str, str]]] = {
    "MP4 H.264": ("mp4", "libx264"),
    "MP4 HEVC": ("mp4", "libx265"),
    "WebM VP9": ("webm", "libvpx-vp9"),
    "MKV AV1": ("matroska", "libsvtav1"),
    "MPEG-4": ("mp4", "mpeg4"),
}
_FILM_SOUNDS: Final[Mapping[str, tuple[str, str]]] = {"M4A AAC": ("mp4", "aac")}


class NoSample(Exception):
    """The sample cannot be made here, which says nothing of the decoder."""


def check_media() -> list[Check]:
    """A line per modality, and one of the libraries."""
    config = ProcessorConfig.from_hf(json.loads((BUILTIN_MODELS["mimo-nano"] / "config.json").read_text()))
    sounds: dict[str, Callable[[], bytes]] = {name: _sound(*made) for name, made in _SOUNDS.items()}
    sounds |= {name: _film_sound(*made) for name, made in _FILM_SOUNDS.items()}
    with _silenced():
        return _all_modalities(config, sounds)


def _all_modalities(config: ProcessorConfig, sounds: Mapping[str, Callable[[], bytes]]) -> list[Check]:
    return [
        _decoded("pictures", Modality.IMAGE, {name: _picture(name) for name in _PICTURES}, config),
        _decoded("sounds", Modality.AUDIO, sounds, config),
        _decoded("videos", Modality.VIDEO, {name: _film(*made) for name, made in _FILMS.items()}, config),
        _libraries(),
    ]


@contextmanager
def _silenced() -> Iterator[None]:
    """Encoders of samples tell their life on standard error, whatever they are asked, and libsvtav1 makes its process
    a real-time one."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
        os.sched_setscheduler(0, policy, parameters)


def _decoded(
    name: str, modality: Modality, samples: Mapping[str, Callable[[], bytes]], config: ProcessorConfig
) -> Check:
    fine, faults, untried = [], [], []
    for kind, make in samples.items():
        try:
            content = make()
        except NoSample:
            untried.append(kind)
            continue
        options = MediaOptions()
        key = media_key(content, modality=modality, options=options, processor=config, tower_fingerprint="")
        try:
            prepare(content, modality=modality, options=options, config=config, key=key)
            fine.append(kind)
        except MediaError as error:
            faults.append(f"{kind} ({error.message})")
    rest = f"; not tried, since no sample can be made here: {', '.join(untried)}" if untried else ""
    if faults:
        fix = "pip install av pillow simplejpeg soundfile again; HEIC needs pillow-heif"
        return Check(name, "fail" if len(faults) > 1 else "warn", f"cannot decode {'; '.join(faults)}{rest}", fix)
    return Check(name, "ok", f"decoded {', '.join(fine)}{rest}")


def _picture(kind: str) -> Callable[[], bytes]:
    def make() -> bytes:
        from PIL import Image, features

        if kind == "HEIF":
            try:
                from pillow_heif import register_heif_opener
            except ImportError as error:
                raise NoSample from error
            register_heif_opener()
        if (kind == "AVIF" and not features.check("avif")) or (kind == "WEBP" and not features.check("webp")):
            raise NoSample
        file = io.BytesIO()
        try:
            Image.fromarray(_pixels(0)).save(file, kind)
        except (KeyError, OSError, RuntimeError) as error:
            raise NoSample from error
        return file.getvalue()

    return make


def _sound(container: str, codec: str) -> Callable[[], bytes]:
    def make() -> bytes:
        import soundfile

        file = io.BytesIO()
        try:
            soundfile.write(file, _tone(), _RATE_HZ, format=container, subtype=codec)
        except (soundfile.LibsndfileError, ValueError, TypeError) as error:
            raise NoSample from error
        return file.getvalue()

    return make


def _film(container: str, codec: str) -> Callable[[], bytes]:
    def make() -> bytes:
        import av

        file = io.BytesIO()
        try:
            with av.open(file, "w", format=container) as output:
                stream: Any = output.add_stream(codec, rate=2)
                stream.width = stream.height = _SIDE
                stream.pix_fmt = "yuv420p"
                for index in range(_NUM_FRAMES):
                    output.mux(stream.encode(av.VideoFrame.from_ndarray(_pixels(index), format="rgb24")))
                output.mux(stream.encode())
        except (av.FFmpegError, ValueError) as error:
            raise NoSample from error
        return file.getvalue()

    return make


def _film_sound(container: str, codec: str) -> Callable[[], bytes]:
    def make() -> bytes:
        import av

        file = io.BytesIO()
        try:
            with av.open(file, "w", format=container) as output:
                stream: Any = output.add_stream(codec, rate=_RATE_HZ, layout="mono")
                frame = av.AudioFrame.from_ndarray(_tone()[None], format="fltp", layout="mono")
                frame.sample_rate = _RATE_HZ
                output.mux(stream.encode(frame))
                output.mux(stream.encode(None))
        except (av.FFmpegError, ValueError) as error:
            raise NoSample from error
        return file.getvalue()

    return make


def _pixels(index: int) -> NDArray[np.uint8]:
    """[64, 64, 3] uint8, a little different in every frame."""
    ramp = np.arange(_SIDE, dtype=np.uint8) * 2
    picture = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    picture[..., 0], picture[..., 1], picture[..., 2] = ramp, ramp[:, None], 40 * index
    return picture


def _tone() -> NDArray[np.float32]:
    """[8000] float32: half a second of 440 Hz."""
    times_s = np.arange(_RATE_HZ // 2, dtype=np.float32) / _RATE_HZ
    return (0.3 * np.sin(2 * np.pi * 440 * times_s)).astype(np.float32)


def _libraries() -> Check:
    import av

    ffmpeg = getattr(av, "ffmpeg_version_info", None) or "of PyAV's own"
    others = [f"{name} {version}" for name in ("decord", "torchcodec") if (version := installed_version(name))]
    return Check("libraries", "ok", ", ".join([f"FFmpeg {ffmpeg}", f"PyAV {av.__version__}", *others]))
