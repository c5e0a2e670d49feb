"""A StepPlan to a StepResult: embeddings, one forward over every sequence, logits where a token is due, the sampler,
and the draft heads over what proved right.

Shape letters: T new tokens of the step over its sequences, drafts included; E tokens to embed: T and known ones after
them; D hidden width; S rows that are sampled; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from epd.engine.balance import ExpertBalance
from epd.engine.draft_heads import DraftHeads, HeadRun
from epd.engine.gate import arrivals_of, gated
from epd.engine.grammar import Answers, GrammarFailed
from epd.engine.graphs import DecodeGraphs
from epd.engine.handoff import KvMover
from epd.engine.heal_forward import heal_windows
from epd.engine.plan import (
    NOT_FINITE,
    Failure,
    MediaSlice,
    SequenceStep,
    StepOutcome,
    StepPlan,
    StepResult,
    embedding_lost,
)
from epd.engine.sampler import DraftChain, SampledToken, sample_chains
from epd.kernels.base import AttentionBackend, PagedSequence
from epd.kv.storage import KvStorage
from epd.model.embed import EmbeddingSpan, merge_embeddings
from epd.model.hybrid import HybridModel

# Rows of the step's own tokens, and of known tokens after them.
_StepMedia = tuple[list[EmbeddingSpan], list[EmbeddingSpan]]


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
        num_heads: int = 0,
        graphs: DecodeGraphs | None = None,
        answers: Answers | None = None,
    ) -> None:
        """`num_token_ids`: token ids from there on are never sampled; None for a model without a tokenizer.

        `num_heads` of the model's draft heads are run, and have layers in the storage. `graphs` take steps they know.
        `answers` are for those that are not drawn as the model would have it; None where there are none.
        """
        self._model = model
        self._num_token_ids = num_token_ids
        self._mover = mover
        self._embeddings = embeddings
        self._attention = attention
        self._graphs = graphs
        self._answers = answers
        self.balance = ExpertBalance(model.config)
        self._device = storage.device
        self._page_size = storage.layout.page_size
        self._heads: DraftHeads | None = None
        if num_heads:
            self._heads = DraftHeads(
                model,
                storage,
                self._paged,
                num_heads=num_heads,
                page_size=self._page_size,
                num_token_ids=num_token_ids,
            )

    def close(self) -> None:
        if self._answers is not None:
            self._answers.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Write the plan's imports, compute its steps. A step whose embedding is lost fails alone.

        Raises CopyFailed when cached pages of a step did not come from host memory.
        """
        for planned in plan.imports:
            if planned.arrival is None:
                self._mover.write(planned)
        media: dict[str, _StepMedia] = {}
        failures: dict[str, StepOutcome] = {}
        for step in plan.steps:
            try:
                media[step.request_id] = self._spans(step.media), self._spans(step.draft.media)
            except EmbeddingLost as error:
                failures[step.request_id] = StepOutcome(failure=embedding_lost(error))
        steps = [step for step in plan.steps if step.request_id not in failures]
        healing, computing = [step for step in steps if step.heals], [step for step in steps if not step.heals]
        outcomes = failures
        if healing:
            outcomes |= self._heal(healing, [media[step.request_id][0] for step in healing])
        if computing:
            media_of_steps = [media[step.request_id] for step in computing]
            outcomes |= self._compute(computing, media_of_steps, num_drafts=plan.num_drafts)
        return StepResult(tuple(outcomes[step.request_id] for step in plan.steps))

    def _heal(self, steps: Sequence[SequenceStep], media: Sequence[list[EmbeddingSpan]]) -> dict[str, StepOutcome]:
        token_ids: list[int] = []
        spans: list[EmbeddingSpan] = []
        for step, step_spans in zip(steps, media, strict=True):
            first = len(token_ids)
            spans += [EmbeddingSpan(first + span.start, first + span.stop, span.rows) for span in step_spans]
            token_ids += step.token_ids
        hidden_TD = merge_embeddings(self._model.embed(self._index(token_ids)), spans)
        attention = gated(self._attention, arrivals_of(steps))
        is_sound = heal_windows(self._model, hidden_TD, steps, attention, page_size=self._page_size)
        if self._heads is not None:
            self._heads.blank([page for step in steps for page in step.pages.window_pages])
        return {step.request_id: _outcome(step, sound) for step, sound in zip(steps, is_sound, strict=True)}

    def _compute(
        self, steps: Sequence[SequenceStep], media: Sequence[_StepMedia], *, num_drafts: int
    ) -> dict[str, StepOutcome]:
        rows = _Rows(steps, media)
        arrivals = arrivals_of(steps)
        attention = gated(self._attention, arrivals)
        # A graph reads the pages of all layers without asking anybody.
        decoded = None if self._graphs is None or arrivals else self._graphs.run(steps)
        if decoded is None:
            embed_ED, hidden_TD = self._forward(steps, rows, attention)
            logits_SV = self._model.logits(hidden_TD[self._index(rows.sampled)]) if rows.sampled else None
        else:
            embed_ED, hidden_TD, logits_SV = decoded.embed, decoded.hidden, decoded.logits
        tokens = iter(self._sample(logits_SV, rows.chains))
        is_sound = iter(self._are_finite(hidden_TD, rows.chunk_ends))
        outcomes = {
            step.request_id: _outcome(step, next(is_sound) if step.sample is None else next(tokens)) for step in steps
        }
        if self._heads is None:
            return outcomes
        return self._draft(rows, (embed_ED, hidden_TD), outcomes, attention, num_drafts)

    def _forward(
        self, steps: Sequence[SequenceStep], rows: _Rows, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [E, D] and normed hidden states [T, D]."""
        embed_ED = merge_embeddings(self._model.embed(self._index(rows.token_ids)), rows.spans)
        positions_T = torch.cat([torch.arange(step.start, step.computed_stop) for step in steps]).to(self._device)
        context = attention.context([self._paged(step, step.start, step.computed_stop) for step in steps])
        counting = self.balance.look()
        hidden_TD = self._model(embed_ED[: rows.num_computed], positions_T, context, router_stats=counting)
        if counting is not None:
            self.balance.seen(counting)
        return embed_ED, hidden_TD

    def _draft(
        self,
        rows: _Rows,
        states: tuple[Tensor, Tensor],
        outcomes: dict[str, StepOutcome],
        attention: AttentionBackend,
        num_drafts: int,
    ) -> dict[str, StepOutcome]:
        """Run the draft heads over the steps that are sound, and add what they leave to the outcomes."""
        assert self._heads is not None
        runs = rows.head_runs(outcomes)
        if not runs:
            return outcomes
        embed_ED, hidden_TD = states
        tails = self._heads.run(embed_ED, hidden_TD, runs, attention, num_drafts=num_drafts)
        ids = [run.step.request_id for run in runs]
        return outcomes | {
            request_id: replace(outcomes[request_id], tail=tail) for request_id, tail in zip(ids, tails, strict=True)
        }

    def _sample(
        self, logits_SV: Tensor | None, chains: list[DraftChain]
    ) -> list[tuple[SampledToken, ...] | GrammarFailed]:
        if logits_SV is None:
            return []
        return sample_chains(logits_SV, chains, num_token_ids=self._num_token_ids, answers=self._answers)

    def _are_finite(self, hidden_TD: Tensor, rows: list[int]) -> list[bool]:
        if not rows:
            return []
        are_finite: list[bool] = torch.isfinite(hidden_TD[self._index(rows)]).all(dim=-1).tolist()
        return are_finite

    def _spans(self, media: Sequence[MediaSlice]) -> list[EmbeddingSpan]:
        """The slices with their rows; positions as they are in the slices."""
        return [
            EmbeddingSpan(
                part.start,
                part.stop,
                self._embeddings.tensor(part.ref)[part.row_start : part.row_start + part.stop - part.start],
            )
            for part in media
        ]

    def _paged(self, step: SequenceStep, start: int, stop: int) -> PagedSequence:
        """The step's sequence for a forward over its tokens [start, stop). The row may reach further: to earlier drafts
        that were wrong."""
        num_pages = -(-stop // self._page_size)
        return PagedSequence(
            num_new=stop - start,
            num_context=start,
            full_pages=self._index(step.pages.full_pages[:num_pages]),
            window_pages=self._index(step.pages.window_pages[: max(0, num_pages - step.pages.window_start)]),
            window_start_page=step.pages.window_start,
        )

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class _Rows:
    """Which rows of the forward belong to which step.

    First come the tokens that are computed, step by step with their drafts; after all of them, only to be embedded, the
    known tokens that draft heads look ahead to.
    """

    def __init__(self, steps: Sequence[SequenceStep], media: Sequence[_StepMedia]) -> None:
        self._steps = steps
        self.token_ids: list[int] = []
        self.spans: list[EmbeddingSpan] = []
        self.sampled: list[int] = []
        self.chains: list[DraftChain] = []
        # Last rows of the steps that do not sample. They see all of the chunk, so what is wrong in it shows in them
        # before its pages are published.
        self.chunk_ends: list[int] = []
        self._firsts: list[int] = []
        self._ahead_firsts: list[int] = []
        for step, (spans, _) in zip(steps, media, strict=True):
            first = len(self.token_ids)
            self._firsts.append(first)
            self._add_spans(first, spans)
            self.token_ids += (*step.token_ids, *step.draft.drafts)
            if step.sample is None:
                self.chunk_ends.append(len(self.token_ids) - 1)
            else:
                self.sampled += range(first + len(step.token_ids) - 1, len(self.token_ids))
                self.chains.append(DraftChain(step.sample, step.draft.drafts))
        self.num_computed = len(self.token_ids)
        for step, (_, ahead_spans) in zip(steps, media, strict=True):
            first = len(self.token_ids)
            self._ahead_firsts.append(first)
            self._add_spans(first, ahead_spans)
            self.token_ids += step.draft.ahead

    def head_runs(self, outcomes: Mapping[str, StepOutcome]) -> list[HeadRun]:
        """What draft heads are run over: every step that did not fail, without the drafts that were wrong."""
        runs = []
        for step, first, ahead_first in zip(self._steps, self._firsts, self._ahead_firsts, strict=True):
            outcome = outcomes[step.request_id]
            if outcome.failure is None:
                tokens = outcome.tokens
                num_rows = len(step.token_ids) + max(0, len(tokens) - 1)
                runs.append(HeadRun(step, first, num_rows, tokens[-1].token_id if tokens else None, ahead_first))
        return runs

    def _add_spans(self, first: int, spans: Sequence[EmbeddingSpan]) -> None:
        self.spans += [EmbeddingSpan(first + span.start, first + span.stop, span.rows) for span in spans]


def _outcome(step: SequenceStep, computed: tuple[SampledToken, ...] | GrammarFailed | bool) -> StepOutcome:
    """`computed` is what was sampled (nothing: logits are not finite) or why not, or, of a chunk, whether its end is
    finite."""
    if isinstance(computed, GrammarFailed):
        return StepOutcome(failure=Failure(status=400, code="grammar_failed", message=str(computed)))
    if computed is True:
        return StepOutcome()
    if not computed:
        message = f"the model gave numbers that are not finite after {step.stop} tokens"
        return StepOutcome(failure=Failure(status=500, code=NOT_FINITE, message=message))
    return StepOutcome(computed)
