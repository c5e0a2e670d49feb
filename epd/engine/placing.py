"""Who gets pages and a place: the first in line, one that fits before it, and prompts that another worker computed.

What is relied on is looked up anew before every decision: over all tiers and both pools, and before anything is
allocated. Between the lookup and the lease some of it may go; then less is reused, and the rest is computed.
"""

import logging

from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.tiered import StagedPagesLost, TieredCache
from epd.engine.clock import Clock
from epd.engine.fetching import PrefixSupply
from epd.engine.healing import Outlook, lease, pages_needed
from epd.engine.plan import Failure, KvImport, kv_lost
from epd.engine.roster import Arrived, Roster
from epd.engine.sequence import Sequence
from epd.engine.staging import KvStager
from epd.kv.copies import DONE, CopyTicket
from epd.kv.errors import NoPages

logger = logging.getLogger(__name__)

# Waiting sequences looked at in a step when there is no room for the first.
_MAX_PASSING = 8


class Placer:
    """The part of the scheduler that admits; shares its roster."""

    def __init__(
        self,
        roster: Roster,
        cache: TieredCache,
        prefixes: PrefixSupply,
        clock: Clock,
        stager: KvStager | None,
        *,
        max_running: int,
        chunk_tokens: int,
    ) -> None:
        self._roster = roster
        self._cache = cache
        self._prefixes = prefixes
        self._clock = clock
        self._stager = stager
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens

    def admit_next(self) -> Sequence | None:
        """Give the first waiting sequence pages of its own if there is a place for it and what is running can go on.

        If there is only too little room for it, one of the next few that fits goes before it, unless it came so late
        that the first would be ahead of it however short it is: so the first is passed by finitely many. One that was
        put back is passed by none: somebody reads its answer already.
        """
        roster = self._roster
        if len(roster.running) >= self._max_running:
            return None
        while (first := roster.waiting.first()) is not None and self._has_room(*first):
            if self._admit(*first):
                return first[0]
        if first is not None and first[0].admitted_s is None:
            for sequence, ahead in roster.waiting.behind_first(_MAX_PASSING):
                if self._has_room(sequence, ahead) and self._admit(sequence, ahead):
                    roster.counters.passed_over += 1
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
        """False when it cannot go on from where it was to: it is lined up again, to compute more."""
        roster, counters, resumed = self._roster, self._roster.counters, ahead.resume
        if not lease(self._cache, sequence, resumed, chunk_tokens=self._chunk_tokens):
            counters.refused_heals += 1
            sequence.may_heal = False
            roster.waiting.put(sequence)
            return False
        assert sequence.pages is not None
        if sequence.num_computed < resumed.start:
            counters.short_loads += 1
            if not roster.holds_rows(sequence):
                sequence.pages.abort()
                sequence.reset()
                sequence.may_load = False
                roster.waiting.put(sequence)
                return False
        self._cache.admitted(sequence.chain.keys, ahead.hit, group=sequence.request.session)
        sequence.may_heal = sequence.may_load = True
        num_host, num_store = self._by_tier(sequence)
        roster.waiting.remove(sequence.request_id)
        self._prefixes.forget(sequence.request_id)
        roster.keep_rows_to_come(sequence)
        if sequence.admitted_s is None:
            sequence.admitted_s = self._clock.monotonic_s()
            sequence.num_cached_tokens = sequence.num_computed
            sequence.num_host_tokens, sequence.num_store_tokens = num_host, num_store
            sequence.place_tokens = ahead.num_compute_tokens
        counters.cached_tokens += sequence.num_computed
        counters.host_hit_tokens += num_host
        counters.store_hit_tokens += num_store
        counters.healed_hits += resumed.heals
        counters.prefix_hits += not resumed.heals and sequence.num_computed > 0
        counters.prefix_misses += not resumed.heals and sequence.num_computed == 0
        roster.running[sequence.request_id] = sequence
        return True

    def _by_tier(self, sequence: Sequence) -> tuple[int, int]:
        """Of the tokens that need no computing, those that the host had and those it was just given by the store."""
        assert sequence.pages is not None
        num_device = sequence.pages.num_published_pages * self._cache.page_size
        num_loaded = max(0, sequence.num_computed - num_device)
        num_store = min(num_loaded, self._prefixes.num_fetched_tokens(sequence.request_id))
        return num_loaded - num_store, num_store

    def plan_imports(self) -> tuple[KvImport, ...]:
        """Move arrived transfers to the device while there are places and pages. Retracted sequences go first. Those
        for which there is none yet go to pages in host memory."""
        imports, roster = [], self._roster
        while not roster.waiting.num_ready and len(roster.running) < self._max_running:
            arrived = next((one for one in roster.arrived if not self._is_awaited(one)), None)
            if arrived is None:
                break
            planned = self._plan_import(arrived) if arrived.held.staged is None else self._plan_load(arrived)
            if planned is None:
                break
            imports.append(planned)
        for arrived in roster.arrived:
            if self._stager is not None and not arrived.is_offered:
                arrived.is_offered = True
                arrived.held = self._stager.stage(arrived.sequence.chain.keys, arrived.held)
        return tuple(imports)

    def _is_awaited(self, arrived: Arrived) -> bool:
        """Whether something is still prepared for it: it holds up none that came later."""
        return self._prefixes.is_fetching(arrived.sequence.request_id)

    def _plan_load(self, arrived: Arrived) -> KvImport | None:
        """Of a transfer whose KV is in host memory."""
        sequence, staged, running = arrived.sequence, arrived.held.staged, self._roster.running
        assert staged is not None
        num_pages = -(-staged.num_tokens // self._cache.page_size)
        num_window = num_pages - self._cache.window_frontier(staged.num_tokens)
        has_room = not running or self._cache.fits(
            # Beside the last page, which is never found: the host has all the others.
            1 + self._num_pages_to_come(),
            num_window + len(running),
            keys=staged.keys,
            num_tokens=staged.num_tokens,
            full_only=True,
        )
        if not has_room:
            return None
        try:
            pages = self._cache.resume_staged(staged)
        except StagedPagesLost as error:
            self._roster.fail(sequence, kv_lost(error))
            return None
        except NoPages as error:
            if not running:
                self._roster.fail(sequence, cannot_fit(sequence, error))
            return None
        return self._place(arrived, pages, len(pages.full_pages), pages.arrival or DONE)

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
                self._roster.fail(sequence, cannot_fit(sequence, error))
            return None
        return self._place(arrived, pages, num_shared_pages)

    def _place(
        self, arrived: Arrived, pages: SequencePages, num_shared_pages: int, arrival: CopyTicket | None = None
    ) -> KvImport:
        sequence = arrived.sequence
        self._roster.arrived.remove(arrived)
        self._prefixes.forget(sequence.request_id)
        sequence.pages = pages
        sequence.admitted_s = self._clock.monotonic_s()
        self._roster.running[sequence.request_id] = sequence
        return KvImport(sequence.request_id, arrived.held, sequence.page_table(), num_shared_pages, arrival)

    def _num_pages_to_come(self) -> int:
        """Full pages the running sequences still take for the tokens they have, and one or two each to go on with."""
        page_size = self._cache.page_size
        to_come = 0
        for sequence in self._roster.running.values():
            assert sequence.pages is not None
            to_come += max(1, sequence.num_tokens // page_size + 2 - len(sequence.pages.full_pages))
        return to_come


def cannot_fit(sequence: Sequence, error: NoPages) -> Failure:
    message = f"a sequence of {sequence.num_tokens} tokens does not fit this worker's KV memory: {error}"
    return Failure(status=503, code="kv_memory_exhausted", message=message)
