"""A StepPlan to a StepResult: embeddings, one forward over every sequence, logits where a token is due, the sampler.

Shape letters: T new tokens of the step over its sequences; D hidden width; S sequences that sample; V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from epd.engine.handoff import KvMover
from epd.engine.plan import NOT_FINITE, Failure, SequenceStep, StepOutcome, StepPlan, StepResult, embedding_lost
from epd.engine.sampler import SampledToken, SampleRow, sample
from epd.kernels.base import AttentionBackend, PagedSequence
from epd.kv.storage import KvStorage
from epd.model.embed import EmbeddingSpan, merge_embeddings
from epd.model.hybrid import HybridModel


class EmbeddingReader(Protocol):
    """Rows that are here already: `epd.engine.feed.RowSupply`. A step never waits for any."""

    def tensor(self, ref: EmbeddingRef) -> Tensor:
        """[num_rows, width] on the CPU, without delay. Raises EmbeddingLost."""
        ...


class Runner:
    """Owns the model and the KV tensors; knows nothing of requests beyond a step's token ranges and pages."""

    def __init__(
        self,
        model: HybridModel,
        storage: KvStorage,
        mover: KvMover,
        embeddings: EmbeddingReader,
        attention: AttentionBackend,
        *,
        num_token_ids: int | None = None,
    ) -> None:
        """`num_token_ids`: token ids from there on are never sampled; None for a model without a tokenizer."""
        self._model = model
        self._num_token_ids = num_token_ids
        self._mover = mover
        self._embeddings = embeddings
        self._attention = attention
        self._device = storage.device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Write the plan's imports, compute its steps. A step whose embedding is lost fails alone."""
        for planned in plan.imports:
            self._mover.write(planned)
        media: dict[str, list[EmbeddingSpan]] = {}
        failures: dict[str, StepOutcome] = {}
        for step in plan.steps:
            try:
                media[step.request_id] = self._media_spans(step)
            except EmbeddingLost as error:
                failures[step.request_id] = StepOutcome(failure=embedding_lost(error))
        steps = [step for step in plan.steps if step.request_id not in failures]
        outcomes = self._compute(steps, [media[step.request_id] for step in steps]) if steps else {}
        outcomes |= failures
        return StepResult(tuple(outcomes[step.request_id] for step in plan.steps))

    def _compute(self, steps: Sequence[SequenceStep], media: Sequence[list[EmbeddingSpan]]) -> dict[str, StepOutcome]:
        token_ids: list[int] = []
        spans: list[EmbeddingSpan] = []
        sampled_rows: list[int] = []
        # Last rows of the steps that do not sample. They see all of the chunk, so what is wrong in it shows in them
        # before its pages are published.
        chunk_rows: list[int] = []
        for step, step_spans in zip(steps, media, strict=True):
            first = len(token_ids)
            spans += [EmbeddingSpan(first + span.start, first + span.stop, span.rows) for span in step_spans]
            token_ids += step.token_ids
            (chunk_rows if step.sample is None else sampled_rows).append(len(token_ids) - 1)
        positions_T = torch.cat([torch.arange(step.start, step.stop) for step in steps]).to(self._device)
        hidden_TD = merge_embeddings(self._model.embed(self._index(token_ids)), spans)
        attention = self._attention.context([self._paged(step) for step in steps])
        hidden_TD = self._model(hidden_TD, positions_T, attention)
        samples = [step.sample for step in steps if step.sample is not None]
        tokens = iter(self._sample(hidden_TD, sampled_rows, samples))
        is_sound = iter(torch.isfinite(hidden_TD[self._index(chunk_rows)]).all(dim=-1).tolist() if chunk_rows else ())
        return {step.request_id: _outcome(step, next(is_sound if step.sample is None else tokens)) for step in steps}

    def _sample(self, hidden_TD: Tensor, rows: list[int], samples: list[SampleRow]) -> list[SampledToken | None]:
        if not rows:
            return []
        logits_SV = self._model.logits(hidden_TD[self._index(rows)])
        return sample(logits_SV, samples, num_token_ids=self._num_token_ids)

    def _media_spans(self, step: SequenceStep) -> list[EmbeddingSpan]:
        """Spans of the step, positions counted from its first token."""
        spans = []
        for part in step.media:
            rows_RD = self._embeddings.tensor(part.ref)[part.row_start : part.row_start + part.stop - part.start]
            spans.append(EmbeddingSpan(part.start, part.stop, rows_RD))
        return spans

    def _paged(self, step: SequenceStep) -> PagedSequence:
        return PagedSequence(
            num_new=len(step.token_ids),
            num_context=step.start,
            full_pages=self._index(step.pages.full_pages),
            window_pages=self._index(step.pages.window_pages),
            window_start_page=step.pages.window_start,
            write_full=not step.heals,
        )

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _outcome(step: SequenceStep, computed: SampledToken | bool | None) -> StepOutcome:
    """`computed` is the sampled token (None: logits are not finite) or, of a chunk, whether its end is finite."""
    if computed is None or computed is False:
        message = f"the model gave numbers that are not finite after {step.stop} tokens"
        return StepOutcome(failure=Failure(status=500, code=NOT_FINITE, message=message))
    return StepOutcome(() if computed is True else (computed,))
