"""The one mutable request object. The scheduler owns it; nothing else writes to it.

    token_ids     prompt [0, num_prompt) .......... generated [num_prompt, num_tokens)
    KV            [0, num_computed); up to heal_stop full layers had it from the start
    a step        computes [num_computed, stop), and samples iff stop == num_tokens

A sequence that decodes has one token to compute, its newest. One that was put back to waiting has all of them again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from encoder.tracing import is_wanted
from encoder.types import EmbeddingRef
from epd.cache.keys import MediaRun, PageKeyChain
from epd.cache.sequence_pages import SequencePages
from epd.engine.clock import Clock
from epd.engine.grammar import AnswerSoFar
from epd.engine.heal_rows import HealRing
from epd.engine.plan import DraftTail, MediaSlice, PageTable
from epd.engine.sampler import SampleRow
from epd.transport.base import Peer
from epd.types import GenerateRequest, Usage


@dataclass(slots=True, eq=False)
class Sequence:
    """`pages` is None while waiting. Times are monotonic seconds; None until they happened.

    `chain` is set by the scheduler once it has found the request sound. `ring` is set while it heals; `may_heal` is
    taken away when there was no room to, `may_load` when what the host has did not come. `draft_tail` holds for its
    `num_tokens` alone. `place_tokens` is what it had to compute when it was first admitted: put back, it counts for no
    more in the line and so keeps its place.
    """

    request: GenerateRequest
    peer: Peer
    arrival_s: float
    decode_address: str | None = None
    decode_incarnation: str | None = None
    num_computed: int = 0
    heal_stop: int = 0
    ring: HealRing | None = None
    may_heal: bool = True
    may_load: bool = True
    place_tokens: int | None = None
    num_cached_tokens: int = 0
    num_healed_tokens: int = 0
    num_host_tokens: int = 0
    num_store_tokens: int = 0
    num_retractions: int = 0
    pages: SequencePages | None = None
    draft_tail: DraftTail | None = None
    is_announced: bool = False
    """A delta of it was sent, so what admission found is known."""
    ready_s: float | None = None
    """What it needs from elsewhere, rows of media and KV of the store, is here or given up."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    earlier_timings: dict[str, float] = field(default_factory=dict)
    imported_bytes: int | None = None
    """What its KV took on the way here, if another worker computed the prompt."""
    chunk_ends: list[tuple[float, int]] | None = None
    """When its prompt was computed up to which token; only of one whose spans are wanted."""
    token_ids: list[int] = field(init=False)
    chain: PageKeyChain = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        if is_wanted(self.request.traceparent):
            self.chunk_ends = []

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Output tokens of this attempt."""
        return self.num_tokens - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens without KV."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_generated > 0 and self.num_remaining == 1

    @property
    def is_imported(self) -> bool:
        """Another worker computed its prompt."""
        return self.imported_bytes is not None

    @property
    def is_healing(self) -> bool:
        return self.num_computed < self.heal_stop

    @property
    def output_index(self) -> int:
        """Index of the next output token in the whole answer."""
        return self.request.num_emitted + self.num_generated

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.chain.append(token_id)

    def reset(self) -> None:
        """It has no pages any more, and everything to compute."""
        self.pages = self.ring = None
        self.num_computed = self.heal_stop = 0

    def sample_row(self) -> SampleRow:
        sampling = self.request.sampling
        if not sampling.looks_back:
            return SampleRow(sampling, self.output_index)
        request = self.request
        generated = tuple(self.token_ids[self.num_prompt :])
        answer = AnswerSoFar(request.request_id, request.token_ids, request.num_emitted, generated)
        return SampleRow(sampling, self.output_index, answer)

    def page_table(self) -> PageTable:
        """The pages as they are now; only of a running sequence."""
        pages = self.pages
        assert pages is not None
        return PageTable(tuple(pages.full_pages), tuple(pages.window_pages), pages.window_start)

    def media_slices(self, start: int, stop: int) -> Iterator[MediaSlice]:
        """The parts of the media spans inside tokens `[start, stop)`, positions counted from `start`."""
        for span in self.request.spans:
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                yield MediaSlice(
                    start=first - start,
                    stop=last - start,
                    row_start=span.row_start + first - span.start,
                    ref=self.request.embeddings[span.media],
                )

    def refs_from(self, start: int) -> tuple[EmbeddingRef, ...]:
        """The embeddings with rows at token `start` or later, each once, in the order in which they are read."""
        spans = sorted((span for span in self.request.spans if span.stop > start), key=lambda span: span.start)
        return tuple(self.request.embeddings[media] for media in dict.fromkeys(span.media for span in spans))

    def usage(self, *, num_unsent: int = 0) -> Usage:
        """`num_unsent` counts a stop token, which is generated but not part of the answer."""
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_generated + num_unsent,
            cached_tokens=self.num_cached_tokens,
            healed_tokens=self.num_healed_tokens,
            host_tokens=self.num_host_tokens,
            store_tokens=self.num_store_tokens,
        )

    def first_token_unix_s(self, clock: Clock) -> float:
        """When its prompt was computed; only of a sequence of which that is so."""
        assert self.first_token_s is not None
        return clock.unix_s() - (clock.monotonic_s() - self.first_token_s)

    def timings(self, now_s: float) -> dict[str, float]:
        """Seconds spent queued, to the first token, and decoding, as far as they were reached in this process.

        `inputs_s` is the part of `queue_s` in which it waited for rows of media or KV of the store. Decode adds to what
        prefill measured: `transfer_s` from the prompt's end until its KV was here, and `decode_queue_s`.
        """
        timings = dict(self.earlier_timings)
        prefix = "decode_" if timings else ""
        if self.ready_s is not None and self.ready_s > self.arrival_s:
            timings[f"{prefix}inputs_s"] = self.ready_s - self.arrival_s
        if self.admitted_s is not None:
            timings[f"{prefix}queue_s"] = self.admitted_s - self.arrival_s
        if self.first_token_s is not None and self.admitted_s is not None:
            if not timings.get("first_token_s"):
                timings["prefill_s"] = self.first_token_s - self.admitted_s
                timings["first_token_s"] = self.first_token_s - self.arrival_s
            timings["decode_s"] = now_s - self.first_token_s
        return timings


def key_chain(request: GenerateRequest, *, page_size: int, seed: bytes) -> PageKeyChain:
    """Page keys of the prompt. A request that may not use the cache gets keys nobody else can have."""
    own = b"" if request.use_cache else request.request_id.encode()
    chain = PageKeyChain(page_size=page_size, seed=seed + own)
    media = [MediaRun(span.start, span.stop, span.key.encode(), span.row_start) for span in request.spans]
    chain.extend(request.token_ids, media)
    return chain
