"""Answers taken apart: reasoning, content, calls; the same wherever the stream is cut."""

import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from epd.gateway.answer import AnswerParser, Content, Piece, Reasoning, joined
from epd.gateway.toolcalls import ToolCall

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
F_ARGS = '{"a": 3, "b": "x y"}'
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
    ("<think>a</think> <think>b</think>", [Reasoning("a"), Content(" <think>b</think>")]),
    ("<think>a<think>b</think>c</think>d", [Reasoning("a<think>b"), Content("c</think>d")]),
    # White space between text and calls is layout; between calls and text it is content.
    ("Look.\n" + CALL_F + "\n\n" + CALL_F + "\n", [Content("Look."), ToolCall("f", F_ARGS), ToolCall("f", F_ARGS)]),
    ("<think>r</think>\n\n" + CALL_F, [Reasoning("r"), ToolCall("f", F_ARGS)]),
    (" \n" + CALL_F + " \n Done. ", [ToolCall("f", F_ARGS), Content(" \n Done. ")]),
    (CALL_F + "\n<tool", [ToolCall("f", F_ARGS), Content("\n<tool")]),
    ("<think>r</think>\n\nhi \n", [Reasoning("r"), Content("\n\nhi \n")]),
    (" \n<thin", [Content(" \n<thin")]),
    # A block that is no call keeps the white space around it.
    ("a\n<tool_call>x</tool_call>\nb", [Content("a\n<tool_call>x</tool_call>\nb")]),
    ("a\n<tool_call>\nx", [Content("a\n<tool_call>\nx")]),
    # Words inside a block, around its function.
    (
        "a\n<tool_call>so: <function=g></function> and <function=f></function></tool_call>",
        [Content("a\nso: "), ToolCall("g", "{}"), Content(" and <function=f></function>")],
    ),
    ("<tool_call><tool_call><function=g></function></tool_call>", [Content("<tool_call>"), ToolCall("g", "{}")]),
    ("</tool_call>a", [Content("</tool_call>a")]),
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
            "</parameter>",
            "<tool_call><function=g></function></tool_call>",
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


@given(FRAGMENTS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_parts_account_for_everything(text: str, with_tools: bool) -> None:
    """What is missing from the texts is the tags that were read, whole calls, and white space beside those."""
    pieces = parse(text, tools=SCHEMAS if with_tools else None)
    num_calls = sum(isinstance(piece, ToolCall) for piece in pieces)
    shown = "".join(piece.text for piece in pieces if not isinstance(piece, ToolCall))
    lost = len(text.replace(" ", "")) - len(shown.replace(" ", ""))
    if num_calls == 0 and not text.lstrip().startswith("<think>"):
        assert shown == text
    tags = len("<think>") + len("</think>")
    shortest, longest = len("<tool_call><function=g></function></tool_call>"), len(text)
    assert num_calls * shortest <= lost <= (num_calls * longest) + tags
    # The texts stand in the answer in their order.
    rest = iter(text)
    assert all(character in rest for character in shown)


@pytest.mark.parametrize(
    ("head", "filler"),
    [
        ("<tool_call><function=f><parameter=b>", "x"),
        ("<tool_call>", "</tool_cal"),
        ("<tool_call>", "<"),
        ("", " "),
        ("<think>", "</think"),
        ("a", " "),
        ("a", "<tool_call"),
    ],
)
def test_a_long_unfinished_answer_costs_linear_time(head: str, filler: str) -> None:
    """Token by token, 200,000 characters; reading everything again at every token would take minutes."""
    parser = AnswerParser(tools=SCHEMAS)
    started_s = time.process_time()
    texts = [head, *[filler] * (200_000 // len(filler))]
    pieces = joined([*itertools.chain.from_iterable(map(parser.push, texts)), *parser.close()])
    assert time.process_time() - started_s < 2
    whole = "".join(texts)
    assert pieces == [Reasoning(whole[len(head) :]) if head == "<think>" else Content(whole)]


def test_many_blocks_in_one_push_cost_linear_time() -> None:
    text = "<tool_call></tool_call>" * 50_000
    parser = AnswerParser(tools=SCHEMAS)
    started_s = time.process_time()
    pieces = joined([*parser.push(text), *parser.close()])
    assert time.process_time() - started_s < 5
    assert pieces == [Content(text)]
