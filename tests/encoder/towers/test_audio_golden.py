"""The audio towers against outputs computed by another implementation, in fp32."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.weights import load_towers

GOLDEN = Path(__file__).parents[2] / "golden" / "audio"
INDEX = json.loads((GOLDEN / "expected_vllm.json").read_text())
EXPECTED = load_file(GOLDEN / "expected_vllm.safetensors")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def towers() -> tuple[AudioTokenizer, AudioEncoder]:
    loaded = load_towers(GOLDEN, torch.float32)
    assert loaded.audio_tokenizer is not None
    assert loaded.audio_encoder is not None
    return loaded.audio_tokenizer, loaded.audio_encoder


def mel_of(case: dict[str, int]) -> torch.Tensor:
    noise = np.random.RandomState(case["mel_seed"]).rand(case["mel_frames"] + 2, 128) * 10 - 8
    return torch.from_numpy(((noise[:-2] + noise[1:-1] + noise[2:]) / 3).astype(np.float32))


@pytest.mark.parametrize("index", range(len(INDEX["mel_cases"])))
def test_mel_to_rows(towers: tuple[AudioTokenizer, AudioEncoder], index: int) -> None:
    tokenizer, encoder = towers
    mel = mel_of(INDEX["mel_cases"][index])
    with torch.inference_mode():
        before_quantizer = tokenizer.encoder_out(mel)
        codes = tokenizer.encode(mel)
        rows = encoder([codes])
    torch.testing.assert_close(before_quantizer, EXPECTED[f"mel{index}.encoder_out"], atol=TOLERANCE, rtol=0)
    assert torch.equal(codes, EXPECTED[f"mel{index}.codes"].long())
    torch.testing.assert_close(rows, EXPECTED[f"mel{index}.embeds"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("index", range(len(INDEX["code_cases"])))
def test_codes_to_rows(towers: tuple[AudioTokenizer, AudioEncoder], index: int) -> None:
    encoder = towers[1]
    codes = EXPECTED[f"codes{index}.codes"]
    with torch.inference_mode():
        local = encoder.local_out([codes])
        rows = encoder([codes])
    torch.testing.assert_close(local, EXPECTED[f"codes{index}.local_out"].reshape(local.shape), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(rows, EXPECTED[f"codes{index}.embeds"], atol=TOLERANCE, rtol=0)


def test_clips_do_not_affect_each_other(towers: tuple[AudioTokenizer, AudioEncoder]) -> None:
    encoder = towers[1]
    clips = [EXPECTED[f"mel{index}.codes"] for index in (0, 1, 2)]
    with torch.inference_mode():
        together = encoder(clips)
        apart = torch.cat([encoder([clip]) for clip in clips])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)
