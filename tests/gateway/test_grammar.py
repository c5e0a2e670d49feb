"""Fields of a request to a grammar or to the refusal that names the field; what grammars let through."""

import json
import random
import time
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from epd.errors import InvalidRequest
from epd.gateway.answer import AnswerParser, Content, Reasoning
from epd.gateway.grammar import Calls, Form, Function, GrammarMaker, Wish, table_of
from epd.gateway.render import Prompt
from epd.gateway.schema import ChatBody
from epd.gateway.vocabulary import Vocabulary
from epd.gateway.wishes import wish_of_chat
from epd.token_table import compile_grammar, load_token_table
from tests.fakes.gateway import MODEL, chat_body, running_gateway
from tests.fakes.tiny_tokenizer import END, write_tokenizer
from tests.oracles.grammar_writer import ENDS, MAKER, MODEL_DIR, VOCABULARY, allowed, write, written
from tests.oracles.whole_calls import ToolCall, with_whole_calls

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}
CLOSED, OPEN, BARE = (
    "<|im_start|>assistant\n<think></think>",
    "<|im_start|>assistant\n<think>",
    "<|im_start|>assistant\n",
)


NAMED_F = {"type": "function", "function": {"name": "f"}}


def tool(name: str, schema: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema or WEATHER, **fields}}


def grammar_of(prompt: str = CLOSED, **fields: Any) -> str | None:
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    ids = tuple(VOCABULARY.encode(prompt))
    return MAKER.grammar(wish_of_chat(body, Prompt((ids,), prompt == OPEN), MAKER))


def answers(number: int = 8, prompt: str = CLOSED, **fields: Any) -> list[str]:
    grammar = grammar_of(prompt, **fields)
    assert grammar is not None
    return [write(grammar, random.Random(seed)) for seed in range(number)]


def json_schema(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


# -- what is free ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [tool("f")]},
        {"tools": [tool("f", strict=False)], "tool_choice": "auto"},
        {"tools": [tool("f", strict=True)], "tool_choice": "none"},
        {
            "tools": [tool("f")],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED_F]}},
        },
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_an_answer_that_needs_no_grammar_has_none(fields: dict[str, Any]) -> None:
    assert grammar_of(**fields) is None


# -- text ------------------------------------------------------------------------------------------------------------


def test_json_objects() -> None:
    texts = answers(response_format={"type": "json_object"})
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert any(len(text) > 10 for text in texts)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"structured_outputs": {"regex": "[a-c]{2}|x+y"}}, lambda text: set(text) <= set("abcxy")),
        ({"guided_regex": r"\d{3}/[A-F]"}, lambda text: len(text) == 5 and text[3] == "/"),
        ({"structured_outputs": {"choice": ["yes", 'n"o', "日本\n"]}}, lambda text: text in ("yes", 'n"o', "日本\n")),
        ({"guided_choice": ["a", "ab"]}, lambda text: text in ("a", "ab")),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "b" | "c"'}}, lambda text: text in ("ab", "ac")),
        ({"guided_grammar": 'root ::= "x" item\nitem ::= [0-9] "z"'}, lambda text: len(text) == 3 and text[0] == "x"),
        ({"structured_outputs": {"json": '{"enum": [1, "b"]}'}}, lambda text: text in ("1", '"b"')),
        ({"guided_json": {"const": None}}, lambda text: text == "null"),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
def test_other_servers_words(fields: dict[str, Any], fits: Any) -> None:
    texts = answers(**fields)
    assert all(map(fits, texts)), texts


def test_white_space_comes_to_an_end() -> None:
    """However a model loves it, at most one line feed and an indent stand between two parts."""
    grammar = grammar_of(response_format=json_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}))
    assert grammar is not None
    space, tokens = set(b" \n"), list(VOCABULARY.encode_plain("["))
    for _ in range(40):
        blank = [one for one in allowed(grammar, tokens) if set(VOCABULARY.spell([one])) <= space]
        if not blank:
            break
        tokens.append(blank[-1])
    assert len(VOCABULARY.spell(tokens)) <= 22


# -- reasoning -------------------------------------------------------------------------------------------------------


def test_reasoning_comes_first_and_is_free() -> None:
    fields = {"response_format": json_schema(WEATHER)}
    for prompt, may_think, must_think in ((CLOSED, False, False), (BARE, True, False), (OPEN, True, True)):
        seen = set()
        for text in answers(16, prompt, **fields):
            parser = AnswerParser(tools=None, in_reasoning=prompt == OPEN)
            pieces = [*parser.push(text), *parser.close()]
            content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
            assert json.loads(content).keys() <= {"city", "days"}
            seen.add(any(isinstance(piece, Reasoning) for piece in pieces) or "</think>" in text)
        assert seen == ({True} if must_think else {True, False} if may_think else {False})


# -- calls -----------------------------------------------------------------------------------------------------------


def calls_in(text: str, *names: str) -> list[ToolCall]:
    parser = AnswerParser(tools=dict.fromkeys(names, WEATHER))
    pieces = with_whole_calls([*parser.push(text), *parser.close()])
    return [piece for piece in pieces if isinstance(piece, ToolCall)]


@pytest.mark.parametrize(
    ("fields", "names", "numbers"),
    [
        ({"tool_choice": "required"}, {"f", "g"}, {1, 2, 3}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"f", "g"}, {1}),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, {"g"}, {1}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "f"}}],
                    },
                }
            },
            {"f"},
            {1, 2, 3},
        ),
    ],
)
def test_calls_that_must_be_made(fields: dict[str, Any], names: set[str], numbers: set[int]) -> None:
    found, counts = set(), set()
    for text in answers(24, tools=[tool("f"), tool("g")], **fields):
        calls = calls_in(text, "f", "g")
        assert text.startswith("<tool_call>")
        assert calls
        found |= {call.name for call in calls}
        counts.add(len(calls))
    assert found == names
    assert counts & numbers
    assert numbers != {1} or counts == {1}


def test_strict_functions_force_nothing_but_their_own_calls() -> None:
    grammar = grammar_of(tools=[tool("f", strict=True), tool("loose")])
    assert grammar is not None
    start = allowed(grammar, [])
    # Free text, its end, and a call.
    assert len(start) > 1400
    assert VOCABULARY.special_ids["<tool_call>"] in start
    assert ENDS[0] in start
    inside = VOCABULARY.encode("Well, <tool_call>\n<function=f>\n")
    after = {VOCABULARY.spell([one]) for one in allowed(grammar, inside)}
    assert after <= {b"<", b"<p", b"<par", b"<parameter", b"<parameter="}
    loose = VOCABULARY.encode(
        "<tool_call>\n<function=loose>\n<parameter=days>many</parameter>\n</function>\n</tool_call>ok"
    )
    assert len(allowed(grammar, loose)) > 1400
    strict = VOCABULARY.encode("<tool_call>\n<function=f>\n<parameter=city>Rome</parameter>\n<parameter=days>")
    assert {VOCABULARY.spell([one]) for one in allowed(grammar, strict)} == {str(n).encode() for n in range(1, 8)}


def test_json_or_a_call() -> None:
    texts = answers(30, tools=[tool("f")], response_format=json_schema({"type": "boolean"}))
    assert {text[:3] for text in texts} == {"tru", "fal", "<to"}


def test_a_function_whose_schema_is_beyond_us_can_still_be_called() -> None:
    """Unless it is strict."""
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]}
    texts = answers(4, tools=[tool("f", odd)], tool_choice="required")
    assert all(calls_in(text, "f") for text in texts)
    with pytest.raises(InvalidRequest, match="look-around") as caught:
        grammar_of(tools=[tool("f", odd, strict=True)])
    assert caught.value.param == "tools[0].function.parameters.properties.a"


# -- what is refused -------------------------------------------------------------------------------------------------

SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "needs tools"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            'is "g", which is not among the tools: f',
        ),
        (
            {"tools": [tool("f")], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "response_format is given",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "response_format and guided_regex are given",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "structured_outputs.regex and structured_outputs.choice are given",
        ),
        ({"response_format": json_schema({"not": {"type": "string"}})}, f"{SCHEMA}.not", "not supported"),
        ({"response_format": json_schema({"type": "strange"})}, f"{SCHEMA}.type", "strange"),
        ({"response_format": json_schema({"$ref": "https://elsewhere/x"})}, f"{SCHEMA}.$ref", "inside the schema"),
        ({"response_format": json_schema({"$ref": "#/$defs/none"})}, f"{SCHEMA}.$ref", "does not exist"),
        (
            {"response_format": json_schema({"type": "string", "pattern": "("})},
            f"{SCHEMA}.pattern",
            "unclosed",
        ),
        ({"response_format": json_schema({"type": "string", "format": "colour"})}, f"{SCHEMA}.format", "colour"),
        ({"response_format": json_schema({"properties": {"a": 3}})}, f"{SCHEMA}.properties.a", "a JSON schema"),
        ({"response_format": json_schema({"enum": []})}, f"{SCHEMA}.enum", "empty"),
        (
            {"response_format": json_schema({"type": "array", "uniqueItems": True})},
            f"{SCHEMA}.uniqueItems",
            "not supported",
        ),
        ({"structured_outputs": {"regex": "(?<=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "nothing"),
        ({"guided_grammar": "root ::= ???"}, "guided_grammar", "GBNF"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": "3"}, "guided_json", "a JSON schema"),
        ({"guided_json": "false"}, "guided_json", "a JSON schema"),
        (
            {"tools": [tool("f", {"type": "object", "anyOf": [{"required": ["a"]}]}, strict=True)]},
            "tools[0].function.parameters.anyOf",
            "together",
        ),
        (
            {"tools": [tool("f", {"type": "array"}, strict=True)]},
            "tools[0].function.parameters.type",
            '"object"',
        ),
        (
            {"tools": [tool("f", {"properties": {"a": {"enum": ["</parameter>"]}}}, strict=True)]},
            "tools[0].function.parameters.properties.a.enum",
            "tag",
        ),
        (
            {
                "tools": [
                    tool("f", {"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 1}}}, strict=True)
                ]
            },
            "tools[0].function.parameters.properties.a",
            "no text",
        ),
        (
            {
                "tools": [
                    tool(
                        "f",
                        {"properties": {"a": {"type": "string", "pattern": "^a$", "allOf": [{"pattern": "^b$"}]}}},
                        strict=True,
                    )
                ]
            },
            "tools[0].function.parameters.properties.a",
            "nothing fits",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(**fields)
    assert caught.value.param == param
    assert words in caught.value.message
    # Nothing of a parser's inside.
    assert len(caught.value.message) < 700
    assert not {"<state>", "(And", "coerce"} & set(caught.value.message.split())


def test_what_of_a_schema_is_not_known_may_be_left_out() -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 2}
    found = {len(json.loads(text)) for text in answers(20, response_format=json_schema(schema, strict=False))}
    assert found == {0, 1, 2}


HOSTILE: dict[str, dict[str, Any]] = {
    "repeats of repeats": {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"},
    "alternatives": {"type": "string", "pattern": "|".join(f"a{{{i}}}b" for i in range(300))},
    "backtracking": {"type": "string", "pattern": "^(a|a)*(a|aa)*(b|a){200}c$"},
    "many values": {"enum": [f"value {i}" for i in range(20_000)]},
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}},
    "wide and required": {
        "type": "object",
        "properties": {f"p{i}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for i in range(400)},
        "required": [f"p{i}" for i in range(400)],
    },
    "long": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    "products": {
        "allOf": [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]
    },
    "circles": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "multiples": {"type": "number", "multipleOf": 0.000001, "minimum": 0.0000001, "maximum": 99999999},
    "many references": {"oneOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 30}}},
    "options": {"oneOf": [{"anyOf": [{"anyOf": [{"minimum": i}] * 5}] * 9, "maxLength": i} for i in range(40)]},
    "long lists": {"oneOf": [{"enum": list(range(i, 15_000, 2))} for i in range(2)]},
    "a chain": {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i * 7919 % 2000}"}, "minItems": 1} for i in range(2000)},
    },
    "deep": reduce(lambda inner, _: {"items": inner}, range(900), {}),
    "union": {
        "oneOf": [
            {"type": "object", "properties": {"a": {"const": i}, "b": {"anyOf": [{"type": "null"}]}}, "required": ["a"]}
            for i in range(150)
        ]
    },
    "too large": {"enum": ["x" * 300_000]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_judged_in_time(name: str) -> None:
    """Refused or taken, and the first tokens of what is taken come fast, too."""
    started_s, refused = time.process_time(), None
    try:
        grammar = grammar_of(response_format=json_schema(HOSTILE[name]))
        assert grammar is not None
        tokens: list[int] = []
        for _ in range(5):
            tokens.append(allowed(grammar, tokens)[0])
    except InvalidRequest as error:
        refused = error.param
    assert refused is None or refused.startswith(SCHEMA)
    assert time.process_time() - started_s < 5


# -- vocabularies ----------------------------------------------------------------------------------------------------


def test_gateway_and_engine_see_the_same_vocabulary() -> None:
    mine, theirs = table_of(VOCABULARY), load_token_table(MODEL_DIR)
    assert (mine.spelled, mine.special_ids) == (theirs.spelled, theirs.special_ids)
    text = "Grüße, <tool_call> 日本 <|im_end|>"
    assert mine.encode(text) == theirs.encode(text)


def test_a_vocabulary_without_tags_spells_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] == END]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    vocabulary = Vocabulary.load(tmp_path / "tokenizer.json")
    maker = GrammarMaker(vocabulary, (END,))
    wish = Wish(calls=Calls((Function("f", {}, "p", True),), must_call=False, at_most_one=False), reasoning="open")
    grammar = maker.grammar(wish)
    assert grammar is not None
    matcher = compile_grammar(grammar, load_token_table(tmp_path).tokenizer((END,)))
    text = "so</think>hi <tool_call>\n<function=f>\n</function>\n</tool_call> and"
    assert matcher.consume_tokens(vocabulary.encode_plain(text)), matcher.get_error()
    assert matcher.is_accepting()
    wrong = compile_grammar(grammar, load_token_table(tmp_path).tokenizer((END,)))
    assert not wrong.consume_tokens(vocabulary.encode_plain("so</think>hi <tool_call>\n<function=g>"))


def test_a_model_that_nothing_ends_has_no_grammars() -> None:
    with pytest.raises(InvalidRequest, match="no token of this vocabulary ends an answer"):
        GrammarMaker(VOCABULARY, ()).grammar(Wish(Form("json", {}, "f")))


def test_what_is_written_is_what_was_wished() -> None:
    assert written(Wish(Form("choice", ("only",), "f")), random.Random(0)) == "only"


# -- on the way to a worker --------------------------------------------------------------------------------------------


async def test_workers_get_what_was_asked_for() -> None:
    async with running_gateway() as stack:
        fields = {
            "response_format": json_schema(WEATHER),
            "ignore_eos": True,
            "logit_bias": {"5": 1.5, "7": -100, "9": 0},
            "frequency_penalty": 0.5,
            "presence_penalty": -1,
            "repetition_penalty": 1.25,
            "min_p": 0.125,
        }
        status, _, _ = await stack.post(chat_body(**fields))
        assert status == 200
        [request] = stack.worker.submitted
        sampling = request.sampling
        assert sampling.grammar == grammar_of(response_format=json_schema(WEATHER))
        # It ends where the grammar does.
        assert set(sampling.stop_token_ids) >= {VOCABULARY.special_ids["<|im_end|>"]}
        assert sampling.logit_bias == ((5, 1.5), (7, -100.0))
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
        assert (sampling.repetition_penalty, sampling.min_p) == (1.25, 0.125)


async def test_plain_requests_ask_for_nothing() -> None:
    async with running_gateway() as stack:
        await stack.post(chat_body())
        [request] = stack.worker.submitted
        assert not request.sampling.changes_odds


async def test_completions_take_forms_too() -> None:
    async with running_gateway() as stack:
        body = {"model": MODEL, "prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}
        async with stack.session.post(f"{stack.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
        [request] = stack.worker.submitted
        assert request.sampling.grammar is not None
        body["structured_outputs"] = {"regex": "("}
        async with stack.session.post(f"{stack.url}/v1/completions", json=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "structured_outputs.regex"
