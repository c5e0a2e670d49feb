"""Traces of requests over all processes, by OpenTelemetry: spans, what carries them along, and how they get away.

    gateway   open_span / span   live spans, on the event loop; the innermost is `current()`
    workers   report             spans that are over, from times recorded anyway; made on a thread of their own
    between   Carrier            W3C `traceparent` and `tracestate`, fields of the requests on the wire

Nothing is imported and nothing is recorded until `exporting` finds that the environment names an exporter (the OTEL_*
variables of the specification; no settings of ours) and that OpenTelemetry is installed. Until then a span is an object
that does nothing but pass the client's own `traceparent` on.
"""

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_MAX_TRACESTATE_CHARS: Final = 512
# What waits to become spans; a worker that ends requests faster than that drops some rather than grow.
_MAX_WAITING: Final = 10_000
# A collector that is down may not keep a process from ending for longer.
_FLUSH_S: Final = 3.0
_NONE: Final[Attributes] = {}


@dataclass(frozen=True, slots=True)
class Carrier:
    """The place in a trace, as it travels between processes. Empty where nobody traces."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of_headers(cls, traceparent: str, tracestates: Iterable[str] = ()) -> "Carrier":
        """From a request's headers; by the specification what is malformed counts as absent, and so does a `tracestate`
        without its `traceparent`."""
        given = traceparent.strip()
        if _ids(given) is None:
            return cls()
        state = ",".join(tracestates)
        return cls(given, state if len(state) <= _MAX_TRACESTATE_CHARS else "")

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, or empty."""
        return self.traceparent[3:35]

    @property
    def is_sampled(self) -> bool:
        """Whether whoever began the trace wants it recorded."""
        ids = _ids(self.traceparent)
        return ids is not None and bool(ids[2] & _SAMPLED)


_NOWHERE: Final = Carrier()


def _ids(traceparent: str) -> tuple[int, int, int] | None:
    """Trace id, span id and flags; None for what is no traceparent."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Version ff is forbidden; 00 has no more fields, a later one may.
    if version == "ff" or (version == "00" and rest is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return int(trace_id, 16), int(span_id, 16), int(flags, 16)


class Span:
    """A piece of a trace that is under way; `carrier` makes others its children. All of it is harmless after `end`."""

    __slots__ = ("_recorded", "carrier")

    def __init__(self, carrier: Carrier, recorded: "trace.Span | None" = None) -> None:
        """Without `recorded` it only passes on what it was given."""
        self.carrier = carrier
        self._recorded = recorded

    @property
    def is_recording(self) -> bool:
        return self._recorded is not None and self._recorded.is_recording()

    def set(self, attributes: Attributes) -> None:
        if self._recorded is not None:
            self._recorded.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes = _NONE, *, at_unix_s: float | None = None) -> None:
        if self._recorded is not None:
            self._recorded.add_event(name, dict(attributes), None if at_unix_s is None else _nanoseconds(at_unix_s))

    def fail(self, code: str, message: str = "") -> None:
        """It ends with an error: `code` becomes `error.type`."""
        if self._recorded is not None:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_attribute("error.type", code)
            self._recorded.set_status(Status(StatusCode.ERROR, message or None))

    def end(self, *, at_unix_s: float | None = None) -> None:
        if self._recorded is not None:
            self._recorded.end(None if at_unix_s is None else _nanoseconds(at_unix_s))


NO_SPAN: Final = Span(_NOWHERE)
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current() -> Span:
    """The innermost span of this task."""
    return _current.get()


def open_span(
    name: str,
    *,
    parent: Span | Carrier | None = None,
    kind: Kind = "internal",
    attributes: Attributes = _NONE,
    links: Iterable[Carrier] = (),
    at_unix_s: float | None = None,
) -> Span:
    """A span that the caller ends. Without `parent` it is a child of `current()`; an empty Carrier begins a trace."""
    above = current() if parent is None else parent
    carrier = above.carrier if isinstance(above, Span) else above
    exporter = _exporter
    if exporter is None or above is NO_SPAN:
        return Span(carrier) if carrier.traceparent else NO_SPAN
    return exporter.open(name, above, kind=kind, attributes=attributes, links=links, at_unix_s=at_unix_s)


@contextmanager
def use(span: Span) -> Iterator[Span]:
    """Make it `current()` for the block, which must be entered and left by one task. It is not ended."""
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)


@contextmanager
def span(name: str, *, kind: Kind = "internal", attributes: Attributes = _NONE) -> Iterator[Span]:
    """A child of `current()` that is current for the block, and ends with it: with an error if the block raises."""
    opened = open_span(name, kind=kind, attributes=attributes)
    try:
        with use(opened):
            yield opened
    except BaseException as error:
        if isinstance(error, Exception):
            code = getattr(error, "code", None)
            opened.fail(code if isinstance(code, str) else type(error).__name__, str(error))
        else:
            opened.set({"mimo.cancelled": True})
        raise
    finally:
        opened.end()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment of a span."""

    name: str
    at_unix_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A span that is over. Children are cut to the time of their parent, so that none outlives it by a rounding error
    of clocks. `error` is a code and a message."""

    name: str
    start_unix_s: float
    stop_unix_s: float
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    children: tuple["Record", ...] = ()
    error: tuple[str, str] | None = None


def is_wanted(traceparent: str) -> bool:
    """Whether spans of a request with this `traceparent` will be exported from here."""
    return bool(traceparent) and _exporter is not None and Carrier(traceparent).is_sampled


def report(traceparent: str, tracestate: str, records: Sequence[Record]) -> None:
    """Record spans below a span of another process. Costs the caller one entry in a queue. Any thread."""
    exporter = _exporter
    if exporter is not None and is_wanted(traceparent):
        exporter.put(Carrier(traceparent, tracestate), records)


def asked_for(environment: Mapping[str, str]) -> bool:
    """Whether OTEL_* variables name an exporter of traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    chosen = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if chosen:
        return chosen != "none"
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environment.get(name, "").strip() for name in names)


@contextmanager
def exporting(stage: str, name: str, *, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Export the spans of this process, the one of `stage` called `name`, for as long as the block runs; what has not
    been sent by then is, within seconds. Does nothing unless the environment asks for it."""
    if not asked_for(environment):
        yield
        return
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        logger.warning("OTEL_* asks for traces, but OpenTelemetry is not installed: pip install 'mimo-epd[otel]'")
        yield
        return
    from encoder.tracing_setup import UnknownExporter, make_provider

    try:
        provider = make_provider(stage, name, environment)
    except UnknownExporter as error:
        logger.warning("traces are not exported: %s", error)
        yield
        return
    logger.info("traces are exported, as the environment (OTEL_*) says")
    with exporting_to(provider):
        yield


@contextmanager
def exporting_to(provider: "TracerProvider") -> Iterator[None]:
    """Record spans with a provider of the caller's for as long as the block runs, and shut it down then."""
    global _exporter
    before, _exporter = _exporter, _Exporter(provider)
    try:
        yield
    finally:
        ending, _exporter = _exporter, before
        ending.close()


class _Exporter:
    """A provider, and the thread that makes spans of records."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mimo")
        self._waiting: queue.SimpleQueue[tuple[Carrier, Sequence[Record]] | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._build, name="spans", daemon=True)
        self._thread.start()

    def open(
        self,
        name: str,
        above: Span | Carrier,
        *,
        kind: Kind,
        attributes: Attributes,
        links: Iterable[Carrier] = (),
        at_unix_s: float | None = None,
    ) -> Span:
        from opentelemetry import trace

        context = _context(above)
        linked = [trace.Link(span_context) for link in links if (span_context := _span_context(link)) is not None]
        recorded = self._tracer.start_span(
            name,
            # An empty context, so that nothing that the caller's process traces by itself becomes the parent.
            context=trace.set_span_in_context(trace.INVALID_SPAN) if context is None else context,
            kind=trace.SpanKind[kind.upper()],
            attributes=dict(attributes),
            links=linked,
            start_time=None if at_unix_s is None else _nanoseconds(at_unix_s),
        )
        return Span(_carrier_of(recorded), recorded)

    def put(self, carrier: Carrier, records: Sequence[Record]) -> None:
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put((carrier, records))
        else:
            self._num_dropped += 1

    def close(self) -> None:
        """Send what there is, for seconds at most."""
        give_up_s = time.monotonic() + _FLUSH_S
        self._waiting.put(None)
        self._thread.join(_FLUSH_S)
        if self._num_dropped:
            logger.warning("%d requests left no spans: too many ended at a time", self._num_dropped)
        # On a thread: a collector that does not answer must not keep this process.
        ending = threading.Thread(target=self._provider.shutdown, name="spans flush", daemon=True)
        ending.start()
        ending.join(max(0.0, give_up_s - time.monotonic()))
        if ending.is_alive():
            logger.warning("the last spans could not be sent within %g s", _FLUSH_S)

    def _build(self) -> None:
        while (taken := self._waiting.get()) is not None:
            carrier, records = taken
            for record in records:
                self._record(record, carrier, record.start_unix_s, max(record.start_unix_s, record.stop_unix_s))

    def _record(self, record: Record, above: Span | Carrier, first_s: float, last_s: float) -> None:
        """All of a record, inside [first_s, last_s]."""
        start_s = min(max(record.start_unix_s, first_s), last_s)
        stop_s = min(max(record.stop_unix_s, start_s), last_s)
        made = self.open(record.name, above, kind=record.kind, attributes=record.attributes, at_unix_s=start_s)
        for event in record.events:
            made.event(event.name, event.attributes, at_unix_s=min(max(event.at_unix_s, start_s), stop_s))
        for child in record.children:
            self._record(child, made, start_s, stop_s)
        if record.error is not None:
            made.fail(*record.error)
        made.end(at_unix_s=stop_s)


_exporter: _Exporter | None = None


def _span_context(carrier: Carrier) -> "trace.SpanContext | None":
    from opentelemetry import trace

    ids = _ids(carrier.traceparent)
    if ids is None:
        return None
    trace_id, span_id, flags = ids
    state = trace.TraceState.from_header([carrier.tracestate]) if carrier.tracestate else trace.TraceState()
    return trace.SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags & _SAMPLED), trace_state=state
    )


def _context(above: Span | Carrier) -> "Context | None":
    from opentelemetry import trace

    if isinstance(above, Span) and above._recorded is not None:
        return trace.set_span_in_context(above._recorded)
    span_context = _span_context(above.carrier if isinstance(above, Span) else above)
    return None if span_context is None else trace.set_span_in_context(trace.NonRecordingSpan(span_context))


def _carrier_of(recorded: "trace.Span") -> Carrier:
    found = recorded.get_span_context()
    parent = f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags & _SAMPLED:02x}"
    return Carrier(parent, found.trace_state.to_header())


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)


def unix_of(monotonic_s: float, *, now_monotonic_s: float, now_unix_s: float | None = None) -> float:
    """Unix seconds of a moment on the monotonic clock."""
    return (time.time() if now_unix_s is None else now_unix_s) - (now_monotonic_s - monotonic_s)
