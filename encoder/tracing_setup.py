"""The provider of spans that the OTEL_* variables describe. Imported only where they ask for one."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class UnknownExporter(ValueError):
    """OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_PROTOCOL names what is not installed."""


def make_provider(stage: str, name: str, environment: Mapping[str, str]) -> TracerProvider:
    """Sampler, limits, resource, endpoint and headers are the SDK's to read. Raises UnknownExporter."""
    exporters = [_exporter(word, environment) for word in _chosen(environment)]
    # Closed by `exporting`, in order.
    provider = TracerProvider(resource=_resource(stage, name, environment), shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


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
