"""What a library would let through, or not put an end to: numbers at the edge of their range, keys that come twice,
options that may both fit, documents without an end. Enforced exactly, or refused by path and keyword."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import InvalidRequest
from epd.gateway.grammar import Calls, Form, Function, Wish
from epd.gateway.schema import ChatBody
from epd.gateway.wishes import calls_of
from epd.token_table import compile_grammar
from tests.oracles.grammar_writer import MAKER, TOKENIZER, VOCABULARY, written

FORM = "response_format.json_schema.schema"


def grammar_of(schema: dict[str, Any]) -> str:
    grammar = MAKER.grammar(Wish(Form("json", schema, FORM)))
    assert grammar is not None
    return grammar


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether this may be the whole answer."""
    return takes_all(schema, [text]) == [text]


def takes_all(schema: dict[str, Any], texts: list[str]) -> list[str]:
    grammar, taken = grammar_of(schema), []
    for text in texts:
        matcher = compile_grammar(grammar, TOKENIZER)
        tokens = VOCABULARY.encode_plain(text)
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            taken.append(text)
    return taken


def refusal(schema: dict[str, Any], *, of_function: bool = False) -> tuple[str, str]:
    """Param, without the field, and message."""
    if not of_function:
        with pytest.raises(InvalidRequest) as caught:
            grammar_of(schema)
        return str(caught.value.param).removeprefix(FORM), caught.value.message
    function = Function("f", schema, FORM, True)
    with pytest.raises(InvalidRequest) as caught:
        MAKER.grammar(Wish(calls=Calls((function,), must_call=True, at_most_one=True)))
    return str(caught.value.param).removeprefix(FORM), caught.value.message


# -- numbers ---------------------------------------------------------------------------------------------------------

OPEN = {"type": "number", "exclusiveMinimum": 0}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({**OPEN, "maximum": 0.5}, ["0.5", "0.1", "0.0000000001"], ["0", "-0", "0.51", "0.0"]),
        ({**OPEN, "maximum": 0.9}, ["0.9", "0.001"], ["0", "0.91"]),
        ({**OPEN, "exclusiveMaximum": 0.99}, ["0.98", "0.9899"], ["0", "0.99", "1"]),
        ({**OPEN, "exclusiveMaximum": 1, "multipleOf": 0.25}, ["0.25", "0.75"], ["0", "1", "0.3"]),
        ({**OPEN, "maximum": 0.5, "type": ["number", "integer"]}, ["0.5"], ["0", "1"]),
        ({**OPEN, "maximum": 0.5, "type": ["number", "null"]}, ["0.5", "null"], ["0"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "null", '"x"', "[]"], ["0"]),
        ({"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, ["-1.25"], ["-1", "-1.5"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["-0", "0"]),
        ({"type": "number", "minimum": 3, "maximum": 3.5, "exclusiveMinimum": 3}, ["3.5", "3.1"], ["3"]),
        ({"allOf": [{"type": "number", "maximum": 0.5}, {"exclusiveMinimum": 0}]}, ["0.25"], ["0"]),
        ({"enum": [0, 0.5, 1], "exclusiveMinimum": 0}, ["0.5", "1"], ["0"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5}, ["1", "2"], ["0", "3"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53), "7"]),
        ({"type": "integer", "maximum": 2**63 - 1}, ["7", "-999999999999999999"], [str(2**63)]),
        ({"type": "integer", "minimum": 2 * 10**18}, ["2000000000000000000"], ["1999999999999999999", "1" * 40]),
        ({"type": "number"}, ["0.0123456789", "-12.5", "5"], ["0.01234567891", "1e5", "1" * 30]),
        ({}, ["[1.5]", '{"a": 0.0123456789}'], ["0.01234567891", "[0.01234567891]", '{"a": 0.01234567891}']),
        ({"type": "object"}, ['{"a": [1.5]}'], ['{"a": 0.01234567891}', '{"a": [' + "1" * 30 + "]}"]),
        ({"type": "array"}, ["[1.5]"], ["[0.01234567891]"]),
    ],
)
def test_numbers_keep_to_their_range(schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    assert takes_all(schema, [*yes, *no]) == yes


HUNDREDTHS = st.integers(-300, 300).map(lambda value: value / 100)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    low=HUNDREDTHS | st.integers(-3, 3),
    size=st.sampled_from([0.01, 0.3, 0.5, 1, 1.7, 4]),
    words=st.tuples(st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])),
    more=st.sampled_from([{}, {"multipleOf": 0.01}, {"multipleOf": 0.5}]),
    kind=st.sampled_from(["number", "integer"]),
)
def test_ranges(low: float, size: float, words: tuple[str, str], more: dict[str, Any], kind: str) -> None:
    high = float(Decimal(repr(low)) + Decimal(repr(size)))
    schema = {"type": kind, words[0]: low, words[1]: high, **more}
    near = [Decimal(repr(edge)) + Decimal(step) / 100 for edge in (low, high, 0) for step in (-50, -1, 0, 1, 50)]
    values = list(dict.fromkeys(near))
    valid = {value for value in values if _fits(value, schema)}
    # A value has spellings, not all of which come.
    texts = [f"{value:.{num_decimals}f}" for value in values for num_decimals in (0, 1, 2)]
    try:
        taken = takes_all(schema, [text for text in texts if Decimal(text) in values])
    except InvalidRequest:
        taken = []
    assert {Decimal(text) for text in taken} == valid


def _fits(value: Decimal, schema: dict[str, Any]) -> bool:
    low, high = (Decimal(repr(schema[word])) for word in list(schema)[1:3])
    above = value > low if "exclusiveMinimum" in schema else value >= low
    below = value < high if "exclusiveMaximum" in schema else value <= high
    step = Decimal(repr(schema.get("multipleOf", 0.001)))
    return above and below and value % step == 0 and (schema["type"] == "number" or value % 1 == 0)


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"type": "integer", "maximum": 2**64}, ".maximum", "it is 18446744073709551616; allowed: -92"),
        ({"type": "integer", "minimum": -(10**30)}, ".minimum", f"it is -{10**30}; allowed"),
        ({"type": "integer", "exclusiveMinimum": 2**63}, ".exclusiveMinimum", str(2**63)),
        ({"type": ["integer", "null"], "maximum": 1e19}, ".maximum", "1e+19"),
        ({"type": "number", "minimum": 1e30}, ".minimum", "1e+30"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-11}, "", "10 decimal places"),
        ({"type": "number", "multipleOf": 1e-12}, ".multipleOf", "1e-12"),
        ({"type": "integer", "multipleOf": 100003}, ".multipleOf", "100000 without its point"),
        ({"type": "number", "multipleOf": 0.07}, ".multipleOf", "0.07"),
        ({"type": "number", "multipleOf": 0}, ".multipleOf", "more than 0"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "", "nothing fits"),
        ({"const": 2**53 + 1}, ".const", str(2**53 + 1)),
        ({"enum": [1, [{"a": 2**53 + 1}]]}, ".enum", str(2**53 + 1)),
    ],
)
def test_numbers_that_cannot_be_had(schema: dict[str, Any], path: str, words: str) -> None:
    for of_function in (False, True):
        whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        where, message = refusal(whole, of_function=of_function)
        assert words in message
        assert where == f".properties.a{path}"


# -- keys ------------------------------------------------------------------------------------------------------------

MAP: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "boolean"}}


def test_a_map_has_as_many_keys_as_it_must() -> None:
    assert takes_all({**MAP, "minProperties": 1}, ["{}", '{"a": true}']) == ['{"a": true}']
    more = {**MAP, "required": ["a"], "properties": {"a": {}}, "minProperties": 2}
    twice = '{"a": 1, "a": true}'
    assert takes_all(more, ['{"a": 1}', twice, '{"a": 1, "b": true}']) == ['{"a": 1, "b": true}']
    few = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
    assert takes({**few, "minProperties": 1, "maxProperties": 2}, '{"a": 1}')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({**MAP, "minProperties": 2}, ".minProperties"),
        ({"type": "object", "patternProperties": {"^a": {}}, "minProperties": 3}, ".minProperties"),
        ({"minProperties": 2}, ".minProperties"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, ".minProperties"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, ".maxProperties"),
        ({**MAP, "required": ["a"], "minProperties": 3}, ".minProperties"),
    ],
)
def test_keys_that_might_come_twice_are_not_counted(schema: dict[str, Any], path: str) -> None:
    where, message = refusal({"type": "array", "items": schema})
    assert where == f".items{path}"
    assert "cannot be enforced" in message


# -- one of ----------------------------------------------------------------------------------------------------------


def animal(kind: Any, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, **properties},
        "required": ["kind", *properties],
    }


PETS = {
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}
DEFS = {
    "Cat": animal("cat", lives={"type": "integer", "minimum": 0, "maximum": 9}),
    "Dog": animal("dog", tricks={"type": "array", "items": {"enum": ["sit"]}, "maxItems": 2}),
}
EXCLUDING: list[dict[str, Any]] = [
    {**PETS, "$defs": DEFS},
    {"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}]}, "maxItems": 1, "$defs": DEFS},
    {"oneOf": [animal(1), animal(2.5), animal(None), animal(True), animal([1])]},
    {"oneOf": [{"const": 1}, {"const": True}, {"enum": ["1", None]}, {"const": {"a": 1}}, {"const": {"a": 2}}]},
    {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3, "maximum": 9}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}, {"type": "array", "maxItems": 1}]},
    {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}},
        "required": ["kind"],
        "additionalProperties": False,
        "oneOf": [{"properties": {"kind": {"const": "a"}}}, {"properties": {"kind": {"const": "b"}}}],
    },
    {"oneOf": [{"type": "object", "properties": {key: {"type": "null"}}, "required": [key]} for key in "ab"]},
    {"oneOf": [{"oneOf": [{"const": "a"}, {"const": "b"}]}, {"anyOf": [{"const": "c"}, {"type": "null"}]}]},
]


@pytest.mark.parametrize("number", range(len(EXCLUDING)))
def test_options_that_exclude_each_other(number: int) -> None:
    schema = EXCLUDING[number]
    texts = {written(Wish(Form("json", schema, FORM)), random.Random(seed)) for seed in range(12)}
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert len(texts) > 1


LETTERS = {"oneOf": [{"const": "a"}, {"const": "b"}]}


@pytest.mark.parametrize("pet", [PETS, LETTERS, {"anyOf": [PETS, {"type": "null"}]}])
def test_options_of_arguments(pet: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"pet": pet}, "required": ["pet"], "$defs": DEFS}
    calls = Calls((Function("f", schema, "p", True),), must_call=True, at_most_one=True)
    assert "<parameter=pet>" in written(Wish(calls=calls), random.Random(1))


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [1.0, 2]}],
        [{"type": "number", "maximum": 3}, {"type": "integer", "minimum": 3}],
        [{"$ref": "#/$defs/a"}, {"type": "string"}],
        [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"type": "object", "properties": {"b": {}}}],
        [{"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object", "properties": {"a": {"const": 2}}}],
        [{}, {"type": "null"}],
    ],
)
@pytest.mark.parametrize("of_function", [False, True])
def test_options_that_may_both_fit_are_refused(options: list[Any], of_function: bool) -> None:
    defs = {"a": {"type": "string", "maxLength": 3}}
    schema = {"type": "object", "properties": {"x": {"oneOf": options}}, "required": ["x"], "$defs": defs}
    where, message = refusal(schema, of_function=of_function)
    assert where == ".properties.x.oneOf"
    assert "options 0 and 1" in message
    assert "coerce" not in message


# -- paths, ends, names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"not": {}}, ".not", "not supported"),
        ({"type": "array", "contains": {}}, ".contains", "not supported"),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern", "look-around"),
        ({"type": "string", "pattern": "^aa$", "maxLength": 1}, "", "nothing fits it"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "", "nothing fits it"),
        ({"type": "object", "propertyNames": {}}, ".propertyNames", "not supported"),
        ({"$ref": "#/$defs/absent"}, ".$ref", "does not exist"),
        ({"type": "int"}, ".type", "int"),
    ],
)
def test_a_refusal_leads_to_its_place(schema: dict[str, Any], path: str, words: str) -> None:
    user = {"type": "object", "properties": {"age": schema}, "required": ["age"]}
    where, message = refusal({"type": "object", "properties": {"user": user}, "required": ["user"]})
    assert where == f".properties.user.properties.age{path}"
    assert words in message
    assert message.startswith(f"{FORM}{where} cannot be enforced: ")
    assert "/(" not in message


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize("of_function", [False, True])
def test_documents_without_an_end_are_refused(of_function: bool) -> None:
    endless = {**NODE, "required": ["next"]}
    for holder in ({"$ref": "#/$defs/node"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}):
        schema = {"type": "object", "properties": {"a": holder}, "$defs": {"node": endless}}
        where, message = refusal(schema, of_function=of_function)
        assert where == ".$defs.node"
        assert "no document with an end" in message
    pair = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    assert refusal(pair)[0] == ""


def test_documents_that_can_end_are_written() -> None:
    either = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    for node in (NODE, {**NODE, "properties": {"next": either}, "required": ["next"]}):
        assert grammar_of({"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert grammar_of({"type": "array", "items": {"$ref": "#"}})


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_two_tools_of_one_name(choice: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "f")]
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    with pytest.raises(InvalidRequest, match=r'is "f", which is the name of tools\[0\]') as caught:
        calls_of(ChatBody.model_validate(fields))
    assert caught.value.param == "tools[2].function.name"
