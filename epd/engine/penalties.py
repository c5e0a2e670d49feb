"""Odds that depend on what was written already: frequency, presence and repetition penalties, and biases of single
tokens. V vocabulary."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from epd.types import SamplingParams


def biased(logits_V: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """A copy with the biases added; token ids beyond the row are left out."""
    known = [(token_id, value) for token_id, value in bias if token_id < len(logits_V)]
    index = torch.tensor([token_id for token_id, _ in known], dtype=torch.int64, device=logits_V.device)
    values = torch.tensor([value for _, value in known], dtype=logits_V.dtype, device=logits_V.device)
    return logits_V.index_add(0, index, values)


def without(logits_V: Tensor, token_ids: Collection[int]) -> Tensor:
    """A copy in which these tokens cannot be drawn, unless that leaves none."""
    index = [token_id for token_id in token_ids if token_id < len(logits_V)]
    rest_V = logits_V.index_fill(0, torch.tensor(index, dtype=torch.int64, device=logits_V.device), float("-inf"))
    return rest_V if bool(torch.isfinite(rest_V).any()) else logits_V


def penalised(logits_V: Tensor, sampling: SamplingParams, counts: Counter[int], prompt_ids: Tensor) -> Tensor:
    """A copy with the penalties for tokens of the answer (`counts`) and, for repetition, of the prompt (ids, int64,
    each once). Repetition divides a positive logit and multiplies a negative one; the others are subtracted, frequency
    once per occurrence."""
    answer = [(token_id, count) for token_id, count in counts.items() if token_id < len(logits_V)]
    ids = torch.tensor([token_id for token_id, _ in answer], dtype=torch.int64, device=logits_V.device)
    if sampling.repetition_penalty != 1:
        seen = torch.unique(torch.cat([prompt_ids.to(logits_V.device), ids]))
        seen = seen[seen < len(logits_V)]
        there = logits_V[seen]
        factor = sampling.repetition_penalty
        logits_V = logits_V.index_copy(0, seen, torch.where(there > 0, there / factor, there * factor))
    if sampling.frequency_penalty or sampling.presence_penalty:
        times = torch.tensor([count for _, count in answer], dtype=logits_V.dtype, device=logits_V.device)
        logits_V = logits_V.index_add(0, ids, -(sampling.frequency_penalty * times + sampling.presence_penalty))
    return logits_V
