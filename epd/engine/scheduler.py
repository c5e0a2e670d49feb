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
from epd.cache.prefix import PrefixCache
from epd.engine.admission import Limits, refusal
from epd.engine.clock import Clock
from epd.engine.committing import Committer
from epd.engine.drafting import DraftPolicy, draft_input
from epd.engine.feed import RowSupply
from epd.engine.heal_cost import HealCost
from epd.engine.healing import Outlook, heal_table, lease, outlook, pages_needed
from epd.engine.plan import (
    Failure,
    HeldTransfer,
    KvImport,
    SequenceStep,
    StepPlan,
    StepResult,
    embedding_lost,
)
from epd.engine.roster import Arrived, Counters, Reply, Roster
from epd.engine.sequence import Sequence, key_chain
from epd.kv.errors import NoPages
from epd.transport.base import Peer
from epd.types import FinishReason, Role

logger = logging.getLogger(__name__)

# Waiting sequences looked at in a step when there is no room for the first.
_MAX_PASSING = 8


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

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, clock: Clock, supply: RowSupply) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        credit = config.waiting_credit_tokens_per_s
        self._roster = Roster(clock, supply, self._outlook, credit_tokens_per_s=credit)
        self._committer = Committer(self._roster, cache, clock, role=config.role, eos_token_ids=config.eos_token_ids)
        self._is_draining = False

    @property
    def counters(self) -> Counters:
        return self._roster.counters

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
        sequence.earlier_timings = dict(held.transfer.timings)
        self._roster.enter(sequence)
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
        while budget > 0 and (admitted := self._admit_next()) is not None:
            num_planned = self._plan_step(admitted, budget, steps)
            if num_planned == 0:
                break
            budget -= num_planned
        return StepPlan(tuple(steps.values()), self._plan_imports(), num_drafts)

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
                        self._roster.fail(sequence, _cannot_fit(sequence, error))
                    return None
            else:
                return stop

    def _retract_after(self, sequence: Sequence, steps: dict[str, SequenceStep]) -> bool:
        """Put the latest admitted sequence back to waiting; False if that is `sequence` itself."""
        victim = next(reversed(self._roster.running.values()))
        if victim is sequence:
            return False
        assert victim.pages is not None
        logger.info("retracting request %s at %d tokens: pages are short", victim.request_id, victim.num_computed)
        steps.pop(victim.request_id, None)
        del self._roster.running[victim.request_id]
        if victim.is_healing:
            victim.pages.abort()
        else:
            victim.pages.finish()
        victim.pages = victim.ring = None
        victim.num_computed = victim.heal_stop = 0
        victim.num_retractions += 1
        self.counters.retractions += 1
        self._roster.waiting.put(victim)
        return True

    def _admit_next(self) -> Sequence | None:
        """Give the first waiting sequence pages of its own if there is a place for it and what is running can go on.

        If there is only too little room for it, one of the next few that fits goes before it, unless it came so late
        that the first would be ahead of it however short it is: so the first is passed by finitely many. One that was
        put back is passed by none: somebody reads its answer already.
        """
        roster = self._roster
        if len(roster.running) >= self._config.max_running:
            return None
        while (first := roster.waiting.first()) is not None and self._has_room(*first):
            if self._admit(*first):
                return first[0]
        if first is not None and first[0].admitted_s is None:
            for sequence, ahead in roster.waiting.behind_first(_MAX_PASSING):
                if self._has_room(sequence, ahead) and self._admit(sequence, ahead):
                    self.counters.passed_over += 1
                    return sequence
        return None

    def _has_room(self, sequence: Sequence, ahead: Outlook) -> bool:
        needed_full, needed_window = pages_needed(self._cache, sequence, ahead.resume)
        return not self._roster.running or self._cache.fits(
            needed_full + self._num_pages_to_come(),
            needed_window,
            keys=sequence.chain.keys,
            num_tokens=sequence.num_tokens,
            full_only=ahead.resume.heals,
        )

    def _admit(self, sequence: Sequence, ahead: Outlook) -> bool:
        """False when it was to heal and there is no room for it: it is lined up again, to be computed instead."""
        roster, counters, resumed = self._roster, self.counters, ahead.resume
        if not lease(self._cache, sequence, resumed, chunk_tokens=self._config.chunk_tokens):
            counters.refused_heals += 1
            sequence.may_heal = False
            roster.waiting.put(sequence)
            return False
        sequence.may_heal = True
        roster.waiting.remove(sequence.request_id)
        roster.keep_rows_to_come(sequence)
        if sequence.admitted_s is None:
            sequence.admitted_s = self._clock.monotonic_s()
            sequence.num_cached_tokens = sequence.num_computed
            sequence.place_tokens = ahead.num_compute_tokens
        counters.cached_tokens += sequence.num_computed
        counters.healed_hits += resumed.heals
        counters.prefix_hits += not resumed.heals and resumed.start > 0
        counters.prefix_misses += not resumed.heals and resumed.start == 0
        roster.running[sequence.request_id] = sequence
        return True

    def _plan_imports(self) -> tuple[KvImport, ...]:
        """Move arrived transfers to the device while there are places and pages. Retracted sequences go first."""
        imports, roster = [], self._roster
        while roster.arrived and not roster.waiting.num_ready and len(roster.running) < self._config.max_running:
            planned = self._plan_import(roster.arrived[0])
            if planned is None:
                break
            imports.append(planned)
        return tuple(imports)

    def _plan_import(self, arrived: Arrived) -> KvImport | None:
        sequence, transfer = arrived.sequence, arrived.held.transfer
        pages = self._cache.begin(sequence.chain.keys, transfer.num_tokens, full_only=True)
        num_shared_pages, running = len(pages.full_pages), self._roster.running
        try:
            window_start = self._cache.window_frontier(transfer.num_tokens)
            needed_full, needed_window = pages.pages_needed(transfer.num_tokens, window_start=window_start)
            if running and not self._cache.fits(needed_full + self._num_pages_to_come(), needed_window + len(running)):
                pages.abort()
                return None
            pages.extend(transfer.num_tokens, window_start=window_start)
        except NoPages as error:
            pages.abort()
            if not running:
                self._roster.fail(sequence, _cannot_fit(sequence, error))
            return None
        self._roster.arrived.popleft()
        sequence.pages = pages
        sequence.admitted_s = self._clock.monotonic_s()
        self._roster.running[sequence.request_id] = sequence
        return KvImport(sequence.request_id, arrived.held, sequence.page_table(), num_shared_pages)

    def _num_pages_to_come(self) -> int:
        """Full pages the running sequences still take for the tokens they have, and one or two each to go on with."""
        page_size = self._config.page_size
        to_come = 0
        for sequence in self._roster.running.values():
            assert sequence.pages is not None
            to_come += max(1, sequence.num_tokens // page_size + 2 - len(sequence.pages.full_pages))
        return to_come

    # -- committing -----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Advance the plan's sequences by what was computed."""
        self._committer.commit(plan, result)

    # -- handing over ---------------------------------------------------------------------------------------------

    def take_handoffs(self) -> list[Sequence]:
        """Sequences whose KV must go to a decode worker now; each is answered with `handed_over`."""
        return list(self._roster.handoffs.values())

    def handed_over(self, sequence: Sequence, failure: Failure | None = None) -> None:
        """The decode worker has the KV and will send the Finish, unless `failure` says that it could not be sent."""
        if failure is not None:
            self._roster.fail(sequence, failure)
            return
        self.counters.finished += 1
        sequence.decode_address = None
        self._roster.release(sequence, keep=True)

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


def _cannot_fit(sequence: Sequence, error: NoPages) -> Failure:
    message = f"a sequence of {sequence.num_tokens} tokens does not fit this worker's KV memory: {error}"
    return Failure(status=503, code="kv_memory_exhausted", message=message)
