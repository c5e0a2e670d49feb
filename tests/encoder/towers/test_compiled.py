"""`encoder.compile`: the steps of the vision tower through torch.compile give the golden rows, and keep media apart."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoder.towers.fast_vision import FastVision
from encoder.towers.weights import load_towers

GOLDEN = Path(__file__).parents[2] / "golden" / "vision"


@pytest.mark.timeout(300)  # The compiler takes half a minute before its first line of code.
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_steps_give_the_golden_rows() -> None:
    tower = load_towers(GOLDEN, torch.float32).vision
    assert tower is not None
    expected = load_file(GOLDEN / "expected_vllm.safetensors")
    fast = FastVision(tower, compiled=True)
    cases = json.loads((GOLDEN / "expected_vllm.json").read_text())["cases"]
    for index, case in enumerate(cases):
        values = np.random.RandomState(case["pixel_seed"]).rand(case["rows"], 1536) * 4 - 2
        grids = [(t, h, w) for t, h, w in expected[f"case{index}.grid_thw"].tolist()]
        pictures = list(torch.split(torch.from_numpy(values.astype(np.float32)), [t * h * w for t, h, w in grids]))
        with torch.inference_mode():
            rows = fast(pictures, grids)
            alone = [fast([one], [grid])[0] for one, grid in zip(pictures, grids, strict=True)]
        torch.testing.assert_close(torch.cat(rows), expected[f"case{index}.embeds_layernorm"], atol=1e-4, rtol=0)
        assert all(torch.equal(one, other) for one, other in zip(rows, alone, strict=True))
