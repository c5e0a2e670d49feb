"""The gateway's part of a trace, over stages that are played: retries, cancellation, refusals, several choices."""

import asyncio
from collections.abc import Iterator

import pytest

from epd.types import GenerateRequest, Role
from tests.fakes.gateway import IMAGE_URL, Stack, chat_body, running_gateway, says
from tests.fakes.span_tree import Spans, collecting
from tests.fakes.stages import until

PICTURE = [{"type": "image_url", "image_url": {"url": IMAGE_URL}}, {"type": "text", "text": "what is it?"}]
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collecting() as found:
        yield found


def submitted(stack: Stack, number: int = -1) -> GenerateRequest:
    request: GenerateRequest = stack.worker.submitted[number]
    return request


async def test_one_request_one_tree(spans: Spans) -> None:
    async with running_gateway() as stack:
        status, body, headers = await stack.ask(PICTURE, max_tokens=20, temperature=0.5, seed=7)
    assert status == 200
    root = await asyncio.to_thread(spans.tree, lambda root: bool(root.find("mimo.gateway.render")))
    assert root.parent_id is None
    assert {"mimo.gateway.render", "mimo.media.fetch", "mimo.generate"} <= {child.name for child in root.children}
    for node in root.walk():
        assert root.start_ns <= node.start_ns <= node.stop_ns <= root.stop_ns, node.name
    assert (
        root.attributes.items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "mimo.request.id": headers["X-Request-Id"],
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.id": body["id"],
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": body["usage"]["completion_tokens"],
            "mimo.media.count": 1,
        }.items()
    )
    attempt = root.one("mimo.generate")
    assert attempt.attributes.items() >= {"gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 7}.items()
    assert submitted(stack).traceparent == f"00-{root.trace_id}-{attempt.span_id}-01"
    assert not any(node.is_error for node in root.walk())


async def test_the_clients_trace_goes_on(spans: Spans) -> None:
    async with running_gateway() as stack:
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
        await stack.post(chat_body(), headers=headers)
    root = await asyncio.to_thread(spans.tree)
    assert (root.trace_id, root.parent_id) == (TRACE_ID, SPAN_ID)
    assert submitted(stack).traceparent.startswith(f"00-{TRACE_ID}-")
    assert submitted(stack).tracestate == "vendor=1"


async def test_a_client_that_wants_no_trace_gets_none(spans: Spans) -> None:
    async with running_gateway() as stack:
        await stack.post(chat_body(), headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})
        assert submitted(stack).traceparent.endswith("-00"), "those who come after hear it"
        await stack.post(chat_body(), headers={"traceparent": "00-nonsense-00"})
    root = await asyncio.to_thread(spans.tree)
    assert root.trace_id != TRACE_ID


async def test_without_an_exporter_the_clients_trace_is_passed_on() -> None:
    async with running_gateway() as stack:
        given = f"00-{TRACE_ID}-{SPAN_ID}-01"
        await stack.post(chat_body(), headers={"traceparent": given})
        await stack.post(chat_body())
    assert submitted(stack, 0).traceparent == given
    assert submitted(stack, 1).traceparent == ""


async def test_a_retry_is_an_event_and_a_linked_attempt(spans: Spans) -> None:
    async with running_gateway() as stack:
        stack.worker.die_after = 2
        asking = asyncio.create_task(stack.ask())
        await until(lambda: bool(stack.worker.submitted))
        await until(lambda: stack.worker.num_running == 0)
        stack.worker.start()
        status, _, _ = await asking
    assert status == 200
    root = await asyncio.to_thread(spans.tree)
    first, second = root.find("mimo.generate")
    assert "mimo.retry" in root.events
    assert first.is_error
    assert not second.is_error
    assert second.links == [first.span_id]
    assert (first.attributes["mimo.attempt.number"], second.attributes["mimo.attempt.number"]) == (1, 2)
    assert first.stop_ns <= second.start_ns
    assert root.attributes["mimo.attempts"] == 2


async def test_every_choice_has_an_attempt(spans: Spans) -> None:
    async with running_gateway() as stack:
        status, body, _ = await stack.ask(n=3)
    assert status == 200
    root = await asyncio.to_thread(spans.tree)
    attempts = root.find("mimo.generate")
    assert len(attempts) == 3
    assert len({attempt.attributes["mimo.choice"] for attempt in attempts}) == 3
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == body["usage"]["completion_tokens"]


async def test_a_client_that_leaves_is_seen(spans: Spans) -> None:
    async with running_gateway(says("word " * 200)) as stack:
        stack.worker.stall_after = 2
        async with stack.session.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
            await response.content.readline()
        await until(lambda: bool(spans.roots()))
    root = await asyncio.to_thread(spans.tree)
    assert root.attributes["mimo.cancelled"] is True
    assert root.attributes["error.type"] == "client_closed_request"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert not root.is_error, "nobody here is at fault"


async def test_refusals_are_seen(spans: Spans) -> None:
    async with running_gateway() as stack:
        status, body, _ = await stack.ask(temperature=99)
        assert status == 400
        root = await asyncio.to_thread(spans.tree)
        assert root.attributes["http.response.status_code"] == 400
        assert root.attributes["error.type"] == body["error"]["code"]
        assert not root.is_error
        spans.clear()
        stack.encoder.failure = None
        async with stack.session.get("/metrics"), stack.session.get("/v1/models"):
            pass
        assert spans.roots() == [], "who only looks is not traced"


async def test_a_stage_that_is_down_is_an_error(spans: Spans) -> None:
    async with running_gateway(roles=(Role.BOTH,), restart_wait_s=0.05) as stack:
        stack.worker.die()
        status, body, _ = await stack.ask()
    assert status == 503
    root = await asyncio.to_thread(spans.tree)
    assert root.is_error
    assert root.attributes["error.type"] == body["error"]["code"]
    assert root.one("mimo.generate").is_error


async def test_a_stop_string_ends_the_attempt_without_an_error(spans: Spans) -> None:
    async with running_gateway(says("a red circle and more")) as stack:
        status, _, _ = await stack.ask(stop="circle")
    assert status == 200
    root = await asyncio.to_thread(spans.tree)
    attempt = root.one("mimo.generate")
    assert attempt.attributes["mimo.stopped"] is True
    assert not attempt.is_error
