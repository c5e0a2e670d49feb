import json
from pathlib import Path
from typing import Any

import pytest

from epd.config import GatewayConfig
from epd.errors import InvalidRequest
from epd.gateway.conversation import read_conversation
from epd.gateway.json_text import depth_at_most
from epd.gateway.schema import ChatBody
from epd.gateway.validation import read_body

LIMITS = GatewayConfig(model_name="m", model_dir=Path("unused"))
HI = [{"role": "user", "content": "hi"}]


def refused(raw: str | bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        read_body(raw.encode() if isinstance(raw, str) else raw, ChatBody, LIMITS)
    return error.value


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"properties": value}
    return value


@pytest.mark.parametrize("depth", [200, 400])
def test_a_schema_nested_too_deeply_names_its_field(depth: int) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": nested(depth)}}
    error = refused(json.dumps({"model": "m", "messages": HI, "tools": [tool]}))
    assert error.param == "tools"
    assert "is nested more than 128 levels deep" in error.message


def test_a_body_nested_beyond_parsing_is_told_so() -> None:
    assert refused('{"tools":' * 5000 + "1" + "}" * 5000).message == "the body is nested far too deeply"


def test_the_deepest_schema_allowed_is_rendered() -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": nested(120)}}
    body = read_body(json.dumps({"model": "m", "messages": HI, "tools": [tool]}).encode(), ChatBody, LIMITS)
    assert read_conversation(body, str).tools


@pytest.mark.parametrize("depth", [129, 3000])
def test_arguments_nested_too_deeply_name_their_field(depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    body = ChatBody.model_validate({"model": "m", "messages": [*HI, {"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(InvalidRequest, match="deeply") as error:
        read_conversation(body, str)
    assert error.value.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('{"messages": [{"content": "\\ud800"}]}', "messages[0].content holds half of a surrogate pair"),
        ('{"messages": [{"content": "\\udc00 x"}]}', "messages[0].content holds half of a surrogate pair"),
        ('{"temperature": 1e999}', "temperature is a number too large"),
        ('{"temperature": [NaN]}', "temperature[0] is a number too large for a double, or no number"),
    ],
)
def test_faults_the_fast_parser_does_not_place(raw: str, words: str) -> None:
    message = refused(raw).message
    assert message.startswith(f"the body is not JSON: {words}")
    assert "`$" not in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ""}, 'stop is ""; it must not be empty'),
        ({"stop": "x" * 300}, "it must have at most 256 characters"),
        ({"stop": 5}, "stop is 5; it must be a string or an array"),
        ({"stop": [""]}, 'stop[0] is ""; it must not be empty'),
        ({"bad_words": ["a"]}, "bad_words is an array with 1 item; it is not supported"),
        ({"messages": []}, "messages is []; it must not be empty"),
    ],
)
def test_what_a_field_may_be_is_told_plainly(fields: dict[str, Any], words: str) -> None:
    assert words in refused(json.dumps({"model": "m", "messages": HI} | fields)).message


def test_depth_is_of_arrays_and_objects() -> None:
    assert depth_at_most(1, 0)
    assert depth_at_most([1], 1)
    assert not depth_at_most([1], 0)
    assert depth_at_most([[1]], 2)
    assert not depth_at_most([[[1]]], 2)
    assert not depth_at_most({"a": [{"b": 1}]}, 2)
