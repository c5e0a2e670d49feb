"""OpenAI's SDK: tools, and answers that fit a schema."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.asked import GREEDY, PICTURE, TOOL, Shape

pytestmark = pytest.mark.e2e
BRIEF: Any = {**GREEDY, "max_tokens": 120}


class Answer(BaseModel):
    shapes: list[Shape]


def arguments_of(call: Any) -> dict[str, Any]:
    assert (call.type, call.function.name) == ("function", "paint")
    arguments: dict[str, Any] = json.loads(call.function.arguments)
    assert set(arguments) == {"colour", "layers"}
    assert arguments["colour"] in ("red", "green")
    assert 1 <= arguments["layers"] <= 9
    return arguments


def test_parse_gives_an_object(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**BRIEF, messages=PICTURE, response_format=Shape)
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Shape)


def test_a_streamed_answer_is_parsed_at_its_end(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**BRIEF, messages=PICTURE, response_format=Shape) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert isinstance(message.parsed, Shape)


def test_json_objects(client: openai.OpenAI) -> None:
    """A small model need not find an end; up to there it is JSON."""
    answer = client.chat.completions.create(**BRIEF, messages=PICTURE, response_format={"type": "json_object"})
    content = answer.choices[0].message.content
    assert content is not None
    assert content.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


def test_a_tool_that_must_be_called_is(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "paint"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(**BRIEF, messages=PICTURE, tools=[TOOL], tool_choice=choice)
        calls = answer.choices[0].message.tool_calls
        assert calls
        arguments_of(calls[0])


def test_a_streamed_call_and_the_turn_after(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **BRIEF, messages=PICTURE, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    (call,) = message.tool_calls
    arguments_of(call)
    turn: Any = [
        *PICTURE,
        {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump(exclude_none=True)]},
        {"role": "tool", "tool_call_id": call.id, "content": "painted"},
    ]
    del turn[1]["tool_calls"][0]["function"]["parsed_arguments"]
    turn[1]["tool_calls"][0].pop("index", None)
    after = client.chat.completions.create(**BRIEF, messages=turn, tools=[TOOL])
    assert after.choices[0].message.role == "assistant"


def test_tools_that_may_be_called(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(**BRIEF, messages=PICTURE, tools=[TOOL], tool_choice=choice)  # type: ignore[call-overload]
        message = answer.choices[0].message
        assert message.content or message.tool_calls
        if choice == "none":
            assert not message.tool_calls


def test_what_cannot_be_enforced_is_refused_by_name(client: openai.OpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**BRIEF, messages=PICTURE, response_format=wrong)
    assert str(refused.value.param).startswith("response_format")
