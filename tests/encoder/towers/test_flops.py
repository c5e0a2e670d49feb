"""Counted from the configuration: what torch counts while the towers' definitions run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.flops import audio_encoder_flops, audio_flops, band_pairs, tokenizer_flops, vision_flops
from encoder.towers.vit import Grid, VisionTower
from tests.fakes.odd_towers import AUDIO, TOKENIZER, VISION, mel, picture


def counted(work: Callable[[], object]) -> int:
    """By torch, without what attention does: of a band it would count every pair."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        work()
    by_kernel = counter.get_flop_counts()["Global"]
    return sum(
        number for kernel, number in by_kernel.items() if "attention" not in str(kernel) and "bmm" not in str(kernel)
    )


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 50))
def test_pairs_of_a_band(length: int, left: int, right: int) -> None:
    pairs = sum(i - left <= j <= i + right for i in range(length) for j in range(length))
    assert band_pairs(length, left, right) == pairs


@pytest.mark.parametrize("grid", [(1, 4, 6), (3, 8, 10), (2, 2, 2)])
def test_pictures(grid: Grid) -> None:
    t, h, w = grid
    length, window, width = h * w, VISION.window_patches, VISION.num_heads * VISION.head_dim
    near = sum(abs(i - j) <= window for i in range(length) for j in range(length))
    pairs = length * length + 3 * near
    expected = counted(lambda: VisionTower(VISION)(picture(grid, 0), [grid])) + 4 * t * pairs * width
    assert vision_flops(VISION, grid) == expected


@pytest.mark.parametrize("frames", [1, 37, 100, 230])
@pytest.mark.parametrize("causal", [True, False])
def test_sounds(frames: int, causal: bool) -> None:
    config = replace(TOKENIZER, causal=causal, window_right=3)
    tokenizer = AudioTokenizer(config, AUDIO.segment_frames)
    pairs = 0
    for start in range(0, frames, AUDIO.segment_frames):
        length = -(-min(AUDIO.segment_frames, frames - start) // 2)
        for windowed in config.windowed_layers:
            for i in range(length):
                first = max(0, i - 8) if windowed else 0
                last = i if causal else min(length - 1, i + 3) if windowed else length - 1
                pairs += last - first + 1
    expected = counted(lambda: tokenizer.encode(mel(frames, 0))) + 4 * pairs * config.d_model
    assert tokenizer_flops(config, frames, AUDIO.segment_frames) == expected
    codes = tokenizer.encode(mel(frames, 0))
    for layers in (1, 2):
        encoder = AudioEncoder(replace(AUDIO, projection_layers=layers))
        groups = -(-len(codes) // 4)
        expected = counted(partial(encoder, [codes])) + 2 * groups * 4 * 16 * AUDIO.num_heads * 24
        assert audio_encoder_flops(encoder.config, len(codes)) == expected
    total = tokenizer_flops(config, frames, AUDIO.segment_frames) + audio_encoder_flops(AUDIO, len(codes))
    assert audio_flops(config, AUDIO, frames) == total
