"""The story of one medium, from bytes to tower input: sniff, decode, resize, normalise, cut.

    image   decode_image -> smart_resize -> patchify
    video   sample_video (decode, sample, resize, patchify frame by frame), decode_track -> log_mel -> slice_audio
    audio   decode_audio -> log_mel

Synchronous and free of shared state: any number of threads may call `prepare`, and the libraries below release the
interpreter while they work. Fetching is another module's business, and so is the key.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from preprocess.audio import decode_audio, decode_track, log_mel, no_deadline
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaUndecodable
from preprocess.image import decode_image
from preprocess.patchify import patchify
from preprocess.resize import smart_resize
from preprocess.tokens import slice_audio
from preprocess.types import Frames, MediaKey, MediaLayout, MediaOptions, MelFrames, Modality, PreparedMedia
from preprocess.video import SampledVideo, sample_video


def prepare(
    content: bytes,
    *,
    modality: Modality,
    options: MediaOptions,
    config: ProcessorConfig,
    key: MediaKey,
    check_deadline: Callable[[], None] = no_deadline,
) -> PreparedMedia:
    """Everything the towers and the prompt need to know of one medium.

    `check_deadline` is called at every decoded frame of video or sound; it may raise to give up. Raises only
    MediaError for bad media.
    """
    check_deadline()
    match modality:
        case Modality.IMAGE:
            return _prepare_image(content, options, config, key)
        case Modality.VIDEO:
            return _prepare_video(content, options, config, key, check_deadline)
        case Modality.AUDIO:
            return _prepare_audio(content, config, key, check_deadline)


def _prepare_image(content: bytes, options: MediaOptions, config: ProcessorConfig, key: MediaKey) -> PreparedMedia:
    budget = config.image_budget(options)
    pixels = decode_image(content, config.limits)
    height, width = smart_resize(
        pixels.shape[0], pixels.shape[1], min_pixels=budget.min_pixels, max_pixels=budget.max_pixels
    )
    frames = Frames(pixels=pixels[None], timestamps_s=np.zeros(1, dtype=np.float32))
    patches = patchify(frames, height=height, width=width)
    layout = MediaLayout(modality=Modality.IMAGE, grid_thw=patches.grid_thw)
    return PreparedMedia(key=key, layout=layout, patches=patches, mel=None)


def _prepare_video(
    content: bytes,
    options: MediaOptions,
    config: ProcessorConfig,
    key: MediaKey,
    check_deadline: Callable[[], None],
) -> PreparedMedia:
    budget = config.video_budget(options)
    video = sample_video(
        content,
        budget=budget,
        limits=config.limits,
        backend=config.video_backend,
        check_deadline=check_deadline,
    )
    mel: MelFrames | None = None
    audio_warnings: tuple[str, ...] = ()
    if budget.use_audio is not False:
        mel, audio_warnings = _video_sound(content, config, check_deadline)
    if mel is None and budget.use_audio:
        raise MediaUndecodable(
            "use_audio is true, but the video has no audio track that decodes; leave it out or send false"
        )
    return PreparedMedia(
        key=key,
        layout=_video_layout(video, mel, config),
        patches=video.patches,
        mel=mel,
        warnings=video.warnings + audio_warnings,
    )


def _video_sound(
    content: bytes, config: ProcessorConfig, check_deadline: Callable[[], None]
) -> tuple[MelFrames | None, tuple[str, ...]]:
    waveform, warnings = decode_track(content, config.limits, check_deadline=check_deadline)
    return (None if waveform is None else log_mel(waveform, config.audio)), warnings


def _video_layout(video: SampledVideo, mel: MelFrames | None, config: ProcessorConfig) -> MediaLayout:
    slices: tuple[tuple[int, int], ...] = ()
    if mel is not None:
        slices = slice_audio(
            video.timestamps_s, num_audio_tokens=mel.num_tokens, tokens_per_s=config.audio.tokens_per_s
        )
    return MediaLayout(
        modality=Modality.VIDEO,
        grid_thw=video.patches.grid_thw,
        timestamps_s=tuple(float(timestamp_s) for timestamp_s in video.timestamps_s[::2]),
        audio_slices=slices,
        num_audio_rows=sum(length for _, length in slices),
    )


def _prepare_audio(
    content: bytes, config: ProcessorConfig, key: MediaKey, check_deadline: Callable[[], None]
) -> PreparedMedia:
    waveform, warnings = decode_audio(content, config.limits, check_deadline=check_deadline)
    mel = log_mel(waveform, config.audio)
    layout = MediaLayout(modality=Modality.AUDIO, num_audio_rows=mel.num_tokens)
    return PreparedMedia(key=key, layout=layout, patches=None, mel=mel, warnings=warnings)
