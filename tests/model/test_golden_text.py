"""Logits and greedy tokens against Transformers and vLLM, recomputed in full and decoded incrementally in pages."""

import json
from functools import cache

import pytest
import torch
from torch import Tensor

from epd.model.hybrid import HybridModel
from epd.model.weights import load_text_model
from tests.fakes.pages import PagedCache
from tests.oracles.golden_text import GOLDEN, TOLERANCE, compare, dense_logits, expected_of

NUM_GREEDY = 16
CHECKPOINTS = [
    ("split", "hf_bf16_wl127", 127),
    ("split", "hf_bf16_wl128", 128),
    ("fused", "hf_bf16_wl127", 127),
    ("fused", "hf_bf16_wl128", 128),
    ("fp8", "hf_fp8_wl127", 127),
    ("fp8", "hf_fp8_wl128", 128),
]
CASES = range(4)


@cache
def model_of(folder: str, window_left: int) -> HybridModel:
    return load_text_model(GOLDEN / folder, window_left=window_left)


@torch.no_grad()
def paged_greedy(model: HybridModel, ids: Tensor, *, chunk: int) -> tuple[Tensor, list[int]]:
    """Prefill in chunks, then decode token by token. Return the logits of every position but the last token's."""
    cache = PagedCache(list(model.config.layers), page_size=16, num_pages=64)
    cache.admit("a")
    logits, greedy = [], []
    pending = list(torch.split(ids, chunk))
    while len(greedy) < NUM_GREEDY:
        new = pending.pop(0) if pending else torch.tensor(greedy[-1:])
        start = cache.num_tokens["a"]
        attention = cache.attention(cache.extend("a", len(new)))
        logits.append(model.logits(model(model.embed(new), torch.arange(start, start + len(new)), attention)))
        if not pending:
            greedy.append(int(logits[-1][-1].argmax()))
    return torch.cat(logits), greedy


@pytest.mark.parametrize(("folder", "expected", "window_left"), CHECKPOINTS)
@pytest.mark.parametrize("case", CASES)
def test_full_recomputation_equals_transformers(folder: str, expected: str, window_left: int, case: int) -> None:
    comparison = compare(model_of(folder, window_left), expected, case)
    assert comparison.agrees, comparison


@pytest.mark.parametrize(("folder", "expected", "window_left"), CHECKPOINTS)
@pytest.mark.parametrize("case", CASES)
def test_paged_decoding_equals_transformers(folder: str, expected: str, window_left: int, case: int) -> None:
    model, golden = model_of(folder, window_left), expected_of(expected)
    prompt = golden[f"case{case}.input_ids"].long()
    logits, greedy = paged_greedy(model, prompt, chunk=100)
    positions = golden[f"case{case}.positions"].long()
    torch.testing.assert_close(logits[positions], golden[f"case{case}.logits"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits[-1], golden[f"case{case}.last_greedy_logits"].flatten(), atol=TOLERANCE, rtol=0)
    assert greedy == golden[f"case{case}.greedy"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_vllm(case: int) -> None:
    model, golden = model_of("fused", 127), expected_of("vllm_bf16_wl127")
    prompt = expected_of("hf_bf16_wl127")[f"case{case}.input_ids"].long()
    top_ids = golden[f"case{case}.top_ids"].long()
    logits, greedy = paged_greedy(model, prompt, chunk=256)
    for log_probs in (logits.log_softmax(-1), dense_logits(model, prompt).log_softmax(-1)):
        rows = log_probs[golden[f"case{case}.positions"].long()].gather(1, top_ids)
        torch.testing.assert_close(rows, golden[f"case{case}.top_logprobs"], atol=TOLERANCE, rtol=0)
    assert greedy == golden[f"case{case}.greedy"].tolist()


def test_the_two_windows_differ() -> None:
    """The switch is live: 127 and 128 agree up to 128 tokens and are far apart behind them."""
    ids = expected_of("hf_bf16_wl127")["case3.input_ids"].long()
    difference = (dense_logits(model_of("split", 127), ids) - dense_logits(model_of("split", 128), ids)).abs().amax(-1)
    assert float(difference[:128].max()) < 1e-4
    assert float(difference[128:].max()) > 1.0


def test_every_golden_case_is_run() -> None:
    for name in {name for _, name, _ in CHECKPOINTS} | {"vllm_bf16_wl127"}:
        described = json.loads((GOLDEN / f"expected_{name}.json").read_text())
        assert [case["case"] for case in described["cases"]] == list(CASES)
