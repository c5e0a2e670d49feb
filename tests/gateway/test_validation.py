"""Refusals in JSON's words, what is accepted because it changes nothing, and bodies made to be slow to judge."""

import asyncio
import itertools
import json
import re
import threading
import time
from typing import Any

import pytest

from epd.config import GatewayConfig
from epd.errors import InvalidRequest
from epd.gateway.schema import ChatBody
from epd.gateway.validation import read_body
from tests.fakes.gateway import IMAGE_URL, MODEL_DIR, RENDERER, VIDEO_URL, chat_body, running_gateway, says, text_of

LIMITS = GatewayConfig(model_dir=MODEL_DIR, model_name="tiny")
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(body: Any) -> ChatBody:
    return read_body(json.dumps(body).encode(), ChatBody, LIMITS)


def refusal(body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    return caught.value


HARMLESS: list[dict[str, Any]] = [
    *({name: None} for name in ChatBody.model_fields if name not in ("model", "messages")),
    {"logit_bias": {}},
    {"store": False},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"modalities": ["text"]},
    {"prompt_cache_key": "k"},
    {"safety_identifier": "s"},
    {"stream": True, "stream_options": {"include_usage": None}},
    {"tools": []},
    {"parallel_tool_calls": True},
    {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
    {"reasoning_effort": "minimal", "chat_template_kwargs": {"enable_thinking": False}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": None, "description": None}}]},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: next(iter(fields)))
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    read(chat_body(**fields))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("store", True, "false"),
        ("service_tier", "flex", '"auto" or "default"'),
        ("modalities", ["text", "audio"], '"text"'),
        ("logit_bias", {"5": 100.5}, "at most 100"),
        ("reasoning_effort", "extreme", '"none", "minimal", "low", "medium", "high", "xhigh" or "max"'),
        ("tool_choice", "always", '"auto", "none" or "required"'),
        ("tool_choice", {"type": "tool", "function": {"name": "f"}}, '"function" or "allowed_tools"'),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": "yes"}}], "true or false"),
        ("chat_template_kwargs", {"thinking_budget": 5}, "enable_thinking, keep_all_reasoning"),
        ("n", 0, "at least 1"),
    ],
)
def test_what_would_change_something_is_refused_by_name(name: str, value: Any, allowed: str) -> None:
    error = refusal(chat_body(**{name: value}))
    assert error.param is not None
    assert error.param.startswith(name)
    assert allowed in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "reasoning_effort"),
    ],
)
def test_a_conflict_names_a_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat_body(**fields))
    assert error.param == param
    assert param in error.message


async def test_names_and_the_developer_role_are_accepted() -> None:
    async with running_gateway(says("ok")) as stack:
        turns = [("developer", "Be kind."), ("user", "hi"), ("assistant", "hello"), ("user", "?")]
        prompts = []
        for first in ("developer", "system"):
            messages = [
                {"role": role, "content": text, "name": "n"} for role, text in [(first, "Be kind."), *turns[1:]]
            ]
            status, body, _ = await stack.post(chat_body() | {"messages": messages})
            assert (status, text_of(body)) == (200, "ok")
            prompts.append(stack.worker.submitted[-1].token_ids)
        assert prompts[0] == prompts[1]


async def test_a_byte_order_mark_is_no_fault() -> None:
    async with running_gateway(says("ok")) as stack:
        assert (await stack.post(b"\xef\xbb\xbf" + json.dumps(chat_body()).encode()))[0] == 200


# Words of Python and of the validator; a client must meet none of them.
LEAK = re.compile(
    r"\bNone\b|\bTrue\b|\bFalse\b|instance|pydantic|validation|validator|dictionary|Input|Value error|\bdict\b|\btag\b"
    r"|discriminator|~|\bclass\b|should be|ImageUrl|Message\b|\['"
)
WRONG: list[Any] = [
    None,
    True,
    False,
    3,
    -1,
    1.5,
    10**30,
    "x",
    "",
    [],
    [None],
    [3],
    ["x"],
    {},
    {"x": None},
    {"type": None},
]


def places(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [path, *itertools.chain.from_iterable(places(value, (*path, key)) for key, value in items)]


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = body.copy()
    copy[path[0]] = replaced(body[path[0]], path[1:], value)
    return copy


FULL = chat_body(
    [
        {"type": "text", "text": "t"},
        {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
        {"type": "video_url", "video_url": {"url": "u", "fps": 1.0, "use_audio": True}},
        {"type": "audio_url", "audio_url": {"url": "u"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ],
    **dict.fromkeys(name for name in ChatBody.model_fields if name not in ("model", "messages")),
)
FULL["messages"] += [
    {"role": "system", "content": "x"},
    {"role": "assistant", "content": "x", "tool_calls": [CALL], "refusal": None, "annotations": []},
    {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "1"},
]
FULL |= {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}, "metadata": {"a": "b"}}
FULL |= {"chat_template_kwargs": {"enable_thinking": None}, "response_format": {"type": "text"}, "stop": ["x"]}


def test_no_refusal_speaks_python() -> None:
    read(FULL)
    refused: list[tuple[tuple[Any, ...], Any, InvalidRequest]] = []
    for path, value in itertools.product(places(FULL), WRONG):
        try:
            read(replaced(FULL, path, value))
        except InvalidRequest as error:
            refused.append((path, value, error))
    assert len(refused) > 500
    for path, value, error in refused:
        assert not LEAK.search(error.message), (path, value, error.message)
        assert "this value is not allowed" not in error.message, (path, value)
        if path and path[0] not in ("stream", "logprobs"):
            assert error.param, (path, value, error.message)
            assert error.param.startswith(str(path[0])), (path, value, error.param)


@pytest.mark.parametrize("key", ["x", "messages[0]"])
def test_an_unknown_field_is_named_at_every_level(key: str) -> None:
    holders = [path for path in places(FULL) if isinstance(_at(FULL, path), dict) and path[:1] != ("metadata",)]
    for path in holders:
        error = refusal(replaced(FULL, path, _at(FULL, path) | {key: None}))
        assert "unknown field" in error.message
        assert key in error.message


def _at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body


HOSTILE: dict[str, dict[str, Any]] = {
    "numbers as parts": chat_body([3] * 420_000),
    "texts": chat_body([{"type": "text", "text": ""}] * 100_000),
    "images": chat_body([{"type": "image_url", "image_url": {"url": IMAGE_URL}}] * 2000),
    "messages": chat_body() | {"messages": [{"role": "user", "content": "x"}] * 50_000},
    "wrong messages": chat_body() | {"messages": [3] * 50_000},
    "split over messages": chat_body()
    | {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 90}] * 1000},
    "tool calls": chat_body() | {"messages": [{"role": "assistant", "tool_calls": [3] * 90_000}]},
    "tools": chat_body(tools=[3] * 90_000),
    "stops": chat_body(stop=[3] * 90_000),
    "unknown fields": chat_body() | {f"x{i}": 1 for i in range(50_000)},
    "fields of a part": chat_body([{"type": "text", "text": ""} | {f"x{i}": 1 for i in range(50_000)}]),
    "metadata": chat_body(metadata={f"x{i}": 1 for i in range(50_000)}),
    "logit bias": chat_body(logit_bias={f"x{i}": "" for i in range(50_000)}),
    "nested parameters": chat_body(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": [[{}]] * 90_000}}}]
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_judged_quickly(name: str) -> None:
    raw = json.dumps(HOSTILE[name]).encode()
    started_s = time.process_time()
    with pytest.raises(InvalidRequest):
        read_body(raw, ChatBody, LIMITS)
    # Seconds without the bounds.
    assert time.process_time() - started_s < 1.0


def test_more_commas_than_any_conversation_has() -> None:
    with pytest.raises(InvalidRequest, match="commas"):
        read_body(b"[" + b"0," * 1_100_000 + b"0]", ChatBody, LIMITS)


def test_limits_are_settings() -> None:
    limits = GatewayConfig(model_dir=MODEL_DIR, model_name="tiny", max_messages=2, max_parts=4, max_media=1)
    image = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
    text = {"type": "text", "text": "t"}
    for content, param in [([image, image], "messages[0].content"), ([text] * 5, "messages[0].content")]:
        with pytest.raises(InvalidRequest, match="at most") as caught:
            read_body(json.dumps(chat_body(content)).encode(), ChatBody, limits)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="at most 2") as caught:
        read_body(json.dumps(chat_body() | {"messages": chat_body()["messages"] * 3}).encode(), ChatBody, limits)
    assert caught.value.param == "messages"
    read_body(json.dumps(chat_body([image, text, text, text])).encode(), ChatBody, limits)


async def test_large_requests_are_read_and_rendered_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a large body costs is paid on a thread, so that /health and every stream go on meanwhile."""
    loop_thread = threading.current_thread()
    on_loop: list[str] = []
    off_loop: set[str] = set()

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is loop_thread:
                on_loop.append(name)
            off_loop.add(name)
            return function(*arguments, **options)

        return call

    async with running_gateway(says("ok")) as stack:
        vocabulary = RENDERER.vocabulary
        for name in ("guard", "encode", "encode_plain", "fewest_tokens"):
            monkeypatch.setattr(vocabulary, name, watched(name, getattr(vocabulary, name)))
        monkeypatch.setattr(RENDERER.template, "render", watched("render", RENDERER.template.render))
        monkeypatch.setattr("epd.gateway.exchange.read_body", watched("read", read_body))
        answers = await asyncio.gather(*(stack.ask("word " * 14_000) for _ in range(4)))
        assert {status for status, _, _ in answers} == {400}
        assert not on_loop
        assert {"read", "guard", "render"} <= off_loop


async def test_a_text_of_middle_size_is_rendered_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    encode = RENDERER.vocabulary.encode

    def watched(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text)

    async with running_gateway(says("ok")) as stack:
        monkeypatch.setattr(RENDERER.vocabulary, "encode", watched)
        await stack.ask("word " * 4000)
        assert threads
        assert threading.current_thread() not in threads


@pytest.mark.parametrize("number", [10**30, -(10**30), 2**63, 1e300])
async def test_numbers_beyond_any_sense_are_the_client_s_fault(number: float) -> None:
    """Whatever is too large for the messages between processes is refused before it gets there."""
    fields = [name for name, field in ChatBody.model_fields.items() if "int" in str(field.annotation)]
    fields += ["temperature", "top_p", "frequency_penalty"]
    assert {"max_tokens", "seed", "top_k"} <= set(fields)
    bodies = [chat_body(**{name: number}) for name in fields]
    for name in ("fps", "max_frames", "min_frames", "num_frames", "min_pixels", "max_pixels"):
        bodies.append(chat_body([{"type": "video_url", "video_url": {"url": VIDEO_URL, name: number}}]))
    for name in ("min_pixels", "max_pixels"):
        bodies.append(chat_body([{"type": "image_url", "image_url": {"url": IMAGE_URL, name: number}}]))
    async with running_gateway() as stack:
        for body in bodies:
            status, answer, _ = await stack.post(body)
            assert status == 400, (body, answer)


async def test_an_object_with_too_many_fields_is_named() -> None:
    body = chat_body(logit_bias={str(token): 1.0 for token in range(1025)})
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.param == "logit_bias"
    assert "1025" in caught.value.message
