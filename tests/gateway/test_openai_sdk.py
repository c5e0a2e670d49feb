"""The official SDK as the client, synchronous and not, streaming and not."""

import asyncio
from typing import Any

import openai
import pytest

from epd.types import Role
from tests.fakes.gateway import AUDIO_URL, IMAGE_URL, MODEL, VIDEO_URL, Stack, running_gateway, says
from tests.fakes.stages import until
from tests.gateway.test_chat import CALL, TOOLS

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "high"}},
            {"type": "video_url", "video_url": {"url": VIDEO_URL}},
            {"type": "audio_url", "audio_url": {"url": AUDIO_URL}},
        ],
    },
]


def async_client(stack: Stack, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, **options)


async def test_async_whole_and_streamed() -> None:
    async with (
        running_gateway(says("a red circle"), roles=(Role.PREFILL, Role.DECODE)) as stack,
        async_client(stack) as client,
    ):
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
        assert answer.choices[0].message.content == "a red circle"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "a red circle"
        assert chunks[-1].usage is not None
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_sync_client_in_a_thread() -> None:
    async with running_gateway(says("a red circle")) as stack:

        def talk() -> tuple[str | None, str]:
            with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
                whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, temperature=0)
                with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
                    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
                return whole.choices[0].message.content, "".join(pieces)

        assert await asyncio.to_thread(talk) == ("a red circle", "a red circle")


async def test_tools_and_the_turn_after() -> None:
    async with running_gateway(says(CALL)) as stack, async_client(stack) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)  # type: ignore[call-overload]
        message = answer.choices[0].message
        assert message.tool_calls[0].function.name == "weather"
        turns = [*MESSAGES, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
        again = await client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS)  # type: ignore[call-overload]
        assert again.choices[0].finish_reason == "tool_calls"
        text = stack.worker.submitted[1].token_ids
        assert len(text) > len(stack.worker.submitted[0].token_ids)


async def test_errors_are_the_sdk_s_own_classes() -> None:
    async with running_gateway() as stack, async_client(stack) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert not_found.value.code == "model_not_found"
        bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://media.test/none"}}]}]
        with pytest.raises(openai.BadRequestError) as unreachable:
            await client.chat.completions.create(model=MODEL, messages=bad)  # type: ignore[call-overload]
        assert unreachable.value.param == "messages[0].content[0].image_url"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3)


async def test_an_error_in_a_stream_is_raised() -> None:
    async with running_gateway(says("one two three four"), restart_wait_s=0.1) as stack, async_client(stack) as client:
        stack.worker.die_after = 2
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_a_stream_that_is_closed_early_stops_the_work() -> None:
    async with running_gateway(says("one two three four")) as stack, async_client(stack) as client:
        stack.worker.stall_after = 2
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await until(lambda: stack.worker.num_running == 0)
        assert not stack.encoder.leases
