"""Options, settings read from a checkpoint, and how the two meet."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from preprocess import FetchLimits, MediaInvalid, MediaOptions, MediaSource, Modality, ProcessorConfig

REAL = {
    "image_min_pixels": 8192, "image_max_pixels": 8_388_608, "video_min_pixels": 8192, "video_max_pixels": 8_388_608,
    "video_total_max_pixels": 268_435_456, "fps": 1.0, "max_frames": 3600, "min_frames": None, "num_frames": None,
    "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "audio_sampling_rate": 24_000,
    "audio_input_id_per_second": 25.0, "audio_group_size": 4, "video_audio_interleave_length": 0.0,
}  # fmt: skip


def test_published_settings() -> None:
    config = ProcessorConfig.from_hf({"processor_config": REAL})
    assert config.video.min_frames == 8
    assert config.video.num_frames is None
    assert config.audio.tokens_per_s == 6.25
    assert config.image.max_pixels == 8_388_608


def test_fallbacks_for_missing_and_null_keys() -> None:
    config = ProcessorConfig.from_hf({"processor_config": {"image_max_pixels": None}})
    assert (config.image.min_pixels, config.image.max_pixels) == (4096, 4_194_304)
    assert (config.video.total_max_pixels, config.video.fps) == (16_777_216, 2.0)
    assert (config.video.max_frames, config.video.min_frames) == (256, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch_size": 14}, "patch_size is 14, allowed is 16"),
        ({"use_video_timestamps": False}, "use_video_timestamps is False"),
        ({"temporal_compression_ratio": 2}, "temporal_compression_ratio is 2"),
        ({"fps": "1"}, "fps is '1'"),
        ({"max_frames": 2.5}, "max_frames is 2.5"),
        ({"image_min_pixels": True}, "image_min_pixels is True"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProcessorConfig.from_hf({"processor_config": {**REAL, **change}})
    with pytest.raises(ValueError, match="processor_config is None"):
        ProcessorConfig.from_hf({})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fps": 0.0}, "fps is 0.0, allowed is 0.001 to 240"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"max_frames": 0}, "max_frames is 0"),
        ({"num_frames": -1}, "num_frames is -1"),
        ({"min_pixels": 0}, "min_pixels is 0"),
        ({"fps": 1, "num_frames": 4}, "exclude each other"),
        ({"min_frames": 9, "max_frames": 8}, "min_frames is 9"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "min_pixels is 9000"),
    ],
)
def test_options_are_validated(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MediaOptions(**options)
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(options, MediaOptions)


def test_unknown_options_and_options_of_another_modality() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `quality`"):
        msgspec.json.decode(b'{"quality": "high"}', type=MediaOptions)
    with pytest.raises(
        ValueError, match="fps does not apply to image; allowed options: detail, max_pixels, min_pixels"
    ):
        MediaSource(Modality.IMAGE, "data:,", MediaOptions(fps=1))
    with pytest.raises(ValueError, match="max_pixels does not apply to audio; allowed options: none"):
        MediaSource(Modality.AUDIO, "data:,", MediaOptions(max_pixels=2000))


def test_sources_survive_the_wire() -> None:
    source = MediaSource(Modality.VIDEO, "https://example.com/a.mp4", MediaOptions(fps=2.0, use_audio=False))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(source), type=MediaSource) == source


def test_requests_may_ask_for_less_and_not_for_more(tiny: ProcessorConfig) -> None:
    budget = tiny.video_budget(MediaOptions(max_frames=4, max_pixels=20_000, fps=3.0))
    assert (budget.max_frames, budget.max_pixels, budget.fps) == (4, 20_000, 3.0)
    # The configured minimum gives way to a lowered maximum.
    assert budget.min_frames == 4
    assert tiny.image_budget(MediaOptions(max_pixels=5000)).min_pixels == 5000
    for options in (MediaOptions(max_frames=65), MediaOptions(num_frames=66), MediaOptions(max_pixels=65_537)):
        with pytest.raises(MediaInvalid, match="allowed is at most"):
            tiny.video_budget(options)
    with pytest.raises(MediaInvalid, match="min_pixels is 300000"):
        tiny.image_budget(MediaOptions(min_pixels=300_000))


@pytest.mark.parametrize("change", [{"max_bytes": 0}, {"timeout_s": 0}, {"max_concurrency": 0}, {"max_redirects": -1}])
def test_fetch_limits_are_validated(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        FetchLimits(**change)
