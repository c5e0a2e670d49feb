"""What a computed step means for its sequences: KV is published, tokens are sent, answers end.

A step gives a sequence no token (a chunk inside its prompt), one, or several. Tokens after one that ends the answer are
dropped as if they had never been computed.
"""

from epd.cache.prefix import PrefixCache
from epd.engine.clock import Clock
from epd.engine.plan import NOT_FINITE, KvImport, SequenceStep, StepOutcome, StepPlan, StepResult
from epd.engine.roster import Roster
from epd.engine.sampler import SampledToken
from epd.engine.sequence import Sequence
from epd.types import FinishReason, Role, TokenDelta


class Committer:
    """The half of the scheduler that applies; shares its roster."""

    def __init__(
        self, roster: Roster, cache: PrefixCache, clock: Clock, *, role: Role, eos_token_ids: frozenset[int]
    ) -> None:
        self._roster = roster
        self._cache = cache
        self._clock = clock
        self._role = role
        self._eos_token_ids = eos_token_ids

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Advance the plan's sequences by what was computed."""
        counters = self._roster.counters
        counters.steps += 1
        counters.batched_sequences += len(plan.steps)
        counters.largest_batch = max(counters.largest_batch, len(plan.steps))
        for planned in plan.imports:
            self._commit_import(planned)
        for step, outcome in zip(plan.steps, result.outcomes, strict=True):
            self._commit_step(step, outcome)

    def _commit_import(self, planned: KvImport) -> None:
        sequence, transfer = self._roster.running[planned.request_id], planned.held.transfer
        assert sequence.pages is not None
        self._roster.counters.imports += 1
        sequence.pages.commit(transfer.num_tokens, sequence.chain.keys)
        sequence.num_computed = transfer.num_tokens
        sequence.first_token_s = sequence.admitted_s
        sequence.append(transfer.first_token)

    def _commit_step(self, step: SequenceStep, outcome: StepOutcome) -> None:
        sequence, counters = self._roster.running[step.request_id], self._roster.counters
        assert sequence.pages is not None
        if outcome.failure is not None:
            if outcome.failure.code == NOT_FINITE:
                sequence.pages.condemn()
            self._roster.fail(sequence, outcome.failure)
            return
        sequence.num_computed = step.stop
        if step.media:
            self._roster.keep_rows_to_come(sequence)
        if step.heals:
            sequence.num_healed_tokens += step.stop - step.start
            counters.healed_tokens += step.stop - step.start
            if sequence.is_healing:
                return
            # Windows further back are not exact in every layer; nobody may find them.
            sequence.pages.extend(step.stop, window_start=self._cache.window_frontier(step.stop))
        elif step.stop < sequence.num_tokens or sequence.num_generated == 0:
            counters.prompt_tokens += step.stop - step.start
        sequence.pages.commit(step.stop, sequence.chain.keys)
        for token in outcome.tokens:
            self._accept(sequence, token)

    def _accept(self, sequence: Sequence, token: SampledToken) -> None:
        """One more output token: send it, or end the answer with it."""
        self._roster.counters.generated_tokens += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock.monotonic_s()
            self._roster.waiting.renew_like(sequence)
        sampling = sequence.request.sampling
        is_eos = token.token_id in self._eos_token_ids and not sampling.ignore_eos
        if is_eos or token.token_id in sampling.stop_token_ids:
            self._roster.finish(sequence, FinishReason.STOP, num_unsent=1)
            return
        delta = TokenDelta(
            request_id=sequence.request_id,
            index=sequence.output_index,
            token_ids=(token.token_id,),
            logprobs=() if token.logprob is None else (token.logprob,),
        )
        self._roster.reply(sequence.peer, delta)
        sequence.append(token.token_id)
        if sequence.output_index >= sampling.max_tokens:
            self._roster.finish(sequence, FinishReason.LENGTH)
        elif self._role is Role.PREFILL:
            del self._roster.running[sequence.request_id]
            self._roster.handoffs[sequence.request_id] = sequence
