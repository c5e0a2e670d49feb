"""What workers say of themselves, as Prometheus text."""

from dataclasses import asdict

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from epd.cache.l3.base import NodeStats, NodeUsage, StoreStats
from epd.cache.prefix import CacheStats, PoolStats
from epd.cache.tiers.bridge import BridgeStats
from epd.cache.tiers.host import HostPoolStats, HostStats
from epd.engine.identity import WorkerIdentity
from epd.engine.measures import Measures
from epd.engine.plan import PageTable, SequenceStep, StepPlan
from epd.engine.report import worker_info
from epd.engine.roster import Counters
from epd.engine.sampler import SampleRow
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.metrics_workers import COUNTER_TEXTS, HISTOGRAM_TEXTS, LABELLED_TEXTS
from epd.kv.copies import MoverStats
from epd.router.workers import Fleet
from epd.transport.memory import MemoryNetwork
from epd.types import LabelledCounter, Role, SamplingParams, WorkerInfo

OTHERS = dict.fromkeys(
    (
        "handoff_bytes",
        "unstaged_transfers",
        "dropped_transfers",
        "dropped_messages",
        "failed_steps",
        "embedding_bytes",
    ),
    2,
)
HOST_POOL = HostPoolStats(total=15, free=1, filling=2, pinned=3, evictable=4, doomed=5, num_evicted=6)


def step(num_tokens: int, *, stop: int | None = None) -> SequenceStep:
    """A decode step, or a chunk inside a prompt that ends at `stop`."""
    sample = SampleRow(SamplingParams(max_tokens=1), 0) if stop is None else None
    pages = PageTable((), (), 0)
    return SequenceStep(request_id=str(stop), start=0, token_ids=(1,) * num_tokens, pages=pages, sample=sample)


def told() -> WorkerInfo:
    measures = Measures()
    measures.stepped(StepPlan(steps=(step(1), step(40, stop=64))), 0.015)
    measures.stepped(StepPlan(), 7.0)
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
        host=HostStats(
            full=HOST_POOL,
            window=HOST_POOL,
            num_hit_tokens=10,
            num_loads=11,
            num_loaded_full_pages=12,
            num_loaded_window_pages=13,
            num_local_window_pages=14,
            num_failed_loads=15,
            num_saves=16,
            num_saved_full_pages=17,
            num_saved_window_pages=18,
            num_failed_saves=19,
            num_unsaved_pages=20,
            num_rescued_pages=21,
            num_pending_copies=22,
        ),
        store=StoreStats(
            hits=31,
            misses=32,
            puts=33,
            unkept=107,
            dropped=35,
            corrupt=36,
            timeouts=37,
            failures=38,
            get_bytes=39,
            put_bytes=40,
            seconds={"get": 1.5},
            nodes=(
                NodeStats(
                    "n:1",
                    "half_open",
                    0,
                    NodeUsage(used_bytes=41),
                    {"kept": 33, "unkept": 100, "refused": 34, "dropped": 35},
                ),
            ),
        ),
    )
    return worker_info(
        identity,
        stats,
        Counters(
            steps=4,
            cached_tokens=100,
            host_hit_tokens=30,
            store_hit_tokens=20,
            healed_tokens=7,
            drafted_tokens_2=9,
            accepted_tokens_2=6,
        ),
        sequence=1,
        address="a",
        kv_fingerprint="k",
        num_waiting=0,
        num_running=1,
        ready=True,
        page_size=16,
        others=OTHERS,
        histograms=tuple(measures.told()),
        balance=(
            LabelledCounter(name="expert_imbalance_ratio", labels={"layers": "mean"}, value=1.25),
            LabelledCounter(name="expert_imbalance_ratio", labels={"layers": "worst"}, value=3.0),
        ),
        copies=MoverStats(loaded_bytes=51, saved_bytes=52, stalled_s=0.5),
        bridge=BridgeStats(
            prefetch={"hit": 61, "fetched_pages": 62},
            incoming={},
            writeback={},
            keepalive={"touches": 63},
            num_fetching=0,
            num_incoming_pages=0,
            num_queued_pages=64,
            num_flying_pages=0,
            num_believed_keys=0,
            dropped={"n:1": 5, "": 6},
        ),
    )


def samples(families: dict[str, Metric], name: str, *labels: str) -> dict[object, float]:
    found = {}
    for sample in families[f"mimo_worker_{name.removesuffix('_total')}"].samples:
        values = tuple(sample.labels[label] for label in labels)
        found[values if len(values) > 1 else values[0]] = sample.value
    return found


def empty_fleet() -> Fleet:
    network = MemoryNetwork()
    return Fleet(prefill=[network.channel("a")], decode=[], heartbeat_s=1.0, timeout_s=1.0, clock=lambda: 0.0)


def shown_text() -> str:
    fleet = empty_fleet()
    fleet.workers[0].info = told()
    return GatewayMetrics(fleet=fleet, encoder_infos=dict).text().decode()


def test_pages_by_state_evictions_and_a_text_for_every_counter() -> None:
    text = shown_text()
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
    assert (families["mimo_worker_steps"].type, families["mimo_worker_kept_tokens"].type) == ("counter", "gauge")
    assert "mimo_worker_steps_total{" in text
    assert samples(families, "draft_position_tokens_total", "position", "result")["2", "drafted"] == 9
    assert samples(families, "draft_position_tokens_total", "position", "result")["2", "accepted"] == 6
    assert samples(families, "expert_imbalance_ratio", "layers") == {"mean": 1.25, "worst": 3.0}
    assert samples(families, "process_resident_bytes", "worker")["w"] > 1 << 20
    assert samples(families, "cache_hit_tokens_total", "tier") == {"l1": 50, "l2": 30, "l3": 20, "healed": 7}
    assert samples(families, "host_pool_pages", "pool", "state")["window", "pinned"] == 3
    assert samples(families, "copied_pages_total", "direction", "pool") == {
        ("load", "full"): 12,
        ("load", "window"): 13,
        ("save", "full"): 17,
        ("save", "window"): 18,
    }
    assert samples(families, "copied_bytes_total", "direction") == {"load": 51, "save": 52}
    assert samples(families, "store_gets_total", "result") == {"hit": 31, "miss": 32}
    assert samples(families, "store_puts_total", "node", "result") == {
        ("n:1", "kept"): 33,
        ("n:1", "refused"): 34,
        ("n:1", "dropped"): 40,
        ("n:1", "failed"): 31,
        ("", "kept"): 0,
        ("", "refused"): 0,
        ("", "dropped"): 6,
        ("", "failed"): 7,
    }
    assert samples(families, "store_corrupt_total", "worker") == {"w": 36}
    breakers = samples(families, "store_breaker", "node", "state")
    assert breakers == {("n:1", "closed"): 0, ("n:1", "half_open"): 1, ("n:1", "open"): 0}
    assert samples(families, "store_node_bytes", "node", "kind") == {("n:1", "used"): 41}
    assert samples(families, "prefetches_total", "outcome")["hit"] == 61
    assert {counter.name for counter in told().labelled} == LABELLED_TEXTS.keys()
    for name, text in LABELLED_TEXTS.items():
        assert families[f"mimo_worker_{name.removesuffix('_total')}"].documentation == text
    names = asdict(Counters()).keys() | told().counters.keys()
    assert names == COUNTER_TEXTS.keys()
    for name in names:
        shown = COUNTER_TEXTS[name]
        family = families[f"mimo_worker_{shown.name}"]
        assert (family.documentation, family.type) == (shown.text, "gauge" if shown.is_gauge else "counter")
    assert {counts.name for counts in told().histograms} == HISTOGRAM_TEXTS.keys()


def test_steps_are_measured_by_what_they_compute() -> None:
    histograms = {(counts.name, counts.labels.get("kind", "")): counts for counts in told().histograms}
    assert histograms["step_seconds", "mixed"].total == 0.015
    assert histograms["step_seconds", "import"].total == 7.0
    batch, tokens = histograms["step_sequences", ""], histograms["step_tokens", ""]
    # A step that computes nothing has no batch.
    assert (sum(batch.counts), batch.total) == (1, 2)
    assert (sum(tokens.counts), tokens.total) == (1, 41)


def test_histograms_are_shown_cumulative() -> None:
    lines = set(shown_text().splitlines())
    for line in (
        "# TYPE mimo_worker_step_seconds histogram",
        'mimo_worker_step_seconds_bucket{kind="mixed",le="0.01",worker="w"} 0.0',
        'mimo_worker_step_seconds_bucket{kind="mixed",le="0.02",worker="w"} 1.0',
        'mimo_worker_step_seconds_bucket{kind="mixed",le="+Inf",worker="w"} 1.0',
        'mimo_worker_step_seconds_bucket{kind="import",le="5.0",worker="w"} 0.0',
        'mimo_worker_step_seconds_count{kind="import",worker="w"} 1.0',
        'mimo_worker_step_seconds_sum{kind="import",worker="w"} 7.0',
        'mimo_worker_step_sequences_bucket{le="2.0",worker="w"} 1.0',
    ):
        assert line in lines


def test_time_between_tokens_is_counted_by_token() -> None:
    metrics = GatewayMetrics(fleet=empty_fleet(), encoder_infos=dict)
    # Three tokens of one step came together.
    metrics.spaced(0.03, 3)
    lines = set(metrics.text().decode().splitlines())
    assert 'mimo_gateway_inter_token_seconds_bucket{le="0.01"} 3.0' in lines
    assert 'mimo_gateway_inter_token_seconds_bucket{le="0.005"} 0.0' in lines
    assert not any("_created" in line for line in lines)
