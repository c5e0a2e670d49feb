"""References of every form, the library's limits in words, and docs/api.md against the keywords of JSON Schema."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from epd.errors import InvalidRequest
from epd.gateway.grammar import Calls, Form, Function, Wish
from epd.gateway.grammar_words import KNOWN
from tests.oracles.grammar_writer import MAKER, written

API = Path(__file__).parents[2] / "docs" / "api.md"
INTEGER = {"type": "integer"}
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


def test_every_keyword_is_documented() -> None:
    rows = [line for line in API.read_text().splitlines() if line.startswith(("| enforced", "| refused", "| says"))]
    named = {word for row in rows for word in re.findall(r"`(\$?[a-zA-Z]+)`", row)}
    missing = {word for word in STANDARD if not word.startswith("$recursive")} - named - {"format"}
    assert missing <= {"exclusiveMinimum", "exclusiveMaximum", "additionalItems"}
    refused = set(re.findall(r"`(\$?[a-zA-Z]+)`", next(row for row in rows if row.startswith("| refused"))))
    assert not (refused & KNOWN) - {"uniqueItems", "patternProperties", "pattern", "multipleOf", "$anchor", "$id"}
