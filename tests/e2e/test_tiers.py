"""KV that outlives its processes: whatever is killed, damaged or deleted, answers stay right, and what is whole serves.

Prompts are texts in which one fact has to be found, so that there is one right answer. Small memories on the way make
what was asked before come from the store after a restart.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest

from epd.cache.l3.open import cold_root, hot_root
from epd.cache.l3.placement import Placement
from epd.cache.l3.redis_node import RedisNode
from tests.e2e.service import KNOWN_ANSWERS, ROOT, SAMPLES, Answer, Service, free_port, text_of
from tests.fakes.redis_server import running_redis

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SENTENCES = re.findall(r"[^.?]+[.?]", (SAMPLES / "recall.txt").read_text(encoding="utf-8"))
FACT = next(sentence for sentence in SENTENCES if "magnet is" in sentence)
NUM_SENTENCES = 30
RIGHT = KNOWN_ANSWERS["recall.txt"].answer
NUM_SESSIONS = 6
NUM_CLIENTS = 3


def document(number: int) -> str:
    """About 500 tokens in an order that no other has, and the question."""
    rng = random.Random(number)
    chosen = [*rng.sample([s for s in SENTENCES[:-1] if "The key" not in s], NUM_SENTENCES), FACT]
    rng.shuffle(chosen)
    return f"{''.join(chosen).strip()}{SENTENCES[-1]}"


def ask(service: Service, number: int) -> Answer:
    """The answer to a document's question, which has to be right."""
    answer = service.ask(document(number), max_tokens=40, prompt_cache_key=f"session {number}")
    assert text_of(answer) == RIGHT
    return answer


def store_share(answer: Answer) -> float:
    usage = answer.body["usage"]
    return float(usage["prompt_tokens_details"]["store_tokens"] / usage["prompt_tokens"])


def metric(service: Service, name: str, **labels: str) -> float:
    """Sum over all workers and labels that are not given."""
    total = 0.0
    for line in service.get("/metrics").body["text"].splitlines():
        found = re.fullmatch(rf"mimo_prefill_{name}(?:\{{(.*)\}})? (\S+)", line)
        if found and all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
            total += float(found[2])
    return total


def until_stored(service: Service) -> None:
    """Until nothing has been on its way to the store for a while."""
    until_s, seen, since_s = time.monotonic() + 30, -1.0, time.monotonic()
    while time.monotonic() - since_s < 1.0:
        assert time.monotonic() < until_s
        num_puts = metric(service, "store_puts_total")
        if num_puts != seen:
            seen, since_s = num_puts, time.monotonic()
        time.sleep(0.1)
    assert seen > 0


@contextmanager
def deployment(log_dir: Path, store: str, *settings: str) -> Iterator[Service]:
    """Until the block ends, if it was not killed before."""
    port = free_port()
    log_path = log_dir / f"serve-{port}.log"
    command = [sys.executable, "-m", "cli", "serve", "--mode", "epd", "--port", str(port)]
    chosen = (f"kv_store={store}", "host_budget_bytes=33554432", "prefetch_timeout_s=5", *settings)
    command += [word for setting in chosen for word in ("--set", f"engine.{setting}")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment) as process,
    ):
        service = Service(f"http://127.0.0.1:{port}", process.pid, log_path)
        try:
            service.wait_ready()
            yield service
        finally:
            process.terminate()
            process.wait(60)


def replace_prefill(service: Service) -> None:
    """SIGKILL: what it had in its memories is gone."""
    killed = service.kill("prefill-0")
    until_s = time.monotonic() + 60
    while service.stages().get("prefill-0", killed) == killed:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    service.wait_ready()


class Load:
    """Clients that ask about new documents until the block ends; every status, and wrong answers."""

    def __init__(self, service: Service, first: int) -> None:
        self.statuses: list[int | str] = []
        self.wrong: list[str] = []
        self._service = service
        self._stop = threading.Event()
        self._clients = [
            threading.Thread(target=self._run, args=(first + 1000 * client,)) for client in range(NUM_CLIENTS)
        ]

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(60)
        assert not any(client.is_alive() for client in self._clients), "a request never ended"

    def wait_for(self, num_answers: int) -> None:
        until_s = time.monotonic() + 60
        while len(self.statuses) < num_answers:
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            number += 1
            try:
                answer = self._service.ask(document(number), max_tokens=40)
            except (OSError, HTTPException) as error:
                self.statuses.append(type(error).__name__)
                # Nobody may be there any more.
                self._stop.wait(0.1)
                continue
            self.statuses.append(answer.status)
            if answer.status == 200 and text_of(answer) != RIGHT:
                self.wrong.append(text_of(answer))


def damage(roots: Sequence[Path]) -> int:
    """Change a byte of every 8 KiB in all files of records, beyond their beginnings; how many bytes."""
    changed = 0
    for path in [path for root in roots for path in root.rglob("*.seg")]:
        content = bytearray(path.read_bytes())
        for at in range(4096 + 700, len(content), 8192):
            content[at] ^= 0xFF
            changed += 1
        path.write_bytes(content)
    return changed


def test_a_local_store_outlives_what_is_killed_and_survives_what_is_done_to_it(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    roots = [hot_root(directory), cold_root(directory)]
    store = f"local:{directory}"
    try:
        with deployment(tmp_path, store) as service:
            for number in range(4):
                ask(service, number)
            until_stored(service)
            with Load(service, 10_000) as load:
                load.wait_for(4)
                replace_prefill(service)
            assert load.wrong == []
            assert set(load.statuses) <= {200, 503}
            assert sum(store_share(ask(service, number)) for number in range(4)) > 3
            reported_until_s = time.monotonic() + 10
            # The stages report twice a second.
            while not metric(service, "cache_hit_tokens_total", tier="l3"):
                assert time.monotonic() < reported_until_s
                time.sleep(0.05)
            with Load(service, 20_000) as load:
                load.wait_for(4)
                # The supervisor first, or it would start them again.
                for pid in (service.pid, *service.stages().values()):
                    os.kill(pid, signal.SIGKILL)
            assert load.wrong == []
        with deployment(tmp_path, store) as service:
            assert sum(store_share(ask(service, number)) for number in range(4)) > 3
            assert metric(service, "store_corrupt_total") == 0
        assert damage(roots) > 20
        with deployment(tmp_path, store) as service:
            for number in range(4):
                ask(service, number)
            until_s = time.monotonic() + 10
            while not metric(service, "store_corrupt_total"):
                assert time.monotonic() < until_s, "nothing was noticed"
                time.sleep(0.1)
            pids = service.stages()
            for root in roots:
                shutil.rmtree(root)
                for number in (0, 30_000 + len(root.name)):
                    ask(service, number)
            assert service.stages() == pids
            replace_prefill(service)
            for number in range(2):
                ask(service, number)
    finally:
        shutil.rmtree(roots[0], ignore_errors=True)


def test_one_of_three_servers_is_killed_under_load(tmp_path: Path) -> None:
    """Nobody's request fails; its sessions begin anew and the others notice nothing."""
    with ExitStack() as stack:
        servers = [stack.enter_context(running_redis(tmp_path)) for _ in range(3)]
        names = [RedisNode(server.url, ttl_s=None).name for server in servers]
        placement = Placement(names)
        homes: dict[str, list[int]] = {name: [] for name in names}
        for number in range(1000):
            home = homes[next(placement.order(f"session {number}"))]
            if len(home) < NUM_SESSIONS // 3:
                home.append(number)
        urls = ",".join(server.url for server in servers)
        service = stack.enter_context(deployment(tmp_path, urls, "kv_store_timeout_s=0.5"))

        def shares() -> dict[str, float]:
            """Of the prompts of a server's sessions, what came from the store."""
            return {
                name: sum(store_share(ask(service, number)) for number in numbers) / len(numbers)
                for name, numbers in homes.items()
            }

        assert shares() == dict.fromkeys(names, 0.0)
        until_stored(service)
        replace_prefill(service)
        before = shares()
        assert min(before.values()) > 0.8
        replace_prefill(service)
        with Load(service, 10_000) as load:
            load.wait_for(3)
            servers[0].kill()
            after = shares()
            load.wait_for(len(load.statuses) + 6)
        assert set(load.statuses) == {200}
        assert load.wrong == []
        assert after[names[0]] == 0
        assert all(after[name] > 0.8 for name in names[1:])
        assert sum(before.values()) - sum(after.values()) < 0.4 * sum(before.values())
