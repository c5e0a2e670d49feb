"""The KV tiers of a running deployment, as its /metrics tells them: one worker, four places where KV may have been."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from cli.load import ConfigError

__all__ = ["TIERS", "DeploymentSilent", "StoreNodeState", "WorkerTiers", "deployment_tiers", "worker_tiers"]

TIERS = ("l1", "l2", "l3", "healed")
_TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20
# Of a worker's stage, then of what is counted; see `epd.gateway.metrics`.
_NAME = re.compile(r"mimo_(prefill|decode|worker)_(\w+)")


class DeploymentSilent(Exception):
    """No answer, or one that is no metrics; the message says which."""


@dataclass(slots=True)
class StoreNodeState:
    """One node of a worker's store."""

    breaker: str = "unknown"
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    puts: dict[str, int] = field(default_factory=dict)
    """Pages by result: kept, refused (it is full, or they are too large), dropped (too many waited), failed."""


@dataclass(slots=True)
class WorkerTiers:
    """One worker. Tokens and store counters run from its start; pages are those of now, by pool and state."""

    worker: str
    stage: str
    hit_tokens: dict[str, int] = field(default_factory=dict)
    """By tier."""
    prompt_tokens: int = 0
    """Computed: found in no tier."""
    device_pages: dict[str, dict[str, int]] = field(default_factory=dict)
    host_pages: dict[str, dict[str, int]] = field(default_factory=dict)
    """Empty without a host tier."""
    copied_bytes: dict[str, int] = field(default_factory=dict)
    """Between device and host: load, save."""
    store: dict[str, int] = field(default_factory=dict)
    """Pages by what became of them; empty without a store."""
    prefetches: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, StoreNodeState] = field(default_factory=dict)


def deployment_tiers(url: str) -> list[WorkerTiers]:
    """Of the workers behind the gateway at `url`, by stage and name. Raises ConfigError for what is no HTTP URL, and
    DeploymentSilent."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url is {url!r}; allowed: http://HOST:PORT of a gateway")
    place = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(place, timeout=_TIMEOUT_S) as reply:
            text = reply.read(_MAX_BYTES).decode("utf-8")
    except urllib.error.HTTPError as error:
        # It is the answer, too, with its connection.
        error.close()
        raise DeploymentSilent(f"{place} answers with {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DeploymentSilent(f"{place} does not answer: {error.reason}") from error
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise DeploymentSilent(f"{place} does not answer with metrics: {error}") from error
    return worker_tiers(text)


def worker_tiers(text: str) -> list[WorkerTiers]:
    """From what /metrics says. Raises DeploymentSilent for another format."""
    found: dict[tuple[str, str], WorkerTiers] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                named = _NAME.fullmatch(sample.name)
                if named is not None and "worker" in sample.labels:
                    stage, what = named.groups()
                    worker = sample.labels["worker"]
                    tiers = found.setdefault((stage, worker), WorkerTiers(worker, stage))
                    _note(tiers, what, sample.labels, sample.value)
    except ValueError as error:
        raise DeploymentSilent(f"what came is no metrics: {error}") from error
    return [found[key] for key in sorted(found)]


def _note(tiers: WorkerTiers, what: str, labels: Mapping[str, str], value: float) -> None:
    count = round(value)
    match what:
        case "prompt_tokens_total":
            tiers.prompt_tokens = count
        case "cache_hit_tokens_total":
            tiers.hit_tokens[labels["tier"]] = count
        case "pool_pages":
            tiers.device_pages.setdefault(labels["pool"], {})[labels["state"]] = count
        case "host_pool_pages":
            tiers.host_pages.setdefault(labels["pool"], {})[labels["state"]] = count
        case "copied_bytes_total":
            tiers.copied_bytes[labels["direction"]] = count
        case "store_gets_total":
            tiers.store[f"gets_{labels['result']}"] = count
        case "store_puts_total":
            result = labels["result"]
            tiers.store[f"puts_{result}"] = tiers.store.get(f"puts_{result}", 0) + count
            if node := labels.get("node"):
                tiers.nodes.setdefault(node, StoreNodeState()).puts[result] = count
        case "store_bytes_total":
            tiers.store[f"{labels['direction']}_bytes"] = count
        case "store_corrupt_total" | "store_timeouts_total" | "store_failures_total" | "store_queued_pages":
            tiers.store[what.removeprefix("store_").removesuffix("_total")] = count
        case "prefetches_total":
            tiers.prefetches[labels["outcome"]] = count
        case "store_breaker" if count:
            tiers.nodes.setdefault(labels["node"], StoreNodeState()).breaker = labels["state"]
        case "store_node_bytes":
            setattr(tiers.nodes.setdefault(labels["node"], StoreNodeState()), f"{labels['kind']}_bytes", count)
