"""Prometheus metrics of one gateway, in a registry of its own. Workers and encoders are read when they are scraped.

Names are `mimo_<stage>_<what>_<unit>`; the stage of a worker that does both is `worker`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from encoder.metrics import replica_metrics
from encoder.types import EncoderInfo
from epd.gateway.reply import AnswerEnd
from epd.router.attempts import Worker
from epd.router.workers import Fleet
from epd.types import Role, WorkerInfo

STAGE_OF_ROLE = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "worker"}
_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# What workers count, by the name in `WorkerInfo.counters`; all from the start of the process unless said otherwise.
COUNTER_TEXTS = {
    "steps": "Steps of the engine: one pass of the model over everything that is batched",
    "prompt_tokens": "Prompt tokens computed, those found in the cache not counted",
    "cached_tokens": "Prompt tokens whose KV was found in the cache at an admission, put back requests counted again",
    "host_hit_tokens": "Of the cached tokens, those whose KV was in the host's memory alone",
    "store_hit_tokens": "Of the cached tokens, those whose KV was fetched from the store",
    "short_loads": "Admissions where less of the cached KV came than was found; the rest was computed",
    "failed_loads": "Copies from the host's memory that failed under a request; the KV was computed",
    "healed_tokens": "Tokens run again through part of the layers to restore windows that had been evicted",
    "prefix_hits": "Admissions that went on from cached KV with whole windows",
    "healed_hits": "Admissions that went on from cached KV after healing its windows",
    "prefix_misses": "Admissions that found nothing to go on from",
    "refused_heals": "Times a request was to be healed and there was no room for it",
    "passed_over": "Admissions before an earlier request that had no room",
    "generated_tokens": "Tokens generated",
    "drafted_tokens": "Guesses of draft heads that were checked",
    "accepted_tokens": "Guesses of draft heads that were right",
    "drafted_tokens_1": "First guesses after a newest token that were checked",
    "drafted_tokens_2": "Second guesses after a newest token that were checked",
    "drafted_tokens_3": "Third guesses after a newest token that were checked",
    "accepted_tokens_1": "First guesses after a newest token that were right",
    "accepted_tokens_2": "Second guesses after a newest token that were right",
    "accepted_tokens_3": "Third guesses after a newest token that were right",
    "batched_sequences": "Sequences of all steps together; divided by the steps, the mean batch",
    "largest_batch": "Most sequences in one step",
    "retractions": "Times a running request was put back because KV pages were short",
    "imports": "Requests taken over with the KV of another worker",
    "finished": "Requests that ended here, failed ones and those handed over included",
    "failed": "Requests that ended here without an answer",
    "handoff_bytes": "Bytes of KV sent to or received from other workers",
    "dropped_transfers": "KV of other workers that nobody asked for, or that came too late",
    "dropped_messages": "Messages that could not be read",
    "failed_steps": "Steps that ended with an error of the worker",
    "embedding_bytes": "Media embeddings held now for requests that wait or are being computed",
    "lookup_tokens": "Prompt tokens looked up in the cache",
    "hit_tokens": "Of the prompt tokens looked up in the cache, those whose KV and windows were there",
    "evicted_full_pages": "Pages of full-attention KV evicted from the cache",
    "evicted_window_pages": "Pages of window KV evicted from the cache",
    "unstaged_transfers": "KV of other workers for which the host tier had no room until its request had a place",
    "copy_stall_seconds": "How long computing has waited for KV from the host's memory",
    "kept_tokens": "Tokens whose full-attention KV the cache keeps now for later requests, those in use not counted",
}
# And those that come in several, by a label: tiers, pools, directions, nodes of the store.
LABELLED_TEXTS = {
    "cache_hit_tokens_total": "Prompt tokens at admissions by where the full pages of their KV were: device (l1), host "
    "memory (l2), store (l3: fetched for this request, alone or with others); and those run again through part of the "
    "layers (healed). Windows are not counted, nor is what a request fetched that did not get that far",
    "host_pool_pages": "Pages of the host tier by pool and state: free, filling (a copy or the store writes them), "
    "pinned (somebody reads them), evictable, doomed (condemned while in use)",
    "host_evicted_pages_total": "Pages evicted from the host tier",
    "copies_total": "Copies between device and host: load, to the device; save, to the host",
    "failed_copies_total": "Copies between device and host that failed; what they were to bring was computed",
    "copied_pages_total": "Pages copied between device and host",
    "copied_bytes_total": "Bytes copied between device and host",
    "unsaved_pages_total": "Pages that were to be copied to the host and found all of it in use",
    "rescued_pages_total": "Pages copied to the host on their way out of the device",
    "store_gets_total": "Pages asked of the store by result",
    "store_puts_total": "Pages for the store by node and result: kept, refused (the node is full, or they are too "
    "large for it), dropped (too many waited for it), failed (the node failed, was left alone or took too long)",
    "store_bytes_total": "Bytes read from and written to the store",
    "store_corrupt_total": "Pages from the store that were not what was put, by their checksums; counted when they "
    "are read, and not for a request that has stopped waiting",
    "store_timeouts_total": "Calls of the store that took too long",
    "store_failures_total": "Calls that a node of the store could not do",
    "store_seconds_total": "Time in calls of the store, by kind of call",
    "store_breaker": "1 for the state each node's breaker is in: closed (in use), open (left alone), half_open (tried)",
    "store_node_bytes": "What a node of the store holds and may hold",
    "store_queued_pages": "Pages that wait to be written to the store now",
    "prefetches_total": "Prefetches of requests by outcome: hit (all came), partial, miss (nothing there), timeout, "
    "no_room (in the host tier), aborted",
    "prefetched_pages_total": "Full pages fetched from the store for requests",
    "keepalive_touches_total": "Pages of the store touched since they are in use above it",
}
_UNKNOWN_TEXT = "A counter of a worker of another version"


class GatewayMetrics:
    """What this gateway counts itself, and collectors over what the stages say."""

    def __init__(self, *, fleet: Fleet, encoder_infos: Callable[[], Mapping[str, EncoderInfo | None]]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "mimo_gateway_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self.inflight = Gauge(
            "mimo_gateway_inflight_requests", "Chat completions now being answered", registry=registry
        )
        self.ttft = Histogram(
            "mimo_gateway_ttft_seconds", "Request to first token", registry=registry, buckets=_TTFT_BUCKETS_S
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
        self.retries.inc(num_attempts - 1)

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
        workers = fleet.of_role(role)
        yield from role_metrics(f"mimo_{STAGE_OF_ROLE[role]}", workers)


def role_metrics(prefix: str, workers: Sequence[Worker]) -> Iterator[Metric]:
    """What the workers of one stage say."""
    up = GaugeMetricFamily(f"{prefix}_ready", "1 when the worker takes requests", labels=["worker"])
    queue = GaugeMetricFamily(f"{prefix}_queue_requests", "Requests by state", labels=["worker", "state"])
    pages = GaugeMetricFamily(
        f"{prefix}_pool_pages",
        "KV pages by pool and state: free, cached (kept for later requests, evicted when room is short), or leased to "
        "requests under way",
        labels=["worker", "pool", "state"],
    )
    for worker in workers:
        info = worker.info
        name = worker.address if info is None else info.worker
        up.add_metric([name], float(worker.ready))
        if info is None:
            continue
        queue.add_metric([name, "waiting"], info.num_waiting)
        queue.add_metric([name, "running"], info.num_running)
        for pool, free, cached, total in (
            ("full", info.full_pages_free, info.full_pages_cached, info.full_pages_total),
            ("window", info.window_pages_free, info.window_pages_cached, info.window_pages_total),
        ):
            pages.add_metric([name, pool, "free"], free - cached)
            pages.add_metric([name, pool, "cached"], cached)
            pages.add_metric([name, pool, "leased"], total - free)
    yield from (up, queue, pages)
    yield from _counters(prefix, [worker.info for worker in workers if worker.info])


def _counters(prefix: str, infos: Sequence[WorkerInfo]) -> Iterator[Metric]:
    """The stage's own counters, one family per name whatever processes report it."""
    families: dict[str, GaugeMetricFamily] = {}
    by_label: dict[str, GaugeMetricFamily] = {}
    for info in infos:
        for name, value in info.counters.items():
            if name not in families:
                # A gauge: the process may restart and count from zero, and some of these are averages.
                families[name] = GaugeMetricFamily(
                    f"{prefix}_{name}", COUNTER_TEXTS.get(name, _UNKNOWN_TEXT), labels=["worker"]
                )
            families[name].add_metric([info.worker], value)
        for counter in info.labelled:
            labels = sorted(counter.labels)
            family = by_label.get(counter.name)
            if family is None:
                text = LABELLED_TEXTS.get(counter.name, _UNKNOWN_TEXT)
                family = GaugeMetricFamily(f"{prefix}_{counter.name}", text, labels=["worker", *labels])
                by_label[counter.name] = family
            family.add_metric([info.worker, *(counter.labels[label] for label in labels)], counter.value)
    yield from (*families.values(), *by_label.values())
