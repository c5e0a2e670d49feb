"""What replicas say of themselves, as Prometheus reads it."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from encoder import metrics
from encoder.measures import COUNTED
from encoder.metrics import COUNTER_TEXTS, replica_metrics
from encoder.types import EncoderInfo, HistogramCounts
from preprocess.types import Modality

INFO = EncoderInfo(
    sequence=1,
    replica="encoder-0",
    incarnation="a",
    fingerprint="f",
    width=4,
    dtype="float32",
    modalities=(Modality.IMAGE,),
    num_pending=3,
    num_cached=2,
    cached_bytes=700,
    capacity_bytes=1000,
    leased_bytes=100,
    ready=True,
    counters={"batches": 4, "batch_jobs": 10, "tower_s": 1.5, "hits": 7, "tokens_video": 44, "news": 3},
    histograms=(
        HistogramCounts(
            name="batch_size_jobs", bounds=(2.0, 4.0), counts=(1, 0, 1), total=11.0, labels={"lane": "vision"}
        ),
    ),
    arena="host",
    tower_busy_s=2.5,
    wedged=True,
)


class _Both(Collector):
    def collect(self) -> list[Metric]:
        return list(replica_metrics({"ipc://a": INFO, "ipc://b": None, "ipc://c": replace(INFO, replica="encoder-2")}))


def test_every_replica_is_told_of_and_only_those_that_are_up_in_detail() -> None:
    registry = CollectorRegistry()
    registry.register(_Both())
    lines = set(generate_latest(registry).decode().splitlines())
    for line in (
        'mimo_encoder_ready{address="ipc://a"} 1.0',
        'mimo_encoder_ready{address="ipc://b"} 0.0',
        'mimo_encoder_queue_jobs{replica="encoder-0"} 3.0',
        'mimo_encoder_arena_bytes{arena="host",state="leased"} 100.0',
        'mimo_encoder_arena_bytes{arena="host",state="cached"} 600.0',
        'mimo_encoder_arena_bytes{arena="host",state="free"} 300.0',
        'mimo_encoder_batch_size_jobs_bucket{lane="vision",le="2.0",replica="encoder-0"} 1.0',
        'mimo_encoder_batch_size_jobs_count{lane="vision",replica="encoder-0"} 2.0',
        'mimo_encoder_tokens_total{modality="video",replica="encoder-0"} 44.0',
        'mimo_encoder_tower_busy_seconds{replica="encoder-0"} 2.5',
        'mimo_encoder_wedged{replica="encoder-0"} 1.0',
        'mimo_encoder_tower_seconds_total{replica="encoder-0"} 1.5',
        'mimo_encoder_hits_total{replica="encoder-0"} 7.0',
        f"# HELP mimo_encoder_tower_seconds_total {COUNTER_TEXTS['tower_s'].text}",
        'mimo_encoder_news{replica="encoder-0"} 3.0',
    ):
        assert line in lines
    # Two encoders, one arena: it counts once.
    assert sum(line.startswith("mimo_encoder_cache_entries{") for line in lines) == 1


@pytest.mark.parametrize(("module", "prefix"), [("server.py", ""), ("tiers/second.py", "tier_")])
def test_every_counter_has_a_text(module: str, prefix: str) -> None:
    source = (Path(metrics.__file__).parent / module).read_text()
    names = set(re.findall(r'counters\["(\w+)"\]', source))
    assert len(names) >= 7
    assert {prefix + name for name in names} <= COUNTER_TEXTS.keys()
    if not prefix:
        assert set(COUNTED) == names, "all are there from the start"
