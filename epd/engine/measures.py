"""What a worker measures of its steps and of the requests that leave it, for /metrics: a few additions per step."""

from collections.abc import Iterator

from encoder.histogram import SIZES, STEP_SECONDS, TOKENS, WAIT_SECONDS, Histogram, Histograms
from encoder.types import HistogramCounts
from epd.engine.plan import StepPlan
from epd.engine.sequence import Sequence


class Measures:
    """Histograms since the start of the worker."""

    def __init__(self) -> None:
        self._steps = Histograms("step_seconds", STEP_SECONDS, "kind")
        self._batch = Histogram("step_sequences", SIZES)
        self._tokens = Histogram("step_tokens", TOKENS)
        self._queue = Histogram("queue_seconds", WAIT_SECONDS)
        self._prompt = Histogram("prompt_seconds", WAIT_SECONDS)
        self._transfer = Histogram("transfer_seconds", WAIT_SECONDS)
        self._answer = Histogram("answer_seconds", WAIT_SECONDS)

    def stepped(self, plan: StepPlan, duration_s: float) -> None:
        """A step was computed and applied."""
        self._steps[_kind(plan)].observe(duration_s)
        if plan.steps:
            self._batch.observe(len(plan.steps))
            self._tokens.observe(sum(step.computed_stop - step.start for step in plan.steps))

    def left(self, sequence: Sequence, now_s: float, *, is_handed_over: bool) -> None:
        """A request ended here or went to another worker. Of what it went through in this process each part counts
        once, as far as it got."""
        if sequence.admitted_s is None:
            return
        self._queue.observe(sequence.admitted_s - sequence.arrival_s)
        if sequence.first_token_s is None:
            return
        if sequence.is_imported:
            self._transfer.observe(sequence.earlier_timings.get("transfer_s", 0.0))
        else:
            self._prompt.observe(sequence.first_token_s - sequence.admitted_s)
        if not is_handed_over:
            self._answer.observe(now_s - sequence.first_token_s)

    def told(self) -> Iterator[HistogramCounts]:
        yield from self._steps.told()
        for histogram in (self._batch, self._tokens, self._queue, self._prompt, self._transfer, self._answer):
            yield histogram.told()


def _kind(plan: StepPlan) -> str:
    """prefill, decode or mixed by what is computed; import for a step that only takes KV over."""
    if not plan.steps:
        return "import"
    num_decoding = sum(len(step.token_ids) == 1 and step.sample is not None for step in plan.steps)
    if num_decoding == len(plan.steps):
        return "decode"
    return "mixed" if num_decoding else "prefill"
