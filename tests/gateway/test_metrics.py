"""What workers say of themselves, as Prometheus text."""

from dataclasses import asdict

from prometheus_client.parser import text_string_to_metric_families

from epd.cache.prefix import CacheStats, PoolStats
from epd.engine.identity import WorkerIdentity
from epd.engine.report import worker_info
from epd.engine.roster import Counters
from epd.gateway.metrics import COUNTER_TEXTS, GatewayMetrics
from epd.router.workers import Fleet
from epd.transport.memory import MemoryNetwork
from epd.types import Role, WorkerInfo

OTHERS = dict.fromkeys(("handoff_bytes", "dropped_transfers", "dropped_messages", "failed_steps", "embedding_bytes"), 2)


def told() -> WorkerInfo:
    identity = WorkerIdentity(
        name="w", role=Role.BOTH, model="m", max_context_tokens=100, eos_token_ids=(), incarnation="i"
    )
    stats = CacheStats(
        full=PoolStats(total=20, free=5, evictable=12, leased=3),
        window=PoolStats(total=10, free=1, evictable=2, leased=7),
        num_nodes=1,
        num_sequences=1,
        num_lookup_tokens=100,
        num_hit_tokens=60,
        num_full_only_hit_tokens=0,
        num_evicted_full_pages=8,
        num_evicted_window_pages=9,
    )
    return worker_info(
        identity,
        stats,
        Counters(steps=4),
        sequence=1,
        address="a",
        kv_fingerprint="k",
        num_waiting=0,
        num_running=1,
        ready=True,
        page_size=16,
        others=OTHERS,
    )


def test_pages_by_state_evictions_and_a_text_for_every_counter() -> None:
    network = MemoryNetwork()
    fleet = Fleet(prefill=[network.channel("a")], decode=[], heartbeat_s=1.0, timeout_s=1.0, clock=lambda: 0.0)
    fleet.workers[0].info = told()
    text = GatewayMetrics(fleet=fleet, encoder_infos=dict).text().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    pages = {
        (sample.labels["pool"], sample.labels["state"]): sample.value
        for sample in families["mimo_worker_pool_pages"].samples
    }
    assert pages == {
        ("full", "free"): 5,
        ("full", "cached"): 12,
        ("full", "leased"): 3,
        ("window", "free"): 1,
        ("window", "cached"): 2,
        ("window", "leased"): 7,
    }
    for name, value in (("evicted_full_pages", 8), ("evicted_window_pages", 9), ("kept_tokens", 192), ("steps", 4)):
        assert [sample.value for sample in families[f"mimo_worker_{name}"].samples] == [value]
    names = asdict(Counters()).keys() | told().counters.keys()
    assert names == COUNTER_TEXTS.keys()
    for name in names:
        assert families[f"mimo_worker_{name}"].documentation == COUNTER_TEXTS[name]
