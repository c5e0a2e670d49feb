"""Samples as a user would send them: real media files in chat messages.

A task's sample holds pixels and numbers; here they become PNG, H.264 in MP4 and 16-bit WAV. Loads no torch.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image as Pil

from preprocess.types import Modality
from training.tasks import TASKS, video
from training.tasks.types import Clip, Image, Part, Sample, Sound

SOUND_RATE_HZ = 24_000

# A sample holds only the frames that the processor would take; these give the whole clip, as a camera does.
CLIPS: dict[str, Callable[[int, int], tuple[NDArray[np.uint8], float]]] = {"video": video.full_clip}


def png_bytes(pixels_HWC: NDArray[np.uint8]) -> bytes:
    """A lossless file of `[H, W, 3]` RGB."""
    out = io.BytesIO()
    Pil.fromarray(pixels_HWC).save(out, "PNG")
    return out.getvalue()


def mp4_bytes(frames_NHWC: NDArray[np.uint8], rate: float) -> bytes:
    """H.264, 4:2:0, default quality, of `[N, H, W, 3]` RGB at `rate` whole frames per second."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=int(rate))
        stream.height, stream.width, stream.pix_fmt = frames_NHWC.shape[1], frames_NHWC.shape[2], "yuv420p"
        stream.codec_context.thread_count = 1
        for pixels in frames_NHWC:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def wav_bytes(samples_N: NDArray[np.float32], rate_hz: int = SOUND_RATE_HZ) -> bytes:
    """16-bit mono of `[N]` in -1..1."""
    out = io.BytesIO()
    soundfile.write(out, samples_N, rate_hz, format="WAV", subtype="PCM_16")
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class File:
    """One medium as its bytes, with their MIME type."""

    modality: Modality
    media_type: str
    content: bytes

    def url(self) -> str:
        """The whole file as a data: URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation: texts and files in the order in which they are given."""

    role: str
    parts: tuple[str | File, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to the last question, and the answer that is wanted to it."""

    messages: tuple[Message, ...]
    answer: str


def conversation(task: str, seed: int, index: int) -> Conversation:
    """One sample of a task in files. Earlier turns of it are history, with the wanted answers."""
    sample = TASKS[task](seed, index)
    clip = CLIPS[task](seed, index) if task in CLIPS else None
    return in_files(sample, clip)


def in_files(sample: Sample, clip: tuple[NDArray[np.uint8], float] | None = None) -> Conversation:
    """A sample in files; `clip` is its whole clip, `[N, H, W, 3]` and frames per second.

    Raises ValueError for a sample that shows a clip when none is given.
    """
    messages = [] if sample.system is None else [Message("system", (sample.system,))]
    for turn in sample.turns:
        messages.append(Message("user", tuple(_piece(part, clip) for part in turn.question)))
        messages.append(Message("assistant", (turn.answer,)))
    return Conversation(tuple(messages[:-1]), sample.turns[-1].answer)


def _piece(part: Part, clip: tuple[NDArray[np.uint8], float] | None) -> str | File:
    match part:
        case str():
            return part
        case Image(pixels_HWC=pixels_HWC):
            return File(Modality.IMAGE, "image/png", png_bytes(pixels_HWC))
        case Sound(samples_N=samples_N):
            return File(Modality.AUDIO, "audio/wav", wav_bytes(samples_N))
        case Clip():
            if clip is None:
                raise ValueError("this sample shows a clip, of which only the sampled frames are known")
            return File(Modality.VIDEO, "video/mp4", mp4_bytes(*clip))
        case _:
            raise ValueError(f"a {type(part).__name__} has no file")


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The `messages` of a chat completion request; files travel in data: URLs."""
    return [{"role": message.role, "content": _content(message.parts)} for message in messages]


def _content(parts: tuple[str | File, ...]) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [_content_part(part) for part in parts]


def _content_part(part: str | File) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = f"{part.modality}_url"
    return {"type": kind, kind: {"url": part.url()}}


def chat_json(task: str, seed: int, index: int) -> tuple[bytes, str]:
    """`chat_messages` of one sample as JSON, and the wanted answer: what a rendering process hands over."""
    asked = conversation(task, seed, index)
    return json.dumps(chat_messages(asked.messages)).encode(), asked.answer
