"""What a worker says of itself: its answer to a gateway's greeting, counters for /metrics included."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from encoder.footprint import footprint
from encoder.types import HistogramCounts
from epd.cache.l3.base import StoreStats
from epd.cache.prefix import CacheStats
from epd.cache.tiers.bridge import BridgeStats
from epd.cache.tiers.host import HostStats
from epd.engine.identity import WorkerIdentity
from epd.engine.roster import Counters
from epd.kv.copies import MoverStats
from epd.types import LabelledCounter, WorkerInfo

# What a prefetch may come to; see `epd.cache.tiers.prefetch`.
_OUTCOMES = ("hit", "partial", "miss", "timeout", "no_room", "aborted")
_HOST_STATES = ("free", "filling", "pinned", "evictable", "doomed")
_BREAKERS = ("closed", "half_open", "open")


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
    copies: MoverStats | None = None,
    bridge: BridgeStats | None = None,
    histograms: tuple[HistogramCounts, ...] = (),
    balance: tuple[LabelledCounter, ...] = (),
) -> WorkerInfo:
    """`others` are counters that neither scheduler nor cache holds. `copies` are those of a host tier, `bridge` is what
    goes to and from a store. The texts of all counters are in `epd.gateway.metrics`."""
    told = {name: float(value) for name, value in asdict(counters).items()}
    told |= {name: float(value) for name, value in others.items()}
    told |= footprint()
    told |= {
        "lookup_tokens": float(stats.num_lookup_tokens),
        "hit_tokens": float(stats.num_hit_tokens),
        "evicted_full_pages": float(stats.num_evicted_full_pages),
        "evicted_window_pages": float(stats.num_evicted_window_pages),
        "kept_tokens": float(stats.full.evictable * page_size),
    }
    labelled = [*_hits(counters), *balance]
    if stats.host is not None:
        labelled += _host(stats.host)
    if copies is not None:
        labelled += _copies(copies)
        told["copy_stall_seconds"] = copies.stalled_s
    if stats.store is not None:
        labelled += _store(stats.store, {} if bridge is None else bridge.dropped)
    if bridge is not None:
        labelled += _bridge(bridge)
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
        labelled=tuple(labelled),
        histograms=histograms,
    )


def _labelled(name: str, value: float, **labels: str) -> LabelledCounter:
    return LabelledCounter(name=name, labels=labels, value=float(value))


def _hits(counters: Counters) -> Iterator[LabelledCounter]:
    by_tier = {
        "l1": counters.cached_tokens - counters.host_hit_tokens - counters.store_hit_tokens,
        "l2": counters.host_hit_tokens,
        "l3": counters.store_hit_tokens,
        "healed": counters.healed_tokens,
    }
    for tier, value in by_tier.items():
        yield _labelled("cache_hit_tokens_total", value, tier=tier)


def _host(host: HostStats) -> Iterator[LabelledCounter]:
    for pool, stats in (("full", host.full), ("window", host.window)):
        for state in _HOST_STATES:
            yield _labelled("host_pool_pages", getattr(stats, state), pool=pool, state=state)
        yield _labelled("host_evicted_pages_total", stats.num_evicted, pool=pool)
    for direction, num_copies, num_failed in (
        ("load", host.num_loads, host.num_failed_loads),
        ("save", host.num_saves, host.num_failed_saves),
    ):
        yield _labelled("copies_total", num_copies, direction=direction)
        yield _labelled("failed_copies_total", num_failed, direction=direction)
    for direction, pool, num_pages in (
        ("load", "full", host.num_loaded_full_pages),
        ("load", "window", host.num_loaded_window_pages),
        ("save", "full", host.num_saved_full_pages),
        ("save", "window", host.num_saved_window_pages),
    ):
        yield _labelled("copied_pages_total", num_pages, direction=direction, pool=pool)
    yield _labelled("unsaved_pages_total", host.num_unsaved_pages)
    yield _labelled("rescued_pages_total", host.num_rescued_pages)


def _copies(copies: MoverStats) -> Iterator[LabelledCounter]:
    yield _labelled("copied_bytes_total", copies.loaded_bytes, direction="load")
    yield _labelled("copied_bytes_total", copies.saved_bytes, direction="save")


def _store(store: StoreStats, unsent: Mapping[str, int]) -> Iterator[LabelledCounter]:
    for result, num_pages in (("hit", store.hits), ("miss", store.misses)):
        yield _labelled("store_gets_total", num_pages, result=result)
    yield _labelled("store_bytes_total", store.get_bytes, direction="get")
    yield _labelled("store_bytes_total", store.put_bytes, direction="put")
    yield _labelled("store_corrupt_total", store.corrupt)
    yield _labelled("store_timeouts_total", store.timeouts)
    yield _labelled("store_failures_total", store.failures)
    for call, seconds in sorted(store.seconds.items()):
        yield _labelled("store_seconds_total", seconds, call=call)
    yield from _puts(store, unsent)
    for node in store.nodes:
        for state in _BREAKERS:
            yield _labelled("store_breaker", node.breaker == state, node=node.name, state=state)
        for kind, size_bytes in (("used", node.usage.used_bytes), ("capacity", node.usage.capacity_bytes)):
            if size_bytes is not None:
                yield _labelled("store_node_bytes", size_bytes, node=node.name, kind=kind)


def _puts(store: StoreStats, unsent: Mapping[str, int]) -> Iterator[LabelledCounter]:
    """By node, and without a name for what came while none worked. `unsent` are pages that never came to the store."""
    kept, unkept = store.puts, store.unkept
    nodes = [(node.name, node.counters) for node in store.nodes]
    for _, counters in nodes:
        kept, unkept = kept - counters.get("kept", 0), unkept - counters.get("unkept", 0)
    for name, counters in (*nodes, ("", {"kept": max(0, kept), "unkept": max(0, unkept)})):
        refused, dropped = counters.get("refused", 0), counters.get("dropped", 0)
        results = {
            "kept": counters.get("kept", 0),
            "refused": refused,
            "dropped": dropped + unsent.get(name, 0),
            # Counted a moment before the call ends, so that there may seem to be fewer than none.
            "failed": max(0, counters.get("unkept", 0) - refused - dropped),
        }
        if name or any(results.values()):
            for result, num_pages in results.items():
                yield _labelled("store_puts_total", num_pages, node=name, result=result)


def _bridge(bridge: BridgeStats) -> Iterator[LabelledCounter]:
    for outcome in _OUTCOMES:
        yield _labelled("prefetches_total", bridge.prefetch.get(outcome, 0), outcome=outcome)
    yield _labelled("prefetched_pages_total", bridge.prefetch.get("fetched_pages", 0))
    yield _labelled("store_queued_pages", bridge.num_queued_pages)
    yield _labelled("keepalive_touches_total", bridge.keepalive.get("touches", 0))
