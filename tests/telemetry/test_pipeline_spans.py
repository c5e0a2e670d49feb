"""The trace of a request over all stages, real ones, in one process."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from cli.load import load
from cli.unified import unified_server
from tests.e2e.service import SAMPLES, Answer, Service, file_url
from tests.fakes.span_tree import Node, Spans, collecting

pytestmark = pytest.mark.e2e


@dataclass
class Unified:
    """A whole pipeline on a thread of this process."""

    service: Service
    spans: Spans

    def ask(self, content: Any, **fields: Any) -> Answer:
        return self.service.ask(content, **fields)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unified]:
    directory = tmp_path_factory.mktemp("unified")
    flags = {"mode": "unified", "gateway": {"port": 0}, "fetch": {"media_roots": [str(SAMPLES)]}}
    environ = {"MIMO_CACHE_DIR": str(directory / "cache"), "MIMO_ENGINE__KV_STORE": ""}
    config = load(runtime_dir=directory, flags=flags, environ=environ)
    ports: list[int] = []
    is_up, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with unified_server(config) as port:
            ports.append(port)
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    with collecting() as spans:
        thread.start()
        try:
            assert is_up.wait(60)
            service = Service(f"http://127.0.0.1:{ports[0]}", os.getpid(), directory / "no log")
            service.wait_ready()
            yield Unified(service, spans)
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join(60)


@pytest.fixture
def unified(running: Unified) -> Unified:
    running.spans.clear()
    return running


def picture(name: str = "picture.png") -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": file_url(name)}},
        {"type": "text", "text": "How many shapes are there?"},
    ]


def is_decoded(root: Node) -> bool:
    """Its spans are made on another thread, after the answer."""
    return bool(root.find("mimo.decode")) and bool(root.find("mimo.gateway.render"))


STEPS = ["mimo.gateway.assemble", "mimo.gateway.encoder", "mimo.gateway.parse", "mimo.gateway.read"]


def test_one_request_with_a_picture_is_one_tree(unified: Unified) -> None:
    answer = unified.ask(picture(), max_tokens=12)
    assert answer.status == 200
    root = unified.spans.tree(is_decoded)
    found = {child.shape() for child in root.children}
    wanted = {
        "mimo.encode(mimo.encode.serve(mimo.encode.prepare, mimo.encode.queue, mimo.encode.tower))",
        "mimo.generate(mimo.decode, mimo.prefill, mimo.prefill.queue)",
        "mimo.media.fetch",
        "mimo.gateway.render",
    }
    assert wanted <= found
    # Steps of the gateway that took no time at all are left out.
    assert found - wanted <= set(STEPS)
    for node in root.walk():
        assert root.start_ns <= node.start_ns <= node.stop_ns <= root.stop_ns, node.name
        for child in node.children:
            assert node.start_ns <= child.start_ns <= child.stop_ns <= node.stop_ns, child.name
        assert not node.is_error
    order = [root.one(name) for name in ("mimo.media.fetch", "mimo.encode", "mimo.prefill", "mimo.decode")]
    assert all(one.stop_ns <= next_.start_ns + 1_000_000 for one, next_ in pairwise(order))


def test_tokens_and_tiers_are_told(unified: Unified) -> None:
    again = picture("number.png")
    first = unified.ask(again, max_tokens=4)
    unified.spans.tree(is_decoded)
    unified.spans.clear()
    answer = unified.ask(again, max_tokens=4)
    usage = answer.body["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    root = unified.spans.tree(is_decoded)
    assert first.body["usage"]["prompt_tokens"] == root.attributes["gen_ai.usage.input_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert root.attributes["mimo.media.image_tokens"] == usage["prompt_tokens_details"]["image_tokens"]
    assert root.attributes["mimo.media.cached_count"] == 1
    prefill = root.one("mimo.prefill")
    assert prefill.attributes["mimo.cache.l1_tokens"] > 0
    assert "mimo.prefill.chunk" in prefill.events
    assert root.one("mimo.decode").attributes["gen_ai.usage.output_tokens"] >= usage["completion_tokens"] - 1
    served = root.one("mimo.encode.serve")
    assert served.attributes["mimo.media.cached"] is True
    assert served.children == [], "nothing was computed for it"
    assert served.attributes["mimo.media.key"] == root.one("mimo.encode").attributes["mimo.media.key"]


def test_a_medium_that_cannot_be_decoded_is_seen_where_it_failed(unified: Unified) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAA="}}]
    answer = unified.ask(content)
    assert answer.status in (400, 422), answer
    root = unified.spans.tree(lambda root: bool(root.find("mimo.encode.serve")))
    served = root.one("mimo.encode.serve")
    assert served.is_error
    assert served.attributes["error.type"] == answer.body["error"]["code"]
    assert root.one("mimo.encode").is_error
    assert root.attributes["error.type"] == answer.body["error"]["code"]
    assert not root.is_error, "the client's fault, not ours"


async def test_who_leaves_is_seen_in_every_stage(unified: Unified) -> None:
    body = {
        "model": "mimo-nano",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        aiohttp.ClientSession(unified.service.url) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        await response.content.readline()
        response.close()
    root = await asyncio.to_thread(unified.spans.tree, lambda root: bool(root.find("mimo.decode")))
    assert root.attributes["mimo.cancelled"] is True
    assert root.one("mimo.generate").attributes["mimo.cancelled"] is True
    assert root.one("mimo.decode").attributes["mimo.cancelled"] is True
