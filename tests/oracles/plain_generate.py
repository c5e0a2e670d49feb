"""The slow truth of generation: the whole sequence is computed anew for every token, nothing is cached."""

from collections.abc import Callable, Sequence

import torch

from epd.engine.grammar import Answers, AnswerSoFar
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
    make_answers: Callable[[], Answers] | None = None,
) -> list[int]:
    """The answer's tokens, without the one that stops it. `make_answers` is called for every token, so that none is
    sampled with what was known of the one before."""
    tokens = list(token_ids)
    answer: list[int] = []
    goes_on = sampling.ignore_eos and sampling.grammar is None
    stops = {*sampling.stop_token_ids, *(() if goes_on else model.config.eos_token_ids)}
    for index in range(sampling.max_tokens):
        hidden = merge_embeddings(model.embed(torch.tensor(tokens)), spans)
        hidden = model(hidden, torch.arange(len(tokens)), DenseAttention([len(tokens)]))
        row = SampleRow(sampling, index, AnswerSoFar("oracle", tuple(token_ids), 0, tuple(answer)))
        answers = None if make_answers is None else make_answers()
        token = sample(model.logits(hidden[-1:]), [row], answers=answers)[0]
        assert token is not None
        if token.token_id in stops:
            break
        answer.append(token.token_id)
        tokens.append(token.token_id)
    return answer
