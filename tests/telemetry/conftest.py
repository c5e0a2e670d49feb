"""One deployment for all tests here: started with OTLP, asked a little of everything, and stopped. What it left behind,
its metrics after that and the spans of all its processes, is what the tests look at."""

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.service import SAMPLES, Answer, Service, file_url, running_service
from tests.fakes.otlp_receiver import receiving
from tests.fakes.span_tree import Node

NUM_GENERATED = 8
"""Choices that were computed, that of the client who left among them."""


@dataclass(frozen=True)
class Recorded:
    """What is left of a deployment that has ended. `answers` by what was asked."""

    metrics: str
    answers: dict[str, Answer]
    nodes: list[Node]
    log: str

    def of_request(self, name: str) -> list[Node]:
        """The spans of the trace of one request."""
        request_id = self.answers[name].headers["X-Request-Id"]
        (trace_id,) = {node.trace_id for node in self.nodes if node.attributes.get("mimo.request.id") == request_id}
        return [node for node in self.nodes if node.trace_id == trace_id]


def parts(name: str, kind: str, question: str) -> list[dict[str, Any]]:
    return [{"type": kind, kind: {"url": file_url(name)}}, {"type": "text", "text": question}]


def leave_early(service: Service) -> None:
    """Ask for a long answer, and be gone after its first bytes."""
    body = {"model": "mimo-nano", "messages": [{"role": "user", "content": "go on"}], "stream": True}
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc)
    with contextlib.closing(connection):
        data = json.dumps(body | {"max_tokens": 2000, "ignore_eos": True})
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        connection.getresponse().read(20)


def traffic(service: Service) -> dict[str, Answer]:
    """A little of everything."""
    picture = parts("picture.png", "image_url", "What is it?")
    prompt = {"model": "mimo-nano", "prompt": "one two three", "max_tokens": 4}
    encode = {"input": [{"type": "image_url", "image_url": {"url": file_url("word.png")}}]}
    answers = {
        "picture": service.ask(picture, max_tokens=8),
        "again": service.ask(picture, max_tokens=8),
        "video": service.ask(parts("clip.mp4", "video_url", "What moves?"), max_tokens=8),
        "sound": service.ask(parts("tones.wav", "audio_url", "Which tones?"), max_tokens=8),
        "choices": service.ask("hello", max_tokens=8, n=2),
        "completion": service.post("/v1/completions", prompt),
        "encode": service.post("/v1/encode", encode),
        "refused": service.ask("hello", temperature=99),
        "undecodable": service.ask(
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAA="}}]
        ),
    }
    leave_early(service)
    return answers


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    directory = tmp_path_factory.mktemp("traced")
    store = f"engine.kv_store=local:{directory / 'store'}"
    with receiving() as received, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        # Nothing is sent before it is time to end.
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
        arguments = ("--mode", "epd", "--media-root", str(SAMPLES), "--set", store)
        with running_service(directory, *arguments) as service:
            answers = traffic(service)
            metrics = settled_metrics(service)
            log_path: Path = service.log_path
        # Stopped: all that was not sent before is there now.
        yield Recorded(metrics, answers, received.nodes(), log_path.read_text())


def settled_metrics(service: Service) -> str:
    """Once the heartbeats have told of everything."""
    while True:
        text: str = service.get("/metrics").body["text"]
        told = re.findall(r"^mimo_(?:prefill|decode)_finished_requests_total{\S* (\S+)$", text, re.MULTILINE)
        if len(told) == 2 and all(float(number) >= NUM_GENERATED for number in told):
            return text
        time.sleep(0.1)
