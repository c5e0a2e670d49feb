"""What a worker says of itself: its answer to a gateway's greeting, counters for /metrics included."""

from dataclasses import asdict

from epd.cache.prefix import CacheStats
from epd.engine.identity import WorkerIdentity
from epd.engine.roster import Counters
from epd.types import WorkerInfo


def worker_info(
    identity: WorkerIdentity,
    stats: CacheStats,
    counters: Counters,
    *,
    sequence: int,
    address: str,
    kv_fingerprint: str,
    num_waiting: int,
    num_running: int,
    ready: bool,
    page_size: int,
    others: dict[str, int],
) -> WorkerInfo:
    """`others` are counters that neither scheduler nor cache holds. Their texts are in `epd.gateway.metrics`."""
    told = {name: float(value) for name, value in asdict(counters).items()}
    told |= {name: float(value) for name, value in others.items()}
    told |= {
        "lookup_tokens": float(stats.num_lookup_tokens),
        "hit_tokens": float(stats.num_hit_tokens),
        "evicted_full_pages": float(stats.num_evicted_full_pages),
        "evicted_window_pages": float(stats.num_evicted_window_pages),
        "kept_tokens": float(stats.full.evictable * page_size),
    }
    return WorkerInfo(
        sequence=sequence,
        worker=identity.name,
        incarnation=identity.incarnation,
        role=identity.role,
        address=address,
        model=identity.model,
        max_context_tokens=identity.max_context_tokens,
        eos_token_ids=identity.eos_token_ids,
        num_waiting=num_waiting,
        num_running=num_running,
        full_pages_free=stats.full.free + stats.full.evictable,
        full_pages_total=stats.full.total,
        full_pages_cached=stats.full.evictable,
        window_pages_free=stats.window.free + stats.window.evictable,
        window_pages_total=stats.window.total,
        window_pages_cached=stats.window.evictable,
        ready=ready,
        kv_fingerprint=kv_fingerprint,
        counters=told,
    )
