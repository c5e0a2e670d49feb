"""The whole gateway over fake workers: answers, streams, media, ends."""

import asyncio
from typing import Any

import pytest

from epd.types import Role
from tests.fakes.gateway import (
    AUDIO_URL,
    IMAGE_URL,
    RENDERER,
    VIDEO_URL,
    running_gateway,
    says,
    text_of,
    text_of_events,
)

MODES = {"one worker": (Role.BOTH,), "prefill and decode": (Role.PREFILL, Role.DECODE)}
ALL_MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": IMAGE_URL}},
    {"type": "text", "text": "between"},
    {"type": "audio_url", "audio_url": {"url": AUDIO_URL}},
    {"type": "video_url", "video_url": {"url": VIDEO_URL, "fps": 2.0}},
    {"type": "text", "text": "What is this?"},
]


@pytest.mark.parametrize("mode", MODES)
async def test_a_text_request_is_answered(mode: str) -> None:
    async with running_gateway(says("a red circle"), roles=MODES[mode]) as stack:
        status, body, headers = await stack.ask("What is this?")
        assert status == 200, body
        assert text_of(body) == "a red circle"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["object"] == "chat.completion"
        num_tokens = len(RENDERER.vocabulary.encode("a red circle"))
        assert body["usage"]["completion_tokens"] in (num_tokens + 1, num_tokens)
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
        assert headers["X-Request-Id"].startswith("req-")


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_says_the_same_in_pieces(mode: str) -> None:
    async with running_gateway(says("a red circle, twice"), roles=MODES[mode]) as stack:
        events = await stack.events("What?", stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert text_of_events(events) == "a red circle, twice"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] > 2
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert len({event["id"] for event in events[:-1]}) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_media_of_all_kinds_become_spans(mode: str) -> None:
    async with running_gateway(roles=MODES[mode]) as stack:
        status, body, _ = await stack.ask(ALL_MEDIA)
        assert status == 200, body
        request = stack.worker.submitted[0]
        assert not stack.encoder.leases, "a lease outlived its request"
        async with stack.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        assert {
            f'mimo_gateway_tokens_total{{kind="{kind}"}} {n}'
            for kind, n in (("cached", 3.0), ("healed", 2.0), ("host", 1.0), ("store", 1.0))
        } <= {*lines}
        assert body["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 3,
            "host_tokens": 1,
            "store_tokens": 1,
            "healed_tokens": 2,
            "image_tokens": 9,
            "video_tokens": 8,
            "audio_tokens": 5,
        }
    pads = RENDERER.vocabulary.special_ids
    assert [span.media for span in request.spans] == [0, 1, 2, 2]
    assert [span.stop - span.start for span in request.spans] == [9, 5, 4, 4]
    assert [span.row_start for span in request.spans] == [0, 0, 0, 4]
    for span, pad in zip(request.spans, ["image", "audio", "video", "video"], strict=True):
        assert set(request.token_ids[span.start : span.stop]) == {pads[f"<|{pad}_pad|>"]}
        assert request.embeddings[span.media].key == span.key


async def test_input_audio_is_a_data_url() -> None:
    async with running_gateway() as stack:
        stack.fetcher.contents["data:audio/wav;base64,QUJD"] = b"ABC"
        part = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
        status, body, _ = await stack.ask([part, {"type": "text", "text": "?"}])
        assert status == 200, body
        assert stack.encoder.encoded == [b"ABC"]


async def test_max_tokens_ends_with_length() -> None:
    async with running_gateway(says("one two three four five six")) as stack:
        for name in ("max_tokens", "max_completion_tokens"):
            _, body, _ = await stack.ask(**{name: 2})
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == 2


async def test_a_stop_string_ends_the_answer_and_the_work() -> None:
    async with running_gateway(says("alpha beta gamma delta epsilon")) as stack:
        _, body, _ = await stack.ask(stop=["mma de", "zzz"])
        assert text_of(body) == "alpha beta ga"
        assert body["choices"][0]["finish_reason"] == "stop"
        events = await stack.events(stop="beta")
        assert text_of_events(events) == "alpha "
        await asyncio.sleep(0.05)
        assert stack.worker.num_running == 0


async def test_reasoning_is_apart_from_content() -> None:
    async with running_gateway(says("<think>It is round.</think>a circle")) as stack:
        _, body, _ = await stack.ask(chat_template_kwargs={"enable_thinking": True})
        message = body["choices"][0]["message"]
        assert message["reasoning_content"] == "It is round."
        assert message["content"] == "a circle"
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 2
        events = await stack.events()
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It is round."
        assert text_of_events(events) == "a circle"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = (
    "Let me look.<tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</tool_call>"
)


async def test_tool_calls_are_parsed() -> None:
    async with running_gateway(says(CALL)) as stack:
        _, body, _ = await stack.ask(tools=TOOLS)
        choice = body["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me look."
        call = choice["message"]["tool_calls"][0]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris", "days": 3}'}
        events = await stack.events(tools=TOOLS)
        calls = [call for event in events[:-1] for call in event["choices"][0]["delta"].get("tool_calls", [])]
        assert [call["function"].get("name") for call in calls] == ["weather", *[None] * (len(calls) - 1)]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris", "days": 3}'
        assert len(calls) > 2
        assert calls[0]["id"]
        assert {call["index"] for call in calls} == {0}
        _, body, _ = await stack.ask(tools=TOOLS, tool_choice="none")
        assert body["choices"][0]["message"]["content"] == CALL


async def test_part_of_a_character_is_written_by_its_bytes() -> None:
    async with running_gateway(says("a \U0001f600")) as stack:
        _, body, _ = await stack.ask(logprobs=True, top_logprobs=1)
    message, entries = body["choices"][0]["message"], body["choices"][0]["logprobs"]["content"]
    parts = [entry for entry in entries if entry["token"].startswith("bytes:")]
    assert parts
    for entry in parts:
        assert bytes.fromhex(entry["token"].removeprefix("bytes:").replace("\\x", "")) == bytes(entry["bytes"])
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    assert not any("\ufffd" in entry["token"] for entry in entries)
    assert message == {"role": "assistant", "content": "a \U0001f600", "refusal": None}


async def test_logprobs_follow_the_tokens() -> None:
    async with running_gateway(says("a red circle")) as stack:
        _, body, _ = await stack.ask(logprobs=True, top_logprobs=1)
        entries = body["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == "a red circle"
        assert all(len(entry["top_logprobs"]) == 1 and entry["logprob"] == -0.5 for entry in entries)
        events = await stack.events(logprobs=True)
        streamed = [
            entry
            for event in events[:-1]
            if event["choices"][0]["logprobs"]
            for entry in event["choices"][0]["logprobs"]["content"]
        ]
        assert "".join(entry["token"] for entry in streamed) == "a red circle"


async def test_sampling_reaches_the_worker() -> None:
    async with running_gateway() as stack:
        await stack.ask(temperature=0.5, top_p=0.9, top_k=7, seed=3, max_tokens=5, ignore_eos=True)
        await stack.ask()
        asked, default = (request.sampling for request in stack.worker.submitted)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.max_tokens) == (0.5, 0.9, 7, 3, 5)
    assert asked.ignore_eos
    assert asked.stop_token_ids == ()
    assert default.temperature == 0.0
    assert default.stop_token_ids == RENDERER.eos_token_ids


async def test_many_requests_at_once_over_two_workers() -> None:
    async with running_gateway(roles=(Role.BOTH, Role.BOTH)) as stack:
        results = await asyncio.gather(*(stack.ask(f"question {i}") for i in range(40)))
        assert {status for status, _, _ in results} == {200}
        assert all(worker.submitted for worker in stack.workers)
        assert await stack.metric("mimo_gateway_inflight_requests") == 0


async def test_models_health_ready_metrics() -> None:
    async with running_gateway(roles=(Role.PREFILL, Role.DECODE)) as stack:
        await stack.ask()
        async with stack.session.get("/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["tiny"]
        async with stack.session.get("/v1/models/tiny") as response:
            assert (await response.json())["id"] == "tiny"
        for path in ("/health", "/ready"):
            async with stack.session.get(path) as response:
                assert response.status == 200, await response.text()
        async with stack.session.get("/metrics") as response:
            text = await response.text()
        for name in ("mimo_prefill_pool_pages", "mimo_decode_queue_requests", "mimo_encoder_cache_entries"):
            assert name in text
        assert "mimo_prefill_steps_total" in text
        stack.workers[1].die()
        stack.encoder.up = False
        async with stack.session.get("/ready") as response:
            assert response.status == 503
            assert set((await response.json())["waiting_for"]) == {"decode", "encoder"}
        async with stack.session.get("/health") as response:
            assert response.status == 200


async def test_workers_that_hold_kv_otherwise_are_not_ready_and_get_nothing() -> None:
    roles = (Role.PREFILL, Role.DECODE)
    async with running_gateway(roles=roles, restart_wait_s=0.1) as stack:
        await stack.ask()
        for worker, kind in zip(stack.workers, ("odd", "even"), strict=True):
            worker.kv_fingerprint = kind
        for worker in stack.workers:
            worker.submitted.clear()
        await asyncio.sleep(0.2)
        async with stack.session.get("/ready") as response:
            assert response.status == 503
            waiting_for = (await response.json())["waiting_for"]
        assert set(waiting_for) == {"prefill", "decode"}
        assert "no decode worker holds KV as this one does (page_size, dtype" in waiting_for["prefill"][0]
        status, body, _ = await stack.ask()
        assert status == 503, body
        assert "no two workers of the stages prefill and decode hold KV in the same way" in body["error"]["message"]
        assert not any(worker.submitted for worker in stack.workers)
