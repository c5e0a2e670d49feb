"""What crosses from the scheduler to the runner and back. Frozen: only `Scheduler.commit` moves a Sequence.

StepPlan    imports: handed-over KV to write into pages; steps: token ranges to compute
StepResult  one StepOutcome per step, in the same order
"""

from dataclasses import dataclass

from torch import Tensor

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from encoder.wire import TensorFrame
from epd.cache.tiers.tiered import StagedPages
from epd.engine.sampler import SampledToken, SampleRow
from epd.kv.copies import CopyTicket
from epd.kv.errors import KvError
from epd.types import Finish, FinishReason, KvTransfer, Usage

NOT_FINITE = "logits_not_finite"


@dataclass(frozen=True, slots=True)
class MediaSlice:
    """Tokens `[start, stop)` of a step take the embedding rows from `row_start` on."""

    start: int
    stop: int
    row_start: int
    ref: EmbeddingRef


@dataclass(frozen=True, slots=True)
class PageTable:
    """A sequence's pages at the time of planning; see `epd.kernels.base.PagedSequence`."""

    full_pages: tuple[int, ...]
    window_pages: tuple[int, ...]
    window_start: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftTail:
    """What draft heads left after the first `num_tokens` tokens of a sequence; see draft_heads.py.

    `guesses` are of the tokens after token `num_tokens`, which is known. The tensors `[R, D]` hold, for the last R
    computed tokens, their embeddings and the trunk's normed hidden states: those rows of the heads took a token that
    was only guessed, and are written again when it is known.
    """

    num_tokens: int
    guesses: tuple[int, ...]
    embeds: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class DraftInput:
    """What a step needs to know for its draft heads.

    `drafts` are computed after the step's own tokens, and each is right if it is what is sampled before it; they have
    pages, but only those that prove right are committed. `ahead` are the known tokens after the step's own, at most one
    per head, positions of `media` counted from the first of them. Only one of both is ever there.
    """

    drafts: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    media: tuple[MediaSlice, ...] = ()
    tail: DraftTail | None = None


_NO_DRAFT = DraftInput()


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Compute tokens `[start, start + len(token_ids))`; sample after the last one unless `sample` is None.

    `heal_stop`: only windows are written, the full pages hold these tokens already; it is where the windows are wanted
    (see healing.py), and `pages` then has what this chunk reads and writes.

    `arrival`: cached pages of `pages` that are still on their way from the host, layer by layer.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    pages: PageTable
    media: tuple[MediaSlice, ...] = ()
    sample: SampleRow | None = None
    heal_stop: int | None = None
    draft: DraftInput = _NO_DRAFT
    arrival: CopyTicket | None = None

    @property
    def stop(self) -> int:
        """End of the step's own tokens."""
        return self.start + len(self.token_ids)

    @property
    def computed_stop(self) -> int:
        """End of what is computed: with the drafts."""
        return self.stop + len(self.draft.drafts)

    @property
    def heals(self) -> bool:
        return self.heal_stop is not None


@dataclass(frozen=True, slots=True)
class HeldTransfer:
    """A transfer as it came, in host memory.

    Once its KV is in pages of the host tier, `staged`, only what draft heads left is among the `tensors`.
    """

    transfer: KvTransfer
    tensors: tuple[TensorFrame, ...]
    staged: StagedPages | None = None


@dataclass(frozen=True, slots=True)
class KvImport:
    """Write a transfer's full pages from row page `first_full_page` on, and the windows the table holds.

    `arrival`: the transfer was staged, and its pages are on their way. There is nothing to write.
    """

    request_id: str
    held: HeldTransfer
    pages: PageTable
    first_full_page: int
    arrival: CopyTicket | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`num_drafts`: tokens that draft heads shall guess after each sequence that samples, for its next step."""

    steps: tuple[SequenceStep, ...] = ()
    imports: tuple[KvImport, ...] = ()
    num_drafts: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.imports

    @property
    def request_ids(self) -> tuple[str, ...]:
        return (*(step.request_id for step in self.steps), *(planned.request_id for planned in self.imports))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ends without an answer; becomes its `Finish`."""

    status: int
    code: str
    message: str
    retryable: bool = False


def finish_of(
    request_id: str,
    reason: FinishReason,
    usage: Usage,
    failure: Failure | None = None,
    timings: dict[str, float] | None = None,
) -> Finish:
    """What is said of a request's end."""
    return Finish(
        request_id=request_id,
        reason=reason,
        usage=usage,
        status=200 if failure is None else failure.status,
        code="" if failure is None else failure.code,
        message="" if failure is None else failure.message,
        retryable=failure is not None and failure.retryable,
        timings={} if timings is None else timings,
    )


def embedding_lost(error: EmbeddingLost) -> Failure:
    """The end of an attempt; the next one brings references that hold."""
    return Failure(status=error.status, code=error.code, message=error.message, retryable=True)


def kv_lost(error: KvError) -> Failure:
    """KV of another worker did not make it to the device; the next attempt computes it."""
    message = f"KV of another worker was lost on its way to the device: {error}"
    return Failure(status=503, code="kv_lost", message=message, retryable=True)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`tokens` is empty when nothing was to be sampled; all but the last of several are drafts that were right. With
    `failure` the step's KV is not to be trusted. `tail` is None without draft heads."""

    tokens: tuple[SampledToken, ...] = ()
    failure: Failure | None = None
    tail: DraftTail | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    outcomes: tuple[StepOutcome, ...]
