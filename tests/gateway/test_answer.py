"""Answers taken apart: reasoning, content, calls; the same wherever the stream is cut."""

import itertools
import json
import random
import time
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from epd.gateway.answer import AnswerParser, Content, Piece, Reasoning, joined
from epd.gateway.call_stream import CallArguments, CallBegin, CallEnd
from tests.oracles.whole_calls import CallReader, ToolCall, with_whole_calls

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}}},
    "g": {},
}


Parts = list[Content | Reasoning | ToolCall]


def parse(
    text: str,
    cuts: list[int] | None = None,
    tools: Any = SCHEMAS,
    in_reasoning: bool = False,
    is_cut: bool = False,
) -> Parts:
    parser = AnswerParser(tools=tools, in_reasoning=in_reasoning)
    borders = [0, *sorted(cuts or []), len(text)]
    pieces: list[Piece] = []
    for start, stop in itertools.pairwise(borders):
        pieces += parser.push(text[start:stop])
    return with_whole_calls(joined([*pieces, *parser.close(is_cut=is_cut)]))


CALL_F = (
    "<tool_call>\n<function=f>\n<parameter=a>3</parameter>\n<parameter=b>x y</parameter>\n</function>\n</tool_call>"
)
F_ARGS = '{"a": 3, "b": "x y"}'
CASES: list[tuple[str, Parts]] = [
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
    # A block that is no call ends with the first tag that closes it, whatever stands in it.
    (
        "<tool_call><function=no>a<tool_call><function=g></function></tool_call>b",
        [Content("<tool_call><function=no>a<tool_call><function=g></function></tool_call>b")],
    ),
    ("<tool_call><function=g></function> \n ", [ToolCall("g", "{}")]),
    ("<tool_call><function=g></function> and", [ToolCall("g", "{}"), Content(" and")]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_cases_whole_and_one_character_at_a_time(text: str, expected: Parts) -> None:
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
        ("<tool_call>", "</tool_cal"),
        ("<tool_call><function=", "x"),
        ("<tool_call><function=f>", " "),
        ("<tool_call><function=f><parameter=", "x"),
        ("<tool_call><function=no>", "</tool_cal"),
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


@pytest.mark.parametrize("filler", ["x", "<", "<parameter=", "</parameter>", "</parameter> ", "</function>", " "])
@pytest.mark.parametrize("key", ["b", "c"])
def test_a_long_argument_costs_linear_time(key: str, filler: str) -> None:
    parser = AnswerParser(tools=SCHEMAS)
    text = filler * (200_000 // len(filler))
    started_s = time.process_time()
    head, tail = f"<tool_call><function=f><parameter={key}>", "</parameter></function></tool_call>"
    pieces = joined([*parser.push(head), *itertools.chain.from_iterable(map(parser.push, text)), *parser.push(tail)])
    assert time.process_time() - started_s < 4
    assert with_whole_calls(pieces) == [ToolCall("f", json.dumps({key: text}))]


def test_a_call_comes_as_it_is_written() -> None:
    parser = AnswerParser(tools=SCHEMAS)
    steps: list[tuple[str, list[Piece]]] = [
        ("<tool_call>\n<function=f>\n", []),
        ("<parameter=b>", [CallBegin("f")]),
        ("one", [CallArguments('{"b": "one')]),
        (' "two"\n', [CallArguments(' \\"two\\"\\n')]),
        ("</param", []),
        ("s", [CallArguments("</params")]),
        ("</parameter>\n<parameter=a>1", [CallArguments('"')]),
        ("2</parameter>\n", []),
        ("</function>", [CallArguments(', "a": 12}'), CallEnd()]),
        ("\n</tool_call>", []),
    ]
    for text, expected in steps:
        assert parser.push(text) == expected, text
    assert parser.close() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so\n<tool_call>", [Content("so")]),
        ("<tool_call>\n<func", []),
        ("<tool_call>\n<function=f>\n<parameter", []),
        ("<tool_call>\n<function=f>\n<parameter=b>", [ToolCall("f", "")]),
        ("<tool_call><function=f><parameter=b>a\nb</para", [ToolCall("f", '{"b": "a\\nb')]),
        ("<tool_call><function=f><parameter=a>1</parameter><parameter=b>x", [ToolCall("f", '{"a": 1, "b": "x')]),
        ("<tool_call><function=f><parameter=a>1</parameter></function>", [ToolCall("f", '{"a": 1}')]),
        (CALL_F + "\n<tool_call>\n<function", [ToolCall("f", F_ARGS)]),
        ("<tool_call>words", [Content("<tool_call>words")]),
    ],
)
def test_a_call_that_is_cut_shows_no_tags(text: str, expected: Parts) -> None:
    assert parse(text, is_cut=True) == expected
    assert parse(text, list(range(len(text))), is_cut=True) == expected


def test_what_is_no_argument_ends_the_call_and_is_text() -> None:
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b<c></function></tool_call>"
    rest = "<parameter=b<c></function>"
    assert parse(text) == [ToolCall("f", '{"a": 1}'), Content(rest)]
    assert parse(text, list(range(len(text)))) == [ToolCall("f", '{"a": 1}'), Content(rest)]


VALUES = st.text(alphabet=st.sampled_from('a<>/="\\ \né0'), max_size=12)
BODIES = st.lists(st.tuples(st.sampled_from("abcz"), VALUES), max_size=4)


@given(BODIES, st.sampled_from(["", "\n"]), st.randoms())
@settings(max_examples=300, deadline=None)
def test_a_stream_gives_what_the_whole_block_is(body: list[tuple[str, str]], gap: str, rng: random.Random) -> None:
    parameters = "".join(f"<parameter={key}>{value}</parameter>{gap}" for key, value in body)
    block = f"<tool_call>{gap}<function=f>{gap}{parameters}</function>{gap}</tool_call>"
    whole = CallReader(SCHEMAS).read(block)
    assert whole is not None
    cuts = [rng.randrange(len(block) + 1) for _ in range(5)]
    assert parse(block, cuts) == [whole[1]]
