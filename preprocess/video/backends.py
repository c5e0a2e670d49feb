"""Whether a video backend works here: asked once, when a process starts, by decoding a picture with it."""

from __future__ import annotations

import importlib
import io
from typing import Any, Final

import av
import numpy as np

from preprocess.config import VIDEO_BACKEND_PACKAGES, DecodeLimits, ProcessorConfig, VideoBackend
from preprocess.crew import NO_CREW
from preprocess.errors import BackendUnavailable, MediaError
from preprocess.types import MediaOptions, MediaPart
from preprocess.video.opened import open_video

_SIZE: Final = 32


def load_video_backend(backend: VideoBackend) -> None:
    """Loads a backend's library and decodes a picture with it. Raises BackendUnavailable."""
    if backend == "pyav":
        return
    try:
        importlib.import_module(backend)
        reasons = _trial(backend)
    except (ImportError, OSError, RuntimeError, MediaError) as error:
        # RuntimeError: torchcodec without the libraries of an FFmpeg that it knows.
        reasons = (str(error).strip().partition("\n")[0],)
    if reasons:
        raise BackendUnavailable(
            f"video_backend is {backend!r}, which does not work here ({'; '.join(reasons)}); "
            f"install {VIDEO_BACKEND_PACKAGES[backend]}, or choose 'pyav'"
        )


def _trial(backend: VideoBackend) -> tuple[str, ...]:
    """Warnings: what else did the work."""
    budget = ProcessorConfig.from_hf({"processor_config": {}}).video_budget(MediaOptions())
    parts: list[MediaPart] = []
    video = open_video(_clip(), budget=budget, limits=DecodeLimits(), backend=backend, check_deadline=lambda: None)
    video.decode(parts.append, patches_per_part=None, raw=True, crew=NO_CREW, check_deadline=lambda: None)
    return video.warnings


def _clip() -> bytes:
    file = io.BytesIO()
    with av.open(file, mode="w", format="mp4") as output:
        stream: Any = output.add_stream("mpeg4", rate=1)
        stream.width = stream.height = _SIZE
        stream.pix_fmt = "yuv420p"
        pixels = np.full((_SIZE, _SIZE, 3), 128, dtype=np.uint8)
        output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()
