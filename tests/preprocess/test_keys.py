"""What a MediaKey depends on, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from preprocess import DecodeLimits, MediaInvalid, MediaOptions, Modality, ProcessorConfig, media_key


def key(config: ProcessorConfig, **changes: Any) -> str:
    given: dict[str, Any] = {
        "content": b"content",
        "modality": Modality.VIDEO,
        "options": MediaOptions(),
        "processor": config,
        "tower_fingerprint": "tower",
    }
    given.update(changes)
    return media_key(given.pop("content"), **given)


def test_form_and_stability(tiny: ProcessorConfig) -> None:
    first = key(tiny)
    assert len(first) == 32
    assert set(first) <= set("0123456789abcdef")
    assert key(tiny) == first


def test_everything_that_changes_the_result_changes_the_key(tiny: ProcessorConfig) -> None:
    keys = [
        key(tiny),
        key(tiny, content=b"content2"),
        key(tiny, modality=Modality.IMAGE),
        key(tiny, modality=Modality.AUDIO),
        key(tiny, options=MediaOptions(fps=2.0)),
        key(tiny, options=MediaOptions(use_audio=False)),
        # Fails where the default does without.
        key(tiny, options=MediaOptions(use_audio=True)),
        key(tiny, options=MediaOptions(num_frames=8)),
        key(tiny, options=MediaOptions(max_pixels=20_000)),
        key(tiny, tower_fingerprint="other"),
        key(replace(tiny, video_backend="decord")),
        key(replace(tiny, audio=replace(tiny.audio, num_mels=80))),
    ]
    assert len(set(keys)) == len(keys)


def test_what_does_not_change_the_result_does_not_change_the_key(tiny: ProcessorConfig) -> None:
    assert key(tiny, options=MediaOptions(fps=tiny.video.fps)) == key(tiny)
    assert key(tiny, options=MediaOptions(max_pixels=tiny.video.max_pixels)) == key(tiny)
    assert key(tiny, options=MediaOptions(fps=3)) == key(tiny, options=MediaOptions(fps=3.0))
    assert key(tiny, options=MediaOptions(num_frames=6)) == key(tiny, options=MediaOptions(num_frames=6, max_frames=7))
    assert key(replace(tiny, limits=DecodeLimits(max_video_frames=7))) == key(tiny)
    image: dict[str, Any] = {"modality": Modality.IMAGE}
    assert key(replace(tiny, video_backend="decord"), **image) == key(tiny, **image)
    assert key(tiny, options=MediaOptions(detail="high"), **image) == key(tiny, **image)
    small = replace(tiny, image=replace(tiny.image, max_pixels=100_000))
    assert key(small, options=MediaOptions(detail="low"), **image) == key(small, **image)


def test_parts_cannot_run_into_each_other(tiny: ProcessorConfig) -> None:
    assert key(tiny, tower_fingerprint="ab", content=b"c") != key(tiny, tower_fingerprint="a", content=b"bc")


def test_options_over_the_ceiling_are_refused(tiny: ProcessorConfig) -> None:
    with pytest.raises(MediaInvalid, match="max_frames is 65"):
        key(tiny, options=MediaOptions(max_frames=65))
