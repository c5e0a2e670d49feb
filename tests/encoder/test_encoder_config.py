"""The encoder's settings: what they lead to, and what is refused."""

from typing import Any

import pytest

from encoder.config import EncoderConfig
from preprocess.config import DecodeSettings


def test_the_decode_pool_gets_its_settings() -> None:
    config = EncoderConfig(
        decode_threads=3,
        isolation="processes",
        video_threads=5,
        max_item_s=7.0,
        max_worker_bytes=2**30,
        max_worker_items=9,
    )
    assert config.decode_settings == DecodeSettings(
        num_threads=3,
        isolation="processes",
        video_threads=5,
        max_item_s=7.0,
        max_worker_bytes=2**30,
        max_worker_items=9,
    )


def test_without_settings_the_pool_has_its_own_defaults() -> None:
    assert EncoderConfig().decode_settings == DecodeSettings()


@pytest.mark.parametrize(
    ("changes", "sends_pixels"),
    [
        ({}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda:1"}, True),
        ({"device": "cuda", "preprocess": "cpu"}, False),
        ({"preprocess": "tower"}, True),
    ],
)
def test_where_pictures_are_resized(changes: dict[str, Any], sends_pixels: bool) -> None:
    assert EncoderConfig(**changes).sends_pixels is sends_pixels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preprocess": "gpu"}, "preprocess is 'gpu'; supported: 'cpu' or 'tower'"),
        ({"isolation": "fibres"}, "isolation is 'fibres', allowed is 'threads' or 'processes'"),
        ({"decode_threads": 0}, "decode_threads is 0"),
        ({"video_threads": 0}, "video_threads is 0, allowed is 1 or more"),
        ({"max_item_s": 0.0}, "max_item_s is 0.0, allowed is above 0"),
        ({"max_worker_bytes": 1}, "max_worker_bytes is 1, allowed is 64 MiB or more"),
        ({"max_worker_items": 0}, "max_worker_items is 0, allowed is 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        EncoderConfig(**changes)
