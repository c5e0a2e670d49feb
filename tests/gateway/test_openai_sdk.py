"""The official SDK as the client, synchronous and not, streaming and not."""

import asyncio
import json
import logging
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from epd.types import Role
from tests.fakes.gateway import AUDIO_URL, IMAGE_URL, MODEL, RENDERER, VIDEO_URL, Stack, running_gateway, says
from tests.fakes.stages import until
from tests.gateway.test_chat import CALL, TOOLS
from tests.gateway.test_template import even

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


async def test_warnings_reach_the_client_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A field of ours, on the whole answer and on the chunk that ends a stream; absent when there is nothing to say."""
    skipped = "20 damaged packets were skipped"
    expected = [
        f"messages[1].content[2].video_url: {skipped}",
        "messages[1].content[2].video_url: audio: left out",
        f"messages[1].content[3].audio_url: {skipped}",
    ]
    caplog.set_level(logging.INFO, logger="epd.gateway.chat")
    async with running_gateway(says("a red circle")) as stack, async_client(stack) as client:
        assert not hasattr((await whole_and_streamed(stack, client))[0], "warnings")
        assert not caplog.records
        stack.encoder.warnings = {b"video": (skipped, "audio: left out"), b"audio": (skipped,)}
        whole, streamed = await whole_and_streamed(stack, client)
        assert whole.warnings == whole.to_dict()["warnings"] == expected
        assert whole.choices[0].message.content == streamed.choices[0].message.content == "a red circle"
        assert [record.getMessage() for record in caplog.records] == [
            f"request {answer.id}: {warning}" for answer in (whole, streamed) for warning in expected
        ]
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        *others, last = [chunk async for chunk in stream]
        assert last.choices[0].finish_reason == "stop"
        assert last.warnings == expected  # type: ignore[attr-defined]
        assert not any(hasattr(chunk, "warnings") for chunk in others)


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
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, store=True)


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


THINKING_CALLS = (
    "<think>Two cities.</think>I look.\n<tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n"
    "</function>\n</tool_call>\n<tool_call><function=weather><parameter=city>Rome</parameter><parameter=days>2</parameter></function>"
    "</tool_call>\n<tool_call><function=nothing></function></tool_call>"
)
UNKNOWN = "\n<tool_call><function=nothing></function></tool_call>"
CITIES = [{"city": "Paris"}, {"city": "Rome", "days": 2}]


async def accumulated(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """A streamed answer put together by the SDK."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in stream:
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


async def whole_and_streamed(stack: Stack, client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)  # type: ignore[call-overload]
    return [whole, await accumulated(client, **options)]


@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)])
async def test_reasoning_text_and_calls_whole_and_accumulated(roles: tuple[Role, ...]) -> None:
    async with running_gateway(says(THINKING_CALLS), roles=roles) as stack, async_client(stack) as client:
        for answer in await whole_and_streamed(stack, client, tools=TOOLS, reasoning_effort="medium"):
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.reasoning_content == "Two cities."
            assert choice.message.content == "I look." + UNKNOWN
            calls = choice.message.tool_calls
            assert [(call.type, call.function.name) for call in calls] == [("function", "weather")] * 2
            assert [json.loads(call.function.arguments) for call in calls] == CITIES
            assert len({call.id for call in calls}) == 2
            num_tokens = len(RENDERER.vocabulary.encode_plain("Two cities."))
            assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens


async def test_one_call_at_most() -> None:
    async with running_gateway(says(THINKING_CALLS)) as stack, async_client(stack) as client:
        for answer in await whole_and_streamed(stack, client, tools=TOOLS, parallel_tool_calls=False):
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "I look."
            assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == CITIES[:1]
            assert answer.usage.completion_tokens < len(RENDERER.vocabulary.encode(THINKING_CALLS)) - 10
        await until(lambda: stack.worker.num_running == 0)


async def test_words_behind_the_one_call_are_no_part_of_the_answer() -> None:
    """They come with the same token as the call."""
    wordy = "<tool_call><function=weather></function> and more</tool_call>"
    async with running_gateway(says(wordy)) as stack, async_client(stack) as client:
        for parallel, content in ((True, " and more"), (False, None)):
            answer = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=parallel
            )  # type: ignore[call-overload]
            assert answer.choices[0].message.content == content
            assert len(answer.choices[0].message.tool_calls) == 1


async def test_nothing_but_a_call_has_no_content() -> None:
    only = "<think></think>\n<tool_call>\n<function=weather>\n</function>\n</tool_call>\n"
    async with running_gateway(says(only)) as stack, async_client(stack) as client:
        for answer in await whole_and_streamed(stack, client, tools=TOOLS):
            message = answer.choices[0].message
            assert not message.content
            assert getattr(message, "reasoning_content", None) is None
            assert [call.function.arguments for call in message.tool_calls] == ["{}"]
            assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("answer", "limit", "reasoning", "content"),
    [
        ("<think>one two three four", None, "one two three four", ""),
        ("<think>one two three four</think>five", 3, "one two", ""),
        ("Look.\n<tool_call>\n<function=weather>\n</function>\n</tool_call>", 6, None, "Look."),
        ("a<tool_call>no XML</tool_call>b", None, None, "a<tool_call>no XML</tool_call>b"),
    ],
)
async def test_what_is_left_open_is_what_it_was(
    answer: str, limit: int | None, reasoning: str | None, content: str
) -> None:
    """Reasoning that nothing closed, a call that the limit cut before its name, bad markup."""
    ids = RENDERER.vocabulary.encode(answer)
    async with running_gateway(lambda _: ids) as stack, async_client(stack) as client:
        limits = {} if limit is None else {"max_tokens": limit}
        for got in await whole_and_streamed(stack, client, tools=TOOLS, **limits):
            choice = got.choices[0]
            assert choice.finish_reason == ("stop" if limit is None else "length")
            assert getattr(choice.message, "reasoning_content", None) == reasoning
            assert choice.message.content == content
            assert not choice.message.tool_calls


@pytest.mark.parametrize(
    ("stop", "reasoning", "content", "reason"),
    [
        ("cit", "Two ", "", "stop"),
        ("</think>", "Two cities.", "", "stop"),
        ("look", "Two cities.", "I ", "stop"),
        ("Paris</", "Two cities.", "I look.", "stop"),
        ("Rome", "Two cities.", "I look.", "tool_calls"),
    ],
)
async def test_a_stop_string_counts_wherever_the_model_writes_it(
    stop: str, reasoning: str, content: str, reason: str
) -> None:
    """In reasoning, in tags and in calls: what is open then ends as it stands."""
    async with running_gateway(says(THINKING_CALLS)) as stack, async_client(stack) as client:
        for answer in await whole_and_streamed(stack, client, tools=TOOLS, stop=[stop]):
            choice = answer.choices[0]
            assert choice.finish_reason == reason
            assert choice.message.reasoning_content == reasoning
            assert choice.message.content == content


async def test_a_conversation_with_calls_is_echoed_back() -> None:
    """What the SDK gives is what the next turn shows to the model, token for token what the model had written."""
    answer = "<think>Two cities.</think>I look.<tool_call>\n<function=weather><parameter=city>Paris</parameter>\n"
    answer += "</function>\n</tool_call>"
    async with running_gateway(says(answer)) as stack, async_client(stack) as client:
        question = [{"role": "user", "content": "?"}]
        options: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "reasoning_effort": "high"}
        first = await client.chat.completions.create(messages=question, **options)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        await client.chat.completions.create(messages=[*question, message, result], **options)
        prompts = [RENDERER.vocabulary.spell(request.token_ids).decode() for request in stack.worker.submitted]
        assert prompts[1].startswith(prompts[0])
        written = prompts[1].removeprefix(prompts[0]).partition("<|im_end|>")[0]
        assert even(written) == even(answer)
