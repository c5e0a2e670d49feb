"""Several choices of one request: how they share, how they end, and that none outlives the others."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import pytest

from epd.gateway.choices import SharedPrompt, merged
from epd.types import Finish, FinishReason, GenerateRequest, Role, Usage
from tests.fakes.gateway import AUDIO_URL, IMAGE_URL, RENDERER, chat_body, running_gateway, says
from tests.fakes.stages import until

MODES = {"one worker": (Role.BOTH,), "prefill and decode": (Role.PREFILL, Role.DECODE)}
TEXT = "one two three four five six"
MEDIA = [
    {"type": "image_url", "image_url": {"url": IMAGE_URL}},
    {"type": "audio_url", "audio_url": {"url": AUDIO_URL}},
    {"type": "text", "text": "?"},
]


def by_seed(request: GenerateRequest) -> list[int]:
    """Every choice says its own seed."""
    return RENDERER.vocabulary.encode(f"seed {request.sampling.seed}.")


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in body["choices"]]


@pytest.mark.parametrize("mode", MODES)
async def test_choices_differ_by_their_seeds(mode: str) -> None:
    async with running_gateway(by_seed, roles=MODES[mode]) as stack:
        status, body, _ = await stack.ask(MEDIA, n=3, seed=2**63 - 1, return_timings=True)
        assert status == 200, body
        assert texts(body) == [f"seed {2**63 - 1 + i}." for i in range(3)]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert stack.encoder.encoded == [b"image", b"audio"], "media are encoded once"
        await until(lambda: not stack.encoder.leases)
        usage = body["usage"]
        lengths = [len(RENDERER.vocabulary.encode(text)) + 1 for text in texts(body)]
        assert usage["completion_tokens"] == sum(lengths)
        assert usage["prompt_tokens"] == len(stack.worker.submitted[0].token_ids), "counted once"
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3, "as the first choice found it"
        assert (body["timings"]["num_choices"], body["timings"]["num_attempts"]) == (3, 3)
        ids = [request.request_id for request in stack.worker.submitted]
        assert ids == [f"{body['id']}-{i}#1" for i in range(3)]


@pytest.mark.parametrize("mode", MODES)
async def test_streams_interleave_and_every_choice_ends_once(mode: str) -> None:
    async with running_gateway(by_seed, roles=MODES[mode]) as stack:
        events = await stack.events(MEDIA, n=4, seed=10, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    *chunks, usage = events[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("role") for choice in choices[:4]] == ["assistant"] * 4
    assert [choice["index"] for choice in choices[:4]] == [0, 1, 2, 3]
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content") or "" for choice in own) == f"seed {10 + index}."
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"
    order = [choice["index"] for choice in choices[4:]]
    assert order != sorted(order), "choices wait for each other"
    assert usage["usage"]["completion_tokens"] > 12
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_the_others_begin_when_the_prompt_is_computed() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.stall_after = 0
        request = asyncio.create_task(stack.ask(MEDIA, n=3))
        await until(lambda: stack.worker.num_running == 1)
        await asyncio.sleep(0.05)
        assert len(stack.worker.submitted) == 1
        request.cancel()
        await until(lambda: not stack.encoder.leases and not stack.worker.num_running)
        stack.worker.stall_after = 1
        request = asyncio.create_task(stack.ask(MEDIA, n=3))
        await until(lambda: stack.worker.num_running == 3)
        # All have a token, so all rows are read.
        await until(lambda: not stack.encoder.leases)
        assert stack.worker.num_running == 3
        request.cancel()
        await until(lambda: not stack.worker.num_running)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all(mode: str, stream: bool) -> None:
    async with running_gateway(says(TEXT), roles=MODES[mode]) as stack:
        stack.workers[-1].stall_after = 3
        ask = stack.events if stream else stack.ask
        request = asyncio.create_task(ask(MEDIA, n=3))
        await until(lambda: stack.workers[-1].num_running == 3)
        request.cancel()
        await until(lambda: not any(worker.num_running for worker in stack.workers))
        await until(lambda: not stack.encoder.leases)
        assert len(set(stack.workers[-1].aborted)) == 3
        assert await stack.metric("mimo_gateway_inflight_requests") == 0


async def test_one_failure_fails_the_request_and_ends_the_others() -> None:
    def answer(request: GenerateRequest) -> list[int]:
        if request.request_id.endswith("-1#1"):
            stack.worker.finish = Finish(
                request_id="",
                reason=FinishReason.FAILED,
                usage=Usage(prompt_tokens=1, completion_tokens=0),
                status=504,
                code="broken",
                message="it broke",
            )
        return RENDERER.vocabulary.encode("word " * 300)

    async with running_gateway(answer) as stack:
        # Choice 1 breaks the worker for those that come after it: choice 2 is told so.
        status, body, _ = await stack.ask(n=3, max_tokens=1000)
        assert (status, body["error"]["code"]) == (504, "broken")
        await until(lambda: not stack.worker.num_running)
        assert {request_id.rpartition("-")[2] for request_id in stack.worker.aborted} == {"0#1", "1#1"}
        stack.worker.finish = None
        events = await stack.events(n=3, max_tokens=1000)
        assert events[-1]["error"]["code"] == "broken"
        assert "[DONE]" not in events


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_that_dies_costs_no_choice(mode: str, after: int) -> None:
    async with running_gateway(by_seed, roles=MODES[mode], restart_wait_s=5.0) as stack:
        worker = stack.workers[-1]
        worker.die_after = after if mode == "one worker" else max(1, after)
        request = asyncio.create_task(stack.ask(MEDIA, n=3, seed=5))
        await until(lambda: worker._endpoint is None)
        worker.start()
        status, body, _ = await request
        assert status == 200, body
        assert texts(body) == ["seed 5.", "seed 6.", "seed 7."]
        await until(lambda: not stack.encoder.leases)
        assert sorted(stack.encoder.released) == sorted(set(stack.encoder.released)), "released twice"


async def test_rows_are_there_for_every_attempt_of_every_choice() -> None:
    """All three lose their worker; each asks for the media anew, and takes none from those that have not read yet."""
    held: list[bool] = []

    def answer(request: GenerateRequest) -> list[int]:
        held.append({ref.lease_id for ref in request.embeddings} <= stack.encoder.leases)
        return by_seed(request)

    async with running_gateway(answer, restart_wait_s=5.0) as stack:
        stack.worker.stall_after = 1
        request = asyncio.create_task(stack.ask(MEDIA, n=3, seed=5))
        await until(lambda: stack.worker.num_running == 3)
        await until(lambda: not stack.encoder.leases)
        stack.worker.die()
        stack.worker.stall_after = None
        # They wait for their first token together.
        stack.worker.step_s = 0.05
        stack.worker.start()
        status, body, _ = await request
        assert (status, texts(body)) == (200, ["seed 5.", "seed 6.", "seed 7."])
        assert held == [True] * 6
        assert not stack.encoder.leases


async def test_logprobs_and_stops_of_each_choice() -> None:
    async with running_gateway(by_seed) as stack:
        _, body, _ = await stack.ask(n=2, seed=7, stop=[" 8"], logprobs=True, top_logprobs=1)
        first, second = body["choices"]
        assert (first["message"]["content"], first["stop_reason"]) == ("seed 7.", None)
        assert (second["message"]["content"], second["stop_reason"]) == ("seed", " 8")
        for choice in (first, second):
            tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
            assert tokens == f"seed {7 + choice['index']}" + ("." if choice is first else "")
        details = body["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"], details["healed_tokens"]) == (3, 2)


async def test_stops_are_found_in_reasoning_and_nothing_comes_after() -> None:
    async with running_gateway(says("<think>one two three</think>four <tool_call>")) as stack:
        _, body, _ = await stack.ask(stop=["wo th"], chat_template_kwargs={"enable_thinking": True})
        choice = body["choices"][0]
        assert choice["message"]["reasoning_content"] == "one t"
        assert choice["message"]["content"] == ""
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wo th")
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        # Over the border of reasoning and content: what the model writes is one text.
        _, body, _ = await stack.ask(
            stop=["ee</think>fo"],
            include_stop_str_in_output=True,
            chat_template_kwargs={"enable_thinking": True},
        )
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("one two three", "fo")


async def test_usage_is_whole_when_the_only_call_ends_the_answer() -> None:
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with running_gateway(says(call + call)) as stack:
        _, body, _ = await stack.ask(tools=[tool], parallel_tool_calls=False)
        assert len(body["choices"][0]["message"]["tool_calls"]) == 1
        assert body["usage"]["completion_tokens"] == len(RENDERER.vocabulary.encode(call))
        details = body["usage"]["prompt_tokens_details"]
        assert [details[f"{name}_tokens"] for name in ("cached", "host", "store", "healed")] == [3, 1, 1, 2]


async def test_more_choices_than_allowed_are_refused_by_name() -> None:
    async with running_gateway(max_choices=3) as stack:
        status, body, _ = await stack.ask(n=4)
        assert (status, body["error"]["param"]) == (400, "n")
        assert "1 to 3" in body["error"]["message"]
        assert not stack.worker.submitted


async def test_tool_calls_of_choices_have_ids_of_their_own() -> None:
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with running_gateway(says(call)) as stack:
        status, body, _ = await stack.ask(n=2, tools=[tool])
        assert status == 200, body
        calls = [call for choice in body["choices"] for call in choice["message"]["tool_calls"]]
        assert len({call["id"] for call in calls}) == 2
        assert {choice["finish_reason"] for choice in body["choices"]} == {"tool_calls"}


def counting(name: int, count: int, log: list[str], *, fail: bool = False) -> Callable[[], AsyncGenerator[int, None]]:
    async def run() -> AsyncGenerator[int, None]:
        log.append(f"begin {name}")
        try:
            for i in range(count):
                await asyncio.sleep(0)
                yield 100 * name + i
            if fail:
                raise ValueError("broken")
        finally:
            log.append(f"end {name}")

    return run


async def test_merged_keeps_each_order_and_the_limit() -> None:
    log: list[str] = []
    runs = [counting(name, 5, log) for name in range(6)]
    seen = [value async for value in merged(runs, limit=2)]
    assert sorted(seen) == sorted(100 * name + i for name in range(6) for i in range(5))
    for name in range(6):
        own = [value for value in seen if value // 100 == name]
        assert own == sorted(own)
    running = 0
    for word, _, _ in (entry.partition(" ") for entry in log):
        running += 1 if word == "begin" else -1
        assert running <= 2
    assert [entry for entry in log if entry.startswith("begin")] == [f"begin {name}" for name in range(6)]


@pytest.mark.parametrize("count", [1, 3])
async def test_merged_ends_all_at_a_failure_or_when_closed(count: int) -> None:
    log: list[str] = []
    runs = [counting(name, 50, log, fail=name == count - 1) for name in range(count)]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged(runs, limit=8):
            pass
    assert {entry for entry in log if entry.startswith("end")} == {f"end {name}" for name in range(count)}
    log.clear()
    events = merged([counting(name, 50, log) for name in range(count)], limit=8)
    await anext(events)
    await events.aclose()
    assert {entry.replace("begin", "end") for entry in log} == {entry for entry in log if entry.startswith("end")}


async def test_embeddings_are_kept_while_somebody_may_read_them() -> None:
    log: list[str] = []

    async def refresh(keep: bool) -> tuple[()]:
        log.append(f"refresh {keep}")
        return ()

    shared = SharedPrompt(3, refresh=refresh, release=partial(log.append, "release"))
    shared.has_read(0)
    await shared.computed()
    await shared.refreshed(0)
    assert log == ["refresh True"]
    shared.has_read(0)
    shared.has_read(1)
    shared.has_read(1)
    assert log == ["refresh True"]
    with shared.running(2):
        pass
    assert log == ["refresh True", "release"]
    await shared.refreshed(1)
    shared.has_read(1)
    assert log == ["refresh True", "release", "refresh False", "release"]


async def test_a_stream_of_choices_read_slowly_is_whole() -> None:
    """More events than are kept for a client that does not read."""
    async with running_gateway(says("word " * 200)) as stack:
        body = chat_body(n=4, stream=True, max_tokens=300)
        raw = b""
        async with stack.session.post("/v1/chat/completions", json=body) as response:
            async for chunk in response.content.iter_chunked(4096):
                raw += chunk
                await asyncio.sleep(0)
        assert raw.count(b'"finish_reason":"stop"') == 4
