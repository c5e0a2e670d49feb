"""Metrics of the workers, from what each says of itself: texts of everything it counts, and how it is shown.

Names are `mimo_<stage>_<what>_<unit>`; the stage of a worker that does both is `worker`. What only grows is a counter
and ends in `_total`.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from encoder.metrics import PROCESS_TEXTS, UNKNOWN_TEXT, Families, Told, told_families
from epd.router.attempts import Worker
from epd.types import Role, WorkerInfo

STAGE_OF_ROLE = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "worker"}

# What workers count, by the name in `WorkerInfo.counters`; all from the start of the process unless said otherwise.
COUNTER_TEXTS: Mapping[str, Told] = {
    "steps": Told("steps", "Steps of the engine: one pass of the model over everything that is batched"),
    "prompt_tokens": Told("prompt_tokens", "Prompt tokens computed, those found in the cache not counted"),
    "cached_tokens": Told(
        "cached_tokens",
        "Prompt tokens whose KV was found in the cache at an admission, put back requests counted again",
    ),
    "host_hit_tokens": Told("host_hit_tokens", "Of the cached tokens, those whose KV was in the host's memory alone"),
    "store_hit_tokens": Told("store_hit_tokens", "Of the cached tokens, those whose KV was fetched from the store"),
    "short_loads": Told(
        "short_loads", "Admissions where less of the cached KV came than was found; the rest was computed"
    ),
    "failed_loads": Told(
        "failed_loads", "Copies from the host's memory that failed under a request; the KV was computed"
    ),
    "healed_tokens": Told(
        "healed_tokens", "Tokens run again through part of the layers to restore windows that had been evicted"
    ),
    "prefix_hits": Told("prefix_hits", "Admissions that went on from cached KV with whole windows"),
    "healed_hits": Told("healed_hits", "Admissions that went on from cached KV after healing its windows"),
    "prefix_misses": Told("prefix_misses", "Admissions that found nothing to go on from"),
    "refused_heals": Told("refused_heals", "Times a request was to be healed and there was no room for it"),
    "passed_over": Told("passed_over_requests", "Admissions before an earlier request that had no room"),
    "generated_tokens": Told("generated_tokens", "Tokens generated"),
    "drafted_tokens": Told("drafted_tokens", "Guesses of draft heads that were checked"),
    "accepted_tokens": Told("accepted_tokens", "Guesses of draft heads that were right"),
    **{
        f"{result}_tokens_{position}": Told(
            "draft_position_tokens",
            "Guesses of draft heads by their position after the newest token, and what became of them: drafted "
            "(checked), accepted (right)",
            {"position": str(position), "result": result},
        )
        for result in ("drafted", "accepted")
        for position in (1, 2, 3)
    },
    "batched_sequences": Told("batched_sequences", "Sequences of all steps together"),
    "largest_batch": Told("largest_batch_sequences", "Most sequences in one step", is_gauge=True),
    "retractions": Told("retractions", "Times a running request was put back because KV pages were short"),
    "imports": Told("imported_requests", "Requests taken over with the KV of another worker"),
    "finished": Told("finished_requests", "Requests that ended here, failed ones and those handed over included"),
    "failed": Told("failed_requests", "Requests that ended here without an answer"),
    "handoff_bytes": Told("handoff_bytes", "Bytes of KV sent to or received from other workers"),
    "dropped_transfers": Told("dropped_transfers", "KV of other workers that nobody asked for, or that came too late"),
    "dropped_messages": Told("dropped_messages", "Messages that could not be read"),
    "failed_steps": Told("failed_steps", "Steps that ended with an error of the worker"),
    "embedding_bytes": Told(
        "embedding_bytes", "Media embeddings held now for requests that wait or are being computed", is_gauge=True
    ),
    "lookup_tokens": Told("lookup_tokens", "Prompt tokens looked up in the cache"),
    "hit_tokens": Told(
        "hit_tokens", "Of the prompt tokens looked up in the cache, those whose KV and windows were there"
    ),
    "evicted_full_pages": Told("evicted_full_pages", "Pages of full-attention KV evicted from the cache"),
    "evicted_window_pages": Told("evicted_window_pages", "Pages of window KV evicted from the cache"),
    "unstaged_transfers": Told(
        "unstaged_transfers",
        "KV of other workers for which the host tier had no room until its request had a place",
    ),
    "copy_stall_seconds": Told("copy_stall_seconds", "How long computing has waited for KV from the host's memory"),
    "kept_tokens": Told(
        "kept_tokens",
        "Tokens whose full-attention KV the cache keeps now for later requests, those in use not counted",
        is_gauge=True,
    ),
    **PROCESS_TEXTS,
}
# And those that come in several, by a label: tiers, pools, directions, nodes of the store. `_total`: counters.
LABELLED_TEXTS: Mapping[str, str] = {
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
    "expert_imbalance_ratio": "Load of the busiest expert over the mean load, in about the last 50 steps that were "
    "looked at (those with graphs are not): the mean over the layers, and the worst layer",
}
HISTOGRAM_TEXTS: Mapping[str, str] = {
    "step_seconds": "One step of the engine: prefill, decode, mixed, or import of KV alone",
    "step_sequences": "Sequences in one step",
    "step_tokens": "Tokens computed in one step, drafts included",
    "queue_seconds": "A request's arrival at this worker to its place in the batch",
    "prompt_seconds": "From its place in the batch to a request's first token",
    "transfer_seconds": "The end of a prompt at its prefill worker to the arrival of all its KV here",
    "answer_seconds": "A request's first token, or its place in the batch where another worker made that, to its end",
}


def role_metrics(prefix: str, workers: Sequence[Worker]) -> Iterator[Metric]:
    """Of all workers of a stage, one family per name whichever of them tells it."""
    up = GaugeMetricFamily(f"{prefix}_ready", "1 when the worker takes requests", labels=["worker"])
    queue = GaugeMetricFamily(f"{prefix}_queue_requests", "Requests by state", labels=["worker", "state"])
    pages = GaugeMetricFamily(
        f"{prefix}_pool_pages",
        "KV pages by pool and state: free, cached (kept for later requests, evicted when room is short), or leased to "
        "requests under way",
        labels=["worker", "pool", "state"],
    )
    families = Families(prefix, "worker")
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
        _tell(families, info)
    yield from (up, queue, pages, *families)


def _tell(families: Families, info: WorkerInfo) -> None:
    told_families(families, info.worker, info.counters, COUNTER_TEXTS, info.histograms, HISTOGRAM_TEXTS)
    for counter in info.labelled:
        is_gauge = not counter.name.endswith("_total")
        text = LABELLED_TEXTS.get(counter.name, UNKNOWN_TEXT)
        told = Told(counter.name.removesuffix("_total"), text, counter.labels, is_gauge=is_gauge)
        families.add(info.worker, told, counter.value)
