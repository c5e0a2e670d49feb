"""The golden text cases: what Transformers and vLLM computed, and how a model is held against it."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from epd.kernels.reference import DenseAttention
from epd.model.hybrid import HybridModel

GOLDEN = Path(__file__).parents[1] / "golden" / "text"
TOLERANCE = 2e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest absolute difference of any golden logit, and whether all greedy tokens are the golden ones."""

    max_difference: float
    same_greedy: bool

    @property
    def agrees(self) -> bool:
        return self.max_difference <= TOLERANCE and self.same_greedy


@cache
def expected_of(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"expected_{name}.safetensors")


@torch.no_grad()
def dense_logits(model: HybridModel, ids: Tensor) -> Tensor:
    attention = DenseAttention([len(ids)])
    return model.logits(model(model.embed(ids), torch.arange(len(ids)), attention))


def compare(model: HybridModel, expected: str, case: int) -> Comparison:
    """Recompute one case in full. By causality one pass over prompt and answer holds what each greedy step would."""
    golden = expected_of(expected)
    prompt, greedy = golden[f"case{case}.input_ids"].long(), golden[f"case{case}.greedy"].long()
    logits = dense_logits(model, torch.cat([prompt, greedy[:-1]]))
    rows = torch.cat([logits[golden[f"case{case}.positions"].long()], logits[-1:]])
    wanted = torch.cat([golden[f"case{case}.logits"], golden[f"case{case}.last_greedy_logits"].view(1, -1)])
    answer = logits[len(prompt) - 1 :].argmax(-1)
    return Comparison(float((rows - wanted).abs().max()), torch.equal(answer, greedy))
