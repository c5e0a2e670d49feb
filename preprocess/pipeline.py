"""The story of one medium, from bytes to tower input: sniff, decode, resize, normalise, cut.

    image   decode_image -> smart_resize -> patchify
    video   open_video -> decode (frames resized and cut as they come), beside it track_mel -> slice_audio
    audio   audio_mel

`open_media` tells how the medium is laid out before its pictures are decoded; `OpenMedia.decode` then hands them over
in parts, so that a tower can begin with a long video's first seconds. `prepare` is both, into one piece.

Synchronous and free of shared state besides the crew: any number of threads may open media, and the libraries below
release the interpreter while they work. Fetching is another module's business, and so is the key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from preprocess.audio import audio_mel, no_deadline, track_mel
from preprocess.config import ProcessorConfig
from preprocess.crew import NO_CREW, Crew, Errand
from preprocess.errors import MediaUndecodable
from preprocess.image import decode_image
from preprocess.patchify import patchify
from preprocess.resize import smart_resize
from preprocess.tokens import slice_audio
from preprocess.types import (
    Frames,
    MediaKey,
    MediaLayout,
    MediaOptions,
    MediaPart,
    MelFrames,
    Modality,
    Patches,
    Pixels,
    PreparedMedia,
)
from preprocess.video import OpenVideo, VideoChanged, open_video
from preprocess.video.animation import is_animated_webp

Put = Callable[[MediaPart], None]
Sound = tuple[MelFrames | None, tuple[str, ...]]
"""Log-mel frames, if there are any, and warnings."""

_SILENCE: Final[Sound] = (None, ())


class LayoutChanged(Exception):
    """Damage made another choice of frames necessary: parts handed over so far are void, start again with `opened`.

    Happens a few times at most.
    """

    def __init__(self, opened: OpenMedia) -> None:
        super().__init__("the medium has another layout than was announced")
        self.opened = opened


class OpenMedia:
    """One medium: everything that is known before its pictures are decoded.

    `layout` is final unless `decode` raises LayoutChanged. `layout`, `mel` and `warnings` wait for the sound to be
    decoded, and raise MediaError if it is missing though asked for; `decode` does not need it.
    """

    def __init__(
        self,
        key: MediaKey,
        modality: Modality,
        config: ProcessorConfig,
        *,
        crew: Crew,
        check_deadline: Callable[[], None],
        sound: Errand[Sound],
        image: tuple[NDArray[np.uint8], int, int] | None = None,
        video: OpenVideo | None = None,
    ) -> None:
        self.key = key
        self._modality = modality
        self._config = config
        self._crew = crew
        self._check_deadline = check_deadline
        self._sound = sound
        self._image = image
        self._video = video

    @property
    def mel(self) -> MelFrames | None:
        """Input of the audio tower; None where there is no sound."""
        return self._sound.result()[0]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was repaired or left out; complete once `decode` has returned."""
        pictures = self._video.warnings if self._video is not None else ()
        return pictures + self._sound.result()[1]

    @property
    def layout(self) -> MediaLayout:
        """How the medium's rows are arranged."""
        mel = self.mel
        if self._video is not None:
            return _video_layout(self._video, mel, self._config)
        if self._image is not None:
            pixels, height, width = self._image
            return MediaLayout(Modality.IMAGE, grid_thw=Pixels((pixels, pixels), height, width).grid_thw)
        return MediaLayout(self._modality, num_audio_rows=0 if mel is None else mel.num_tokens)

    def decode(self, put: Put, *, patches_per_part: int | None = None, raw: bool = False) -> None:
        """Decodes the pictures and calls `put` once per part; nothing to do for sound. Call it once.

        A part has max(1, patches_per_part // (h * w)) pairs of the grid (t, h, w); the last one may have fewer, and so
        may all when they are `raw` and large. None makes it one part. Early parts come first as far as decoding allows.
        `put` may be called from several threads and may block, which holds up decoding: only a few parts exist at a
        time. `raw` gives Pixels instead of Patches.

        Raises MediaError, LayoutChanged, and what `put` or the deadline's check raises.
        """
        if self._image is not None:
            pixels, height, width = self._image
            put(MediaPart(0, _image_pictures(pixels, height, width, raw)))
        elif self._video is not None:
            try:
                self._video.decode(
                    put,
                    patches_per_part=patches_per_part,
                    raw=raw,
                    crew=self._crew,
                    check_deadline=self._check_deadline,
                )
            except VideoChanged as change:
                raise LayoutChanged(self._with_video(change.video)) from change

    def _with_video(self, video: OpenVideo) -> OpenMedia:
        return OpenMedia(
            self.key,
            self._modality,
            self._config,
            crew=self._crew,
            check_deadline=self._check_deadline,
            sound=self._sound,
            video=video,
        )


def open_media(
    content: bytes,
    *,
    modality: Modality,
    options: MediaOptions,
    config: ProcessorConfig,
    key: MediaKey,
    crew: Crew | None = None,
    check_deadline: Callable[[], None] = no_deadline,
) -> OpenMedia:
    """Looks at one medium. Images are decoded here, sound and video are read as far as the layout needs.

    `check_deadline` is called at every decoded frame of video or sound, from every thread that decodes; it may raise
    to give up. Raises only MediaError for bad media.
    """
    check_deadline()
    crew = crew or NO_CREW
    image: tuple[NDArray[np.uint8], int, int] | None = None
    video: OpenVideo | None = None
    sound = NO_CREW.start(lambda: _SILENCE)
    match modality:
        case Modality.IMAGE:
            image = _open_image(content, options, config)
        case Modality.VIDEO:
            budget = config.video_budget(options)
            video = open_video(
                content,
                budget=budget,
                limits=config.limits,
                backend=config.video_backend,
                check_deadline=check_deadline,
            )
            if budget.use_audio is not False:
                # After the pictures are looked at: the sound is placed by when the first is shown.
                sound = crew.start(
                    partial(_video_sound, content, config, budget.use_audio, video.index.start_s, check_deadline)
                )
        case Modality.AUDIO:
            sound = NO_CREW.start(partial(_audio_sound, content, config, check_deadline))
            sound.result()
    return OpenMedia(
        key, modality, config, crew=crew, check_deadline=check_deadline, sound=sound, image=image, video=video
    )


def prepare(
    content: bytes,
    *,
    modality: Modality,
    options: MediaOptions,
    config: ProcessorConfig,
    key: MediaKey,
    crew: Crew | None = None,
    check_deadline: Callable[[], None] = no_deadline,
) -> PreparedMedia:
    """Everything the towers and the prompt need to know of one medium, pictures in one piece.

    `check_deadline` is called at every decoded frame of video or sound; it may raise to give up. Raises only
    MediaError for bad media.
    """
    opened = open_media(
        content,
        modality=modality,
        options=options,
        config=config,
        key=key,
        crew=crew,
        check_deadline=check_deadline,
    )
    while True:
        pieces: list[MediaPart] = []
        try:
            opened.decode(pieces.append)
        except LayoutChanged as change:
            opened = change.opened
        else:
            break
    patches = pieces[0].pictures if pieces else None
    if isinstance(patches, Pixels):
        raise TypeError("pixels where patches were asked for")
    return PreparedMedia(key=key, layout=opened.layout, patches=patches, mel=opened.mel, warnings=opened.warnings)


def _open_image(content: bytes, options: MediaOptions, config: ProcessorConfig) -> tuple[NDArray[np.uint8], int, int]:
    budget = config.image_budget(options)
    pixels = decode_image(content, config.limits)
    height, width = smart_resize(
        pixels.shape[0], pixels.shape[1], min_pixels=budget.min_pixels, max_pixels=budget.max_pixels
    )
    return pixels, height, width


def _image_pictures(pixels: NDArray[np.uint8], height: int, width: int, raw: bool) -> Patches | Pixels:
    if raw:
        whole = np.ascontiguousarray(pixels)
        return Pixels(frames=(whole, whole), height=height, width=width)
    return patchify(Frames(pixels=pixels[None], timestamps_s=np.zeros(1, dtype=np.float32)), height=height, width=width)


def _video_sound(
    content: bytes,
    config: ProcessorConfig,
    use_audio: bool | None,
    start_s: float | None,
    check_deadline: Callable[[], None],
) -> Sound:
    mel, warnings = _SILENCE
    if not is_animated_webp(content):
        mel, warnings = track_mel(content, config.audio, config.limits, start_s=start_s, check_deadline=check_deadline)
    if mel is None and use_audio:
        raise MediaUndecodable(
            "use_audio is true, but the video has no audio track that decodes; leave it out or send false"
        )
    return mel, warnings


def _audio_sound(content: bytes, config: ProcessorConfig, check_deadline: Callable[[], None]) -> Sound:
    return audio_mel(content, config.audio, config.limits, check_deadline=check_deadline)


def _video_layout(video: OpenVideo, mel: MelFrames | None, config: ProcessorConfig) -> MediaLayout:
    slices: tuple[tuple[int, int], ...] = ()
    if mel is not None:
        slices = slice_audio(
            video.timestamps_s, num_audio_tokens=mel.num_tokens, tokens_per_s=config.audio.tokens_per_s
        )
    return MediaLayout(
        modality=Modality.VIDEO,
        grid_thw=video.grid_thw,
        timestamps_s=tuple(float(timestamp_s) for timestamp_s in video.timestamps_s[::2]),
        audio_slices=slices,
        num_audio_rows=sum(length for _, length in slices),
    )
