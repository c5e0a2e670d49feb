"""References of every form, the library's limits in words, and docs/api.md against the keywords of JSON Schema."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from epd.errors import InvalidRequest
from epd.gateway.grammar import Calls, Form, Function, Wish, table_of
from epd.gateway.grammar_words import KNOWN
from epd.token_table import compile_grammar
from tests.oracles.grammar_writer import ENDS, MAKER, VOCABULARY, written

API = Path(__file__).parents[2] / "docs" / "api.md"
INTEGER = {"type": "integer"}
TOKENIZER = table_of(VOCABULARY).tokenizer(ENDS)
STANDARD = {
    word
    for validator in (Draft202012Validator, Draft7Validator)
    for word in (*validator.META_SCHEMA.get("properties", ()), *validator.VALIDATORS)
}


def holder(inner: Any, **definitions: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": inner}, "required": ["x"], "$defs": definitions}


def refusal(kind: Any, value: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        MAKER.grammar(Wish(Form(kind, value, "F")))
    return caught.value.param, caught.value.message


@pytest.mark.parametrize("reference", ["#q", "#none", "q.json", "https://a/b", "", "#/", "#/$defs/a/anyOf/0"])
@pytest.mark.parametrize("in_call", [False, True])
def test_references_that_are_no_pointers(reference: str, in_call: bool) -> None:
    schema = holder({"$ref": reference}, a={"$anchor": "q", "$id": "q.json", "anyOf": [INTEGER]})
    functions = (Function("f", schema, "F", True),)
    wish = Wish(calls=Calls(functions, True, True)) if in_call else Wish(Form("json", schema, "F"))
    with pytest.raises(InvalidRequest, match="allowed: one inside the schema, as #/") as caught:
        MAKER.grammar(wish)
    assert caught.value.param == "F.properties.x.$ref"


@pytest.mark.parametrize(("reference", "name"), [("a%20b", "a b"), ("a b", "a b"), ("%C3%A4", "ä"), ("a%25b", "a%b")])
def test_pointers_with_escapes(reference: str, name: str) -> None:
    schema = holder({"$ref": f"#/$defs/{reference}"}, **{name: {"const": 7}})
    assert "7" in written(Wish(Form("json", schema, "F")), random.Random(0))


@pytest.mark.parametrize(
    ("kind", "value", "param", "words"),
    [
        ("regex", r"\bfoo\b", "F", "the edge of a word"),
        ("grammar", 'start: "a" start', "F", "has no end"),
        (
            "json",
            holder({"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(900)}}),
            "F.properties.x",
            "(900)",
        ),
        ("json", {"patternProperties": {"^a": INTEGER, "b$": INTEGER}}, "F.patternProperties", "the same key"),
    ],
)
def test_limits_in_words(kind: str, value: Any, param: str, words: str) -> None:
    where, message = refusal(kind, value)
    assert where == param
    assert words in message
    assert not any(inner in message for inner in ("items", "lexemes", "disjoint", "recursive"))


def test_raw_strings_that_are_too_long() -> None:
    schema = holder({"type": "string", "minLength": 4000})
    with pytest.raises(InvalidRequest, match="lengths are too much together") as caught:
        MAKER.grammar(Wish(calls=Calls((Function("f", schema, "F", True),), True, True)))
    assert caught.value.param == "F.properties.x"


@pytest.mark.parametrize(("word", "is_allowed_inside"), [("anyOf", True), ("propertyNames", False)])
def test_words_for_all_arguments_together(word: str, is_allowed_inside: bool) -> None:
    value = [{}] if word == "anyOf" else {}
    with pytest.raises(InvalidRequest, match="arguments of a function together") as caught:
        MAKER.grammar(Wish(calls=Calls((Function("f", {word: value}, "F", True),), True, True)))
    assert ("allowed inside of one" in caught.value.message) == is_allowed_inside


def test_pointers_do_not_go_by_an_inner_id() -> None:
    inner = {"$id": "b.json", "items": {"$ref": "#/$defs/c"}, "$defs": {"c": INTEGER}}
    where, _ = refusal("json", holder({"$ref": "#/$defs/b"}, b=inner, c={"type": "boolean"}))
    assert where == "F.$defs.b.$id"


@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}, {"patternProperties": {"^[a-c]$": INTEGER}}])
def test_a_declared_key_comes_once(more: dict[str, Any]) -> None:
    grammar = MAKER.grammar(
        Wish(Form("json", {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, **more}, "F"))
    )
    assert grammar is not None
    assert compile_grammar(grammar, TOKENIZER).consume_tokens(VOCABULARY.encode_plain('{"a": 1, "b": 3'))
    for text in ('{"a": 1, "a', '{"a": 1, "b": 2, "a', '{"a": 1, "b": 2, "b', '{"a": 1, "\\u0061'):
        matcher = compile_grammar(grammar, TOKENIZER)
        assert not matcher.consume_tokens(VOCABULARY.encode_plain(f'{text}": 3'))


def test_every_keyword_is_documented() -> None:
    rows = [line for line in API.read_text().splitlines() if line.startswith(("| enforced", "| refused", "| says"))]
    named = {word for row in rows for word in re.findall(r"`(\$?[a-zA-Z]+)`", row)}
    # `format` has a row of its own.
    assert not {word for word in STANDARD if not word.startswith("$recursive")} - named - {"format"}
    refused = set(re.findall(r"`(\$?[a-zA-Z]+)`", next(row for row in rows if row.startswith("| refused"))))
    assert not (refused & KNOWN) - {"uniqueItems", "patternProperties", "pattern", "multipleOf", "$anchor", "$id"}
