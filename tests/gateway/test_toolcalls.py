"""Blocks to calls, and values to the types that JSON schemas ask for."""

import itertools
import json
import time
from typing import Any

import pytest

from epd.gateway.answer import AnswerParser, Content, Reasoning, joined
from epd.gateway.toolcalls import convert, kinds_of
from tests.oracles.whole_calls import CallReader, ToolCall, with_whole_calls

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}}},
    "g": {},
    "odd": {"properties": [1, 2]},
}
READER = CallReader(TOOLS)


def streamed(block: str) -> list[Content | Reasoning | ToolCall]:
    """One character at a time."""
    parser = AnswerParser(tools=TOOLS)
    return with_whole_calls(joined([*itertools.chain.from_iterable(map(parser.push, block)), *parser.close()]))


def arguments(body: str, name: str = "f") -> Any:
    """Of a call with this function body; None where the block is text."""
    block = f"<tool_call><function={name}>{body}</function></tool_call>"
    parsed = READER.read(block)
    if parsed is None:
        return None
    before, call, after = parsed
    assert (before, after) == ("", "")
    assert call.name == name
    assert streamed(block) == [call]
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", {}),
        (" \n ", {}),
        ("<parameter=a>3</parameter><parameter=b>x</parameter>", {"a": 3, "b": "x"}),
        ("\n\n<parameter= a >3</parameter>\t<parameter=b>\n x \n</parameter>\n", {"a": 3, "b": "\n x \n"}),
        ("<parameter=b></parameter>", {"b": ""}),
        # Not in the schema: a string.
        ("<parameter=z>3</parameter>", {"z": "3"}),
        # Twice: the first one.
        ("<parameter=a>1</parameter><parameter=a>2</parameter>", {"a": 1}),
        # Closing tags left out before a declared parameter and at the end.
        ("<parameter=a>7<parameter=b>q", {"a": 7, "b": "q"}),
        ("<parameter=a>7<parameter=b>q</parameter>", {"a": 7, "b": "q"}),
        # Tags inside a value.
        ("<parameter=b>1 </parameter> 2</parameter>", {"b": "1 </parameter> 2"}),
        ("<parameter=b>x</parameter></parameter>", {"b": "x</parameter>"}),
        ("<parameter=b><parameter=z>y</parameter></parameter>", {"b": "<parameter=z>y</parameter>"}),
        ("<parameter=b>see <parameter=b> here</parameter>", {"b": "see <parameter=b> here"}),
        ("<parameter=b></function></parameter><parameter=a>1</parameter>", {"b": "</function>", "a": 1}),
        ("<parameter=b><function=g></function></parameter>", {"b": "<function=g></function>"}),
        ("<parameter=b><tool_call></parameter>", {"b": "<tool_call>"}),
        ("<parameter=b>a < b > c &lt; d</parameter>", {"b": "a < b > c &lt; d"}),
    ],
)
def test_parameters(body: str, expected: dict[str, Any]) -> None:
    assert arguments(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        "junk",
        "junk<parameter=a>1</parameter>",
        "<parameter=a>1</parameter>junk",
        "<parameter=a>1</parameter>junk<parameter=b>2</parameter>",
        "<parameter=a",
        "<parameter=a<parameter=b>2</parameter>",
        "<parameter>a</parameter>",
    ],
)
def test_something_between_the_parameters_is_no_call(body: str) -> None:
    assert arguments(body) is None


@pytest.mark.parametrize(
    "block",
    [
        "",
        "<tool_call></tool_call>",
        "<tool_call><function=f></tool_call>",
        "<tool_call><function=f</function></tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=F></function></tool_call>",
        "<tool_call><function=no such></function></tool_call>",
        "<tool_call></function><function=f></tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call(block: str) -> None:
    assert READER.read(block) is None


def test_the_first_function_is_the_call_and_the_rest_is_kept() -> None:
    block = "<tool_call>a<function=f><parameter=a>1</parameter></function>b<function=g></function></tool_call>"
    assert READER.read(block) == ("a", ToolCall("f", '{"a": 1}'), "b<function=g></function>")


def test_a_schema_of_an_odd_shape_harms_nobody() -> None:
    assert arguments("<parameter=a>1</parameter>", "odd") == {"a": "1"}
    for schema in ([3], {"type": {"x": 1}}, {"anyOf": 3}, {"allOf": [3]}, {"$ref": 3}, {"enum": {}}, {"type": [[]]}):
        assert kinds_of(schema, {}) == ()


@pytest.mark.parametrize(
    ("raw", "kind", "value"),
    [
        ("3", "integer", 3),
        (" 3 ", "integer", 3),
        ("3.0", "integer", 3),
        ("3.5", "integer", "3.5"),
        ("3", "int", 3),
        ("three", "integer", "three"),
        ("9" * 5000, "integer", "9" * 5000),
        ("123456789012345678901234567890", "number", 123456789012345678901234567890),
        ("3.0", "number", 3),
        ("3.5", "number", 3.5),
        ("1e3", "number", 1000),
        ("inf", "number", "inf"),
        ("1e999", "number", "1e999"),
        ("nan", "number", "nan"),
        ("True", "boolean", True),
        (" true\n", "boolean", True),
        ("yes", "boolean", False),
        ("null", "integer", None),
        (" NULL ", "object", None),
        # A string is what stands there: no entity, no null, no white space is touched.
        ("Null", "string", "Null"),
        (" a ", "string", " a "),
        ("a &lt; b", "string", "a &lt; b"),
        ("5", "string", "5"),
        ('{"x": [1]}', "object", {"x": [1]}),
        ("{&quot;x&quot;: 1}", "object", {"x": 1}),
        ("{'x': 1}", "object", {"x": 1}),
        ("{'x': (1, None)}", "object", {"x": [1, None]}),
        ("{'x'", "object", "{'x'"),
        ("{1, 2}", "array", "{1, 2}"),
        ("NaN", "array", "NaN"),
        ('["\\ud800"]', "array", '["\\ud800"]'),
        ("[1e999]", "array", "[1e999]"),
        ("__import__('os')", "array", "__import__('os')"),
        ("5", ["string", "null"], "5"),
        ("null", ["string", "null"], None),
        ("5", ["integer", "null"], 5),
        ("5", ["string", "integer"], 5),
        ("007", ["string", "integer"], "007"),
        ("true", ["string", "boolean"], True),
        ("yes", ["string", "boolean"], "yes"),
        ("1.5", ["integer", "string"], "1.5"),
        ("2.0", ["integer", "string"], 2),
        ("x", ["integer", "boolean"], "x"),
        ("007", ["integer", "array"], 7),
        ("5", "mystery", 5),
        ("(1, 2)", "mystery", [1, 2]),
        ("5", None, "5"),
        ("null", None, None),
    ],
)
def test_values_take_the_schema_s_type(raw: str, kind: object, value: object) -> None:
    found = convert(raw, kinds_of({"type": kind}, {}))
    assert found == value
    assert type(found) is type(value)
    json.dumps(found, allow_nan=False)


ROOT = {
    "$defs": {
        "Size": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b": {"enum": ["x", "y"]},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Size"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({}, ()),
        (True, ()),
        ({"description": "d"}, ()),
        ({"type": ["integer", "null", 3]}, ("integer", "null")),
        ({"type": "string", "nullable": True}, ("string", "null")),
        ({"nullable": True}, ()),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("integer", "null")),
        ({"oneOf": [{"type": "string"}, {"enum": [1, 2.5]}]}, ("string", "integer", "number")),
        ({"allOf": [{"description": "d"}, {"$ref": "#/$defs/Size"}]}, ("integer",)),
        ({"enum": ["a", "b"]}, ("string",)),
        ({"enum": [1, "a", None, True, [], {}]}, ("integer", "string", "null", "boolean", "array", "object")),
        ({"const": 5}, ("integer",)),
        ({"properties": {}}, ("object",)),
        ({"items": {}}, ("array",)),
        ({"$ref": "#/$defs/Size"}, ("integer",)),
        ({"$ref": "#/$defs/a~1b"}, ("string",)),
        ({"$ref": "#/$defs/Tree"}, ("integer",)),
        ({"$ref": "#/$defs/Loop"}, ()),
        ({"$ref": "#/$defs/nowhere"}, ()),
        ({"$ref": "https://example.org/schema"}, ()),
    ],
)
def test_the_types_a_schema_allows(schema: object, kinds: tuple[str, ...]) -> None:
    assert kinds_of(schema, ROOT) == kinds


def test_references_that_fan_out_are_read_once() -> None:
    many = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 50} for i in range(200)}
    assert kinds_of({"$ref": "#/$defs/d0"}, {"$defs": many}) == ()


def test_a_schema_is_walked_once_for_all_calls() -> None:
    values: list[Any] = [f"{i}" for i in range(50_000)]
    reader = CallReader({"f": {"properties": {"a": {"enum": [*values, 5]}}}})
    started_s = time.process_time()
    for _ in range(1000):
        parsed = reader.read("<tool_call><function=f><parameter=a>5</parameter></function></tool_call>")
        assert parsed is not None
        assert parsed[1].arguments == '{"a": 5}'
    assert time.process_time() - started_s < 2


@pytest.mark.parametrize(
    "filler",
    [
        "<parameter=",
        "<parameter=b>",
        "<parameter=z>",
        "<parameter=a>x<parameter=b>",
        "</parameter>",
        "</parameter> ",
        "</parameter>x",
        "<parameter=z></parameter>",
        "<parameter=z></parameter>x",
        "</function>",
        "<function=",
        "<function=f>",
        " ",
        "x",
        "<",
        "[",
        "-",
        "&",
        "9",
    ],
)
def test_a_hostile_block_costs_linear_time(filler: str) -> None:
    """Half a million characters; anything quadratic in them would take minutes."""
    many = filler * (500_000 // len(filler))
    started_s = time.process_time()
    for body in (many, f"<parameter=c>{many}</parameter>", f"<parameter=a>{many}</parameter>", f"<parameter=b>{many}"):
        READER.read(f"<tool_call><function=f>{body}</function></tool_call>")
    READER.read(f"<tool_call>{many}</tool_call>")
    assert time.process_time() - started_s < 5


def test_white_space_without_end_in_a_tag_costs_linear_time() -> None:
    started_s = time.process_time()
    for block in ("<function={}", "<function=f{}", "<function=f></parameter>{}x", "<function=f>{}x"):
        READER.read("<tool_call>" + block.format(" " * 500_000) + "</tool_call>")
    assert time.process_time() - started_s < 5


def test_many_declared_keys_without_closing_tags_cost_linear_time() -> None:
    """Twenty thousand values, each ended by the next opening tag: none may search the whole block for its end."""
    keys = [f"k{i}" for i in range(20_000)]
    reader = CallReader({"f": {"type": "object", "properties": {key: {} for key in keys}}})
    body = "".join(f"<parameter={key}>{key} " for key in keys)
    started_s = time.process_time()
    read = reader.read(f"<tool_call><function=f>{body}</function></tool_call>")
    assert time.process_time() - started_s < 5
    assert read is not None
    assert json.loads(read[1].arguments) == {key: f"{key} " for key in keys}
