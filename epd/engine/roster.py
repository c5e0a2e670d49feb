"""Where every request of a worker is, and how it leaves: with exactly one Finish.

waiting    in line for embedding rows,  arrived    KV in host memory, in line for pages
           for KV, or for pages
running    has pages, in order of       handoffs   prompt computed, KV about to be sent to a decode worker
           admission
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from epd.cache.tiers.tiered import TieredCache
from epd.engine.clock import Clock
from epd.engine.feed import RowSupply
from epd.engine.fetching import PrefixSupply
from epd.engine.line import WaitingLine
from epd.engine.measures import Measures
from epd.engine.plan import Failure, HeldTransfer, finish_of
from epd.engine.sequence import Sequence
from epd.engine.spans import report_left
from epd.transport.base import Message, Peer
from epd.types import Abort, FinishReason


@dataclass(frozen=True, slots=True)
class Reply:
    peer: Peer
    message: Message


@dataclass(slots=True)
class Counters:
    """Totals since the start; `batched_sequences / steps` is the mean batch.

    Each admission of a prompt is a `prefix_hits` (windows were whole), a `healed_hits` or a `prefix_misses`;
    `refused_heals` is how often there was no room to heal. `passed_over` counts admissions before one that had no room.

    Of `cached_tokens`, `host_hit_tokens` came from the host's memory and `store_hit_tokens` from the store.
    `short_loads` counts admissions where less of that came than was found, `failed_loads` copies that failed under a
    request: each computed the rest.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_hit_tokens: int = 0
    store_hit_tokens: int = 0
    short_loads: int = 0
    failed_loads: int = 0
    healed_tokens: int = 0
    prefix_hits: int = 0
    healed_hits: int = 0
    prefix_misses: int = 0
    refused_heals: int = 0
    passed_over: int = 0
    generated_tokens: int = 0
    # Draft tokens that were checked and those that were right; `_n` is the n-th after a sequence's newest token.
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens_1: int = 0
    drafted_tokens_2: int = 0
    drafted_tokens_3: int = 0
    accepted_tokens_1: int = 0
    accepted_tokens_2: int = 0
    accepted_tokens_3: int = 0
    batched_sequences: int = 0
    largest_batch: int = 0
    retractions: int = 0
    imports: int = 0
    finished: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class Arrived:
    """`is_offered`: the host was asked to keep its KV until there is a place; see staging.py."""

    sequence: Sequence
    held: HeldTransfer
    is_offered: bool = False


class Roster:
    """The scheduler's sequences and what is to be said about them."""

    def __init__(
        self, clock: Clock, supply: RowSupply, prefixes: PrefixSupply, cache: TieredCache, waiting: WaitingLine
    ) -> None:
        """`supply` keeps the rows of every sequence here and forgets them when it leaves, as `prefixes` do theirs. What
        a sequence leaves in `cache` is saved by it."""
        self.waiting = waiting
        self._supply = supply
        self._prefixes = prefixes
        self._cache = cache
        self.arrived: deque[Arrived] = deque()
        self.running: dict[str, Sequence] = {}
        self.handoffs: dict[str, Sequence] = {}
        self.counters = Counters()
        self.measures = Measures()
        self._by_id: dict[str, Sequence] = {}
        self._clock = clock
        self._replies: list[Reply] = []

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running.values()
        yield from self.waiting
        yield from (arrived.sequence for arrived in self.arrived)
        yield from self.handoffs.values()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.arrived)

    @property
    def is_empty(self) -> bool:
        return not (self.running or self.waiting or self.arrived or self.handoffs)

    @property
    def is_asleep(self) -> bool:
        """Nothing can go on before a message or embedding rows come, or a deadline passes."""
        return not (self.running or self.waiting.num_ready or self.arrived or self.handoffs)

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def enter(self, sequence: Sequence) -> None:
        """To be known from now on; the caller puts it where it waits."""
        self._by_id[sequence.request_id] = sequence

    def reply(self, peer: Peer, message: Message) -> None:
        self._replies.append(Reply(peer, message))

    def take_replies(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def fail(self, sequence: Sequence, failure: Failure) -> None:
        """End the request without an answer."""
        self.counters.failed += 1
        self.finish(sequence, FinishReason.FAILED, failure=failure)

    def finish(
        self, sequence: Sequence, reason: FinishReason, *, failure: Failure | None = None, stopped_by: int | None = None
    ) -> None:
        """End the request. `stopped_by` is a stop token, which is generated but not part of the answer."""
        self.counters.finished += 1
        self.measures.left(sequence, self._clock.monotonic_s(), is_handed_over=False)
        error = None if failure is None else (failure.code, failure.message)
        report_left(sequence, self._clock, reason=reason, error=error)
        self.release(sequence, keep=reason in (FinishReason.STOP, FinishReason.LENGTH))
        timings = sequence.timings(self._clock.monotonic_s())
        usage = sequence.usage(num_unsent=stopped_by is not None)
        finish = finish_of(sequence.request_id, reason, usage, failure, timings)
        self.reply(sequence.peer, msgspec.structs.replace(finish, stop_token_id=stopped_by))

    def hand_over(self, sequence: Sequence) -> None:
        """Another worker has its KV and ends the request."""
        self.counters.finished += 1
        self.measures.left(sequence, self._clock.monotonic_s(), is_handed_over=True)
        report_left(sequence, self._clock, reason=None)
        sequence.decode_address = None
        self.release(sequence, keep=True)

    def keep_rows_to_come(self, sequence: Sequence) -> None:
        """Keep of the sequence's embedding rows only those that a later step reads."""
        refs = sequence.refs_from(sequence.num_computed)
        self._supply.want(sequence.request_id, refs, sequence.request.deadline_unix_s)

    def holds_rows(self, sequence: Sequence) -> bool:
        """Whether all embedding rows are here that it will read."""
        return self._supply.holds(sequence.request_id, sequence.refs_from(sequence.num_computed))

    def put_back(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a running sequence's pages away; it waits for others. `keep` leaves its end to resume from."""
        assert sequence.pages is not None
        del self.running[sequence.request_id]
        if keep:
            sequence.pages.finish()
        else:
            sequence.pages.abort()
        sequence.reset()
        sequence.num_retractions += 1
        self.waiting.put(sequence)

    def expire(self) -> None:
        """End what is past its deadline, wherever it is."""
        now_unix_s = self._clock.unix_s()
        for sequence in [sequence for sequence in self if sequence.request.deadline_unix_s <= now_unix_s]:
            late_s = now_unix_s - sequence.request.deadline_unix_s
            message = f"the deadline passed {late_s:.2f} s ago, after {sequence.num_generated} new tokens"
            self.fail(sequence, Failure(status=504, code="deadline_exceeded", message=message))

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take the sequence out of everything. `keep` leaves its end in the tree for the next turn to resume from."""
        request_id = sequence.request_id
        if self._by_id.get(request_id) is sequence:
            del self._by_id[request_id]
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        self._supply.forget(request_id)
        self._prefixes.forget(request_id)
        self.running.pop(request_id, None)
        self.handoffs.pop(request_id, None)
        self._leave_arrived(sequence)
        if sequence.pages is not None:
            num_pages = sequence.pages.num_published_pages
            if keep:
                sequence.pages.finish()
                self._cache.ended(sequence.chain.keys, num_pages, group=sequence.request.session)
            else:
                sequence.pages.abort()
            sequence.pages = None
        if sequence.decode_address is not None:
            # The decode worker expects KV that will not come.
            self.reply(Peer(b"", sequence.decode_address), Abort(request_id=request_id))

    def _leave_arrived(self, sequence: Sequence) -> None:
        left = [arrived for arrived in self.arrived if arrived.sequence is sequence]
        for arrived in left:
            self.arrived.remove(arrived)
            if arrived.held.staged is not None:
                self._cache.unstage(arrived.held.staged)
