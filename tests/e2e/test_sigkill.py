"""SIGKILL of every stage under load: the supervisor restarts it, every request ends, the next ones work."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service import SAMPLES, Service, file_url, running_service, text_of

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 6
PICTURE = [
    {"type": "image_url", "image_url": {"url": file_url("picture.png")}},
    {"type": "text", "text": "What is in the picture?"},
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log_dir: Path = tmp_path_factory.mktemp("sigkill")
    with running_service(log_dir, "--mode", "epd", "--media-root", str(SAMPLES)) as running:
        yield running


class Load:
    """Clients that ask in a loop and record how each request ended; a hang shows as a client that never stops."""

    def __init__(self, service: Service) -> None:
        self.outcomes: Counter[str] = Counter()
        self._service = service
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._clients = [threading.Thread(target=self._run, args=(i,)) for i in range(NUM_CLIENTS)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(60)
        assert not any(client.is_alive() for client in self._clients), "a request never ended"

    def wait_for(self, num_answers: int) -> None:
        deadline = time.monotonic() + 60
        while self.outcomes["200"] < num_answers:
            assert time.monotonic() < deadline, self.outcomes
            time.sleep(0.02)

    def _run(self, index: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            # Half ask about the picture, half send a text of their own, so that prompts differ.
            content = PICTURE if index % 2 else f"Client {index}, request {number}: count from 3 to 12."
            try:
                outcome = str(self._service.ask(content, max_tokens=32, timeout_s=45).status)
            except (OSError, ValueError) as error:
                outcome = type(error).__name__
            with self._lock:
                self.outcomes[outcome] += 1


@pytest.mark.parametrize("stage", ["encoder-0", "prefill-0", "decode-0"])
def test_killing_a_stage_under_load(service: Service, stage: str) -> None:
    expected = text_of(service.ask(PICTURE))
    with Load(service) as load:
        load.wait_for(6)
        killed_pid = service.kill(stage)
        load.wait_for(load.outcomes["200"] + 12)
    assert service.stages()[stage] != killed_pid
    assert set(load.outcomes) <= {"200", "503"}, load.outcomes
    assert text_of(service.ask(PICTURE)) == expected


def test_killing_the_gateway_under_load(service: Service) -> None:
    expected = text_of(service.ask(PICTURE))
    with Load(service) as load:
        load.wait_for(6)
        killed_pid = service.kill("gateway")
        load.wait_for(load.outcomes["200"] + 12)
    assert service.stages()["gateway"] != killed_pid
    assert text_of(service.ask(PICTURE)) == expected


@pytest.mark.parametrize("stage", ["encoder-0", "prefill-0", "decode-0", "gateway"])
def test_a_stage_that_hangs_is_replaced(tmp_path: Path, stage: str) -> None:
    """SIGSTOP: the process lives and says nothing. The supervisor gives it `silence_s`, then starts another."""
    arguments = ("--media-root", str(SAMPLES), "--set", "supervisor.silence_s=6")
    with running_service(tmp_path, "--mode", "epd", *arguments) as service:
        expected = text_of(service.ask(PICTURE))
        time.sleep(2.5)
        stopped_pid = service.stages()[stage]
        os.kill(stopped_pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while service.stages().get(stage, stopped_pid) == stopped_pid:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        service.wait_ready()
        assert text_of(service.ask(PICTURE)) == expected


def test_killing_everything_at_once(service: Service) -> None:
    before = service.stages()
    for name in before:
        service.kill(name)
    deadline = time.monotonic() + 60
    while set(service.stages()) != set(before) or set(service.stages().values()) & set(before.values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    service.wait_ready()
    assert service.ask(PICTURE).status == 200
