"""What processes say of themselves, as Prometheus metrics: how it becomes families, and the texts of the replicas'.

Names are `mimo_<stage>_<what>_<unit>`, here `mimo_encoder_<what>_<unit>`; what only grows is a counter and ends in
`_total`. Loads prometheus_client and nothing heavy.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from encoder.types import EncoderInfo, HistogramCounts


@dataclass(frozen=True, slots=True)
class Told:
    """A number that a process tells, as a metric: its name without prefix and `_total`, and what it means.

    `labels` are for numbers that are told under several names and shown under one. A gauge may fall.
    """

    name: str
    text: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_gauge: bool = False


PROCESS_TEXTS: Mapping[str, Told] = {
    "process_resident_bytes": Told(
        "process_resident_bytes", "Memory of the process, shared memory included", is_gauge=True
    ),
    "process_open_files": Told("process_open_files", "Open files and sockets of the process", is_gauge=True),
    "process_cpu_seconds": Told("process_cpu_seconds", "Processor time of the process"),
    "process_start_unix_seconds": Told(
        "process_start_unix_seconds", "When the process was started, since the epoch", is_gauge=True
    ),
}
# What replicas count, by the name in `EncoderInfo.counters`; all from the start of the process unless said otherwise.
COUNTER_TEXTS: Mapping[str, Told] = {
    "requests": Told("requests", "Requests for embeddings received"),
    "hits": Told("hits", "Embeddings answered from the arena"),
    "joined": Told("joined_requests", "Requests answered by an encoding that was already under way"),
    "encoded": Told("encoded_media", "Media encoded"),
    "recalled": Told("recalled_media", "Embeddings brought back from the embedding store instead of encoded"),
    "refused": Told("refused_requests", "Requests refused at once: too many wait, or the request cannot be served"),
    "failed": Told("failed_media", "Encodings that ended with an error"),
    "cancelled": Told("cancelled_requests", "Requests taken back by who sent them"),
    "deadlines": Told("late_requests", "Requests whose deadline passed before the answer"),
    "leases_reclaimed": Told(
        "reclaimed_leases", "Leases of embeddings taken back from holders that were gone or too slow"
    ),
    "batches": Told("batches", "Batches that passed the tower"),
    "batch_jobs": Told("batched_jobs", "Media and parts of media of all batches together"),
    "tower_passes": Told("tower_passes", "Passes of the tower"),
    "packing_refused": Told(
        "packing_refused",
        "1 when media may not share a pass of the tower on this machine, because bytes would change",
        is_gauge=True,
    ),
    "prepare_s": Told("prepare_seconds", "Time spent decoding and preparing media, of all threads together"),
    "tower_s": Told("tower_seconds", "Time spent in the tower"),
    "decode_stuck": Told(
        "decode_stuck_threads", "Decoding threads that do not come back from a medium now", is_gauge=True
    ),
    **{
        f"decode_workers_{fate}": Told("decode_worker_ends", "Decoding processes lost or ended, by why", {"why": fate})
        for fate in ("crashed", "killed", "out_of_memory", "timed_out", "abandoned", "recycled")
    },
    "decode_workers_forked": Told("decode_worker_starts", "Decoding processes begun"),
    "decode_workers_nurseries": Told(
        "decode_nursery_starts", "Processes begun from which decoding processes are forked"
    ),
    "tier_hits": Told("store_hits", "Embeddings found in the embedding store"),
    "tier_misses": Told("store_misses", "Embeddings that the embedding store did not have"),
    "tier_skipped": Told("store_skipped_reads", "Look-ups not made because the embedding store had been failing"),
    "tier_written": Told("store_written_media", "Embeddings written to the embedding store"),
    "tier_unwritten": Told(
        "store_unwritten_media",
        "Embeddings not written to the embedding store: it was failing or behind, or they were gone",
    ),
    "tier_damaged": Told(
        "store_damaged_records",
        "Records in the embedding store that were damaged or of another model, and were removed",
    ),
    "tier_errors": Told("store_errors", "Errors and timeouts of the embedding store"),
    **{
        f"tokens_{modality}": Told("tokens", "Embedding rows made by the towers", {"modality": modality})
        for modality in ("image", "video", "audio")
    },
    **PROCESS_TEXTS,
}
HISTOGRAM_TEXTS: Mapping[str, str] = {
    "request_seconds": "A request's arrival to its reply; cached: the rows were there",
    "queue_seconds": "A request's arrival to its preparation, and all later waits but that for a batch",
    "step_seconds": "One medium in one step: prepare (decode, resize), batch_wait, tower",
    "batch_size_jobs": "Media and parts of media in one batch, by kind of tower",
    "batch_seconds": "One batch in the tower",
}
UNKNOWN_TEXT = "A number of a process of another version"


class Families:
    """Metric families of one prefix, each made when its first sample comes."""

    def __init__(self, prefix: str, owner: str) -> None:
        """`owner` is the label that names the process."""
        self._prefix = prefix
        self._owner = owner
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}

    def add(self, who: str, told: Told, value: float, labels: Mapping[str, str] | None = None) -> None:
        """A sample. `labels` come after those of `told`; the same names in every sample of a name."""
        given = {**told.labels, **(labels or {})}
        family = self._families.get(told.name)
        if family is None:
            kind = GaugeMetricFamily if told.is_gauge else CounterMetricFamily
            family = kind(f"{self._prefix}_{told.name}", told.text, labels=[self._owner, *sorted(given)])
            self._families[told.name] = family
        family.add_metric([who, *(given[name] for name in sorted(given))], value)

    def add_histogram(self, who: str, counts: HistogramCounts, text: str) -> None:
        family = self._histograms.get(counts.name)
        names = sorted(counts.labels)
        if family is None:
            family = HistogramMetricFamily(f"{self._prefix}_{counts.name}", text, labels=[self._owner, *names])
            self._histograms[counts.name] = family
        buckets, below = [], 0
        for bound, count in zip((*counts.bounds, float("inf")), counts.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(below)))
        family.add_metric([who, *(counts.labels[name] for name in names)], buckets, counts.total)

    def __iter__(self) -> Iterator[Metric]:
        yield from self._families.values()
        yield from self._histograms.values()


def told_families(
    families: Families,
    who: str,
    counters: Mapping[str, float],
    texts: Mapping[str, Told],
    histograms: Iterable[HistogramCounts],
    histogram_texts: Mapping[str, str],
) -> None:
    """Add what one process tells. What nobody here knows is shown as it came, as a gauge."""
    for name, value in counters.items():
        families.add(who, texts.get(name) or Told(name, UNKNOWN_TEXT, is_gauge=True), value)
    for counts in histograms:
        families.add_histogram(who, counts, histogram_texts.get(counts.name, UNKNOWN_TEXT))


def replica_metrics(replicas: Mapping[str, EncoderInfo | None]) -> Iterator[Metric]:
    """Of the replicas by address; None for one that is not up."""
    ready = GaugeMetricFamily("mimo_encoder_ready", "1 when the replica takes media", labels=["address"])
    queue = GaugeMetricFamily("mimo_encoder_queue_jobs", "Jobs admitted and not answered", labels=["replica"])
    busy = GaugeMetricFamily(
        "mimo_encoder_tower_busy_seconds", "How long the batch in the tower has been there", labels=["replica"]
    )
    wedged = GaugeMetricFamily("mimo_encoder_wedged", "1 when the tower is stuck", labels=["replica"])
    locked = GaugeMetricFamily(
        "mimo_encoder_arena_locked_seconds",
        "How long another process has kept the replica's arena locked",
        labels=["replica"],
    )
    cached = GaugeMetricFamily("mimo_encoder_cache_entries", "Embeddings kept", labels=["arena"])
    space = GaugeMetricFamily("mimo_encoder_arena_bytes", "Shared memory by state", labels=["arena", "state"])
    families = Families("mimo_encoder", "replica")
    infos = [info for info in replicas.values() if info is not None]
    for address, info in replicas.items():
        ready.add_metric([address], float(info is not None and info.ready))
    for info in infos:
        queue.add_metric([info.replica], info.num_pending)
        busy.add_metric([info.replica], info.tower_busy_s)
        wedged.add_metric([info.replica], float(info.wedged))
        locked.add_metric([info.replica], info.arena_locked_s)
        told_families(families, info.replica, info.counters, COUNTER_TEXTS, info.histograms, HISTOGRAM_TEXTS)
    # The encoders of a host share an arena: it is told once, so that sums are right.
    for arena, info in {info.arena: info for info in infos}.items():
        cached.add_metric([arena], info.num_cached)
        space.add_metric([arena, "cached"], info.cached_bytes - info.leased_bytes)
        space.add_metric([arena, "leased"], info.leased_bytes)
        space.add_metric([arena, "free"], info.capacity_bytes - info.cached_bytes)
    yield from (ready, queue, busy, wedged, locked, cached, space, *families)
