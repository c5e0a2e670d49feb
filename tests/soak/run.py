"""`scripts/soak`: mixed load for a long time, while stages are killed and clients leave.

First the capacity is measured: as many clients as get the most out of it, each asking again at once. Then requests come
at random moments (Poisson) at a share of that, some clients hang up in the middle, and once a minute a stage gets a
SIGKILL, in turn. In the end every request has to have ended once, the books have to be empty, memory and descriptors
flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from tests.e2e.service import SAMPLES, Service, running_service
from tests.soak.clients import HUNG_AFTER_S, End, follow, patience
from tests.soak.mix import draw
from tests.soak.watch import Watch, growth, total_slope

STAGES = ("encoder-0", "prefill-0", "decode-0", "gateway")
# A connection that breaks is the gateway's death alone, and only around it.
_AROUND_A_KILL_S = 15.0
console = Console(highlight=False)


@dataclass(slots=True)
class Soak:
    """What is known while it runs."""

    service: Service
    rng: random.Random
    leave: float
    ends: list[tuple[float, End]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    num_asked: int = 0

    async def capacity(self, num_clients: int, duration_s: float) -> float:
        """Requests a second with so many clients, each asking again at once."""
        answered = 0
        async with self._session() as session:

            async def client() -> None:
                nonlocal answered
                while True:
                    await follow(session, draw(self.rng), None)
                    answered += 1

            clients = [asyncio.create_task(client()) for _ in range(num_clients)]
            await asyncio.sleep(min(5.0, duration_s / 2))
            warm, started_s = answered, time.monotonic()
            await asyncio.sleep(duration_s)
            rate = (answered - warm) / (time.monotonic() - started_s)
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        return rate

    async def load(self, rate: float, duration_s: float) -> None:
        """Requests at random moments; returns when the last one has ended."""
        end_s = time.monotonic() + duration_s
        async with self._session() as session, asyncio.TaskGroup() as group:
            while time.monotonic() < end_s:
                group.create_task(self._one(session))
                self.num_asked += 1
                await asyncio.sleep(self.rng.expovariate(rate))

    async def kill_in_turn(self, period_s: float) -> None:
        while True:
            for stage in STAGES:
                await asyncio.sleep(period_s)
                if stage in self.service.stages():
                    self.service.kill(stage)
                    self.kills.append((time.monotonic(), stage))
                    console.print(f"{time.strftime('%H:%M:%S')} SIGKILL {stage}   {self.counts()}")

    def counts(self) -> dict[str, int]:
        return dict(Counter(end.outcome for _, end in self.ends))

    def faults(self) -> list[str]:
        """What must not be: what is no answer, refusal or 503, and connections broken without a killed gateway."""
        found = []
        gateway_kills = [at for at, stage in self.kills if stage == "gateway"]
        for at, end in self.ends:
            near = any(-1.0 < at - killed < _AROUND_A_KILL_S for killed in gateway_kills)
            if end.outcome in ("wrong", "fault", "hung") or (end.outcome == "cut" and not near):
                found.append(f"{end.kind}: {end.outcome} {end.detail} after {end.seconds:.1f} s, {end.request_id}")
        if len(self.ends) != self.num_asked:
            found.append(f"{self.num_asked} requests, {len(self.ends)} ends")
        return found

    async def until_idle(self, timeout_s: float = 330.0) -> list[str]:
        """What is still held when nobody asks for anything any more; empty as it should be.

        The leases of a gateway that was killed end with its silence or, when the encoder that gave them was killed
        before it noticed, at the deadlines of their requests: after `gateway.request_timeout_s`.
        """
        end_s = time.monotonic() + timeout_s
        held = ["not ready"]
        while held and time.monotonic() < end_s:
            await asyncio.sleep(1.0)
            answer = await asyncio.to_thread(self.service.get, "/metrics")
            held = [line for line in answer.body["text"].splitlines() if _is_held(line)]
        return held

    async def _one(self, session: aiohttp.ClientSession) -> None:
        end = await follow(session, draw(self.rng), patience(self.rng, self.leave))
        self.ends.append((time.monotonic(), end))

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=2 * HUNG_AFTER_S)
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(self.service.url, timeout=timeout, connector=connector)


def _is_held(line: str) -> bool:
    """A line of /metrics that shows something in use."""
    name, _, value = line.rpartition(" ")
    is_use = (
        name == "mimo_gateway_inflight_requests"
        or "_queue_requests{" in name
        or ("_pool_pages{" in name and 'state="leased"' in name)
        or name.startswith("mimo_encoder_queue_jobs")
        or (name.startswith("mimo_encoder_arena_bytes") and 'state="leased"' in name)
    )
    return is_use and not line.startswith("#") and float(value) > 0


async def soak(service: Service, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was found, for people and machines."""
    run = Soak(service, random.Random(options.seed), options.leave)
    capacity = options.rate / options.share if options.rate else await run.capacity(options.clients, options.calibrate)
    rate = capacity * options.share
    console.print(
        f"capacity {capacity:.2f} requests/s with {options.clients} clients; {rate:.2f}/s for {options.minutes} min"
    )
    watch = Watch(service, options.sample)
    started_s = time.monotonic()
    others = [asyncio.create_task(watch.run()), asyncio.create_task(run.kill_in_turn(options.kill_every))]
    try:
        await run.load(rate, options.minutes * 60)
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    service.wait_ready()
    held = await run.until_idle()
    memory, fds = total_slope(watch.samples)
    seconds = sorted(end.seconds for _, end in run.ends if end.outcome == "right")
    return {
        "capacity_per_s": capacity,
        "rate_per_s": rate,
        "minutes": (time.monotonic() - started_s) / 60,
        "asked": run.num_asked,
        "outcomes": run.counts(),
        "busy": dict(Counter(end.detail for _, end in run.ends if end.outcome == "busy")),
        "kills": dict(Counter(stage for _, stage in run.kills)),
        "faults": run.faults(),
        "held": held,
        "median_s": seconds[len(seconds) // 2] if seconds else None,
        "p99_s": seconds[int(len(seconds) * 0.99)] if seconds else None,
        "growth": [asdict(each) for each in growth(watch.samples, settled_s=options.settled)],
        "total_memory_bytes_per_minute": memory,
        "total_fds_per_minute": fds,
        "samples": [asdict(sample) for sample in watch.samples],
    }


def show(found: dict[str, Any]) -> None:
    console.print(f"asked {found['asked']}, ended: {found['outcomes']}; busy: {found['busy']}; kills: {found['kills']}")
    console.print(f"time to a right answer: median {found['median_s']:.2f} s, 99 % {found['p99_s']:.2f} s")
    for each in found["growth"]:
        console.print(
            f"{each['name']:<12} {each['memory_bytes'] / 1e6:8.1f} MB "
            f"{each['memory_bytes_per_minute'] / 1e6:+7.3f} MB/min {each['num_fds']:6.0f} descriptors "
            f"{each['fds_per_minute']:+6.2f}/min   ({each['num_processes']} processes)"
        )
    memory, fds = found["total_memory_bytes_per_minute"] / 1e6, found["total_fds_per_minute"]
    console.print(f"together {memory:+.3f} MB/min, {fds:+.2f} descriptors/min")
    for line in found["held"]:
        console.print(f"still held: {line}")
    for line in found["faults"][:20]:
        console.print(f"FAULT {line}")
    console.print(f"{len(found['faults'])} faults")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the capacity")
    parser.add_argument("--rate", type=float, help="requests a second, instead of measuring the capacity")
    parser.add_argument("--clients", type=int, default=8, help="while the capacity is measured")
    parser.add_argument("--calibrate", type=float, default=30.0, help="seconds for that")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--leave", type=float, default=0.15, help="share of clients that hang up in the middle")
    parser.add_argument("--sample", type=float, default=5.0, help="seconds between two looks at memory")
    parser.add_argument("--settled", type=float, default=60.0, help="age from which a process's memory counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", default="epd")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="of the server; small pools (engine.kv_budget_bytes, engine.host_budget_bytes) are full within a minute, "
        "so that what grows after it is a leak",
    )
    parser.add_argument("--json", type=Path, help="all that was found, samples included")
    parser.add_argument("--log", type=Path, help="where the server's log is kept, which has the ids of requests")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as directory:
        settings = [word for setting in options.set for word in ("--set", setting)]
        extra = ("--mode", options.mode, "--media-root", str(SAMPLES), *settings)
        with running_service(Path(directory), *extra) as service:
            found = asyncio.run(soak(service, options))
        if options.log:
            shutil.copy(service.log_path, options.log)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(1 if found["faults"] or found["held"] else 0)


if __name__ == "__main__":
    main()
