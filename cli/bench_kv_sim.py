"""A replay of a workload on the real cache with no model behind it: who waits, what is leased, computed, lost, healed.

The engine's order of events in simulated time. One prompt is computed at a time, chunk by chunk; answers grow beside
it; whoever finds no pages waits, and the latest admitted is put back if that does not help. The next turn of a session
comes a pause after the answer before, so a slower server is asked later, like a real one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from cli.bench_case import BenchFailed
from cli.bench_kv_bounds import Span
from cli.bench_kv_trace import Request
from epd import HealCost, NoPages, PrefixCache, PrefixHit, SequencePages, TieredCache, ring_pages

__all__ = ["Replay", "ServerTimes", "Tally"]

Rate = Annotated[float, Span(1, 1_000_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """How the server's time passes, and how much it does at once."""

    prefill_tokens_per_s: Rate = 40_000.0
    """Of the whole server."""
    decode_tokens_per_s: Rate = 50.0
    """Of one answer."""
    chunk_tokens: Annotated[int, Span(16, 1 << 20)] = 2048
    max_running: Annotated[int, Span(1, 4096)] = 32
    decode_stride_tokens: Annotated[int, Span(1, 1 << 20)] = 128
    """Answers are committed so many tokens at a time; less often than by the engine, for the bench's own speed."""


@dataclass(slots=True)
class Tally:
    """Sums over all requests of a replay, in tokens unless said otherwise.

    `computed` has everything that went through the model before an answer began: new tokens, tokens whose pages or
    windows were lost, healed ones, and those of requests that were put back and came again.
    """

    requests: int = 0
    prompt: int = 0
    computed: int = 0
    healed: int = 0
    """Of `computed`: windows restored, their full pages being there."""
    heal_work: int = 0
    """What healing was worth in arithmetic, in tokens: it runs fewer rows from layer to layer."""
    full_only: int = 0
    """Of `prompt`: how far full pages reached."""
    usable: int = 0
    """Of `prompt`: how far windows allowed to resume without healing."""
    host: int = 0
    """Of `prompt`: what came from the host's memory because the device had lost it."""
    num_healings: int = 0
    num_retractions: int = 0
    num_refused: int = 0
    """Requests longer than the pools: nobody can serve them, and all of their prompts counts as computed."""
    computed_again: int = 0
    """Of `computed`: by requests that were put back."""
    peak_cached: int = 0
    """Tokens in the full pool, at most."""
    evicted_full_pages: int = 0
    evicted_window_pages: int = 0
    span_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """1 - computed / prompt tokens: what of the prompts went through no model, healing counted as work."""
        return 1 - self.computed / max(1, self.prompt)

    @property
    def reach_rate(self) -> float:
        """The same without the work of healing: what healing made usable counts as found."""
        return 1 - (self.computed - self.healed) / max(1, self.prompt)

    @property
    def work_rate(self) -> float:
        """The same with healing counted by its arithmetic."""
        return 1 - (self.computed - self.healed + self.heal_work) / max(1, self.prompt)

    @property
    def window_loss(self) -> float:
        """Share of what full pages reach that windows did not allow to use, before healing."""
        return 1 - self.usable / max(1, self.full_only)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way. `goal`: where its prompt ends for now, generated tokens of before a retraction included."""

    request: Request
    arrival_s: float
    order: int
    on_end: Callable[[float], None]
    num_tokens: int = field(init=False)
    pages: SequencePages | None = None
    num_computed: int = 0
    heal_stop: int = 0
    epoch: int = 0
    """Counts retractions, so that events of before are known as such."""
    is_decoding: bool = False

    def __post_init__(self) -> None:
        self.num_tokens = self.request.num_prompt_tokens

    @property
    def end(self) -> int:
        """Tokens whose KV is computed when all is said: the last token of an answer never is."""
        return self.request.num_prompt_tokens + max(0, self.request.num_answer_tokens - 1)


class Replay:
    """One run. `waiting_credit`: tokens that a second of waiting is worth in the line, as in the engine."""

    def __init__(
        self,
        cache: PrefixCache | TieredCache,
        times: ServerTimes,
        *,
        heal_cost: HealCost | None,
        waiting_credit: float = 2000.0,
    ) -> None:
        """`cache`: of the device alone, or with tiers behind it, whose copies take no time here."""
        self.cache = cache if isinstance(cache, TieredCache) else TieredCache(cache)
        self.tally = Tally()
        self._times = times
        self._heal_cost = heal_cost
        self._credit = waiting_credit
        self._page_size = cache.page_size
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._orders = itertools.count()
        self._waiting: list[tuple[float, int, _Sequence]] = []
        self._running: dict[int, _Sequence] = {}
        self._stalled: dict[int, _Sequence] = {}
        self._is_prefilling = False

    def run(self, sessions: Sequence[tuple[float, Sequence[Request]]], advance: Callable[[int], None]) -> Tally:
        """Play all sessions, each (start in seconds, its requests). `advance` is told of requests that ended.

        Raises BenchFailed when a request fits the pools not even alone.
        """
        for start_s, requests in sessions:
            self._play(requests, 0, start_s, advance)
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
            self.cache.poll()
            self._progress()
        if self._running or self._waiting:
            raise BenchFailed(f"{len(self._running) + len(self._waiting)} requests never ended: pools are too small")
        stats = self.cache.stats()
        self.tally.evicted_full_pages = stats.num_evicted_full_pages
        self.tally.evicted_window_pages = stats.num_evicted_window_pages
        self.tally.span_s = self._now_s
        return self.tally

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._orders), event))

    def _play(self, requests: Sequence[Request], index: int, previous_s: float, advance: Callable[[int], None]) -> None:
        request = requests[index]

        def ended(end_s: float) -> None:
            advance(1)
            if index + 1 < len(requests):
                self._play(requests, index + 1, end_s, advance)

        def arrive() -> None:
            self._submit(_Sequence(request, self._now_s, next(self._orders), ended))

        self._at(previous_s + request.pause_s, arrive)

    def _submit(self, sequence: _Sequence) -> None:
        self.tally.requests += 1
        self.tally.prompt += sequence.request.num_prompt_tokens
        # The engine keeps a page for the token that is computed while a sequence is at its longest.
        if sequence.end > (self.cache.stats().full.total - 1) * self._page_size:
            self.tally.num_refused += 1
            self.tally.computed += sequence.request.num_prompt_tokens
            sequence.on_end(self._now_s)
            return
        self._wait(sequence)

    def _wait(self, sequence: _Sequence) -> None:
        hit = self.cache.match(sequence.request.keys, sequence.num_tokens)
        _, _, work = self._resume(hit)
        key = work + sequence.num_tokens - hit.num_full_only_tokens + self._credit * sequence.arrival_s
        heapq.heappush(self._waiting, (key, sequence.order, sequence))

    def _progress(self) -> None:
        """Whatever can go on after something happened."""
        for sequence in list(self._stalled.values()):
            if self._stalled.pop(sequence.order, None) is not None:
                self._decode(sequence)
        while self._admit():
            pass
        if not self._is_prefilling:
            for sequence in list(self._running.values()):
                if not sequence.is_decoding and sequence.order in self._running and self._prefill(sequence):
                    break

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        if not self._waiting or len(self._running) >= self._times.max_running:
            return False
        sequence = self._waiting[0][2]
        keys, num_tokens, page_size = sequence.request.keys, sequence.num_tokens, self._page_size
        hit = self.cache.match(keys, num_tokens)
        start, heal_stop, work = self._resume(hit)
        needed_full = -(-(num_tokens + 1 - heal_stop) // page_size) + self._num_pages_to_come()
        needed_window = 1 + self._ring(start, heal_stop, 1)
        if self._running and not self.cache.fits(needed_full, needed_window, keys=keys, num_tokens=num_tokens):
            return False
        if start < heal_stop and self._lease_healing(sequence, start, heal_stop):
            self.tally.heal_work += work
        elif not self._lease(sequence):
            return False
        heapq.heappop(self._waiting)
        self.cache.admitted(keys, hit)
        if sequence.epoch == 0:
            self.tally.full_only += hit.num_full_only_tokens
            self.tally.usable += hit.num_tokens
            self.tally.host += hit.num_host_tokens
        self._running[sequence.order] = sequence
        return True

    def _lease(self, sequence: _Sequence) -> bool:
        """What can be gone on from at once. False where pages that others will give back are needed for it."""
        keys, num_tokens = sequence.request.keys, sequence.num_tokens
        try:
            pages = self.cache.resume(keys, num_tokens)
        except NoPages:
            if self._running:
                return False
            pages = self.cache.begin(keys, num_tokens)
        sequence.pages = pages
        sequence.num_computed = sequence.heal_stop = pages.num_cached_tokens
        return True

    def _resume(self, hit: PrefixHit) -> tuple[int, int, int]:
        """Where to start, where healing ends (at the start if it is not to heal), and the work up to where full pages
        reach, as the engine weighs it, in tokens."""
        if self._heal_cost is None:
            return hit.num_tokens, hit.num_tokens, hit.num_full_only_tokens - hit.num_tokens
        resumed, work = self._heal_cost.resume(hit)
        return resumed.start, resumed.heal_stop, work

    def _ring(self, start: int, stop: int, chunk_tokens: int) -> int:
        """Window pages that healing [start, stop) takes."""
        return ring_pages(
            (stop - start) // self._page_size,
            window_pages=self.cache.window_pages,
            chunk_pages=-(-chunk_tokens // self._page_size),
        )

    def _lease_healing(self, sequence: _Sequence, start: int, stop: int) -> bool:
        """As the engine does it: full pages are leased, windows written again in a ring. False without room."""
        try:
            pages = self.cache.resume(sequence.request.keys, sequence.num_tokens, stop, full_only=True)
        except NoPages:
            return False
        if pages.num_cached_tokens < stop:
            pages.abort()
            return False
        for chunk_tokens in (self._times.chunk_tokens, 1):
            num_places = self._ring(start, stop, chunk_tokens)
            try:
                pages.extend(stop, window_start=stop // self._page_size - num_places)
            except NoPages:
                continue
            sequence.pages, sequence.num_computed, sequence.heal_stop = pages, start, stop
            self.tally.num_healings += 1
            return True
        pages.abort()
        return False

    def _num_pages_to_come(self) -> int:
        to_come = 0
        for sequence in self._running.values():
            assert sequence.pages is not None
            to_come += max(1, sequence.num_tokens // self._page_size + 2 - len(sequence.pages.full_pages))
        return to_come

    # -- prompts --------------------------------------------------------------------------------------------------

    def _prefill(self, sequence: _Sequence) -> bool:
        """Start the next chunk; False if it has to wait for pages."""
        page_size, start = self._page_size, sequence.num_computed
        heals = start < sequence.heal_stop
        goal = sequence.heal_stop if heals else sequence.num_tokens
        stop = min(start + self._times.chunk_tokens, goal)
        if stop < goal:
            stop = max(stop // page_size * page_size, start + 1)
        if not heals and not self._make_room(sequence, stop):
            return False
        self._is_prefilling = True
        epoch = sequence.epoch

        def done() -> None:
            self._is_prefilling = False
            if sequence.epoch == epoch:
                self._chunk_done(sequence, start, stop, heals=heals)

        self._at(self._now_s + (stop - start) / self._times.prefill_tokens_per_s, done)
        return True

    def _chunk_done(self, sequence: _Sequence, start: int, stop: int, *, heals: bool) -> None:
        assert sequence.pages is not None
        tally = self.tally
        tally.computed += stop - start
        sequence.num_computed = stop
        if sequence.epoch:
            tally.computed_again += stop - start
        if heals:
            tally.healed += stop - start
            if stop < sequence.heal_stop:
                return
            sequence.pages.extend(stop, window_start=self.cache.window_frontier(stop))
        sequence.pages.commit(stop, sequence.request.keys)
        if stop == sequence.num_tokens:
            self.cache.prefilled(sequence.request.keys, stop // self._page_size)
            sequence.is_decoding = True
            self._decode(sequence)

    # -- answers --------------------------------------------------------------------------------------------------

    def _decode(self, sequence: _Sequence) -> None:
        """The next stretch of the answer, its end, or waiting for pages."""
        start = sequence.num_computed
        if start >= sequence.end:
            self._finish(sequence)
            return
        stop = min(start + self._times.decode_stride_tokens, sequence.end)
        if not self._make_room(sequence, stop):
            if sequence.order in self._running:
                self._stalled[sequence.order] = sequence
            return
        epoch = sequence.epoch

        def done() -> None:
            if sequence.epoch == epoch:
                assert sequence.pages is not None
                sequence.num_computed = sequence.num_tokens = stop
                sequence.pages.commit(stop, sequence.request.keys)
                self._decode(sequence)

        self._at(self._now_s + (stop - start) / self._times.decode_tokens_per_s, done)

    def _finish(self, sequence: _Sequence) -> None:
        assert sequence.pages is not None
        stats = self.cache.stats().full
        self.tally.peak_cached = max(self.tally.peak_cached, (stats.total - stats.free) * self._page_size)
        self._give_back(sequence)
        sequence.epoch += 1
        del self._running[sequence.order]
        sequence.on_end(self._now_s)

    def _give_back(self, sequence: _Sequence) -> None:
        """What it has computed stays behind, as long as there is room."""
        assert sequence.pages is not None
        num_pages = sequence.pages.num_committed_tokens // self._page_size
        sequence.pages.finish()
        self.cache.ended(sequence.request.keys, num_pages)

    def _make_room(self, sequence: _Sequence, stop: int) -> bool:
        """Extend the sequence's pages, putting back later ones for it; False if it is the latest and has to wait."""
        assert sequence.pages is not None
        while True:
            try:
                sequence.pages.extend(stop)
            except NoPages as error:
                if len(self._running) == 1:
                    raise BenchFailed(f"a context of {sequence.num_tokens:,} tokens does not fit: {error}") from error
                latest = next(reversed(self._running.values()))
                if latest is sequence:
                    return False
                self._retract(latest)
            else:
                return True

    def _retract(self, sequence: _Sequence) -> None:
        assert sequence.pages is not None
        del self._running[sequence.order]
        self._stalled.pop(sequence.order, None)
        self._give_back(sequence)
        sequence.pages = None
        sequence.epoch += 1
        sequence.is_decoding = False
        sequence.num_computed = sequence.heal_stop = 0
        self.tally.num_retractions += 1
        self._wait(sequence)
