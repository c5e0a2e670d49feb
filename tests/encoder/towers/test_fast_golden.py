"""The towers as a server runs them, against outputs computed by another implementation: the same cases and tolerance.

What `test_vit_golden` and `test_audio_golden` ask of the towers' definitions.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.fast_audio import FastAudioEncoder, FastTokenizer
from encoder.towers.fast_vision import FastVision
from encoder.towers.vit import VisionTower
from encoder.towers.weights import load_towers

GOLDEN = Path(__file__).parents[2] / "golden"
VISION = load_file(GOLDEN / "vision" / "expected_vllm.safetensors")
AUDIO = load_file(GOLDEN / "audio" / "expected_vllm.safetensors")
NUM_VISION = sum(name.endswith("embeds_layernorm") for name in VISION)
NUM_MELS = sum(name.startswith("mel") and name.endswith(".codes") for name in AUDIO)
NUM_CODES = sum(name.startswith("codes") and name.endswith(".embeds") for name in AUDIO)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def vision() -> VisionTower:
    tower = load_towers(GOLDEN / "vision", torch.float32).vision
    assert tower is not None
    return tower


@pytest.fixture(scope="module")
def audio() -> tuple[AudioTokenizer, AudioEncoder]:
    towers = load_towers(GOLDEN / "audio", torch.float32)
    assert towers.audio_tokenizer is not None
    assert towers.audio_encoder is not None
    return towers.audio_tokenizer, towers.audio_encoder


def vision_case(index: int) -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
    case = json.loads((GOLDEN / "vision" / "expected_vllm.json").read_text())["cases"][index]
    values = np.random.RandomState(case["pixel_seed"]).rand(case["rows"], 1536) * 4 - 2
    grids = [(t, h, w) for t, h, w in VISION[f"case{index}.grid_thw"].tolist()]
    pixels = torch.from_numpy(values.astype(np.float32))
    return list(torch.split(pixels, [t * h * w for t, h, w in grids])), grids


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("index", range(NUM_VISION))
def test_pictures(vision: VisionTower, index: int, packed: bool) -> None:
    pictures, grids = vision_case(index)
    with torch.inference_mode():
        rows = torch.cat(FastVision(vision, packed=packed)(pictures, grids))
    torch.testing.assert_close(rows, VISION[f"case{index}.embeds_layernorm"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("index", [i for i in range(NUM_VISION) if f"case{i}.embeds_rmsnorm" in VISION])
def test_pictures_with_the_other_norm(vision: VisionTower, index: int) -> None:
    other = VisionTower(replace(vision.config, merger_norm="rmsnorm")).eval().requires_grad_(False)
    other.load_state_dict(vision.state_dict())
    with torch.inference_mode():
        rows = torch.cat(FastVision(other)(*vision_case(index)))
    torch.testing.assert_close(rows, VISION[f"case{index}.embeds_rmsnorm"], atol=TOLERANCE, rtol=0)


def test_pictures_in_bfloat16_are_as_near_as_those_of_the_definition(vision: VisionTower) -> None:
    """bf16 keeps no golden tolerance, whoever computes in it; the fast tower loses no more than the plain one."""
    half = VisionTower(vision.config).eval().requires_grad_(False)
    half.load_state_dict(vision.state_dict())
    half = half.to(torch.bfloat16)
    fast = [FastVision(half, packed=packed) for packed in (True, False)]
    errors = torch.zeros(3)
    with torch.inference_mode():
        for index in range(NUM_VISION):
            pictures, grids = vision_case(index)
            made = [half(torch.cat(pictures).bfloat16(), grids), *(torch.cat(one(pictures, grids)) for one in fast)]
            expected = VISION[f"case{index}.embeds_layernorm"]
            errors += torch.stack([(rows.float() - expected).square().sum() for rows in made])
    assert errors[0] > 0
    assert errors[1:].max() < 1.2 * errors[0]


def mel_case(index: int) -> torch.Tensor:
    case = json.loads((GOLDEN / "audio" / "expected_vllm.json").read_text())["mel_cases"][index]
    noise = np.random.RandomState(case["mel_seed"]).rand(case["mel_frames"] + 2, 128) * 10 - 8
    return torch.from_numpy(((noise[:-2] + noise[1:-1] + noise[2:]) / 3).astype(np.float32))


@pytest.mark.parametrize("packed", [True, False])
def test_sounds(audio: tuple[AudioTokenizer, AudioEncoder], packed: bool) -> None:
    tokenizer, encoder = FastTokenizer(audio[0], packed=packed), FastAudioEncoder(audio[1], packed=packed)
    with torch.inference_mode():
        codes = tokenizer([mel_case(index) for index in range(NUM_MELS)])
        rows = encoder(codes)
    for index in range(NUM_MELS):
        assert torch.equal(codes[index], AUDIO[f"mel{index}.codes"].long())
        torch.testing.assert_close(rows[index], AUDIO[f"mel{index}.embeds"], atol=TOLERANCE, rtol=0)


def test_codes(audio: tuple[AudioTokenizer, AudioEncoder]) -> None:
    codes = [AUDIO[f"codes{index}.codes"] for index in range(NUM_CODES)]
    with torch.inference_mode():
        rows = FastAudioEncoder(audio[1])(codes)
    for index in range(NUM_CODES):
        torch.testing.assert_close(rows[index], AUDIO[f"codes{index}.embeds"], atol=TOLERANCE, rtol=0)
