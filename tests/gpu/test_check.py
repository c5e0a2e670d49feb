"""The script that measures on a GPU, tried on a CPU: that it has not fallen behind the engine."""

import json
from pathlib import Path

import pytest
import torch

from epd.model.config import TextConfig
from tests.fakes.tiny_text import CONFIG
from tests.gpu import check


def test_timings_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--device", "cpu", "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(capsys.readouterr().out) == report
    assert [(timing["name"], timing["refused"]) for timing in report["timings"]] == [("sdpa", "")]
    assert all(speed > 0 for timing in report["timings"] for speed in timing["decode_tokens_per_s"].values())


def test_the_large_model_is_one_that_is_implemented() -> None:
    config = TextConfig.from_hf(CONFIG | check.LARGE)
    assert {(layer.qk_dim, layer.v_dim) for layer in config.layers} == {(192, 128)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_says_that_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err
