"""Schemas as applications write them, asked of the small built-in model: whatever it makes of them, its answers fit."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.clients.asked import PICTURE
from tests.e2e.service import Answer, Service

pytestmark = pytest.mark.e2e

TEXT = {"type": "string", "maxLength": 24}
SCHEMAS: dict[str, dict[str, Any]] = {
    "contact": {
        "type": "object",
        "properties": {
            "name": TEXT,
            "email": {"type": "string", "format": "email"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "phones": {"type": "array", "items": {"type": "string", "pattern": r"^\+?\d{5,12}$"}, "maxItems": 2},
        },
        "required": ["name", "email"],
    },
    "sentiment": {
        "type": "object",
        "properties": {
            "label": {"enum": ["positive", "neutral", "negative"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
        },
        "required": ["label", "score"],
        "additionalProperties": False,
    },
    "invoice": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "date": {"type": "string", "format": "date"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {
                        "sku": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"},
                        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                        "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000, "multipleOf": 0.01},
                    },
                    "required": ["sku", "quantity", "price"],
                },
            },
            "currency": {"enum": ["EUR", "USD", "JPY"]},
        },
        "required": ["id", "date", "lines", "currency"],
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "shape or text": {
        "anyOf": [
            {"type": "object", "properties": {"radius": {"type": "integer", "maximum": 50}}, "required": ["radius"]},
            {
                "type": "object",
                "properties": {"sides": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 4}},
                "required": ["sides"],
            },
            {"type": "string", "enum": ["none", "unknown"]},
        ]
    },
    "pydantic optional": {
        "title": "Event",
        "type": "object",
        "$defs": {"Kind": {"enum": ["talk", "break"], "title": "Kind", "type": "string"}},
        "properties": {
            "kind": {"$ref": "#/$defs/Kind"},
            "room": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None},
            "start": {"type": "string", "format": "date-time"},
        },
        "required": ["kind", "start"],
    },
    "box": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 999}] * 4,
        "items": False,
        "minItems": 4,
    },
    "boxes": {
        "type": "object",
        "properties": {
            "objects": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "class": {"enum": ["red square", "green cross"]},
                        "x": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.001},
                    },
                    "required": ["class", "x"],
                },
            }
        },
        "required": ["objects"],
    },
    "settings": {
        "type": "object",
        "properties": {
            "address": {"type": "string", "format": "ipv4"},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "debug": {"type": "boolean"},
            "limits": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
        },
        "required": ["address", "port", "debug"],
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {
                "type": "object",
                "properties": {"b": {"const": 5}},
                "required": ["b"],
            },
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "tagged union": {
        "type": "object",
        "properties": {
            "step": {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"op": {"const": "move"}, "to": {"enum": [[0, 0], [1, 2]]}},
                        "required": ["op", "to"],
                    },
                    {
                        "type": "object",
                        "properties": {"op": {"const": "say"}, "text": TEXT},
                        "required": ["op", "text"],
                    },
                ]
            }
        },
        "required": ["step"],
    },
    "identifiers": {
        "type": "array",
        "items": {"type": "string", "format": "uuid"},
        "minItems": 1,
        "maxItems": 2,
    },
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": f"store_{number}", "parameters": schema, "strict": True},
    }
    for number, schema in enumerate(
        schema for schema in SCHEMAS.values() if schema.get("properties") and "allOf" not in schema
    )
]


def ask(served: Service, *, max_tokens: int = 700, **fields: Any) -> Answer:
    return served.ask(PICTURE[0]["content"], max_tokens=max_tokens, **fields)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_fit(served: Service, name: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name], "strict": True}}
    manner: dict[str, Any] = {"temperature": 1, "seed": 3} if len(name) % 2 else {"temperature": 0}
    answer = ask(served, response_format=wanted, **manner)
    [choice] = answer.body["choices"]
    assert choice["finish_reason"] == "stop", choice
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(choice["message"]["content"]))


def test_together(served: Service) -> None:
    """Different grammars in one batch, and answers without."""

    def one(number: int) -> None:
        schema = list(SCHEMAS.values())[number]
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        fields: dict[str, Any] = {"response_format": wanted} if number % 4 else {}
        answer = ask(served, max_tokens=150, temperature=1, seed=number, **fields)
        assert answer.status == 200, answer
        [choice] = answer.body["choices"]
        if fields and choice["finish_reason"] == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice["message"]["content"]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))


@pytest.mark.parametrize("number", [1, 4])
def test_named_calls_fit(served: Service, number: int) -> None:
    function = TOOLS[number]["function"]
    named = {"type": "function", "function": {"name": function["name"]}}
    answer = ask(served, tools=TOOLS, tool_choice=named, temperature=1, seed=number)
    [choice] = answer.body["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == function["name"]
    jsonschema.Draft202012Validator(function["parameters"]).validate(json.loads(call["function"]["arguments"]))


PAIR = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[ab]{2}"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PAIR}}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PAIR}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
]


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_ends_with_its_form_however_long_it_is_to_be(served: Service, form: int, temperature: float) -> None:
    fields = {**FORMS[form], "temperature": temperature, "seed": 5, "min_tokens": 120}
    answer = ask(served, max_tokens=200, **fields)
    [choice] = answer.body["choices"]
    text = choice["message"]["content"]
    if form == 3:
        text = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert choice["finish_reason"] == ("tool_calls" if form == 3 else "stop")
    assert text in ("yes", "no", "aa", "ab", "ba", "bb") or isinstance(json.loads(text)["a"], bool)
    # The same in pieces.
    lines, parts = ask(served, max_tokens=200, stream=True, **fields).body["text"].splitlines(), ""
    for line in lines:
        event = line.removeprefix("data: ")
        for piece in json.loads(event)["choices"] if event.startswith("{") else ():
            delta = piece["delta"]
            calls = delta.get("tool_calls") or []
            parts += (delta.get("content") or "") + "".join(call["function"].get("arguments", "") for call in calls)
    assert parts == text


def test_reasoning_and_then_json(served: Service) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["sentiment"]}}
    answer = ask(served, response_format=wanted, reasoning_effort="high", temperature=0, max_tokens=200)
    [choice] = answer.body["choices"]
    if choice["finish_reason"] == "stop":
        jsonschema.Draft202012Validator(SCHEMAS["sentiment"]).validate(json.loads(choice["message"]["content"]))
    else:
        assert choice["message"]["reasoning_content"]


def test_biases_and_penalties(served: Service) -> None:
    """Each moves the answer; a bias of a hundred decides it."""
    ids = served.post("/tokenize", {"model": "mimo-nano", "prompt": "red", "add_special_tokens": False}).body["tokens"]
    biased = served.ask("Say a colour.", max_tokens=4, temperature=0, logit_bias={str(ids[0]): 100})
    assert biased.body["choices"][0]["message"]["content"]
    first = dict.fromkeys(("frequency_penalty", "presence_penalty"), 2.0)
    other = served.ask("Say red red red red red red.", max_tokens=20, temperature=0, ignore_eos=True, **first)
    same = served.ask("Say red red red red red red.", max_tokens=20, temperature=0, ignore_eos=True)
    assert other.body["choices"][0]["message"]["content"] != same.body["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": -0.1}, "min_p"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_outside_the_range_is_refused(served: Service, fields: dict[str, Any], param: str) -> None:
    answer = ask(served, **fields)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
