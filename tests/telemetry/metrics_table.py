"""The table of all metrics in docs/observability.md, from what the code knows of each.

python -m tests.telemetry.metrics_table     prints it
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from encoder.front.metrics import FrontMetrics
from encoder.metrics import COUNTER_TEXTS, HISTOGRAM_TEXTS
from encoder.types import EncoderInfo, HistogramCounts
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.metrics_library import LibraryMetrics
from epd.gateway.metrics_workers import COUNTER_TEXTS as WORKER_COUNTERS
from epd.gateway.metrics_workers import HISTOGRAM_TEXTS as WORKER_HISTOGRAMS
from epd.gateway.metrics_workers import LABELLED_TEXTS as WORKER_LABELLED
from epd.router.workers import Fleet
from epd.transport.memory import MemoryNetwork
from epd.types import LabelledCounter, Role, WorkerInfo

# What the labels of numbers with several are; the code makes them where it counts.
_LABELS = {
    "cache_hit_tokens_total": ("tier",),
    "host_pool_pages": ("pool", "state"),
    "host_evicted_pages_total": ("pool",),
    "copies_total": ("direction",),
    "failed_copies_total": ("direction",),
    "copied_pages_total": ("direction", "pool"),
    "copied_bytes_total": ("direction",),
    "store_gets_total": ("result",),
    "store_puts_total": ("node", "result"),
    "store_bytes_total": ("direction",),
    "store_seconds_total": ("call",),
    "store_breaker": ("node", "state"),
    "store_node_bytes": ("kind", "node"),
    "prefetches_total": ("outcome",),
    "expert_imbalance_ratio": ("layers",),
    "step_seconds": ("kind",),
}
_ENCODER_LABELS = {
    "request_seconds": ("cached",),
    "step_seconds": ("step",),
    "batch_size_jobs": ("lane",),
    "batch_seconds": ("lane",),
}


@dataclass(frozen=True, order=True)
class Row:
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def rows() -> list[Row]:
    """Every metric of a gateway with one worker, one encoder, and of an encoder's own front."""
    network = MemoryNetwork()
    fleet = Fleet(prefill=[network.channel("a")], decode=[], heartbeat_s=1.0, timeout_s=1.0, clock=lambda: 0.0)
    fleet.workers[0].info = _worker()
    gateway = GatewayMetrics(fleet=fleet, encoder_infos=lambda: {"a": _encoder()})
    gateway.registry.register(LibraryMetrics(_libraries()))
    front = FrontMetrics(infos=dict)
    found = {row.name: row for row in _rows(gateway.text().decode())}
    found |= {row.name: row for row in _rows(front.text().decode()) if row.name not in found}
    declared = {"mimo_gateway_requests_total": ("route", "status"), "mimo_gateway_media_parts_total": ("modality",)}
    declared |= {"mimo_gateway_tokens_total": ("kind",), "mimo_gateway_request_tokens": ("kind",)}
    declared |= {"mimo_encoder_http_requests_total": ("route", "status")}
    declared |= {"mimo_encoder_media_total": ("modality", "outcome")}
    return sorted(
        Row(row.name, row.kind, declared.get(row.name, row.labels), row.text)
        for row in found.values()
        if row.name.startswith("mimo_")
    )


def table() -> str:
    """Markdown, by stage; of a worker's names the prefix is left to the reader."""
    sections = {"mimo_gateway_": "Gateway", "mimo_worker_": "Prefill and decode", "mimo_encoder_": "Encoder"}
    lines = []
    for prefix, title in sections.items():
        shown = prefix.replace("worker", "STAGE")
        lines += [f"### {title}: `{shown}...`", "", "| name | type | labels | |", "|---|---|---|---|"]
        for row in rows():
            if row.name.startswith(prefix):
                labels = ", ".join(row.labels)
                name, text = row.name.removeprefix(prefix), row.text.replace("|", "\\|")
                lines.append(f"| `{name}` | {row.kind} | {labels} | {text} |")
        lines.append("")
    return "\n".join(lines).strip()


def _rows(text: str) -> Iterator[Row]:
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        yield Row(name, family.type, tuple(sorted(labels)), re.sub(r"\s+", " ", family.documentation))


def _libraries() -> Any:
    """As `epd.gateway.library.Libraries` is counted."""
    shelf = SimpleNamespace(size_bytes=1, num_names=1, num_hits=1, num_misses=1, num_evicted=1)
    return SimpleNamespace(shelf=shelf, files=SimpleNamespace(usage=lambda: (1, 1)))


def _histogram(name: str, labels: tuple[str, ...]) -> HistogramCounts:
    return HistogramCounts(name=name, bounds=(1.0,), counts=(1, 0), total=1.0, labels=dict.fromkeys(labels, "x"))


def _worker() -> WorkerInfo:
    return WorkerInfo(
        sequence=1,
        worker="w",
        incarnation="i",
        role=Role.BOTH,
        address="a",
        model="m",
        max_context_tokens=1,
        eos_token_ids=(),
        num_waiting=0,
        num_running=0,
        full_pages_free=1,
        full_pages_total=1,
        window_pages_free=1,
        window_pages_total=1,
        ready=True,
        counters=dict.fromkeys(WORKER_COUNTERS, 1.0),
        labelled=tuple(
            LabelledCounter(name=name, labels=dict.fromkeys(_LABELS.get(name, ()), "x"), value=1.0)
            for name in WORKER_LABELLED
        ),
        histograms=tuple(_histogram(name, _LABELS.get(name, ())) for name in WORKER_HISTOGRAMS),
    )


def _encoder() -> EncoderInfo:
    return EncoderInfo(
        sequence=1,
        replica="e",
        incarnation="i",
        fingerprint="f",
        width=1,
        dtype="float32",
        modalities=(),
        num_pending=0,
        num_cached=0,
        cached_bytes=0,
        capacity_bytes=1,
        leased_bytes=0,
        ready=True,
        counters=dict.fromkeys(COUNTER_TEXTS, 1.0),
        histograms=tuple(_histogram(name, _ENCODER_LABELS.get(name, ())) for name in HISTOGRAM_TEXTS),
    )


if __name__ == "__main__":
    print(table())
