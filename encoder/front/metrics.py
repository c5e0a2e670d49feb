"""Prometheus metrics of one front, in a registry of its own; replicas are read when they are scraped."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from encoder.front.desk import MediumEnd
from encoder.metrics import replica_metrics
from encoder.types import EncoderInfo

_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class FrontMetrics:
    """What the front counts itself, and a collector over what the replicas say."""

    def __init__(self, *, infos: Callable[[], Mapping[str, EncoderInfo | None]]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "mimo_encoder_http_requests", "HTTP requests by route and status", ["route", "status"], registry=registry
        )
        self.inflight_requests = Gauge(
            "mimo_encoder_http_inflight_requests", "Requests of /v1/encode being answered", registry=registry
        )
        self.inflight_media = Gauge(
            "mimo_encoder_inflight_media", "Media being fetched or encoded, of all dialects", registry=registry
        )
        self.seconds = Histogram(
            "mimo_encoder_http_request_seconds",
            "Request to last byte of the answer",
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self.disconnects = Counter(
            "mimo_encoder_http_disconnects", "Clients that left before the end", registry=registry
        )
        self._media = Counter(
            "mimo_encoder_media", "Media by kind and outcome", ["modality", "outcome"], registry=registry
        )
        self._fetch = Histogram(
            "mimo_encoder_fetch_seconds", "Fetching the content of a medium", registry=registry, buckets=_BUCKETS_S
        )
        registry.register(_Replicas(infos))

    def medium_ended(self, end: MediumEnd) -> None:
        """One medium was encoded, or failed."""
        self._media.labels(end.modality.value, end.outcome).inc()
        if end.fetch_s:
            self._fetch.observe(end.fetch_s)

    def watch_sglang(self, gauges: Callable[[], Mapping[str, int]]) -> None:
        """What the SGLang dialect has under way, by name, read when it is scraped."""
        self.registry.register(_Sglang(gauges))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Sglang(Collector):
    def __init__(self, gauges: Callable[[], Mapping[str, int]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        metric = GaugeMetricFamily(
            "mimo_encoder_sglang", "What the SGLang dialect has under way, by what it is", labels=["what"]
        )
        for name, value in self._gauges().items():
            metric.add_metric([name], value)
        yield metric


class _Replicas(Collector):
    def __init__(self, infos: Callable[[], Mapping[str, EncoderInfo | None]]) -> None:
        self._infos = infos

    def collect(self) -> Iterable[Metric]:
        return replica_metrics(self._infos())
