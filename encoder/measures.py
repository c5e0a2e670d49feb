"""What a replica measures of the requests it answers: histograms for /metrics, and spans of each that is traced.

mimo.encode.serve      from the request's arrival to its one reply
  mimo.encode.queue    until somebody began to prepare it; all of it for one that was refused or cancelled before
  mimo.encode.prepare  decoding and resizing; of a long video the tower works on its beginning meanwhile
  mimo.encode.tower    from its first pass to its last
"""

from collections import Counter
from collections.abc import Iterator

from encoder.errors import EncodeCancelled
from encoder.flight import Waiter
from encoder.histogram import WAIT_SECONDS, Histogram, Histograms
from encoder.passage import Moments
from encoder.tracing import Record, Value, is_wanted, report
from encoder.types import EncodeFailure, EncodeReply, HistogramCounts, StageTimings
from preprocess.types import MediaLayout, Modality

COUNTED = (
    *("requests", "hits", "joined", "encoded", "recalled"),
    *("refused", "failed", "cancelled", "deadlines", "leases_reclaimed"),
)
"""What a server counts, see `encoder.metrics.COUNTER_TEXTS`."""


class EncodeMeasures:
    """Times are Unix seconds by the server's clock."""

    def __init__(self) -> None:
        self._whole = Histograms("request_seconds", WAIT_SECONDS, "cached")
        self._queue = Histogram("queue_seconds", WAIT_SECONDS)
        self._steps = Histograms("step_seconds", WAIT_SECONDS, "step")
        self.tokens: Counter[str] = Counter({f"tokens_{modality.value}": 0 for modality in Modality})
        """Rows made by the towers, by modality: `tokens_image`, ..."""

    def encoded(self, timings: StageTimings, layout: MediaLayout) -> None:
        """A medium went through the works, whoever waits for it."""
        self.tokens[f"tokens_{layout.modality.value}"] += layout.num_rows
        self._steps["prepare"].observe(timings.prepare_s)
        self._steps["batch_wait"].observe(timings.batch_wait_s)
        self._steps["tower"].observe(timings.tower_s)

    def answered(self, waiter: Waiter, reply: EncodeReply, moments: Moments | None, now_s: float) -> None:
        """A request has its rows. `moments` None: they were there, or came from the second tier."""
        self._whole["true" if reply.cached else "false"].observe(max(0.0, now_s - waiter.admitted_s))
        if not reply.cached:
            self._queue.observe(reply.timings.queue_s)
        if is_wanted(waiter.request.traceparent):
            attributes: dict[str, Value] = {
                "mimo.media.cached": reply.cached,
                "mimo.media.tokens": reply.ref.num_rows,
                "mimo.encode.batch_wait_s": reply.timings.batch_wait_s,
            }
            _report(waiter, attributes, None if reply.cached else moments, now_s)

    def failed(self, waiter: Waiter, failure: EncodeFailure, moments: Moments | None, now_s: float) -> None:
        """A request ends without rows."""
        if is_wanted(waiter.request.traceparent):
            if failure.code == EncodeCancelled.code:
                _report(waiter, {"mimo.cancelled": True}, moments, now_s)
            else:
                _report(waiter, {}, moments, now_s, error=(failure.code, failure.message))

    def told(self) -> Iterator[HistogramCounts]:
        yield from self._whole.told()
        yield self._queue.told()
        yield from self._steps.told()


def _report(
    waiter: Waiter,
    attributes: dict[str, Value],
    moments: Moments | None,
    now_s: float,
    *,
    error: tuple[str, str] | None = None,
) -> None:
    request = waiter.request
    own: dict[str, Value] = {"mimo.media.key": request.key, "mimo.media.modality": request.modality.value}
    served = Record(
        name="mimo.encode.serve",
        kind="server",
        start_unix_s=waiter.admitted_s,
        stop_unix_s=now_s,
        attributes={**own, **attributes},
        children=() if moments is None else tuple(_steps(waiter, moments, now_s)),
        error=error,
    )
    report(request.traceparent, request.tracestate, [served])


def _steps(waiter: Waiter, moments: Moments, now_s: float) -> Iterator[Record]:
    """What happened after this request came; who joins late sees the end of it only."""
    began_s = now_s if moments.prepared is None else max(waiter.admitted_s, moments.prepared[0])
    yield Record(name="mimo.encode.queue", start_unix_s=waiter.admitted_s, stop_unix_s=began_s)
    for name, span in (("mimo.encode.prepare", moments.prepared), ("mimo.encode.tower", moments.in_tower)):
        if span is not None and span[1] >= waiter.admitted_s:
            yield Record(name=name, start_unix_s=span[0], stop_unix_s=span[1])
