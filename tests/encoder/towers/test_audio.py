"""Properties of the audio towers that no golden case shows."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.weights import load_towers

SEGMENT = 320


@pytest.fixture(scope="module")
def towers(tiny_model_dir: Path) -> tuple[AudioTokenizer, AudioEncoder]:
    loaded = load_towers(tiny_model_dir, torch.float32)
    assert loaded.audio_tokenizer is not None
    assert loaded.audio_encoder is not None
    return loaded.audio_tokenizer, loaded.audio_encoder


def mel(num_frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_frames, 128, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 1000))
def test_counts(towers: tuple[AudioTokenizer, AudioEncoder], num_frames: int) -> None:
    codes = towers[0].encode(mel(num_frames))
    assert codes.shape == (-(-num_frames // 4), 4)
    assert towers[1]([codes]).shape[0] == -(-num_frames // 16)


def test_late_frames_leave_early_codes_alone(towers: tuple[AudioTokenizer, AudioEncoder]) -> None:
    clip = mel(300)
    changed = clip.clone()
    changed[200:] += 5.0
    before, after = towers[0].encoder_out(clip), towers[0].encoder_out(changed)
    # Convolutions look one position ahead, attention never does.
    torch.testing.assert_close(before[:48], after[:48], atol=1e-5, rtol=0)
    assert not torch.allclose(before[50:], after[50:], atol=1e-2)


def test_segments_are_independent(towers: tuple[AudioTokenizer, AudioEncoder]) -> None:
    clip = mel(2 * SEGMENT + 37)
    pieces = [towers[0].encoder_out(piece) for piece in torch.split(clip, SEGMENT)]
    assert torch.equal(towers[0].encoder_out(clip), torch.cat(pieces))


def test_a_batch_of_equal_segments_equals_single_ones(towers: tuple[AudioTokenizer, AudioEncoder]) -> None:
    batch = torch.stack([mel(100, seed) for seed in range(3)])
    together = towers[0].encode_segments(batch)
    for one, row in zip(batch, together, strict=True):
        torch.testing.assert_close(towers[0].encoder_out(one), row, atol=1e-5, rtol=0)


def test_groups_are_completed_with_the_last_row(towers: tuple[AudioTokenizer, AudioEncoder]) -> None:
    codes = torch.randint(0, 32, (6, 4), generator=torch.Generator().manual_seed(0))
    completed = torch.cat((codes, codes[-1:], codes[-1:]))
    assert torch.equal(towers[1]([codes]), towers[1]([completed]))


def test_more_channels_than_needed_are_cut(towers: tuple[AudioTokenizer, AudioEncoder]) -> None:
    codes = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))
    assert torch.equal(towers[1]([codes]), towers[1]([codes[:, :4]]))


@pytest.mark.parametrize("shape", [(0, 128), (5, 64), (128,)])
def test_wrong_mels_are_refused(towers: tuple[AudioTokenizer, AudioEncoder], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        towers[0].encode(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(0, 4), (5, 3)])
def test_wrong_codes_are_refused(towers: tuple[AudioTokenizer, AudioEncoder], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        towers[1]([torch.zeros(shape, dtype=torch.long)])
