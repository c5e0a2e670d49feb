"""Draft heads against vLLM, in one pass and row by row in pages."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from epd.kernels.reference import DenseAttention
from epd.model.hybrid import HybridModel
from epd.model.weights import load_text_model
from tests.fakes.pages import PagedCache

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 2e-3


@cache
def model() -> HybridModel:
    return load_text_model(GOLDEN / "text" / "fused", window_left=127)


@cache
def expected_of(k: int) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    path = GOLDEN / "mtp" / f"expected_vllm_mtp{k}_wl127.json"
    return load_file(path.with_suffix(".safetensors")), json.loads(path.read_text())["cases"]


def check(k: int, case: int, out: Tensor) -> None:
    golden, cases = expected_of(k)
    rows = golden[f"case{case}.logit_positions"].long() - cases[case]["first_row"]
    torch.testing.assert_close(out[rows], golden[f"case{case}.out_hidden"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(model().logits(out[rows]), golden[f"case{case}.logits"], atol=TOLERANCE, rtol=0)


def inputs(k: int, case: int) -> tuple[Tensor, Tensor, Tensor]:
    golden, _ = expected_of(k)
    hidden = expected_of(0)[0][f"case{case}.hidden"]
    return model().embed(golden[f"case{case}.token_ids"].long()), hidden, golden[f"case{case}.positions"].long()


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("case", range(4))
@torch.no_grad()
def test_one_pass_equals_vllm(k: int, case: int) -> None:
    token, hidden, positions = inputs(k, case)
    check(k, case, model().draft(k, token, hidden, positions, DenseAttention([len(positions)])))


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("case", range(4))
@torch.no_grad()
def test_row_by_row_equals_vllm(k: int, case: int) -> None:
    token, hidden, positions = inputs(k, case)
    pages = PagedCache([model().config.mtp_layer(k)], page_size=16, num_pages=16)
    pages.admit("a")
    # Long prompts come with their last rows only: the cache counts from the first of them, rotation does not.
    steps = [1] * 20 + [len(positions) - 20] if len(positions) > 20 else [1] * len(positions)
    rows = zip(*(torch.split(x, steps) for x in (token, hidden, positions)), strict=True)
    out = [model().draft(k, *row, pages.attention(pages.extend("a", len(row[0])))) for row in rows]
    check(k, case, torch.cat(out))


@torch.no_grad()
def test_the_trunk_gives_the_hidden_states() -> None:
    """Draft heads are fed what the trunk returns: states after its last norm, one per prompt row."""
    ids = load_file(GOLDEN / "text" / "expected_hf_bf16_wl127.safetensors")["case1.input_ids"].long()
    hidden = model()(model().embed(ids), torch.arange(len(ids)), DenseAttention([len(ids)]))
    torch.testing.assert_close(hidden, expected_of(0)[0]["case1.hidden"], atol=TOLERANCE, rtol=0)
