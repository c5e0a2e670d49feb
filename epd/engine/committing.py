"""What a computed step means for its sequences: KV is published, tokens are sent, answers end.

A step gives a sequence no token (a chunk inside its prompt), one, or several. Tokens after one that ends the answer are
dropped as if they had never been computed.

KV that was to come from the host and did not takes the step with it, of its own sequence alone: nothing computed from
such pages is published or sent, and the sequence begins anew without them.
"""

import logging

from epd.cache.tiers.tiered import TieredCache
from epd.engine.clock import Clock
from epd.engine.handoff import draft_tail
from epd.engine.plan import NOT_FINITE, KvImport, SequenceStep, StepOutcome, StepPlan, StepResult, kv_lost
from epd.engine.roster import Roster
from epd.engine.sampler import SampledToken
from epd.engine.sequence import Sequence
from epd.kv.copies import CopyFailed, CopyTicket
from epd.types import FinishReason, Role, TokenDelta

logger = logging.getLogger(__name__)


class Committer:
    """The half of the scheduler that applies; shares its roster."""

    def __init__(
        self, roster: Roster, cache: TieredCache, clock: Clock, *, role: Role, eos_token_ids: frozenset[int]
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
            if self._has_arrived(step):
                self._commit_step(step, outcome)

    def undo(self, plan: StepPlan) -> None:
        """The plan was not computed, since something it was to read has not arrived. Raises CopyFailed if that is not
        so: then nobody knows why it was not."""
        for planned in plan.imports:
            # Written before anything is computed, or not read by it.
            self._commit_import(planned)
        missing = [step.request_id for step in plan.steps if not self._has_arrived(step)]
        if not missing:
            raise CopyFailed("a step was given up for a copy that did not fail")

    def _has_arrived(self, step: SequenceStep) -> bool:
        """Wait for what the step read while it came. If it did not come, its sequence is put back."""
        if step.arrival is None or _has_come(step.arrival):
            return True
        logger.warning("KV of request %s could not be copied from the host; computing it", step.request_id)
        self._roster.counters.failed_loads += 1
        sequence = self._roster.running[step.request_id]
        sequence.may_load = False
        self._roster.put_back(sequence, keep=False)
        return False

    def _commit_import(self, planned: KvImport) -> None:
        sequence, transfer = self._roster.running[planned.request_id], planned.held.transfer
        assert sequence.pages is not None
        try:
            sequence.pages.commit(transfer.num_tokens, sequence.chain.keys)
        except CopyFailed as error:
            self._roster.fail(sequence, kv_lost(error))
            return
        self._roster.counters.imports += 1
        sequence.num_computed = transfer.num_tokens
        sequence.first_token_s = sequence.admitted_s
        sequence.append(transfer.first_token)
        sequence.draft_tail = draft_tail(planned.held)

    def _commit_step(self, step: SequenceStep, outcome: StepOutcome) -> None:
        sequence, counters = self._roster.running[step.request_id], self._roster.counters
        assert sequence.pages is not None
        if outcome.failure is not None:
            if outcome.failure.code == NOT_FINITE:
                sequence.pages.condemn()
                self._cache.condemn(sequence.chain.keys)
            self._roster.fail(sequence, outcome.failure)
            return
        sequence.num_computed = step.stop
        if sequence.chunk_ends is not None and sequence.first_token_s is None:
            sequence.chunk_ends.append((self._clock.monotonic_s(), step.stop))
        if step.media:
            self._roster.keep_rows_to_come(sequence)
        if step.heals:
            # As `num_cached_tokens`, of the first admission: what its own KV costs a request that was put back is not
            # reuse of a prompt.
            if sequence.num_retractions == 0:
                sequence.num_healed_tokens += step.stop - step.start
            counters.healed_tokens += step.stop - step.start
            if sequence.is_healing:
                return
            sequence.ring = None
            # Windows further back are not exact in every layer; nobody may find them.
            sequence.pages.extend(step.stop, window_start=self._cache.window_frontier(step.stop))
        elif step.stop < sequence.num_tokens or sequence.num_generated == 0:
            counters.prompt_tokens += step.stop - step.start
        sequence.draft_tail = outcome.tail
        if outcome.tokens:
            self._count_drafts(len(step.draft.drafts), len(outcome.tokens) - 1)
            self._take(sequence, outcome.tokens)
        else:
            sequence.pages.commit(step.stop, sequence.chain.keys)
            self._roster.waiting.renew_like(sequence)

    def _take(self, sequence: Sequence, tokens: tuple[SampledToken, ...]) -> None:
        """The step's output tokens: publish what they leave behind them, send them, and end the answer or go on."""
        assert sequence.pages is not None
        taken, reason = self._until_end(sequence, tokens)
        sent = taken[:-1] if reason is FinishReason.STOP else taken
        self._roster.counters.generated_tokens += len(taken)
        is_first = sequence.first_token_s is None
        if is_first:
            sequence.first_token_s = self._clock.monotonic_s()
            self._roster.waiting.renew_like(sequence)
        index = sequence.output_index
        for token in sent:
            sequence.append(token.token_id)
        # All tokens before the last one taken were computed in this step: they were drafts.
        sequence.num_computed += len(taken) - 1
        sequence.pages.commit(sequence.num_computed, sequence.chain.keys)
        if is_first:
            num_pages = sequence.num_prompt // self._cache.page_size
            self._cache.prefilled(sequence.chain.keys, num_pages, group=sequence.request.session)
        if sent:
            delta = TokenDelta(
                request_id=sequence.request_id,
                index=index,
                token_ids=tuple(token.token_id for token in sent),
                logprobs=tuple(token.logprob for token in sent if token.logprob is not None),
                usage=None if sequence.is_announced else sequence.usage(),
                timings={} if sequence.is_announced else sequence.timings(self._clock.monotonic_s()),
            )
            sequence.is_announced = True
            self._roster.reply(sequence.peer, delta)
        if reason is not None:
            stopped_by = taken[-1].token_id if reason is FinishReason.STOP else None
            self._roster.finish(sequence, reason, stopped_by=stopped_by)
        elif self._role is Role.PREFILL:
            del self._roster.running[sequence.request_id]
            self._roster.handoffs[sequence.request_id] = sequence

    def _until_end(
        self, sequence: Sequence, tokens: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        """The tokens up to the one that ends the answer, and how it does; all of them and None if none does."""
        sampling = sequence.request.sampling
        # A grammar comes to its end whatever the client says.
        goes_on = sampling.ignore_eos and sampling.grammar is None
        stops = sampling.stop_token_ids if goes_on else {*sampling.stop_token_ids, *self._eos_token_ids}
        for number, token in enumerate(tokens, start=1):
            if token.token_id in stops:
                return tokens[:number], FinishReason.STOP
            if sequence.output_index + number >= sampling.max_tokens:
                return tokens[:number], FinishReason.LENGTH
        return tokens, None

    def _count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        counters = self._roster.counters
        counters.drafted_tokens += num_drafted
        counters.accepted_tokens += num_accepted
        counters.drafted_tokens_1 += num_drafted >= 1
        counters.drafted_tokens_2 += num_drafted >= 2
        counters.drafted_tokens_3 += num_drafted >= 3
        counters.accepted_tokens_1 += num_accepted >= 1
        counters.accepted_tokens_2 += num_accepted >= 2
        counters.accepted_tokens_3 += num_accepted >= 3


def _has_come(arrival: CopyTicket) -> bool:
    try:
        arrival.wait()
    except CopyFailed as error:
        logger.warning("%s", error)
        return False
    return True
