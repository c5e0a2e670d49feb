"""What runs next. Decides in `plan`, applies in `commit`, and alone moves a Sequence.

    waiting --admit--> running --commit--> ... --> one Finish
       ^                  |
       +----- retract ----+      when a pool is short: the latest admitted goes back, the earliest never does

Every decoding sequence runs in every step; prompts share what is left of the token budget, in order of admission. The
earliest admitted sequence may take every page there is, and `Limits` made sure that it fits alone: so some request
always ends, and with it the shortage.
"""

import logging
from dataclasses import dataclass, replace

from epd.cache.keys import PageKeyChain
from epd.cache.tiers.tiered import TieredCache
from epd.engine.admission import Limits, refusal
from epd.engine.clock import Clock
from epd.engine.committing import Committer
from epd.engine.drafting import DraftPolicy, draft_input
from epd.engine.feed import RowSupply
from epd.engine.fetching import NO_STORE, PrefixSupply
from epd.engine.handoff import size_bytes
from epd.engine.heal_cost import HealCost
from epd.engine.healing import Outlook, heal_table, outlook
from epd.engine.line import WaitingLine
from epd.engine.measures import Measures
from epd.engine.placing import Placer, cannot_fit
from epd.engine.plan import (
    Failure,
    HeldTransfer,
    SequenceStep,
    StepPlan,
    StepResult,
    embedding_lost,
)
from epd.engine.roster import Arrived, Counters, Reply, Roster
from epd.engine.sequence import Sequence, key_chain
from epd.engine.staging import KvStager
from epd.kv.errors import NoPages
from epd.transport.base import Peer
from epd.types import FinishReason, Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    role: Role
    limits: Limits
    eos_token_ids: frozenset[int]
    page_size: int
    key_seed: bytes
    chunk_tokens: int
    max_running: int
    heal_cost: HealCost
    waiting_credit_tokens_per_s: float
    drafting: DraftPolicy


class Scheduler:
    """Every request a worker has taken, from `submit` to its Finish. Single-threaded, like the cache it plans with."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: TieredCache,
        clock: Clock,
        supply: RowSupply,
        prefixes: PrefixSupply = NO_STORE,
        stager: KvStager | None = None,
    ) -> None:
        """Without a `stager` what arrives stays as it came until it has a place."""
        self._config = config
        self._cache = cache
        self._clock = clock
        self._prefixes = prefixes
        line = WaitingLine(
            supply,
            prefixes,
            self._outlook,
            credit_tokens_per_s=config.waiting_credit_tokens_per_s,
            now_s=clock.monotonic_s,
        )
        self._roster = Roster(clock, supply, prefixes, cache, line)
        self._placer = Placer(
            self._roster,
            cache,
            prefixes,
            clock,
            stager,
            max_running=config.max_running,
            chunk_tokens=config.chunk_tokens,
        )
        self._committer = Committer(self._roster, cache, clock, role=config.role, eos_token_ids=config.eos_token_ids)
        self._is_draining = False

    @property
    def counters(self) -> Counters:
        return self._roster.counters

    @property
    def measures(self) -> Measures:
        return self._roster.measures

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def is_idle(self) -> bool:
        return self._roster.is_empty

    @property
    def is_asleep(self) -> bool:
        return self._roster.is_asleep

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def __contains__(self, request_id: str) -> bool:
        return self._roster.find(request_id) is not None

    # -- taking requests ------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Take a prompt to compute, or end it at once with the reason why not."""
        failure = self._why_not(sequence)
        if failure is not None:
            self._roster.fail(sequence, failure)
            return
        sequence.chain = self._key_chain(sequence)
        self._roster.enter(sequence)
        self._prefixes.begin(sequence)
        self._roster.waiting.put(sequence)

    def submit_transfer(self, sequence: Sequence, held: HeldTransfer) -> None:
        """Take a sequence whose prompt another worker computed; its KV stays in host memory until it has pages."""
        failure = self._why_not(sequence)
        if failure is not None:
            self._roster.fail(sequence, replace(failure, retryable=failure.status == 503))  # another may have room
            return
        sequence.chain = self._key_chain(sequence)
        sequence.num_cached_tokens = held.transfer.cached_tokens
        sequence.num_healed_tokens = held.transfer.healed_tokens
        sequence.num_host_tokens = held.transfer.host_tokens
        sequence.num_store_tokens = held.transfer.store_tokens
        sequence.imported_bytes = size_bytes(held)
        sequence.earlier_timings = dict(held.transfer.timings)
        if held.transfer.first_token_unix_s:
            # Between two hosts it is as exact as their clocks agree.
            transfer_s = max(0.0, self._clock.unix_s() - held.transfer.first_token_unix_s)
            sequence.earlier_timings["transfer_s"] = transfer_s
        self._roster.enter(sequence)
        self._prefixes.expect(sequence)
        self._roster.arrived.append(Arrived(sequence, held))

    def abort(self, request_id: str) -> None:
        """End a request as cancelled. Unknown ids are ignored: they may have ended already."""
        sequence = self._roster.find(request_id)
        if sequence is not None:
            self._roster.finish(sequence, FinishReason.CANCELLED)

    def drop_peer(self, peer: Peer, failure: Failure | None = None) -> int:
        """Free everything of a gateway, and count it. Without a failure nobody is there to be told."""
        dropped = [sequence for sequence in self._roster if sequence.peer == peer]
        for sequence in dropped:
            if failure is None:
                self._roster.release(sequence, keep=False)
            else:
                self._roster.fail(sequence, failure)
        return len(dropped)

    def drain(self) -> None:
        """Finish what runs; what has not started is handed back as retryable, and so is all that comes."""
        self._is_draining = True
        not_started = [*self._roster.waiting, *(arrived.sequence for arrived in self._roster.arrived)]
        for sequence in not_started:
            if sequence.num_generated == 0:
                self._roster.fail(sequence, _DRAINING)

    def fail(self, request_ids: tuple[str, ...], failure: Failure) -> None:
        """End these requests; used when a whole step failed."""
        for request_id in request_ids:
            sequence = self._roster.find(request_id)
            if sequence is not None:
                self._roster.fail(sequence, failure)

    def take_replies(self) -> list[Reply]:
        return self._roster.take_replies()

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step. Leases and reserves pages; no sequence advances before `commit`."""
        self._roster.expire()
        for sequence, error in self._roster.waiting.collect():
            self._roster.fail(sequence, embedding_lost(error))
        steps: dict[str, SequenceStep] = {}
        decoding = [sequence for sequence in self._roster.running.values() if sequence.is_decoding]
        prefilling = [sequence for sequence in self._roster.running.values() if not sequence.is_decoding]
        num_drafts = self._config.drafting.num_drafts(len(decoding))
        num_decoded = sum([self._plan_step(sequence, 1, steps, num_drafts) for sequence in decoding])
        # Even with a full decode batch prompts get a page per step, so neither kind of work starves.
        budget = max(self._config.chunk_tokens - num_decoded, self._config.page_size)
        for sequence in prefilling:
            if budget > 0:
                budget -= self._plan_step(sequence, budget, steps)
        while budget > 0 and (admitted := self._placer.admit_next()) is not None:
            num_planned = self._plan_step(admitted, budget, steps)
            if num_planned == 0:
                break
            budget -= num_planned
        return StepPlan(tuple(steps.values()), self._placer.plan_imports(), num_drafts)

    def _plan_step(self, sequence: Sequence, budget: int, steps: dict[str, SequenceStep], num_drafts: int = 0) -> int:
        """Add the sequence's next tokens to `steps`, and up to `num_drafts` guesses if it decodes; returns how many
        tokens that is, 0 if it has to wait for pages."""
        if sequence.pages is None:
            return 0
        start = sequence.num_computed
        stop = self._make_room(sequence, self._chunk_stop(sequence, budget), steps)
        if stop is None:
            return 0
        draft = draft_input(sequence, stop, num_heads=self._config.drafting.num_heads, num_drafts=num_drafts)
        steps[sequence.request_id] = SequenceStep(
            request_id=sequence.request_id,
            start=start,
            token_ids=tuple(sequence.token_ids[start:stop]),
            pages=heal_table(sequence, start, stop) if sequence.is_healing else sequence.page_table(),
            media=tuple(sequence.media_slices(start, stop)),
            sample=sequence.sample_row() if stop == sequence.num_tokens else None,
            heal_stop=sequence.heal_stop if sequence.is_healing else None,
            draft=draft,
            arrival=sequence.pages.arrival,
        )
        return stop - start + len(draft.drafts)

    def _chunk_stop(self, sequence: Sequence, budget: int) -> int:
        """End of the next chunk: a page boundary, where a prefix can be shared, or the end of the tokens."""
        end = sequence.heal_stop if sequence.is_healing else sequence.num_tokens
        stop = min(sequence.num_computed + budget, end)
        if sequence.is_healing and sequence.ring is not None:
            stop = min(stop, sequence.ring.limit(sequence.num_computed))
        aligned = stop // self._config.page_size * self._config.page_size
        return stop if stop == end or aligned <= sequence.num_computed else aligned

    def _make_room(self, sequence: Sequence, stop: int, steps: dict[str, SequenceStep]) -> int | None:
        """Extend the sequence's pages to `stop` or, if pages are short, to less; None if no token fits now."""
        assert sequence.pages is not None
        while True:
            try:
                sequence.pages.extend(stop)
            except NoPages as error:
                smaller = self._chunk_stop(sequence, (stop - sequence.num_computed) // 2)
                if sequence.num_computed < smaller < stop:
                    stop = smaller
                elif not self._retract_after(sequence, steps):
                    if len(self._roster.running) == 1:
                        self._roster.fail(sequence, cannot_fit(sequence, error))
                    return None
            else:
                return stop

    def _retract_after(self, sequence: Sequence, steps: dict[str, SequenceStep]) -> bool:
        """Put the latest admitted sequence back to waiting; False if that is `sequence` itself."""
        victim = next(reversed(self._roster.running.values()))
        if victim is sequence:
            return False
        logger.info("retracting request %s at %d tokens: pages are short", victim.request_id, victim.num_computed)
        steps.pop(victim.request_id, None)
        self._roster.put_back(victim, keep=not victim.is_healing)
        self.counters.retractions += 1
        return True

    # -- committing -----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Advance the plan's sequences by what was computed."""
        self._committer.commit(plan, result)

    def undo(self, plan: StepPlan) -> None:
        """Nothing of the plan was computed, since KV that it was to read did not arrive: whoever that concerns starts
        anew, without."""
        self._committer.undo(plan)

    # -- handing over ---------------------------------------------------------------------------------------------

    def take_handoffs(self) -> list[Sequence]:
        """Sequences whose KV must go to a decode worker now; each is answered with `handed_over`."""
        return list(self._roster.handoffs.values())

    def handed_over(self, sequence: Sequence, failure: Failure | None = None) -> None:
        """The decode worker has the KV and will send the Finish, unless `failure` says that it could not be sent."""
        if failure is not None:
            self._roster.fail(sequence, failure)
            return
        self._roster.hand_over(sequence)

    def _why_not(self, sequence: Sequence) -> Failure | None:
        if self._is_draining:
            return _DRAINING
        if self.num_waiting >= self._config.limits.max_waiting:
            message = f"{self.num_waiting} requests are waiting here, at most {self._config.limits.max_waiting} may"
            return Failure(status=503, code="overloaded", message=message)
        return refusal(sequence.request, self._config.limits)

    def _key_chain(self, sequence: Sequence) -> PageKeyChain:
        return key_chain(sequence.request, page_size=self._config.page_size, seed=self._config.key_seed)

    def _outlook(self, sequence: Sequence) -> Outlook:
        return outlook(self._cache, sequence, self._config.heal_cost)


_DRAINING = Failure(status=503, code="draining", message="this worker is shutting down", retryable=True)
