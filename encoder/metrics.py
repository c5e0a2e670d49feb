"""What the replicas of an encoder say of themselves, as Prometheus metrics: for every process that knows them.

Names are `mimo_encoder_<what>_<unit>`. Loads prometheus_client and nothing heavy.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from encoder.types import EncoderInfo


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
                    f"mimo_encoder_{name}", f"{counter} as the process reports it", labels=["replica"]
                )
            families[name].add_metric([info.replica], value)
    yield from families.values()
