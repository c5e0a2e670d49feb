"""Settings of the media path, frozen, units in names. Model settings come from a checkpoint's config.json."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeVar, get_args

import msgspec

from preprocess.errors import BackendUnavailable, MediaInvalid
from preprocess.processor_keys import AudioResampler, ProcessorKeys
from preprocess.ranges import shown_value
from preprocess.types import (
    LOW_DETAIL_PIXELS,
    TEMPORAL_PATCH_SIZE,
    UNIT_PIXELS,
    MediaOptions,
)

VideoBackend = Literal["pyav", "torchcodec", "decord"]
VIDEO_BACKEND_PACKAGES: Final[Mapping[str, str]] = {
    "torchcodec": "mimo-epd[torchcodec] (pip install 'mimo-epd[torchcodec]', from a checkout pip install -e "
    "'.[torchcodec]') and the shared libraries of FFmpeg (as package ffmpeg brings them)",
    "decord": "decord",
}
"""What the backends need that do not come with the default one."""
Isolation = Literal["threads", "processes"]
_ALLOWED_BACKENDS: Final = f"allowed is {', '.join(map(repr, get_args(VideoBackend)))}"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What a fetch may cost and where it may go."""

    max_bytes: int = 256 * 1024 * 1024
    timeout_s: float = 30.0
    """For one source, all redirects together, from the moment it has a slot."""
    stall_timeout_s: float = 10.0
    """For one connection to come about, and between two pieces of an answer."""
    max_redirects: int = 5
    allow_private_addresses: bool = False
    """True lets URLs reach loopback and private addresses, link-local ones never. For tests and closed networks."""
    media_roots: tuple[Path, ...] = ()
    """Directories that file: URLs may read; none by default, so file: is off."""
    max_concurrency: int = 256
    """Downloads at a time, of all requests together."""
    max_concurrency_per_request: int = 64
    """So that one request with many URLs, on servers that never answer, leaves slots for the others."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "timeout_s", "stall_timeout_s", "max_concurrency", "max_concurrency_per_request"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is above 0")
        if self.max_redirects < 0:
            raise ValueError(f"max_redirects is {self.max_redirects}, allowed is 0 or more")


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Refused from headers before a raster is allocated, and again while decoding. Not part of a medium's identity."""

    max_image_pixels: int = 100_000_000
    max_frame_pixels: int = 36_000_000
    max_video_frames: int = 1_000_000
    """Frames in the file, not sampled frames."""
    max_free_pixels: int = 1_000_000_000
    """Pixels that all frames of a video may have together however short the file is; each of its bytes allows more.

    A bound on the pixels alone would not do: an hour of 4K has 9e11 of them, and is a gigabyte that somebody made,
    while a GIF of 6,000 x 6,000 buys 36 million for 23 bytes a frame. So decoding is bounded by what was sent. The
    free ones are four seconds of 4K, or a thousand frames of 720p: a few seconds' work.
    """
    max_video_pixels_per_byte: int = 250_000
    """Of codecs made for video. Film has about a hundred, a still picture in 4K for hours up to 225,000."""
    max_animation_pixels_per_byte: int = 10_000
    """Of GIF, APNG, WebP and everything else; a cursor that blinks in a recorded terminal has some thousands. Each of
    their frames costs the whole canvas, whatever changes in it."""
    max_duration_s: float = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How a `preprocess.pool.DecodePool` works. None of it changes a result.

    threads     fastest to start and nothing to copy. A decoder that hangs takes its thread with it, one that crashes
                takes the process.
    processes   Linux only: `num_threads` worker processes, each under a memory ceiling. A worker that crashes, hangs or
                grows costs the one medium it worked on, and is replaced.
    """

    num_threads: int = 2
    """Media decoded at a time: by a thread each, or by a worker process each."""
    isolation: Isolation = "threads"
    video_threads: int | None = None
    """Threads at work on one video where they are free: shared by all videos of a process. None: `num_threads`."""
    max_item_s: float = 900.0
    """No medium is decoded for longer, whatever its caller allows. Time in which the caller takes no parts counts."""
    max_worker_bytes: int = 4 * 1024**3
    """Memory one medium may take in its worker, besides the content and the results, which are shared. Processes only:
    the memory of a thread cannot be bounded."""
    max_worker_items: int = 1000
    """Media after which a worker is replaced by a fresh one."""
    max_worker_growth_bytes: int = 256 * 1024**2
    """A worker that holds this much more than at its start after an item is replaced."""
    max_worker_spare_bytes: int = 256 * 1024**2
    """Shared memory that a worker keeps for its next results; making it anew costs more time than filling it."""

    def __post_init__(self) -> None:
        if self.isolation not in ("threads", "processes"):
            raise ValueError(f"isolation is {self.isolation!r}, allowed is 'threads' or 'processes'")
        for name in ("num_threads", "max_worker_items"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is 1 or more")
        if self.video_threads is not None and self.video_threads < 1:
            raise ValueError(f"video_threads is {self.video_threads}, allowed is 1 or more")
        if not self.max_item_s > 0:
            raise ValueError(f"max_item_s is {self.max_item_s}, allowed is above 0")
        for name in ("max_worker_bytes", "max_worker_growth_bytes"):
            if getattr(self, name) < 64 * 1024**2:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is 64 MiB or more")
        if self.max_worker_spare_bytes < 0:
            raise ValueError(f"max_worker_spare_bytes is {self.max_worker_spare_bytes}, allowed is 0 or more")

    @property
    def num_helpers(self) -> int:
        """Threads of the crew that joins whoever decodes a video."""
        return (self.num_threads if self.video_threads is None else self.video_threads) - 1


@dataclass(frozen=True, slots=True)
class ImageBudget:
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class VideoBudget:
    """How many frames are taken, and how many pixels each may have."""

    min_pixels: int
    max_pixels: int
    total_max_pixels: int
    fps: float
    min_frames: int
    max_frames: int
    num_frames: int | None
    use_audio: bool | None
    """None: the audio track is used if there is one. True requires one."""


@dataclass(frozen=True, slots=True)
class AudioBudget:
    """The log-mel front end."""

    rate_hz: int = 24_000
    num_fft: int = 960
    window_size: int = 960
    hop_length: int = 240
    num_mels: int = 128
    fmin_hz: float = 0.0
    fmax_hz: float | None = None
    """None: half the rate."""
    tokens_per_s: float = 6.25
    resampler: AudioResampler = "published"
    """How sound comes to the model's rate. `published` lets half of what lies just above the new Nyquist frequency
    through as aliases, and the model was trained on those; `soxr_hq` does not, and shows it other spectra."""


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """Everything that decides what `prepare` computes from given bytes."""

    image: ImageBudget
    video: VideoBudget
    audio: AudioBudget = AudioBudget()
    interleave_s: float = 0.0
    """How video and its audio alternate in a prompt; see `preprocess.tokens.expand`."""
    video_backend: VideoBackend = "pyav"
    """What decodes videos. All give the same frames, but not bit for bit: their scalers are of different versions.

    pyav        decodes only what is needed, takes everything
    torchcodec  decodes what it can and hands the rest to pyav, with a warning
    decord      refuses what it cannot do rightly, see `preprocess.video.decord`
    """
    limits: DecodeLimits = field(default_factory=DecodeLimits)

    def __post_init__(self) -> None:
        if self.video_backend not in get_args(VideoBackend):
            raise ValueError(f"video_backend is {self.video_backend!r}, {_ALLOWED_BACKENDS}")

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> ProcessorConfig:
        """Reads `processor_config` of a Hugging Face config.json.

        Raises ValueError naming key, value and what is allowed.
        """
        section = config.get("processor_config")
        if not isinstance(section, Mapping):
            raise ValueError(f"processor_config is {shown_value(section)}, allowed is an object")
        get = ProcessorKeys(section)
        get.check_required()
        get.check_orders()
        return cls(
            image=ImageBudget(get.integer("image_min_pixels"), get.integer("image_max_pixels")),
            video=VideoBudget(
                min_pixels=get.integer("video_min_pixels"),
                max_pixels=get.integer("video_max_pixels"),
                total_max_pixels=get.integer("video_total_max_pixels"),
                fps=get.number("fps"),
                min_frames=get.integer("min_frames"),
                max_frames=get.integer("max_frames"),
                num_frames=get.optional_integer("num_frames"),
                use_audio=None,
            ),
            audio=AudioBudget(
                rate_hz=get.integer("audio_sampling_rate"),
                num_fft=get.integer("audio_nfft"),
                window_size=get.integer("audio_window_size"),
                hop_length=get.integer("audio_hop_length"),
                num_mels=get.integer("audio_n_mels"),
                fmin_hz=get.number("audio_fmin"),
                fmax_hz=get.optional_number("audio_fmax"),
                tokens_per_s=get.number("audio_input_id_per_second") / get.integer("audio_group_size"),
                resampler=get.resampler("audio_resampler"),
            ),
            interleave_s=get.interleave_s("video_audio_interleave_length"),
        )

    # Budgets are canonical: options that lead to the same pixels give equal budgets, hence equal keys.

    def image_budget(self, options: MediaOptions) -> ImageBudget:
        """The image settings of one request. Raises MediaInvalid when an option passes the configured ceiling."""
        max_pixels = _upper_bound("max_pixels", options.max_pixels, self.image.max_pixels)
        if options.detail == "low":
            max_pixels = min(max_pixels, LOW_DETAIL_PIXELS)
        min_pixels = _lower_bound("min_pixels", options.min_pixels, self.image.min_pixels, max_pixels)
        return ImageBudget(min_pixels=_reachable(min_pixels), max_pixels=max_pixels)

    def video_budget(self, options: MediaOptions) -> VideoBudget:
        """The video settings of one request. Raises MediaInvalid when an option passes the configured ceiling.

        Frames come in pairs, so bounds and counts in the result are even. Where there is a count of frames, the rate
        and the bounds are the configured ones and mean nothing.
        """
        base = self.video
        max_pixels = _upper_bound("max_pixels", options.max_pixels, base.max_pixels)
        min_pixels = _lower_bound("min_pixels", options.min_pixels, base.min_pixels, max_pixels)
        max_frames = _even_down(_upper_bound("max_frames", options.max_frames, base.max_frames))
        _upper_bound("num_frames", options.num_frames, base.max_frames)
        min_frames = _even_up(_lower_bound("min_frames", options.min_frames, base.min_frames, base.max_frames))
        num_frames = self._num_frames(options, min_frames, max_frames)
        budget = replace(
            base,
            min_pixels=_reachable(min_pixels),
            max_pixels=max_pixels,
            num_frames=num_frames,
            use_audio=options.use_audio if options.use_audio is not None else base.use_audio,
        )
        if num_frames is None:
            fps = float(_given(options.fps, base.fps))
            budget = replace(budget, fps=fps, min_frames=min(min_frames, max_frames), max_frames=max_frames)
        self._check_total(options, max_frames if num_frames is None else num_frames)
        return budget

    def _num_frames(self, options: MediaOptions, min_frames: int, max_frames: int) -> int | None:
        """A count of frames asked for or configured, as the published processor rounds it, within asked bounds."""
        # A frame rate in the request replaces a frame count in the checkpoint's settings.
        wanted = options.num_frames
        if wanted is None and options.fps is None:
            wanted = self.video.num_frames
        if wanted is None:
            return None
        even = max(round(wanted / 2) * 2, TEMPORAL_PATCH_SIZE)
        if options.min_frames is not None:
            even = max(even, min_frames)
        if options.max_frames is not None or options.num_frames is not None:
            even = min(even, max_frames)
        return even

    def _check_total(self, options: MediaOptions, num_frames: int) -> None:
        """A lower bound per frame overrules the total of a video; the request may not use that to take any memory."""
        allowed = max(self.video.min_pixels, self.video.total_max_pixels * TEMPORAL_PATCH_SIZE // num_frames)
        if options.min_pixels is not None and options.min_pixels > allowed:
            raise MediaInvalid(
                f"min_pixels is {options.min_pixels}, allowed is at most {allowed} where a video may have "
                f"{num_frames} frames; fewer frames (max_frames, num_frames) allow more",
                field="min_pixels",
            )

    def fingerprint(self) -> bytes:
        """Canonical bytes of all that changes the result; limits only decide whether there is one."""
        fields = asdict(self)
        del fields["limits"]
        return msgspec.json.encode(fields, order="sorted")


def check_video_backend(backend: str) -> None:
    """Raises ValueError for a backend that there is not, BackendUnavailable if its library is not installed.

    Does not load it.
    """
    if backend not in get_args(VideoBackend):
        raise ValueError(f"video_backend is {backend!r}, {_ALLOWED_BACKENDS}")
    if backend != "pyav" and importlib.util.find_spec(backend) is None:
        raise BackendUnavailable(
            f"video_backend is {backend!r}, which is not installed; install {VIDEO_BACKEND_PACKAGES[backend]}, or "
            "choose 'pyav'"
        )


def _given(option: _T | None, default: _T) -> _T:
    return default if option is None else option


def _even_down(count: int) -> int:
    return count // TEMPORAL_PATCH_SIZE * TEMPORAL_PATCH_SIZE


def _even_up(count: int) -> int:
    return -(-count // TEMPORAL_PATCH_SIZE) * TEMPORAL_PATCH_SIZE


def _reachable(min_pixels: int) -> int:
    """Every picture is resized to one unit at least, so lower bounds below that are the same bound."""
    return max(min_pixels, UNIT_PIXELS)


def _upper_bound(name: str, option: int | None, ceiling: int) -> int:
    if option is None:
        return ceiling
    if option > ceiling:
        raise MediaInvalid(f"{name} is {option}, allowed is at most {ceiling}", field=name)
    return option


def _lower_bound(name: str, option: int | None, default: int, ceiling: int) -> int:
    """A lower bound asked for must fit below the ceiling; the configured one gives way to a lowered ceiling."""
    if option is None:
        return min(default, ceiling)
    if option > ceiling:
        raise MediaInvalid(f"{name} is {option}, allowed is at most {ceiling}", field=name)
    return option
