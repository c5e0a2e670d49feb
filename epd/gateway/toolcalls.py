"""The text of a tool call's parameter to the value that its schema asks for.

    <tool_call> <function=NAME> <parameter=KEY>VALUE</parameter> ... </function> </tool_call>

White space between tags means nothing, white space of a value is the value's. Templates write strings raw and all other
values as JSON; strings are read back as they stand (no HTML entity is resolved in them), everything else is read as
JSON first. `epd.gateway.call_stream` reads the block.
"""

import ast
import html
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

Tools = Mapping[str, Mapping[str, Any]]
"""Function names and the JSON schemas of their parameters."""

# Schemas of clients that write a language's type names.
_ALIASES = {
    **dict.fromkeys(("str", "text", "enum"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
# Python's own parser takes seconds and much memory for long literals.
_LONGEST_LITERAL = 1 << 16


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters that a function's schema declares."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def convert(raw: str, kinds: tuple[str, ...]) -> Any:
    """A parameter's text as one of the types its schema allows (see `kinds_of`); text that fits none stays a string.

    Nothing known means a string. The word null in any case is None unless the schema says string and not null. Integral
    numbers are ints, a boolean is true only for the word true. With several types the text is what JSON reads if one of
    them allows that, else a string if that is allowed.
    """
    if raw.strip().lower() == "null" and (not kinds or "null" in kinds or "string" not in kinds):
        return None
    kinds = tuple(kind for kind in kinds if kind != "null")
    if kinds in ((), ("string",)):
        return raw
    # A model that escapes for XML is understood, too.
    for text in dict.fromkeys((raw, html.unescape(raw))):
        try:
            return _convert(text, kinds)
        except _UNREADABLE:
            continue
    return raw


_UNREADABLE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def _convert(text: str, kinds: tuple[str, ...]) -> Any:
    """Raises one of _UNREADABLE for a text that is none of the kinds."""
    if len(kinds) == 1:
        return _as_kind(text, kinds[0])
    try:
        value = _json(text)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if any(_is_kind(value, kind) for kind in kinds):
            return value
    except _UNREADABLE:
        pass
    if "string" not in kinds:
        for kind in (kind for kind in kinds if kind != "boolean"):
            try:
                return _as_kind(text, kind)
            except _UNREADABLE:
                continue
    raise ValueError("no JSON of these types")


def _as_kind(text: str, kind: str) -> Any:
    match kind:
        case "integer" | "number":
            return _number(text, integral=kind == "integer")
        case "boolean":
            return text.strip().lower() == "true"
        case _:
            return _structured(text)


def _number(text: str, *, integral: bool) -> int | float:
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if number.is_integer():
        return int(number)
    # JSON has no infinities and no NaN.
    if integral or number != number or abs(number) == float("inf"):
        raise ValueError("no such number")
    return number


def _structured(text: str) -> Any:
    """JSON, else a Python literal that JSON can carry."""
    try:
        return _json(text)
    except ValueError:
        if len(text) > _LONGEST_LITERAL:
            raise
        return json.loads(_portable(ast.literal_eval(text.strip())))


def _json(text: str) -> Any:
    value = json.loads(text, parse_constant=_no_number)
    _portable(value)
    return value


def _portable(value: Any) -> bytes:
    """The value as JSON. Raises ValueError or TypeError for infinities, lone surrogates, sets and the like."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def kinds_of(schema: object, root: Mapping[str, Any]) -> tuple[str, ...]:
    """The types a JSON schema allows, in its order; empty when it does not say. `$ref` is followed inside `root`."""
    return tuple(dict.fromkeys(_kinds(schema, root, set())))


def _kinds(schema: object, root: Mapping[str, Any], followed: set[str]) -> list[str]:
    """`followed` are references seen already: each is read once, so that circles end and the work is bounded."""
    if not isinstance(schema, Mapping):
        return []
    found = [_ALIASES.get(kind, kind) for kind in _strings(schema.get("type"))]
    if not found and isinstance(reference := schema.get("$ref"), str) and reference not in followed:
        followed.add(reference)
        found = _kinds(resolve(reference, root), root, followed)
    for word in ("anyOf", "oneOf"):
        found = found or [kind for option in _list(schema.get(word)) for kind in _kinds(option, root, followed)]
    found = found or next(filter(None, (_kinds(option, root, followed) for option in _list(schema.get("allOf")))), [])
    found = found or [_kind_of(value) for value in _list(schema.get("enum"))]
    if not found and "const" in schema:
        found = [_kind_of(schema["const"])]
    if not found:
        found = [kind for word, kind in (("properties", "object"), ("items", "array")) if word in schema]
    return [*found, "null"] if found and schema.get("nullable") is True else found


def resolve(reference: str, root: Mapping[str, Any]) -> object:
    """What a JSON pointer such as `#/$defs/Point` leads to; None for anything else."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: object = root
    for step in unquote(reference[1:]).split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _strings(value: object) -> Iterable[str]:
    return [value] if isinstance(value, str) else [item for item in _list(value) if isinstance(item, str)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _is_kind(value: object, kind: str) -> bool:
    own = _kind_of(value)
    return own == kind or (own == "integer" and kind == "number")
