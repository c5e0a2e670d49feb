"""The slow truth of generation: the whole sequence is computed anew for every token, nothing is cached."""

from collections.abc import Sequence

import torch

from epd.engine.sampler import SampleRow, sample
from epd.kernels.reference import DenseAttention
from epd.model.embed import EmbeddingSpan, merge_embeddings
from epd.model.hybrid import HybridModel
from epd.types import SamplingParams


@torch.inference_mode()
def plain_generate(
    model: HybridModel,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    spans: Sequence[EmbeddingSpan] = (),
) -> list[int]:
    """The answer's tokens, without the one that stops it."""
    tokens = list(token_ids)
    answer: list[int] = []
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.config.eos_token_ids)}
    for index in range(sampling.max_tokens):
        hidden = merge_embeddings(model.embed(torch.tensor(tokens)), spans)
        hidden = model(hidden, torch.arange(len(tokens)), DenseAttention([len(tokens)]))
        token = sample(model.logits(hidden[-1:]), [SampleRow(sampling, index)])[0]
        assert token is not None
        if token.token_id in stops:
            break
        answer.append(token.token_id)
        tokens.append(token.token_id)
    return answer
