"""A client's JSON schema to one that can be enforced token by token, or the reason why not.

What is written is never more than the schema allows, and sometimes less: keys that it does not name are left out where
it names others, numbers are no larger and no finer than a reader of them can hold, and texts of a format have the
length that people give them. Inside a tool call (`in_tags`) no string or key spells a tag of the call format, which
reads raw text.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from epd.gateway.grammar_faults import Unenforceable
from epd.gateway.grammar_numbers import MAX_NUMBER, NUMBER_WORDS, narrow_numbers
from epd.gateway.grammar_options import Exclusion, check_exclusive, endless
from epd.gateway.grammar_regex import FORMATS, TAG_FREE, has_tag
from epd.gateway.grammar_words import (
    ANNOTATIONS,
    BRANCHES,
    KNOWN,
    LISTED,
    LISTS,
    MAPS,
    SINGLES,
    TYPES,
    WORDS_OF,
    check_shapes,
    check_words,
    has_grid,
    may_close,
    parts,
    references,
)

SPACE_PATTERN = r" |\n {0,20}"
"""White space between the parts of a JSON answer: a blank, or a new line and what it is indented by. No more, so that a
model cannot lose itself in it."""

_ANY = "any-"
# Of one object, without one that is required among them: the parser looks at all of them at once.
_MAX_OPTIONAL = 500


def enforceable(schema: object, *, in_tags: bool = False, lenient: bool = False) -> dict[str, Any]:
    """A schema for llguidance, its options included. Raises Unenforceable. With `lenient` what llguidance does not know
    is left out of account."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise Unenforceable("", f"it is {json.dumps(schema)}; allowed: a JSON schema that something fits")
    check_shapes(schema)
    for path, part in parts(schema):
        check_words(part, path, schema, in_tags=in_tags, lenient=lenient)
    reference = endless(schema, references(schema))
    if reference is not None:
        where = "".join(f".{step}" for step in unquote(reference[1:]).split("/")[1:])
        raise Unenforceable(where, "no document with an end fits it")
    walker = _Walker(schema, in_tags=in_tags, lenient=lenient)
    result = walker.schema(schema, "")
    if walker.needs_any:
        result["$defs"] = {**result.get("$defs", {}), _ANY: _anything(in_tags=in_tags)}
    options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    if not in_tags:
        options = {"whitespace_pattern": SPACE_PATTERN}
    return {**result, "x-guidance": {**options, "lenient": lenient}}


class _Walker:
    def __init__(self, root: Mapping[str, Any], *, in_tags: bool, lenient: bool) -> None:
        self._may_close = may_close(root)
        self._in_tags = in_tags
        self._lenient = lenient
        self._exclusion = Exclusion(root, closes=self._may_close)
        self._has_grid = has_grid(root)
        # Where schemas are merged, a reference could not always be.
        self._names_any = in_tags or self._may_close
        self.needs_any = False

    def schema(self, schema: object, path: str) -> Any:
        """`path` is for errors."""
        if isinstance(schema, bool):
            return self._any() if schema and self._names_any else schema
        if not isinstance(schema, Mapping):
            raise Unenforceable(path, f"it is {json.dumps(schema)[:80]}; allowed: a JSON schema")
        result = dict(self._below(schema, path))
        if result.get("uniqueItems") is False:
            del result["uniqueItems"]
        self._one_of(result, schema, path)
        self._numbers(result, path)
        self._count_keys(result, path)
        _check_optional(result, path)
        if result.get("format") in FORMATS and result.get("type", "string") in ("string", ["string", "null"]):
            _add_pattern(result, f"^({FORMATS[result.pop('format')]})$")
        if self._in_tags:
            return self._guarded(result, path)
        if self._may_close:
            self._fill(result)
        return result

    def _below(self, schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for word, value in schema.items():
            here = f"{path}.{word}"
            if word in MAPS and isinstance(value, Mapping):
                yield word, {key: self.schema(item, f"{here}.{key}") for key, item in value.items()}
            elif word in LISTS and isinstance(value, list):
                yield word, [self.schema(item, f"{here}[{i}]") for i, item in enumerate(value)]
            elif word in SINGLES:
                # Open keys are dealt with where the object is.
                yield word, value if isinstance(value, bool) else self.schema(value, here)
            elif word == "$ref":
                yield word, f"#{quote(unquote(value[1:]), safe='/~$')}"
            elif word in KNOWN - ANNOTATIONS - {"nullable"}:
                yield word, value

    def _one_of(self, result: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
        """Options that exclude each other are any of them."""
        if "oneOf" not in result:
            return
        options = result.pop("oneOf")
        if not self._lenient:
            check_exclusive(self._exclusion, schema, path)
        more = {"anyOf": options}
        result |= more if "anyOf" not in result else {"allOf": [*result.get("allOf", ()), more]}

    def _numbers(self, result: dict[str, Any], path: str) -> None:
        kinds = result.get("type", ())
        named = {"number", "integer"} & set(kinds if isinstance(kinds, list) else [kinds] if kinds else ())
        single = not result.keys() & (BRANCHES | LISTED)
        if result.keys() & NUMBER_WORDS or (named and not result.keys() & LISTED):
            narrow_numbers(result, path, on_grid=self._has_grid and single)

    def _count_keys(self, result: dict[str, Any], path: str) -> None:
        """Keys that an object does not name may come twice in what is written, and are one then."""
        named = set(result.get("properties", ()))
        required = set(result.get("required", ()))
        closed = result.get("additionalProperties", not (named and self._may_close)) is False
        closed = closed and "patternProperties" not in result
        if closed and result.get("maxProperties", -1) >= len(named | required):
            del result["maxProperties"]
        if "minProperties" in result and result["minProperties"] <= len(required):
            del result["minProperties"]
        for word in ("minProperties", "maxProperties"):
            if word in result and named - required and not self._lenient:
                raise Unenforceable(f"{path}.{word}", "it is supported only beside properties that are all required")
            if word in result and named - required:
                del result[word]
        most = len(required) + 1
        if result.get("minProperties", 0) > most:
            if not self._lenient:
                raise Unenforceable(
                    f"{path}.minProperties",
                    f"it is {result['minProperties']}; allowed: at most {most}, one more than is required, since a key "
                    "that is not named may be written twice",
                )
            result["minProperties"] = most

    def _fill(self, schema: dict[str, Any]) -> None:
        """What a schema leaves open gets its bounds, too."""
        if "properties" in schema and "additionalProperties" not in schema:
            self._close(schema)
        if schema.keys() & (BRANCHES | LISTED):
            return
        if not schema.keys() - {"$defs", "definitions"}:
            schema |= self._any()
            return
        kinds = schema.get("type", TYPES)
        if "type" not in schema and not schema.keys() & NUMBER_WORDS:
            narrow_numbers(schema, "", on_grid=self._has_grid)
        if "array" in kinds and schema.get("items", True) is True and "additionalItems" not in schema:
            schema["items"] = self._any()
        if "object" in kinds and schema.get("additionalProperties", True) is True:
            schema["additionalProperties"] = self._any()

    def _close(self, schema: dict[str, Any]) -> None:
        """No keys but those that are named."""
        properties = schema.setdefault("properties", {})
        others = schema.get("additionalProperties", True)
        for key in schema.get("required") or ():
            if key not in properties and others is not False:
                properties[key] = self._any() if others is True else others
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
        found = [kind for kind, words in WORDS_OF.items() if words & schema.keys()]
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


def _anything(*, in_tags: bool) -> dict[str, Any]:
    """Any JSON value; in tags without tags in it."""
    again = {"$ref": f"#/$defs/{_ANY}"}
    number: dict[str, Any] = {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}
    narrow_numbers(number, "", on_grid=True)
    keys = {"patternProperties": {TAG_FREE: again}, "additionalProperties": False}
    return {
        "anyOf": [
            {"type": ["null", "boolean"]},
            number,
            {"type": "string", "pattern": TAG_FREE} if in_tags else {"type": "string"},
            {"type": "array", "items": again},
            {"type": "object", **(keys if in_tags else {"additionalProperties": again})},
        ]
    }


def _check_optional(schema: Mapping[str, Any], path: str) -> None:
    required, number, most = set(schema.get("required") or ()), 0, 0
    for key in schema.get("properties", ()):
        number = 0 if key in required else number + 1
        most = max(most, number)
    if most > _MAX_OPTIONAL:
        raise Unenforceable(
            path, f"too many optional properties in one object ({most}); allowed: about {_MAX_OPTIONAL} in a row"
        )


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    more = {"pattern": pattern}
    schema |= more if "pattern" not in schema else {"allOf": [*schema.get("allOf", []), more]}
