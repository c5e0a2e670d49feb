"""The spans of a request in one worker, made from the times its sequence carries anyway when it leaves.

    prefill   mimo.prefill.queue | mimo.prefill (an event for each chunk)
    decode    mimo.kv.transfer | mimo.decode.queue | mimo.decode
    both      mimo.prefill.queue | mimo.prefill | mimo.decode

All are children of the gateway's attempt. The one that a failure or a cancellation ended says so.
"""

from collections.abc import Callable
from dataclasses import replace

from encoder.tracing import Event, Record, Value, is_wanted, report
from epd.engine.clock import Clock
from epd.engine.sequence import Sequence
from epd.types import FinishReason, Usage

_Moment = Callable[[float | None], float]
"""Unix seconds of a moment on the monotonic clock; of now for one that has not come."""


def report_left(
    sequence: Sequence, clock: Clock, *, reason: FinishReason | None, error: tuple[str, str] | None = None
) -> None:
    """Report a sequence that leaves now. `reason` None: another worker goes on with it; `error` is a code and a
    message."""
    request = sequence.request
    if not is_wanted(request.traceparent):
        return
    now_s, now_unix_s = clock.monotonic_s(), clock.unix_s()

    def at(moment_s: float | None) -> float:
        return now_unix_s if moment_s is None else now_unix_s - (now_s - moment_s)

    records = _imported(sequence, at) if sequence.is_imported else _computed(sequence, at)
    if reason is not None and sequence.first_token_s is not None:
        records.append(_decode(sequence, at))
    outcome: dict[str, Value] = {}
    if reason is FinishReason.CANCELLED:
        outcome["mimo.cancelled"] = True
    elif reason is not None:
        outcome["gen_ai.response.finish_reasons"] = (reason.value,)
    records[-1] = replace(records[-1], attributes={**records[-1].attributes, **outcome}, error=error)
    own: dict[str, Value] = {"mimo.attempt.id": request.request_id}
    whole = [replace(record, attributes={**own, **record.attributes}) for record in records]
    report(request.traceparent, request.tracestate, whole)


def _computed(sequence: Sequence, at: _Moment) -> list[Record]:
    """Of a prompt that was computed here, or was to be: up to its first token."""
    records = [_queue("mimo.prefill.queue", sequence, at)]
    if sequence.admitted_s is not None:
        events = [
            Event("mimo.prefill.chunk", at(done_s), {"mimo.prefill.computed_tokens": stop})
            for done_s, stop in sequence.chunk_ends or ()
        ]
        prefill = Record(
            name="mimo.prefill",
            start_unix_s=at(sequence.admitted_s),
            stop_unix_s=at(sequence.first_token_s),
            attributes=_cache_attributes(sequence.usage()) | {"mimo.retractions": sequence.num_retractions},
            events=tuple(events),
        )
        records.append(prefill)
    return records


def _imported(sequence: Sequence, at: _Moment) -> list[Record]:
    """Of a prompt that another worker computed: up to a place in the batch."""
    transfer = Record(
        name="mimo.kv.transfer",
        start_unix_s=at(sequence.arrival_s) - sequence.earlier_timings.get("transfer_s", 0.0),
        stop_unix_s=at(sequence.arrival_s),
        attributes={"mimo.kv.bytes": sequence.imported_bytes or 0, "mimo.kv.tokens": sequence.num_prompt},
    )
    return [transfer, _queue("mimo.decode.queue", sequence, at)]


def _queue(name: str, sequence: Sequence, at: _Moment) -> Record:
    # Rows of media and KV of the store are waited for in the queue.
    events = () if sequence.ready_s is None else (Event("mimo.inputs_ready", at(sequence.ready_s)),)
    return Record(name=name, start_unix_s=at(sequence.arrival_s), stop_unix_s=at(sequence.admitted_s), events=events)


def _decode(sequence: Sequence, at: _Moment) -> Record:
    return Record(
        name="mimo.decode",
        start_unix_s=at(sequence.first_token_s),
        stop_unix_s=at(None),
        attributes={
            "gen_ai.usage.output_tokens": sequence.num_generated,
            "mimo.retractions": sequence.num_retractions,
        },
    )


def _cache_attributes(usage: Usage) -> dict[str, Value]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "mimo.cache.l1_tokens": usage.cached_tokens - usage.host_tokens - usage.store_tokens,
        "mimo.cache.l2_tokens": usage.host_tokens,
        "mimo.cache.l3_tokens": usage.store_tokens,
        "mimo.cache.healed_tokens": usage.healed_tokens,
    }
