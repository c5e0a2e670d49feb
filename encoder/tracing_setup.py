"""The provider of spans that the OTEL_* variables describe. Imported only where they ask for one.

What it sends through gives up on a collector that is away when the process ends, and speaks of it once a minute.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from encoder.seldom import Seldom

logger = logging.getLogger(__name__)

_REASON = re.compile(r"\[Errno -?\d+\] ([\w ]+)")
_MAX_REASON_CHARS = 120
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class UnknownExporter(ValueError):
    """OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_PROTOCOL names what is not installed."""


def make_provider(stage: str, name: str, environment: Mapping[str, str]) -> TracerProvider:
    """Sampler, limits, resource, endpoint and headers are the SDK's to read. Raises UnknownExporter."""
    exporters = [PatientExporter(_exporter(word, environment)) for word in _chosen(environment)]
    # Closed by `exporting`, in order.
    provider = _Provider(exporters, resource=_resource(stage, name, environment))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class PatientExporter(SpanExporter):
    """Sends through another one, which tries again and again and logs each try at length: until the process ends.

    From `hurry` on, a failure is the last: nothing is tried again, nor tried at all while the collector is known to be
    away.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._seldom = Seldom()
        self._is_failing = False
        self._is_hurried = False
        self._is_closed = False
        # Where it complains: in the loggers of the modules that its class comes from.
        names = {kind.__module__ for kind in type(inner).__mro__ if kind.__module__.startswith("opentelemetry.")}
        self._loggers = [logging.getLogger(name) for name in names]
        for noisy in self._loggers:
            noisy.addFilter(self._complained)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_closed:
            return SpanExportResult.FAILURE
        result = self._inner.export(spans)
        self._is_failing = result is not SpanExportResult.SUCCESS
        return result

    def hurry(self) -> None:
        """The process ends. Any thread."""
        self._is_hurried = True
        if self._is_failing:
            self.shutdown()

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._inner.shutdown()

    def complain_again(self) -> None:
        """Nothing is sent any more: the inner one's loggers are left as they were found."""
        for noisy in self._loggers:
            noisy.removeFilter(self._complained)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._is_closed or self._inner.force_flush(timeout_millis)

    def _complained(self, record: logging.LogRecord) -> bool:
        """Whether the inner one's record is logged as it is."""
        if record.levelno < logging.WARNING:
            return True
        self._is_failing = True
        if not self._is_closed and (added := self._seldom.due()) is not None:
            logger.warning("spans cannot be sent: %s%s", _short(record.getMessage()), added)
        if self._is_hurried:
            # Wakes it from its wait for another try.
            self.shutdown()
        return False


class _Provider(TracerProvider):
    def __init__(self, exporters: Sequence[PatientExporter], *, resource: Resource) -> None:
        super().__init__(resource=resource, shutdown_on_exit=False)
        self._exporters = exporters

    def shutdown(self) -> None:
        for exporter in self._exporters:
            exporter.hurry()
        super().shutdown()
        for exporter in self._exporters:
            exporter.complain_again()


def _short(message: str) -> str:
    """The system's words if there are any, else the beginning."""
    found = _REASON.search(message)
    words = " ".join((found[1] if found else message).split())
    return words if len(words) <= _MAX_REASON_CHARS else f"{words[:_MAX_REASON_CHARS]}..."


def _chosen(environment: Mapping[str, str]) -> list[str]:
    words = environment.get("OTEL_TRACES_EXPORTER", "").split(",")
    return [word.strip().lower() for word in words if word.strip()] or ["otlp"]


def _exporter(word: str, environment: Mapping[str, str]) -> SpanExporter:
    wanted = word
    if word == "otlp":
        protocol = (
            environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
            or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or "http/protobuf"
        ).strip()
        if protocol not in _PROTOCOLS:
            raise UnknownExporter(f"the OTLP protocol {protocol!r} is not known; known: {', '.join(_PROTOCOLS)}")
        wanted = _PROTOCOLS[protocol]
    found = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
    if wanted not in found:
        raise UnknownExporter(f"no exporter {wanted} is installed; installed: {', '.join(sorted(found)) or 'none'}")
    exporter: SpanExporter = found[wanted].load()()
    return exporter


def _resource(stage: str, name: str, environment: Mapping[str, str]) -> Resource:
    """Who this process is; what the environment says of it goes first."""
    own = {
        "service.name": f"mimo-{stage}",
        "service.namespace": "mimo",
        "service.instance.id": name,
        "service.version": _version(),
    }
    said = {pair.partition("=")[0].strip() for pair in environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    if environment.get("OTEL_SERVICE_NAME", "").strip():
        said.add("service.name")
    return Resource.create({key: value for key, value in own.items() if key not in said})


def _version() -> str:
    try:
        return version("mimo-epd")
    except PackageNotFoundError:
        return "unknown"
