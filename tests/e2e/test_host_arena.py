"""The arena of a deployment outlives its encoders, and only them: what a killed one made is found, nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service import ROOT, SAMPLES, Service, file_url, running_service

pytestmark = pytest.mark.e2e

SHM = Path("/dev/shm")
NUM_MEDIA = 8


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    arguments = ("--role", "encoder", "--encoders", "2", "--media-root", str(SAMPLES))
    with running_service(tmp_path_factory.mktemp("arena"), *arguments) as service:
        name = arena_of(service)["name"]
        yield service
    assert list(SHM.glob(f"{name}*")) == []


def stats() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "cli", "cache", "stats", "--json"], cwd=ROOT, stdout=subprocess.PIPE)
    found: list[dict[str, Any]] = json.loads(done.stdout)["embeddings"]
    return found


def arena_of(service: Service) -> dict[str, Any]:
    (arena,) = (arena for arena in stats() if arena["pid"] == service.pid)
    return arena


def ask(service: Service) -> list[bool]:
    """Pictures that differ by their bounds; which of them were cached."""
    part = {"type": "image_url", "image_url": {"url": file_url("picture.png")}}
    body = {"input": [part | {"max_pixels": 20_000 + 4096 * number} for number in range(NUM_MEDIA)]}
    answer = service.post("/v1/encode", body)
    assert answer.status == 200, answer
    return [item["cached"] for item in answer.body["data"]]


def test_what_killed_encoders_made_is_found_by_those_that_follow(service: Service) -> None:
    assert ask(service) == [False] * NUM_MEDIA
    before = arena_of(service)
    assert (before["num_entries"], len(before["holders"])) == (NUM_MEDIA, 2)
    killed = {name: service.kill(name) for name in ("encoder-0", "encoder-1")}
    deadline_s = time.monotonic() + 60
    while any(service.stages().get(name, pid) == pid for name, pid in killed.items()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    service.wait_ready()
    assert ask(service) == [True] * NUM_MEDIA
    while (after := arena_of(service))["hits"] < NUM_MEDIA or len(after["holders"]) != 2:
        assert time.monotonic() < deadline_s, after
        time.sleep(0.2)
    assert after["name"] == before["name"]
    assert (after["num_entries"], after["num_leases"], after["usage"]["reserved_bytes"]) == (NUM_MEDIA, 0, 0)
    assert not {holder["pid"] for holder in after["holders"]} & set(killed.values())


def test_clearing_makes_all_of_them_forget(service: Service) -> None:
    ask(service)
    command = [sys.executable, "-m", "cli", "cache", "clear", arena_of(service)["name"]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert arena_of(service)["num_entries"] == 0
    assert ask(service) == [False] * NUM_MEDIA


def test_the_next_start_removes_what_a_killed_deployment_left(tmp_path: Path) -> None:
    """SIGKILL of the supervisor before any encoder has opened the arena: it stays until somebody starts again."""
    command = [sys.executable, "-m", "cli", "serve", "--role", "encoder", "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as killed:
        deadline_s = time.monotonic() + 60
        while not (left := [arena["name"] for arena in stats() if arena["pid"] == killed.pid]):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        killed.send_signal(signal.SIGKILL)
    assert list(SHM.glob(f"{left[0]}*"))
    assert left[0] not in [arena["name"] for arena in stats()]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as following:
        while list(SHM.glob(f"{left[0]}*")):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        following.send_signal(signal.SIGTERM)
        following.wait(60)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("mimo-")] == []
