"""The trace of a request to an encoder that serves by itself, and of media that are waited for, refused or retried."""

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from encoder.config import EncoderConfig
from encoder.tracing import Carrier, open_span, use
from encoder.types import CancelEncode, EncodeReply
from tests.encoder.test_client import answer, client_of, encode, owner_first, refuse
from tests.fakes.encoder_peer import Opener
from tests.fakes.front import fronted
from tests.fakes.span_tree import Node, Spans, collecting

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collecting() as found:
        yield found


def item(content: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def has(name: str, count: int = 1) -> Callable[[Node], bool]:
    return lambda root: len(root.find(name)) == count


async def test_a_front_is_the_root_of_its_traces(
    spans: Spans, tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with fronted(tiny_model_dir) as parts:
        status, _ = await parts.encode(item(make_png(1)), item(make_png(2)))
        assert status == 200
        root = await asyncio.to_thread(spans.tree, has("mimo.encode.serve", 2))
        assert root.attributes["http.route"] == "/v1/encode"
        assert root.attributes["gen_ai.operation.name"] == "embeddings"
        assert len(root.find("mimo.media.fetch")) == 2
        for encode in root.find("mimo.encode"):
            shape = "mimo.encode(mimo.encode.serve(mimo.encode.prepare, mimo.encode.queue, mimo.encode.tower))"
            assert encode.shape() == shape
        for node in root.walk():
            assert root.start_ns <= node.start_ns <= node.stop_ns <= root.stop_ns, node.name
        spans.clear()
        status, _ = await parts.encode(item(b"\x89PNG\r\n\x1a\n no picture"))
        assert status == 422
        root = await asyncio.to_thread(spans.tree, has("mimo.encode.serve"))
        assert root.one("mimo.encode.serve").is_error
        assert root.one("mimo.encode").is_error
        assert not root.is_error


async def test_who_only_looks_is_not_traced(spans: Spans, tiny_model_dir: Path) -> None:
    async with fronted(tiny_model_dir) as parts:
        async with parts.http.get("/metrics"), parts.http.get("/health"):
            pass
        async with parts.http.post("/nothing") as response:
            assert response.status == 404
    root = await asyncio.to_thread(spans.tree)
    assert root.attributes["http.response.status_code"] == 404


async def test_who_joins_late_sees_the_end_of_it(
    spans: Spans, open_peer: Opener, make_png: Callable[..., bytes]
) -> None:
    """Two requests for one medium: it is computed once, and both see it, each in its own trace."""
    async with open_peer(EncoderConfig(arena_bytes=2**23, max_batch_wait_s=0.3)) as peer:
        ids = []
        for digit in "12":
            request = peer.request(make_png(3), traceparent=f"00-{digit * 32}-{SPAN_ID}-01")
            ids.append(peer.send(request, make_png(3)))
            await asyncio.sleep(0.1)
        replies = [await peer.answer(request_id) for request_id in ids]
        assert all(isinstance(reply, EncodeReply) for reply in replies)
    first, second = await asyncio.to_thread(served, spans, 2)
    assert first.trace_id == "1" * 32
    assert second.trace_id == "2" * 32
    assert first.one("mimo.encode.tower").stop_ns == second.one("mimo.encode.tower").stop_ns
    for node in second.walk():
        assert second.start_ns <= node.start_ns, "nothing before it came"
    assert second.start_ns - first.start_ns > 50_000_000


async def test_a_cancelled_request_says_so(spans: Spans, open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(EncoderConfig(arena_bytes=2**23, max_batch_wait_s=5.0)) as peer:
        request = peer.request(make_png(4), traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")
        request_id = peer.send(request, make_png(4))
        await asyncio.sleep(0.05)
        peer.server.handle(CancelEncode(request_id=request_id), (), lambda *_: None, peer=peer.name)
        await peer.answer(request_id)
    (node,) = await asyncio.to_thread(served, spans, 1)
    assert node.attributes["mimo.cancelled"] is True
    assert not node.is_error
    assert node.find("mimo.encode.tower") == []


async def test_a_medium_that_one_replica_did_not_serve_is_an_event(spans: Spans) -> None:
    links = owner_first(refuse, answer)
    async with client_of(*links) as client:
        root = open_span("mimo.request", parent=Carrier())
        with use(root):
            await encode(client)
        root.end()
    asked = (await asyncio.to_thread(spans.tree)).one("mimo.encode")
    assert asked.events == ["mimo.retry"]
    assert not asked.is_error
    # Both replicas hear of the same span.
    (first,), (second,) = (link.requests() for link in links)
    assert first.traceparent == second.traceparent == f"00-{asked.trace_id}-{asked.span_id}-01"


def served(spans: Spans, count: int) -> list[Node]:
    """Spans of the server alone, once there are so many."""
    for _ in range(1000):
        found = [root for root in spans.roots() if root.name == "mimo.encode.serve"]
        if len(found) == count:
            return found
        time.sleep(0.005)
    raise AssertionError([root.shape() for root in spans.roots()])
