"""A `<tool_call>` block to a call, and a parameter's text to the value that its schema asks for.

    <tool_call> <function=NAME> <parameter=KEY>VALUE</parameter> ... </function> </tool_call>

White space between tags means nothing, white space of a value is the value's. A closing tag closes only where the next
tag of the grammar can follow it, so a text value may hold tags of its own. Templates write strings raw and all other
values as JSON; strings are read back as they stand (no HTML entity is resolved in them), everything else is read as
JSON first. The work is linear in the block, whatever it holds.
"""

import ast
import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

Tools = Mapping[str, Mapping[str, Any]]
"""Function names and the JSON schemas of their parameters."""

_FUNCTION_OPEN = "<function="
_FUNCTION_CLOSE = "</function>"
_PARAMETER_CLOSE = "</parameter>"
# Possessive where white space repeats: what was skipped is not tried again, so a long run of it stays linear.
_NAME = re.compile(r"<function=\s*+([^\s<>]*+)\s*+>")
_NO_PARAMETERS = re.compile(r"\s*+(</function>)")
_LAST_PARAMETER = re.compile(r"</parameter>\s*+(</function>)")
_PARAMETER = re.compile(r"<parameter=([^<>]*)>")
_CLOSES = re.compile(r"</parameter>(?=\s*+(?:<parameter=|\Z))")
_SPACE = re.compile(r"\s*")

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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object as text, the way the API carries it."""

    name: str
    arguments: str


class CallReader:
    """Reads the blocks of one answer. A schema is walked once, however often its function is called."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._kinds: dict[tuple[str, str], tuple[str, ...]] = {}

    def read(self, block: str) -> tuple[str, ToolCall, str] | None:
        """The first function of a block, and the text before and after it inside the block.

        None where the block is text: no function, one that is not among the tools, or something between its parameters.
        Of a parameter given twice the last one counts; the closing tag of a parameter may be missing before the next
        one that the schema declares and before the function's end.
        """
        inner = block.removeprefix(CALL_OPEN).removesuffix(CALL_CLOSE)
        start = inner.find(_FUNCTION_OPEN)
        opened = _NAME.match(inner, start) if start >= 0 else None
        if opened is None or opened[1] not in self._tools:
            return None
        first = opened.end()
        if (end := _NO_PARAMETERS.match(inner, first) or _LAST_PARAMETER.search(inner, first)) is not None:
            stop, rest = end.span(1)
        elif (stop := inner.find(_FUNCTION_CLOSE, first)) >= 0:
            rest = stop + len(_FUNCTION_CLOSE)
        else:
            return None
        name = opened[1]
        texts = _parameters(inner[first:stop], _properties(self._tools[name]))
        if texts is None:
            return None
        arguments = {key: convert(text, self._kinds_of(name, key)) for key, text in texts.items()}
        return inner[:start], ToolCall(name, json.dumps(arguments, ensure_ascii=False)), inner[rest:]

    def _kinds_of(self, name: str, key: str) -> tuple[str, ...]:
        schema = self._tools[name]
        declared = _properties(schema)
        if key not in declared:
            return ()
        if (name, key) not in self._kinds:
            self._kinds[name, key] = kinds_of(declared[key], schema)
        return self._kinds[name, key]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _parameters(body: str, declared: Mapping[str, Any]) -> dict[str, str] | None:
    """Keys and raw texts; None when something else stands between them."""
    texts: dict[str, str] = {}
    at = _past_space(body, 0)
    closing = _CLOSES.search(body, at)
    while (opened := _PARAMETER.match(body, at)) is not None:
        start = opened.end()
        # Looked for again only when it has been passed: values without closing tags would all search to the end.
        if closing is not None and closing.start() < start:
            closing = _CLOSES.search(body, start)
        limit = len(body) if closing is None else closing.start()
        key = opened[1].strip()
        following = next(
            (
                tag
                for tag in _PARAMETER.finditer(body, start, limit)
                if _opens_next(tag[1].strip(), key, texts, declared)
            ),
            None,
        )
        stop = limit if following is None else following.start()
        if (following is not None or closing is None) and body.find(_PARAMETER_CLOSE, start, stop) >= 0:
            return None
        texts[key] = body[start:stop]
        at = _past_space(body, stop if following is not None or closing is None else closing.end())
    return texts if at == len(body) else None


def _opens_next(key: str, current: str, given: Mapping[str, str], declared: Mapping[str, Any]) -> bool:
    """Whether an opening tag before the closing one ends the value: it does where the schema waits for that key."""
    return key in declared and key != current and key not in given


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


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
