"""Answers taken apart: reasoning, content, calls; the same wherever the stream is cut."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from epd.gateway.answer import AnswerParser, Content, Piece, Reasoning, ToolCall, convert, joined

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}}},
    "g": {},
}


def parse(text: str, cuts: list[int] | None = None, tools: Any = SCHEMAS, in_reasoning: bool = False) -> list[Piece]:
    parser = AnswerParser(tools=tools, in_reasoning=in_reasoning)
    borders = [0, *sorted(cuts or []), len(text)]
    pieces: list[Piece] = []
    for start, stop in itertools.pairwise(borders):
        pieces += parser.push(text[start:stop])
    return joined([*pieces, *parser.close()])


CALL_F = (
    "<tool_call>\n<function=f>\n<parameter=a>3</parameter>\n<parameter=b>x y</parameter>\n</function>\n</tool_call>"
)
CASES: list[tuple[str, list[Piece]]] = [
    ("hello", [Content("hello")]),
    ("", []),
    ("<think>r</think>c", [Reasoning("r"), Content("c")]),
    ("<think></think>c", [Content("c")]),
    ("\n <think>r</think>", [Reasoning("r")]),
    ("<think>open end", [Reasoning("open end")]),
    ("a <think>r</think>", [Content("a <think>r</think>")]),
    ("  indented", [Content("  indented")]),
    ("<thin", [Content("<thin")]),
    ("a" + CALL_F + "b", [Content("a"), ToolCall("f", '{"a": 3, "b": "x y"}'), Content("b")]),
    (CALL_F + CALL_F, [ToolCall("f", '{"a": 3, "b": "x y"}')] * 2),
    ("<tool_call><function=g></function></tool_call>", [ToolCall("g", "{}")]),
    (
        "<tool_call><function= f ><parameter= a >7<parameter=b>q</function></tool_call>",
        [ToolCall("f", '{"a": 7, "b": "q"}')],
    ),
    (
        "<tool_call><function=nope></function></tool_call>",
        [Content("<tool_call><function=nope></function></tool_call>")],
    ),
    ("<tool_call>garbage</tool_call>", [Content("<tool_call>garbage</tool_call>")]),
    ("<tool_call><function=f>", [Content("<tool_call><function=f>")]),
    ("x<tool_", [Content("x<tool_")]),
    ("<think>" + CALL_F + "</think>", [Reasoning(CALL_F)]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_cases_whole_and_one_character_at_a_time(text: str, expected: list[Piece]) -> None:
    assert parse(text) == expected
    assert parse(text, list(range(len(text)))) == expected


def test_without_tools_a_call_is_text() -> None:
    assert parse(CALL_F, tools=None) == [Content(CALL_F)]


def test_a_prompt_that_opened_the_reasoning() -> None:
    assert parse("why</think>because", in_reasoning=True) == [Reasoning("why"), Content("because")]


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "</function>",
            "<parameter=a>",
            "1",
            "<",
            " ",
        ]
    ),
    max_size=14,
).map("".join)


@given(FRAGMENTS, st.randoms())
@settings(max_examples=300, deadline=None)
def test_cuts_change_nothing(text: str, rng: random.Random) -> None:
    cuts = [rng.randrange(len(text) + 1) for _ in range(4)]
    assert parse(text, cuts) == parse(text)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_text_is_never_lost(text: str) -> None:
    # The tag that opens reasoning is the one text that stands for something else.
    assume(not text.lstrip().startswith("<think>"))
    pieces = parse(text)
    assert "".join(piece.text for piece in pieces if not isinstance(piece, ToolCall)) == text


@pytest.mark.parametrize(
    ("raw", "kind", "value"),
    [
        ("3", "integer", 3),
        (" 3 ", "integer", 3),
        ("3.5", "integer", "3.5"),
        ("3.0", "number", 3),
        ("3.5", "number", 3.5),
        ("inf", "number", "inf"),
        ("nan", "number", "nan"),
        ("True", "boolean", True),
        ("yes", "boolean", False),
        ("null", "string", None),
        ("NULL", "integer", None),
        (" a ", "string", " a "),
        ("a &lt; b", "string", "a < b"),
        ('{"x": [1]}', "object", {"x": [1]}),
        ("{'x': 1}", "object", {"x": 1}),
        ("{'x'", "object", "{'x'"),
        ("{1, 2}", "array", "{1, 2}"),
        ("NaN", "array", "NaN"),
        ('["\\ud800"]', "array", '["\\ud800"]'),
        ("[1e999]", "array", "[1e999]"),
        ("5", ["string", "null"], "5"),
        ("5", ["integer", "null"], 5),
        ("5", "mystery", 5),
        ("5", None, "5"),
    ],
)
def test_values_take_the_schema_s_type(raw: str, kind: object, value: object) -> None:
    found = convert(raw, kind)
    assert found == value
    assert type(found) is type(value)
    json.dumps(found, allow_nan=False)
