"""Spans: what carries them, what they cost where nobody asked, and how records of other processes become spans."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from encoder import tracing
from encoder.tracing import NO_SPAN, Carrier, Event, Record, asked_for, exporting, exporting_to, open_span
from encoder.tracing_setup import UnknownExporter, make_provider

ROOT = Path(__file__).parent.parent.parent
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with exporting_to(provider):
        yield exporter


def finished(exporter: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    """Spans by name, once there are so many: records become spans on another thread."""
    deadline = time.monotonic() + 5
    while len(exporter.get_finished_spans()) < count and time.monotonic() < deadline:
        time.sleep(0.002)
    found = exporter.get_finished_spans()
    assert len(found) == count, [span.name for span in found]
    return {span.name: span for span in found}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"{SAMPLED}-more",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID[1:]}-{SPAN_ID}-01",
    ],
)
def test_a_malformed_traceparent_counts_as_absent(header: str) -> None:
    assert Carrier.of_headers(header, ["vendor=1"]) == Carrier()


def test_a_sound_traceparent_is_taken_with_its_state() -> None:
    carrier = Carrier.of_headers(f" {SAMPLED} ", ["a=1", "b=2"])
    assert carrier == Carrier(SAMPLED, "a=1,b=2")
    assert carrier.trace_id == TRACE_ID
    assert carrier.is_sampled
    assert not Carrier.of_headers(UNSAMPLED).is_sampled
    # A later version may say more than is known today.
    assert Carrier.of_headers(f"01-{TRACE_ID}-{SPAN_ID}-01-what-else").is_sampled
    assert Carrier.of_headers(SAMPLED, ["x" * 600]).tracestate == ""


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.*", fullmatch=True))
def test_no_header_is_a_fault(header: str) -> None:
    carrier = Carrier.of_headers(header)
    assert carrier.traceparent in ("", header.strip())
    assert isinstance(carrier.is_sampled, bool)


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
    ],
)
def test_who_asks_for_traces(environment: dict[str, str], asked: bool) -> None:
    assert asked_for(environment) is asked


def test_without_an_exporter_a_span_only_passes_on_what_came() -> None:
    assert open_span("a", parent=Carrier()) is NO_SPAN
    passed = open_span("a", parent=Carrier(SAMPLED, "a=1"))
    assert passed.carrier == Carrier(SAMPLED, "a=1")
    with tracing.use(passed), tracing.span("b") as inner:
        assert inner.carrier == passed.carrier
        inner.set({"x": 1})
        inner.event("y")
        inner.fail("z")
        assert not inner.is_recording
    assert tracing.current() is NO_SPAN
    assert not tracing.is_wanted(SAMPLED)
    tracing.report(SAMPLED, "", [Record(name="a", start_unix_s=0, stop_unix_s=1)])


def test_nothing_is_imported_before_somebody_asks() -> None:
    """Also where the packages are not there at all."""
    probe = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from encoder.tracing import exporting, span, open_span, Carrier\n"
        "with exporting('gateway', 'g', environment={}), span('a') as inner: inner.set({'b': 1})\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.')], 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True)


def test_asked_for_but_not_installed_is_said_and_nothing_breaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with exporting("gateway", "g", environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}):
        assert open_span("a", parent=Carrier()) is NO_SPAN
    assert "pip install 'mimo-epd[otel]'" in caplog.text


def test_an_exporter_that_is_not_installed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with exporting("gateway", "g", environment={"OTEL_TRACES_EXPORTER": "carrier_pigeon"}):
        assert open_span("a", parent=Carrier()) is NO_SPAN
    assert "carrier_pigeon" in caplog.text
    with pytest.raises(UnknownExporter, match="thrift"):
        make_provider("g", "g", {"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "thrift"})


def test_the_resource_is_who_the_process_is_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"OTEL_TRACES_EXPORTER": "console"}
    resource = make_provider("decode", "decode-1", environment).resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("mimo-decode", "decode-1")
    for name, value in {"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "service.version=7,a=b"}.items():
        monkeypatch.setenv(name, value)
        environment[name] = value
    resource = make_provider("decode", "decode-1", environment).resource.attributes
    assert (resource["service.name"], resource["service.version"], resource["a"]) == ("mine", "7", "b")


def test_live_spans_nest_and_fail(spans: InMemorySpanExporter) -> None:
    class Coded(Exception):
        code = "media_undecodable"

    def work() -> None:
        with tracing.span("child", kind="client") as child:
            child.event("retry", {"attempt": 2})
            raise Coded("broken")

    root = open_span("root", parent=Carrier(SAMPLED, "a=1"), kind="server", attributes={"n": 1})
    with pytest.raises(Coded, match="broken"), tracing.use(root):
        work()
    root.end()
    found = finished(spans, 2)
    outer, inner = found["root"], found["child"]
    assert f"{outer.context.trace_id:032x}" == TRACE_ID
    assert outer.parent is not None
    assert f"{outer.parent.span_id:016x}" == SPAN_ID
    assert outer.context.trace_state.to_header() == "a=1"
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert (outer.kind, inner.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert inner.status.status_code is StatusCode.ERROR
    assert inner.status.description == "broken"
    assert inner.attributes is not None
    assert inner.attributes["error.type"] == "media_undecodable"
    assert [event.name for event in inner.events] == ["retry"]
    assert root.carrier.trace_id == TRACE_ID
    assert root.carrier.is_sampled
    assert root.carrier.tracestate == "a=1"


def test_who_does_not_want_a_trace_gets_none(spans: InMemorySpanExporter) -> None:
    with tracing.use(open_span("root", parent=Carrier(UNSAMPLED))) as root:
        assert not root.is_recording
        # Those who come after hear that they need not record either.
        assert not root.carrier.is_sampled
        assert root.carrier.trace_id == TRACE_ID
        with tracing.span("child") as child:
            assert not child.is_recording
    root.end()
    assert not tracing.is_wanted(UNSAMPLED)
    tracing.report(UNSAMPLED, "", [Record(name="a", start_unix_s=0, stop_unix_s=1)])
    tracing.report(SAMPLED, "", [Record(name="last", start_unix_s=0, stop_unix_s=1)])
    assert finished(spans, 1).keys() == {"last"}


def test_records_become_spans_below_another_process(spans: InMemorySpanExporter) -> None:
    record = Record(
        name="prefill",
        start_unix_s=100.0,
        stop_unix_s=101.0,
        kind="server",
        attributes={"tokens": 5},
        events=(Event("chunk", 100.5, {"stop": 16}), Event("late", 200.0)),
        # Both stick out of their parent: by a hair, and by far.
        children=(
            Record(name="queue", start_unix_s=99.999, stop_unix_s=100.25),
            Record(name="forward", start_unix_s=100.25, stop_unix_s=105.0, error=("oom", "no memory")),
            Record(name="backwards", start_unix_s=100.9, stop_unix_s=100.2),
        ),
    )
    tracing.report(SAMPLED, "", [record])
    found = finished(spans, 4)
    parent = found["prefill"]
    assert parent.parent is not None
    assert f"{parent.parent.span_id:016x}" == SPAN_ID
    assert (parent.start_time, parent.end_time) == (100 * 10**9, 101 * 10**9)
    assert [event.timestamp for event in parent.events] == [100_500_000_000, 101 * 10**9]
    for name in ("queue", "forward", "backwards"):
        child = found[name]
        assert child.parent is not None
        assert child.parent.span_id == parent.context.span_id
        assert child.start_time is not None
        assert child.end_time is not None
        assert 100 * 10**9 <= child.start_time <= child.end_time <= 101 * 10**9
    assert found["forward"].status.status_code is StatusCode.ERROR


def test_links_name_other_spans(spans: InMemorySpanExporter) -> None:
    open_span("second", parent=Carrier(), links=[Carrier(SAMPLED), Carrier()]).end()
    (link,) = finished(spans, 1)["second"].links
    assert f"{link.context.span_id:016x}" == SPAN_ID


def test_what_was_reported_is_sent_when_the_process_ends() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with exporting_to(provider):
        for number in range(100):
            tracing.report(SAMPLED, "", [Record(name=str(number), start_unix_s=0, stop_unix_s=1)])
    assert len(exporter.get_finished_spans()) == 100
    assert not [thread for thread in threading.enumerate() if thread.name == "spans"]
    assert open_span("a", parent=Carrier()) is NO_SPAN


def test_a_collector_that_does_not_answer_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_FLUSH_S", 0.1)
    release = threading.Event()

    class Stuck(TracerProvider):
        def shutdown(self) -> None:
            release.wait(10)

    started = time.monotonic()
    with exporting_to(Stuck(shutdown_on_exit=False)):
        pass
    assert time.monotonic() - started < 2
    release.set()
