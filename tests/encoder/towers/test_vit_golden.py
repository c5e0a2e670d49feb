"""The vision tower against outputs computed by another implementation, in fp32."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoder.config import MergerNorm
from encoder.towers.vit import VisionTower
from encoder.towers.weights import load_towers

GOLDEN = Path(__file__).parents[2] / "golden" / "vision"
CASES = json.loads((GOLDEN / "expected_vllm.json").read_text())["cases"]
EXPECTED = load_file(GOLDEN / "expected_vllm.safetensors")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    vision = load_towers(GOLDEN, torch.float32).vision
    assert vision is not None
    return vision


def with_merger_norm(tower: VisionTower, norm: MergerNorm) -> VisionTower:
    other = VisionTower(replace(tower.config, merger_norm=norm)).eval()
    other.load_state_dict(tower.state_dict())
    return other


def pixels_of(case: dict[str, int]) -> torch.Tensor:
    values = np.random.RandomState(case["pixel_seed"]).rand(case["rows"], 1536) * 4 - 2
    return torch.from_numpy(values.astype(np.float32))


def grids_of(case_index: int) -> list[tuple[int, int, int]]:
    return [(t, h, w) for t, h, w in EXPECTED[f"case{case_index}.grid_thw"].tolist()]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_layernorm_merger(tower: VisionTower, index: int) -> None:
    pixels = pixels_of(CASES[index])
    assert torch.allclose(pixels.flatten()[:4], torch.tensor(CASES[index]["pixel_first4"]), atol=1e-5)
    with torch.inference_mode():
        rows = tower(pixels, grids_of(index))
    torch.testing.assert_close(rows, EXPECTED[f"case{index}.embeds_layernorm"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("index", [i for i in range(len(CASES)) if f"case{i}.embeds_rmsnorm" in EXPECTED])
def test_rmsnorm_merger(tower: VisionTower, index: int) -> None:
    with torch.inference_mode():
        rows = with_merger_norm(tower, "rmsnorm")(pixels_of(CASES[index]), grids_of(index))
    torch.testing.assert_close(rows, EXPECTED[f"case{index}.embeds_rmsnorm"], atol=TOLERANCE, rtol=0)
