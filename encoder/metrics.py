"""What the replicas of an encoder say of themselves, as Prometheus metrics: for every process that knows them.

Names are `mimo_encoder_<what>_<unit>`. Loads prometheus_client and nothing heavy.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from encoder.types import EncoderInfo

# What replicas count, by the name in `EncoderInfo.counters`; all from the start of the process unless said otherwise.
COUNTER_TEXTS = {
    "requests": "Requests for embeddings received",
    "hits": "Embeddings answered from the arena",
    "joined": "Requests answered by an encoding that was already under way",
    "encoded": "Media encoded",
    "recalled": "Embeddings brought back from the embedding store instead of encoded",
    "refused": "Requests refused at once: too many wait, or the request cannot be served",
    "failed": "Encodings that ended with an error",
    "cancelled": "Requests taken back by who sent them",
    "deadlines": "Requests whose deadline passed before the answer",
    "leases_reclaimed": "Leases of embeddings taken back from holders that were gone or too slow",
    "batches": "Batches that passed the tower",
    "batch_jobs": "Media and parts of media of all batches together; divided by the batches, the mean batch",
    "tower_passes": "Passes of the tower",
    "packing_refused": "1 when media may not share a pass of the tower on this machine, because bytes would change",
    "prepare_seconds": "Time spent decoding and preparing media, of all threads together",
    "tower_seconds": "Time spent in the tower",
    "decode_stuck": "Decoding threads that do not come back from a medium now",
    "decode_workers_crashed": "Decoding processes lost because they crashed",
    "decode_workers_killed": "Decoding processes lost because something else killed them",
    "decode_workers_out_of_memory": "Decoding processes ended because a medium took too much memory",
    "decode_workers_timed_out": "Decoding processes ended because a medium took too long",
    "decode_workers_abandoned": "Decoding processes ended because nobody waited for their medium any more",
    "decode_workers_recycled": "Decoding processes replaced after their number of media",
    "decode_workers_forked": "Decoding processes begun",
    "decode_workers_nurseries": "Processes begun from which decoding processes are forked",
    "tier_hits": "Embeddings found in the embedding store",
    "tier_misses": "Embeddings that the embedding store did not have",
    "tier_skipped": "Look-ups not made because the embedding store had been failing",
    "tier_written": "Embeddings written to the embedding store",
    "tier_unwritten": "Embeddings not written to the embedding store: it was failing or behind, or they were gone",
    "tier_damaged": "Records in the embedding store that were damaged or of another model, and were removed",
    "tier_errors": "Errors and timeouts of the embedding store",
}
_UNKNOWN_TEXT = "A counter of a replica of another version"


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
    size = GaugeMetricFamily("mimo_encoder_batch_size_jobs", "Mean jobs per batch since the start", labels=["replica"])
    cached = GaugeMetricFamily("mimo_encoder_cache_entries", "Embeddings kept", labels=["arena"])
    space = GaugeMetricFamily("mimo_encoder_arena_bytes", "Shared memory by state", labels=["arena", "state"])
    infos = [info for info in replicas.values() if info is not None]
    for address, info in replicas.items():
        ready.add_metric([address], float(info is not None and info.ready))
    for info in infos:
        queue.add_metric([info.replica], info.num_pending)
        busy.add_metric([info.replica], info.tower_busy_s)
        wedged.add_metric([info.replica], float(info.wedged))
        locked.add_metric([info.replica], info.arena_locked_s)
        num_batches = info.counters.get("batches", 0)
        size.add_metric([info.replica], info.counters.get("batch_jobs", 0) / num_batches if num_batches else 0.0)
    # The encoders of a host share an arena: it is told once, so that sums are right.
    for arena, info in {info.arena: info for info in infos}.items():
        cached.add_metric([arena], info.num_cached)
        space.add_metric([arena, "cached"], info.cached_bytes)
        space.add_metric([arena, "leased"], info.leased_bytes)
        space.add_metric([arena, "total"], info.capacity_bytes)
    yield from (ready, queue, busy, wedged, locked, size, cached, space)
    yield from _counters(infos)


def _counters(infos: list[EncoderInfo]) -> Iterator[Metric]:
    """The replicas' own counters, one family per name whichever of them reports it."""
    families: dict[str, GaugeMetricFamily] = {}
    for info in infos:
        for counter, value in info.counters.items():
            name = f"{counter.removesuffix('_s')}_seconds" if counter.endswith("_s") else counter
            if name not in families:
                # A gauge: the process may restart and count from zero, and some of these are averages.
                families[name] = GaugeMetricFamily(
                    f"mimo_encoder_{name}", COUNTER_TEXTS.get(name, _UNKNOWN_TEXT), labels=["replica"]
                )
            families[name].add_metric([info.replica], value)
    yield from families.values()
