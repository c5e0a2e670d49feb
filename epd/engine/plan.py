"""What crosses from the scheduler to the runner and back. Frozen: only `Scheduler.commit` moves a Sequence.

StepPlan    imports: handed-over KV to write into pages; steps: token ranges to compute
StepResult  one StepOutcome per step, in the same order
"""

from dataclasses import dataclass

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from encoder.wire import TensorFrame
from epd.engine.sampler import SampledToken, SampleRow
from epd.types import KvTransfer

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


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Compute tokens `[start, start + len(token_ids))`; sample after the last one unless `sample` is None.

    `heals`: only windows are written, the full pages hold these tokens already (see healing.py).
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    pages: PageTable
    media: tuple[MediaSlice, ...] = ()
    sample: SampleRow | None = None
    heals: bool = False

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class HeldTransfer:
    """A transfer as it came, in host memory."""

    transfer: KvTransfer
    tensors: tuple[TensorFrame, ...]


@dataclass(frozen=True, slots=True)
class KvImport:
    """Write a transfer's full pages from row page `first_full_page` on, and the windows the table holds."""

    request_id: str
    held: HeldTransfer
    pages: PageTable
    first_full_page: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    steps: tuple[SequenceStep, ...] = ()
    imports: tuple[KvImport, ...] = ()

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


def embedding_lost(error: EmbeddingLost) -> Failure:
    """The end of an attempt; the next one brings references that hold."""
    return Failure(status=error.status, code=error.code, message=error.message, retryable=True)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`tokens` is empty when nothing was to be sampled. With `failure` the step's KV is not to be trusted."""

    tokens: tuple[SampledToken, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    outcomes: tuple[StepOutcome, ...]
