"""A client's JSON schema to one that can be enforced token by token, or the reason why not.

What is written is never more than the schema allows, and sometimes less: keys that it does not name are left out where
it names others, integers have at most 18 digits, and texts of a format the length that people give them. Inside a tool
call (`in_tags`) no string or key spells a tag of the call format, which reads raw text, and numbers are no larger than
a reader of them can hold.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from epd.gateway.grammar_regex import FORMATS, TAG_FREE, has_tag

SPACE_PATTERN = r" |\n {0,20}"
"""White space between the parts of a JSON answer: a blank, or a new line and what it is indented by. No more, so that a
model cannot lose itself in it."""

_MAX_INTEGER = 10**18
_MAX_NUMBER = 1e15
_ANY = "any-"
# Keywords that say nothing about what is valid.
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
        "$defs",
        "definitions",
        "discriminator",
        "xml",
        "externalDocs",
        "strict",
        "contentEncoding",
        "contentMediaType",
        "x-guidance",
    ]
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_OBJECT_WORDS = frozenset(("properties", "required", "additionalProperties", "patternProperties"))
_WORDS_OF = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": _OBJECT_WORDS | {"minProperties", "maxProperties"},
}


class Unenforceable(Exception):
    """A part of a schema that cannot be enforced; `path` leads to it from the schema's root."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


def enforceable(schema: object, *, in_tags: bool = False, lenient: bool = False) -> dict[str, Any]:
    """A schema for llguidance, its options included. Raises Unenforceable. With `lenient` what llguidance does not know
    is left out of account."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise Unenforceable("", f"it is {json.dumps(schema)}; allowed: a JSON schema that something fits")
    check_shapes(schema)
    _check_references(schema)
    walker = _Walker(may_close=_may_close(schema), in_tags=in_tags)
    result = walker.schema(schema, "")
    if walker.needs_any:
        result["$defs"] = {**result.get("$defs", {}), _ANY: _anything()}
    options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    if not in_tags:
        options = {"whitespace_pattern": SPACE_PATTERN}
    return {**result, "x-guidance": {**options, "lenient": lenient}}


def check_shapes(schema: object) -> None:
    """Raises Unenforceable where a keyword has a value that no JSON schema gives it, anywhere inside."""
    waiting = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise Unenforceable(path, f"it is {json.dumps(part)[:80]}; allowed: a JSON schema")
        for word, value in part.items():
            here = f"{path}.{word}"
            fits, allowed = _SHAPES.get(word, _ANY_SHAPE)
            if not fits(value):
                raise Unenforceable(here, f"it is {json.dumps(value)[:80]}; allowed: {allowed}")
            if word in _MAPS:
                waiting += [(f"{here}.{key}", item) for key, item in value.items()]
            elif word in _LISTS:
                waiting += [(f"{here}[{i}]", item) for i, item in enumerate(value)]
            elif word in _SINGLES:
                waiting.append((here, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_Shape = tuple[Callable[[Any], bool], str]
_ANY_SHAPE: _Shape = (lambda value: True, "anything")
_SHAPES: Mapping[str, _Shape] = {
    "type": (
        lambda value: isinstance(value, str) or (_are_strings(value) and bool(value)),
        "a type, or an array of them",
    ),
    "enum": (lambda value: isinstance(value, list), "an array"),
    "required": (_are_strings, "an array of strings"),
    **dict.fromkeys(_MAPS, (lambda value: isinstance(value, Mapping), "an object")),
    **dict.fromkeys(_LISTS, (lambda value: isinstance(value, list), "an array")),
    **dict.fromkeys(("pattern", "format", "$ref"), (lambda value: isinstance(value, str), "a string")),
    **dict.fromkeys(("nullable", "uniqueItems"), (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (_is_number, "a number")
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (
            lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31,
            "0 to 2147483647",
        ),
    ),
}


class _Walker:
    def __init__(self, *, may_close: bool, in_tags: bool) -> None:
        self._may_close = may_close
        self._in_tags = in_tags
        self.needs_any = False

    def schema(self, schema: object, path: str) -> Any:
        """`path` is for errors."""
        if isinstance(schema, bool):
            return self._any() if schema and self._in_tags else schema
        if not isinstance(schema, Mapping):
            raise Unenforceable(path, f"it is {json.dumps(schema)[:80]}; allowed: a JSON schema")
        result = dict(self._below(schema, path))
        if result.get("uniqueItems") is False:
            del result["uniqueItems"]
        self._narrow_integer(result)
        if result.get("format") in FORMATS and result.get("type", "string") in ("string", ["string", "null"]):
            _add_pattern(result, f"^({FORMATS[result.pop('format')]})$")
        if self._in_tags:
            return self._guarded(result, path)
        if self._may_close and "properties" in result and "additionalProperties" not in result:
            self._close(result)
        return result

    def _below(self, schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for word, value in schema.items():
            here = f"{path}.{word}"
            if word in _MAPS and isinstance(value, Mapping):
                yield word, {key: self.schema(item, f"{here}.{key}") for key, item in value.items()}
            elif word in _LISTS and isinstance(value, list):
                yield word, [self.schema(item, f"{here}[{i}]") for i, item in enumerate(value)]
            elif word in _SINGLES:
                # Open keys are dealt with where the object is.
                yield word, value if isinstance(value, bool) else self.schema(value, here)
            elif word not in ANNOTATIONS and word != "nullable":
                yield word, value

    def _narrow_integer(self, schema: dict[str, Any]) -> None:
        if schema.get("type") == "integer":
            _bound(schema, _MAX_INTEGER)

    def _close(self, schema: dict[str, Any]) -> None:
        """No keys but those that are named."""
        properties = schema.setdefault("properties", {})
        others = schema.get("additionalProperties", True)
        for key in schema.get("required") or ():
            if key not in properties and others is not False:
                properties[key] = self._any() if others is True and self._in_tags else others
        schema["additionalProperties"] = False

    # -- inside a tool call: strings and keys without tags, numbers that fit -------------------------------------------

    def _any(self) -> dict[str, Any]:
        self.needs_any = True
        return {"$ref": f"#/$defs/{_ANY}"}

    def _guarded(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        for word in ("enum", "const"):
            if has_tag(json.dumps(schema.get(word), ensure_ascii=False)):
                raise Unenforceable(f"{path}.{word}", "a value spells a tag of the call format")
        if "enum" in schema or "const" in schema or "$ref" in schema:
            return schema
        kinds = self._kinds(schema, path)
        if kinds is None:
            return schema
        if "string" in kinds:
            _add_pattern(schema, TAG_FREE)
        if "number" in kinds:
            _bound(schema, _MAX_NUMBER)
        if "array" in kinds and "items" not in schema:
            schema["items"] = self._any()
        if "object" in kinds:
            self._guard_keys(schema, path)
        return schema

    def _kinds(self, schema: dict[str, Any], path: str) -> list[str] | None:
        """The types, made explicit; None where alternatives have them."""
        if "type" in schema:
            kinds = schema["type"]
            return kinds if isinstance(kinds, list) else [kinds]
        if any(word in schema for word in ("anyOf", "oneOf", "allOf")):
            return None
        found = [kind for kind, words in _WORDS_OF.items() if words & schema.keys()]
        if not found and not schema.keys() - {"$defs", "definitions"}:
            schema |= self._any()
            return None
        if len(found) != 1:
            raise Unenforceable(path, 'it has no "type", and what it says fits several')
        schema["type"] = found[0]
        return found

    def _guard_keys(self, schema: dict[str, Any], path: str) -> None:
        for word in ("patternProperties", "propertyNames"):
            if word in schema:
                raise Unenforceable(f"{path}.{word}", "it is not supported in arguments of a function")
        for key in (*schema.get("properties", ()), *schema.get("required", ())):
            if has_tag(key):
                raise Unenforceable(path, "the name of a property spells a tag of the call format")
        others = schema.get("additionalProperties", True)
        if others is False:
            return
        if "properties" in schema:
            if not self._may_close:
                raise Unenforceable(path, 'an object that others add to needs "additionalProperties": false')
            self._close(schema)
        else:
            schema["patternProperties"] = {TAG_FREE: self._any() if others is True else others}
            schema["additionalProperties"] = False


def _anything() -> dict[str, Any]:
    """Any JSON value without tags in it."""
    again = {"$ref": f"#/$defs/{_ANY}"}
    return {
        "anyOf": [
            {"type": ["null", "boolean"]},
            {"type": "number", "minimum": -_MAX_NUMBER, "maximum": _MAX_NUMBER},
            {"type": "string", "pattern": TAG_FREE},
            {"type": "array", "items": again},
            {"type": "object", "patternProperties": {TAG_FREE: again}, "additionalProperties": False},
        ]
    }


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    more = {"pattern": pattern}
    schema |= more if "pattern" not in schema else {"allOf": [*schema.get("allOf", []), more]}


def _bound(schema: dict[str, Any], largest: int | float) -> None:
    """Both sides, where the schema leaves one open and its other side leaves room."""
    least, most = (
        [schema[word] for word in words if isinstance(schema.get(word), int | float)]
        for words in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if not least and all(value > -largest for value in most):
        schema["minimum"] = -largest
    if not most and all(value < largest for value in least):
        schema["maximum"] = largest


def _may_close(schema: Mapping[str, Any]) -> bool:
    """Whether every object is described in one place: then keys it does not name can be left out."""
    for part in _parts(schema):
        own = part.keys() - ANNOTATIONS
        if len(part.get("allOf") or ()) > 0 or ("$ref" in part and len(own) > 1):
            return False
        if own & {"anyOf", "oneOf"} and own & _OBJECT_WORDS:
            return False
    return True


def _check_references(schema: Mapping[str, Any]) -> None:
    for part in _parts(schema):
        reference = part.get("$ref", "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise Unenforceable(
                "", f"$ref is {json.dumps(reference)[:200]}; allowed: one inside the schema, as #/$defs/NAME"
            )
        for word in ("$dynamicRef", "$recursiveRef"):
            if word in part:
                raise Unenforceable("", f"{word} is not supported")


def _parts(schema: object) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        for word, value in part.items():
            if word in _MAPS and isinstance(value, Mapping):
                waiting += value.values()
            elif word in _LISTS and isinstance(value, list):
                waiting += value
            elif word in _SINGLES:
                waiting.append(value)
