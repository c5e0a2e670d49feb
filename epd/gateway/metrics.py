"""Prometheus metrics of one gateway, in a registry of its own. Workers and encoders are read when they are scraped.

Names are `mimo_<stage>_<what>_<unit>`; see docs/observability.md for all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from encoder.metrics import replica_metrics
from encoder.types import EncoderInfo
from epd.gateway.metrics_workers import STAGE_OF_ROLE, role_metrics
from epd.gateway.reply import AnswerEnd
from epd.router.workers import Fleet

__all__ = ["STAGE_OF_ROLE", "GatewayMetrics", "role_metrics"]

_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOKENS_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class GatewayMetrics:
    """What this gateway counts itself, and collectors over what the stages say."""

    def __init__(self, *, fleet: Fleet, encoder_infos: Callable[[], Mapping[str, EncoderInfo | None]]) -> None:
        # A series with the time of its birth for each counter would double what is scraped.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "mimo_gateway_requests",
            "Requests by route and status, refused ones included; 499: the client left before the end",
            ["route", "status"],
            registry=registry,
        )
        self.inflight = Gauge("mimo_gateway_inflight_requests", "Requests now being answered", registry=registry)
        self.ttft = Histogram(
            "mimo_gateway_ttft_seconds", "Request to first token", registry=registry, buckets=_TTFT_BUCKETS_S
        )
        self.inter_token = Histogram(
            "mimo_gateway_inter_token_seconds",
            "Time between tokens of an answer after its first, as they came from the workers",
            registry=registry,
            buckets=_TOKEN_BUCKETS_S,
        )
        self.duration = Histogram(
            "mimo_gateway_answer_seconds", "Request to last token", registry=registry, buckets=_DURATION_BUCKETS_S
        )
        self.media = Counter("mimo_gateway_media_parts", "Media parts by kind", ["modality"], registry=registry)
        self.media_seconds = Histogram(
            "mimo_gateway_media_seconds",
            "Fetching and encoding all media of a request",
            registry=registry,
            buckets=_TTFT_BUCKETS_S,
        )
        self.retries = Counter("mimo_gateway_retries", "Attempts beyond the first", registry=registry)
        self.disconnects = Counter("mimo_gateway_disconnects", "Clients that left before the end", registry=registry)
        self._tokens = Counter("mimo_gateway_tokens", "Tokens of finished answers by kind", ["kind"], registry=registry)
        self._sizes = Histogram(
            "mimo_gateway_request_tokens",
            "Tokens of one finished request: its prompt, and what was generated for it",
            ["kind"],
            registry=registry,
            buckets=_TOKENS_BUCKETS,
        )
        build = Gauge("mimo_gateway_build_info", "1, with the version that runs", ["version"], registry=registry)
        build.labels(_version()).set(1)
        ProcessCollector(registry=registry)
        registry.register(_Collected(lambda: _fleet_metrics(fleet)))
        registry.register(_Collected(lambda: replica_metrics(encoder_infos())))

    def finished(self, end: AnswerEnd, num_attempts: int) -> None:
        usage = end.usage
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("completion").inc(usage.completion_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("healed").inc(usage.healed_tokens)
        self._tokens.labels("host").inc(usage.host_tokens)
        self._tokens.labels("store").inc(usage.store_tokens)
        self._sizes.labels("prompt").observe(usage.prompt_tokens)
        self._sizes.labels("completion").observe(usage.completion_tokens)
        self.retries.inc(num_attempts - 1)

    def spaced(self, gap_s: float, num_tokens: int) -> None:
        """So many tokens of one answer came together, `gap_s` after those before them."""
        for _ in range(num_tokens):
            self.inter_token.observe(gap_s / num_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _fleet_metrics(fleet: Fleet) -> Iterator[Metric]:
    late = CounterMetricFamily("mimo_gateway_late_messages", "Messages of attempts that were already given up")
    late.add_metric([], fleet.num_late_messages)
    yield late
    for role in fleet.roles:
        yield from role_metrics(f"mimo_{STAGE_OF_ROLE[role]}", fleet.of_role(role))


def _version() -> str:
    try:
        return version("mimo-epd")
    except PackageNotFoundError:
        return "unknown"
