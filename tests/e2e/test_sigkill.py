"""SIGKILL of every stage under load: the supervisor restarts it, every request ends, the next ones work."""

import base64
import io
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.e2e.service import SAMPLES, Service, file_url, running_service, text_of
from tests.oracles.effort import scaled

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 6
# What urllib raises for a listener that is gone, a connection cut, and a body that breaks off.
CONNECTION_FAULTS = {"URLError", "ConnectionResetError", "ConnectionRefusedError", "RemoteDisconnected"}
CONNECTION_FAULTS |= {"IncompleteRead", "BrokenPipeError"}
PICTURE = [
    {"type": "image_url", "image_url": {"url": file_url("picture.png")}},
    {"type": "text", "text": "What is in the picture?"},
]


def same_picture(remark: str) -> list[dict[str, Any]]:
    """PICTURE in a file that nobody has seen, so that it is encoded anew: only a remark in it differs."""
    chunks, buffer = PngInfo(), io.BytesIO()
    chunks.add_text("Comment", remark)
    with Image.open(SAMPLES / "picture.png") as picture:
        picture.save(buffer, "PNG", pnginfo=chunks)
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, *PICTURE[1:]]


# Half of the clients ask about the picture, half count, each from its own numbers, so that prompts differ.
PROMPTS: list[list[Any]] = [
    [PICTURE] if index % 2 else [f"Count from {first} to {first + 9}." for first in range(index + 1, index + 9, 3)]
    for index in range(NUM_CLIENTS)
]


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[list[str]]:
    """The answer to every prompt of PROMPTS, asked one at a time while nothing is broken."""
    return [[answer_to(service, prompt) for prompt in prompts] for prompts in PROMPTS]


def answer_to(service: Service, prompt: Any) -> str:
    return text_of(service.ask(prompt, max_tokens=32))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log_dir: Path = tmp_path_factory.mktemp("sigkill")
    with running_service(log_dir, "--mode", "epd", "--media-root", str(SAMPLES)) as running:
        yield running


class Load:
    """Clients that ask in a loop and record how each request ended; a hang shows as a client that never stops.

    Outcomes are statuses and names of exceptions; `wrong` holds the answers that are not the undisturbed ones.
    """

    def __init__(self, service: Service, undisturbed: list[list[str]], *, new_pictures: bool = False) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[tuple[Any, str]] = []
        self._service = service
        self._undisturbed = undisturbed
        self._new_pictures = new_pictures
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
            at = number % len(PROMPTS[index])
            number += 1
            prompt, expected, text = PROMPTS[index][at], self._undisturbed[index][at], None
            if self._new_pictures and prompt is PICTURE:
                prompt = same_picture(f"{index}/{number}")
            try:
                answer = self._service.ask(prompt, max_tokens=32, timeout_s=45)
                outcome = str(answer.status)
                text = text_of(answer) if answer.status == 200 else None
            except (OSError, HTTPException) as error:
                outcome = type(error).__name__
            with self._lock:
                self.outcomes[outcome] += 1
                if text not in (None, expected):
                    self.wrong.append((prompt, str(text)))


@pytest.mark.parametrize("stage", ["encoder-0", "prefill-0", "decode-0"])
def test_killing_a_stage_under_load(service: Service, undisturbed: list[list[str]], stage: str) -> None:
    expected = answer_to(service, PICTURE)
    with Load(service, undisturbed) as load:
        load.wait_for(6)
        killed_pid = service.kill(stage)
        load.wait_for(load.outcomes["200"] + 12)
    assert service.stages()[stage] != killed_pid
    assert set(load.outcomes) <= {"200", "503"}, load.outcomes
    assert load.outcomes["200"] >= load.outcomes.total() / 2, load.outcomes
    assert load.wrong == []
    assert answer_to(service, PICTURE) == expected


def test_killing_one_of_two_encoders_costs_nothing(tmp_path: Path, undisturbed: list[list[str]]) -> None:
    """Not even a 503: what it owed is encoded by the other, and what it had encoded is in the arena of the host."""
    arguments = ("--mode", "epd", "--encoders", "2", "--media-root", str(SAMPLES))
    with running_service(tmp_path, *arguments) as service:
        with Load(service, undisturbed, new_pictures=True) as load:
            for stage in ("encoder-0", "encoder-1"):
                load.wait_for(load.outcomes["200"] + 6)
                killed_pid = service.kill(stage)
                load.wait_for(load.outcomes["200"] + 12)
                service.wait_ready()
                assert service.stages()[stage] != killed_pid
        assert set(load.outcomes) == {"200"}, load.outcomes
        assert load.wrong == []


def test_killing_the_gateway_under_load(service: Service, undisturbed: list[list[str]]) -> None:
    """While nobody listens the clients meet refused connections, however often they try, so their share is open."""
    expected = answer_to(service, PICTURE)
    with Load(service, undisturbed) as load:
        load.wait_for(6)
        killed_pid = service.kill("gateway")
        load.wait_for(load.outcomes["200"] + 12)
    assert service.stages()["gateway"] != killed_pid
    assert set(load.outcomes) <= {"200", "503"} | CONNECTION_FAULTS, load.outcomes
    assert load.wrong == []
    assert answer_to(service, PICTURE) == expected


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    arguments = ("--mode", "epd", "--media-root", str(SAMPLES), "--set", "supervisor.silence_s=6")
    with running_service(tmp_path_factory.mktemp("impatient"), *arguments) as running:
        # Its stages have sent their first signs of life.
        time.sleep(2.5)
        yield running


# The supervisor listens to all stages alike: every one of them is stopped with MIMO_TEST_EFFORT=3.
@pytest.mark.parametrize("stage", ["decode-0", "gateway", "encoder-0", "prefill-0"][: scaled(4, least=2)])
def test_a_stage_that_hangs_is_replaced(impatient: Service, stage: str) -> None:
    """SIGSTOP: the process lives and says nothing. The supervisor gives it `silence_s`, then starts another."""
    expected = text_of(impatient.ask(PICTURE))
    stopped_pid = impatient.stages()[stage]
    os.kill(stopped_pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while impatient.stages().get(stage, stopped_pid) == stopped_pid:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    impatient.wait_ready()
    assert text_of(impatient.ask(PICTURE)) == expected


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
