"""`mimo cache stats --url`: what a gateway's /metrics say of the tiers, read back and told."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.cache_workers import DeploymentSilent, StoreNodeState, WorkerTiers, worker_tiers
from cli.load import ConfigError
from epd.cache.l3.base import NodeStats, NodeUsage, StoreStats
from epd.cache.prefix import CacheStats, PoolStats
from epd.cache.tiers.bridge import BridgeStats
from epd.cache.tiers.host import HostPoolStats, HostStats
from epd.engine.identity import WorkerIdentity
from epd.engine.report import worker_info
from epd.engine.roster import Counters
from epd.gateway.metrics import GatewayMetrics
from epd.kv.copies import MoverStats
from epd.router.workers import Fleet
from epd.transport.memory import MemoryNetwork
from epd.types import Role, WorkerInfo

HOST_POOL = HostPoolStats(total=50, free=5, filling=1, pinned=4, evictable=40, doomed=0, num_evicted=7)
PUTS_A = {"kept": 12, "unkept": 7, "refused": 4, "dropped": 1}
PUTS_B = {"kept": 8, "unkept": 2}
STORE = StoreStats(
    hits=12,
    misses=3,
    puts=20,
    unkept=9,
    dropped=1,
    corrupt=2,
    timeouts=0,
    failures=4,
    get_bytes=5 << 20,
    put_bytes=6 << 20,
    seconds={"get": 1.5},
    nodes=(
        NodeStats("redis://a:1/0", "closed", 0, NodeUsage(used_bytes=1 << 20, capacity_bytes=4 << 20), PUTS_A),
        NodeStats("redis://b:1/0", "open", 0, NodeUsage(), PUTS_B),
    ),
)


def zeros(kind: type) -> dict[str, Any]:
    return dict.fromkeys((field.name for field in fields(kind)), 0)


def told(name: str, *, has_tiers: bool) -> WorkerInfo:
    pool = PoolStats(total=100, free=10, evictable=60, leased=30)
    host = HostStats(**zeros(HostStats) | {"full": HOST_POOL, "window": HOST_POOL}) if has_tiers else None
    stats = CacheStats(
        **zeros(CacheStats) | {"full": pool, "window": pool, "host": host, "store": STORE if has_tiers else None}
    )
    bridge = BridgeStats(
        **zeros(BridgeStats)
        | {
            "prefetch": {"hit": 8, "timeout": 1},
            "incoming": {},
            "writeback": {},
            "keepalive": {},
            "num_queued_pages": 6,
            "dropped": {"redis://b:1/0": 3},
        }
    )
    return worker_info(
        WorkerIdentity(name=name, role=Role.BOTH, model="m", max_context_tokens=100, eos_token_ids=(), incarnation="i"),
        stats,
        Counters(prompt_tokens=60, cached_tokens=900, host_hit_tokens=300, store_hit_tokens=200, healed_tokens=40),
        sequence=1,
        address=name,
        kv_fingerprint="k",
        num_waiting=0,
        num_running=1,
        ready=True,
        page_size=16,
        others={},
        copies=MoverStats(loaded_bytes=1 << 20, saved_bytes=2 << 20, stalled_s=0.5) if has_tiers else None,
        bridge=bridge if has_tiers else None,
    )


def metrics(*workers: WorkerInfo) -> str:
    """As a gateway writes it."""
    network = MemoryNetwork()
    channels = [network.channel(worker.address) for worker in workers]
    fleet = Fleet(prefill=channels, decode=[], heartbeat_s=1.0, timeout_s=1.0, clock=lambda: 0.0)
    for worker, info in zip(fleet.workers, workers, strict=True):
        worker.info = info
    return GatewayMetrics(fleet=fleet, encoder_infos=dict).text().decode()


@contextmanager
def served(text: str, status: int = 200) -> Iterator[str]:
    """A gateway of one page; its URL."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            self.send_response(status if found else 404)
            self.end_headers()
            self.wfile.write(text.encode() if found else b"")

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["cache", "stats", *arguments])


def test_tiers_are_read_from_what_a_gateway_writes() -> None:
    plain, tiered = worker_tiers(metrics(told("worker-1", has_tiers=True), told("worker-0", has_tiers=False)))
    pages = {pool: {"free": 10, "cached": 60, "leased": 30} for pool in ("full", "window")}
    hits = {"l1": 400, "l2": 300, "l3": 200, "healed": 40}
    # The free ones of a worker's own words are those that can be had.
    assert plain == WorkerTiers("worker-0", "worker", hit_tokens=hits, prompt_tokens=60, device_pages=pages)
    assert tiered == WorkerTiers(
        "worker-1",
        "worker",
        hit_tokens=hits,
        prompt_tokens=60,
        device_pages=pages,
        host_pages={
            pool: {"free": 5, "filling": 1, "pinned": 4, "evictable": 40, "doomed": 0} for pool in ("full", "window")
        },
        copied_bytes={"load": 1 << 20, "save": 2 << 20},
        store={
            "gets_hit": 12,
            "gets_miss": 3,
            "puts_kept": 20,
            "puts_refused": 4,
            "puts_dropped": 4,
            "puts_failed": 4,
            "get_bytes": 5 << 20,
            "put_bytes": 6 << 20,
            "corrupt": 2,
            "timeouts": 0,
            "failures": 4,
            "queued_pages": 6,
        },
        prefetches={"hit": 8, "partial": 0, "miss": 0, "timeout": 1, "no_room": 0, "aborted": 0},
        nodes={
            "redis://a:1/0": StoreNodeState(
                "closed", 1 << 20, 4 << 20, {"kept": 12, "refused": 4, "dropped": 1, "failed": 2}
            ),
            "redis://b:1/0": StoreNodeState("open", puts={"kept": 8, "refused": 0, "dropped": 3, "failed": 2}),
        },
    )


def test_a_deployment_for_people_and_as_json() -> None:
    with served(metrics(told("worker-0", has_tiers=True))) as url:
        done = run("--url", url)
        found = json.loads(run("--url", f"{url}/", "--json").stdout)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "worker-0 worker" in lines
    assert "l2 300 30% tokens of prompts that came from the host's memory" in lines
    assert "none 60 6% tokens of prompts that were computed" in lines
    assert "host, full pages: 5 free, 1 filling, 4 pinned, 40 evictable, 0 doomed" in lines
    assert "copied from host to device 1.0 MiB, from device to host 2.0 MiB" in lines
    assert "store: 12 pages found, 3 missed, 5.0 MiB read; 20 written, 6.0 MiB; 6 waiting" in lines
    assert "faults: 2 corrupt, 0 timeouts, 4 failures" in lines
    assert "pages not kept: 4 refused, 4 dropped, 4 failed" in lines
    assert (
        "redis://a:1/0: breaker closed, 1.0 MiB used of 4.0 MiB; 4 pages refused (it is full, or they are too large "
        "for it); 1 pages dropped (too many waited for it); 2 pages lost to its failures" in lines
    )
    assert (
        "redis://b:1/0: breaker open; 3 pages dropped (too many waited for it); 2 pages lost to its failures" in lines
    )
    (worker,) = found["workers"]
    assert worker["hit_tokens"]["l3"] == 200
    assert worker["nodes"]["redis://b:1/0"]["breaker"] == "open"


def test_who_does_not_answer_is_told_with_exit_code_1() -> None:
    with served("") as url:
        assert "no worker has been heard of" in run("--url", url).output
    assert run("--url", url).exit_code == 1
    assert f"{url}/metrics does not answer" in run("--url", url).output
    with served("", status=503) as url:
        done = run("--url", url)
        assert (done.exit_code, "503" in done.output) == (1, True)
    with served("<html>{</html>") as url:
        done = run("--url", url)
        assert (done.exit_code, "no metrics" in done.output) == (1, True)
    with pytest.raises(DeploymentSilent, match="no metrics"):
        worker_tiers("mimo_worker_pool_pages{")


@pytest.mark.parametrize("arguments", [["--url", "localhost:8000"], ["--url", "http://localhost", "--kv"]])
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    assert isinstance(run(*arguments).exception, ConfigError)
