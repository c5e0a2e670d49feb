"""A turn rendered for the model, read back as if the model had written it: the same reasoning, text and calls."""

import itertools
import json
import random
import re
import unicodedata
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from epd.gateway.answer import AnswerParser, Content, Piece, Reasoning, joined
from epd.gateway.call_stream import CallArguments, CallBegin, CallEnd
from epd.gateway.conversation import read_conversation
from epd.gateway.detokenize import Detokenizer, StopStrings
from epd.gateway.schema import ChatBody
from epd.gateway.toolcalls import convert, kinds_of
from tests.fakes.gateway import RENDERER
from tests.oracles.whole_calls import ToolCall, with_whole_calls

VOCABULARY = RENDERER.vocabulary
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Count": {"type": "integer"}},
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "count": {"$ref": "#/$defs/Count"},
        "size": {"type": "number"},
        "on": {"type": "boolean"},
        "rows": {"type": "array"},
        "map": {"type": "object"},
        "unit": {"enum": ["C", "F"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "array"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g.h-2"}},
]
SCHEMAS = {"f": SCHEMA, "g.h-2": {}}

# What no parser of this format can tell from markup: the closing tag of a value where the next tag may follow, the
# opening of a parameter that is still to come, and the end of the block.
AMBIGUOUS = re.compile(
    rf"</tool_call>|</parameter>\s*(?:<parameter=|</function>|\Z)|<parameter=\s*(?:{'|'.join(SCHEMA['properties'])})\s*>"
)


def is_plain(text: str) -> bool:
    """Whether the tokenizer keeps the text as it is (it composes characters)."""
    framed = f">{text}<"
    return unicodedata.normalize("NFC", framed) == framed


FRAGMENTS = ["</parameter>", "<parameter=x>", "</function>", "<tool_call>", "<think>", "</think>", "<|im_end|>", "&lt;"]
TEXTS = st.one_of(
    st.text(max_size=12),
    st.lists(
        st.sampled_from([*FRAGMENTS, "null", "None", "true", "1", "\n", " ", "a", "<", "é", "\U0001f600"]), max_size=6
    ).map("".join),
).filter(is_plain)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "maybe": st.none() | TEXTS.filter(lambda text: text.strip().lower() != "null"),
        "count": st.integers(),
        "size": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
        "on": st.booleans(),
        "rows": st.lists(VALUES, max_size=3),
        "map": st.dictionaries(TEXTS, VALUES, max_size=3),
        "unit": st.sampled_from(["C", "F"]),
        "either": st.none() | st.integers() | st.lists(VALUES, max_size=2),
        "unknown": TEXTS.filter(lambda text: text.strip().lower() != "null"),
    },
).filter(lambda arguments: not any(AMBIGUOUS.search(written(value)) for value in arguments.values()))
CALLS: st.SearchStrategy[list[tuple[str, dict[str, Any]]]] = st.lists(
    st.tuples(st.just("f"), ARGUMENTS) | st.just(("g.h-2", {})), max_size=3
)


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def turn_tokens(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """The tokens of an assistant turn in the rendered history, without its borders."""
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [
            {"id": f"{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    messages = [{"role": "user", "content": "?"}, message]
    body = ChatBody.model_validate({"model": "tiny", "messages": messages, "tools": TOOLS})
    pieces = RENDERER.render(read_conversation(body, VOCABULARY.guard)).pieces
    ids = [token_id for piece in pieces if isinstance(piece, tuple) for token_id in piece]
    start, end = VOCABULARY.special_ids["<|im_start|>"], VOCABULARY.special_ids["<|im_end|>"]
    # system, user, this turn, the next one that is still to be written
    first = [at for at, token_id in enumerate(ids) if token_id == start][2]
    turn = ids[first : ids.index(end, first)]
    return turn[1 + len(VOCABULARY.encode_plain("assistant\n")) :]


def read(token_ids: list[int], cuts: list[int], tools: Any = SCHEMAS, stops: tuple[str, ...] = ()) -> list[Piece]:
    """As the gateway reads an answer that comes in these portions."""
    detokenizer, stop_strings, parser = (
        Detokenizer(VOCABULARY.token_bytes),
        StopStrings(stops),
        AnswerParser(tools=tools),
    )
    pieces: list[Piece] = []
    for start, stop in itertools.pairwise([0, *sorted(cuts), len(token_ids)]):
        pieces += parser.push(stop_strings.push(detokenizer.push(token_ids[start:stop])))
    pieces += parser.push(stop_strings.push(detokenizer.close()) + stop_strings.close())
    return joined([*pieces, *parser.close()])


def expected(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, Any]]:
    texts = [("reasoning", reasoning), ("content", content)]
    return [entry for entry in texts if entry[1]] + [(name, arguments) for name, arguments in calls]


def shown(pieces: list[Piece]) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for piece in with_whole_calls(pieces):
        match piece:
            case Reasoning(text):
                result.append(("reasoning", text))
            case Content(text):
                result.append(("content", text))
            case ToolCall(name, arguments):
                result.append((name, json.loads(arguments)))
    return result


@given(TEXTS, TEXTS, CALLS, st.randoms())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_a_turn_through_template_and_tokens(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], rng: random.Random
) -> None:
    content = content.rstrip() if calls else content
    assume("</think>" not in reasoning and "<tool_call>" not in content)
    # The template is what it is about; a client's content that opens with a think pair is reasoning sent back.
    token_ids = turn_tokens(reasoning, content, calls)
    whole = read(token_ids, [])
    assert shown(whole) == expected(reasoning, content, calls)
    assert read(token_ids, list(range(len(token_ids)))) == whole
    assert read(token_ids, [rng.randrange(len(token_ids) + 1) for _ in range(3)]) == whole


@given(CALLS.filter(bool), st.sampled_from(["\n", "", " ", "\r\n", "\n\n  "]), st.randoms())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_calls_in_any_layout(calls: list[tuple[str, dict[str, Any]]], gap: str, rng: random.Random) -> None:
    """With line feeds, as one revision of the template writes them, and without, as another does."""
    blocks = []
    for name, arguments in calls:
        parameters = [f"<parameter={key}>{written(value)}</parameter>{gap}" for key, value in arguments.items()]
        blocks.append(f"<tool_call>{gap}<function={name}>{gap}{''.join(parameters)}</function>{gap}</tool_call>")
    text = "Let me see." + gap + gap.join(blocks) + gap
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
    parser = AnswerParser(tools=SCHEMAS)
    pieces = [
        piece for start, stop in itertools.pairwise([0, *cuts, len(text)]) for piece in parser.push(text[start:stop])
    ]
    assert shown(joined([*pieces, *parser.close()])) == expected("", "Let me see.", calls)


@given(
    st.lists(
        st.integers(0, max(VOCABULARY.special_ids.values()) + 20)
        | st.sampled_from(
            [VOCABULARY.special_ids[tag] for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
        )
        | st.sampled_from([VOCABULARY.encode_plain(text)[0] for text in ("<", "=", ">", "f")]),
        max_size=40,
    ),
    st.sampled_from([(), ("a",), ("</", "\n")]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_tokens_are_an_answer(token_ids: list[int], stops: tuple[str, ...], with_tools: bool) -> None:
    tools = SCHEMAS if with_tools else None
    whole = read(token_ids, [], tools, stops)
    assert read(token_ids, list(range(len(token_ids))), tools, stops) == whole
    arguments = ""
    for piece in whole:
        match piece:
            case CallBegin():
                arguments = ""
            case CallArguments(text):
                arguments += text
            case CallEnd():
                assert isinstance(json.loads(arguments), dict)
            case Reasoning(text) | Content(text):
                assert text
                text.encode()


@given(
    st.text(max_size=30), VALUES, st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "x"])
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_value(text: str, value: Any, kind: str) -> None:
    for raw in (text, written(value), repr(value)):
        for schema in (
            {"type": kind},
            {"type": [kind, "string"]},
            {"type": [kind, "boolean", "null"]},
            {"enum": [value]},
        ):
            json.dumps(convert(raw, kinds_of(schema, {})), allow_nan=False).encode()
