"""The words of a JSON schema: which there are, what stands where, and what a schema as a whole is made of."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from epd.gateway.grammar_faults import Unenforceable
from epd.gateway.grammar_numbers import NUMBER_WORDS
from epd.gateway.grammar_regex import FORMATS
from epd.gateway.toolcalls import resolve

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
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES = ("items", "additionalProperties")
OBJECT_WORDS = frozenset(("properties", "required", "additionalProperties", "patternProperties"))
WORDS_OF = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": NUMBER_WORDS,
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": OBJECT_WORDS | {"minProperties", "maxProperties"},
}


BRANCHES = frozenset(("anyOf", "oneOf", "allOf", "$ref"))
_MAX_CONSTANT = 1e300
_MAX_DEPTH = 100
LISTED = frozenset(("enum", "const"))
KNOWN = ANNOTATIONS.union(*WORDS_OF.values(), ("type", "nullable", "uniqueItems", "additionalItems"), BRANCHES, LISTED)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_FORMAT_NAMES = frozenset((*FORMATS, "ipv6"))


def check_shapes(schema: object) -> None:
    """Raises Unenforceable where a keyword has a value that no JSON schema gives it, anywhere inside."""
    waiting = [("", schema, 0)]
    while waiting:
        path, part, depth = waiting.pop()
        if isinstance(part, bool):
            continue
        if depth > _MAX_DEPTH:
            raise Unenforceable("", f"it is nested too deeply; allowed: {_MAX_DEPTH} schemas inside each other")
        if not isinstance(part, Mapping):
            raise Unenforceable(path, f"it is {json.dumps(part)[:80]}; allowed: a JSON schema")
        for word, value in part.items():
            here = f"{path}.{word}"
            fits, allowed = _SHAPES.get(word, _ANY_SHAPE)
            if not fits(value):
                raise Unenforceable(here, f"it is {json.dumps(value)[:80]}; allowed: {allowed}")
            if word in MAPS:
                waiting += [(f"{here}.{key}", item, depth + 1) for key, item in value.items()]
            elif word in LISTS:
                waiting += [(f"{here}[{i}]", item, depth + 1) for i, item in enumerate(value)]
            elif word in SINGLES:
                waiting.append((here, value, depth + 1))


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
    **dict.fromkeys(MAPS, (lambda value: isinstance(value, Mapping), "an object")),
    **dict.fromkeys(LISTS, (lambda value: isinstance(value, list), "an array")),
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


def may_close(schema: Mapping[str, Any]) -> bool:
    """Whether every object is described in one place: then keys it does not name can be left out."""
    for _, part in parts(schema):
        own = part.keys() - ANNOTATIONS
        if len(part.get("allOf") or ()) > 0 or ("$ref" in part and len(own) > 1):
            return False
        if own & {"anyOf", "oneOf"} and own & OBJECT_WORDS:
            return False
    return True


def has_grid(schema: Mapping[str, Any]) -> bool:
    """Whether numbers can be given a smallest step: llguidance counts steps in 32 bits where it merges schemas."""
    merges = counts = False
    for _, part in parts(schema):
        own = part.keys() - ANNOTATIONS - {"type", "nullable"}
        merges |= "allOf" in own or (len(own) > 1 and bool(own & BRANCHES))
        counts |= bool(own & (LISTED | {"multipleOf"})) or "integer" in json.dumps(part.get("type"))
    return not (merges and counts)


def check_words(part: Mapping[str, Any], path: str, root: Mapping[str, Any], *, in_tags: bool, lenient: bool) -> None:
    """Raises Unenforceable for what is not known."""
    for word in part:
        if word.startswith(("$dynamic", "$recursive")) or (
            not lenient and word not in KNOWN and not word.startswith("x-")
        ):
            raise Unenforceable(f"{path}.{word}", "it is not supported")
    kinds = part.get("type", ())
    for kind in kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else ():
        if kind not in TYPES:
            raise Unenforceable(f"{path}.type", f"it is {json.dumps(kind)[:80]}; allowed: {', '.join(TYPES)}")
    if part.get("uniqueItems") and not lenient:
        raise Unenforceable(f"{path}.uniqueItems", "it is not supported")
    for word in LISTED & part.keys():
        if (odd := _coarse(part[word])) is not None:
            raise Unenforceable(f"{path}.{word}", f"{json.dumps(odd)[:80]} is no number that a float of 64 bits holds")
    if part.get("enum") == []:
        raise Unenforceable(f"{path}.enum", "it is empty, so that nothing fits it")
    named = part.get("format")
    if named is not None and named not in _FORMAT_NAMES and not lenient and (not kinds or "string" in kinds):
        allowed = ", ".join(sorted(_FORMAT_NAMES))
        raise Unenforceable(f"{path}.format", f"it is {json.dumps(named)[:80]}; allowed: {allowed}")
    if "$ref" in part:
        check_reference(part["$ref"], path, root, in_tags=in_tags)
    base = part.get("$id", "#")
    if path and not str(base).startswith("#") and '"$ref"' in json.dumps(part):
        raise Unenforceable(f"{path}.$id", "references inside of it go by it, which is not supported")


def check_reference(reference: str, path: str, root: Mapping[str, Any], *, in_tags: bool) -> None:
    """Raises Unenforceable for one that is no pointer to a schema inside the root. `in_tags`: to a definition."""
    shown = json.dumps(reference)[:200]
    steps = unquote(reference).split("/")
    leads = steps[0] == "#" and (not in_tags or steps[1:2] in (["$defs"], ["definitions"]))
    at = 1
    while leads and at < len(steps):
        leads = steps[at] in SINGLES or (steps[at] in MAPS and at + 1 < len(steps))
        at += 2 if steps[at] in MAPS else 1
    if not leads:
        raise Unenforceable(f"{path}.$ref", f"it is {shown}; allowed: one inside the schema, as #/$defs/NAME")
    if not isinstance(resolve(reference, root), Mapping | bool):
        raise Unenforceable(f"{path}.$ref", f"it is {shown}, which does not exist in the schema")


def references(root: Mapping[str, Any]) -> Iterator[str]:
    """Those that are met on the way from the root."""
    seen: set[str] = set()
    waiting: list[object] = [root]
    while waiting:
        for _, part in parts(waiting.pop(), with_definitions=False):
            reference = part.get("$ref")
            if reference is not None and reference not in seen:
                seen.add(reference)
                yield reference
                waiting.append(resolve(reference, root))


def parts(schema: object, *, with_definitions: bool = True) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schema and all schemas in it, each with the path to it."""
    waiting = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield path, part
        for word, value in part.items():
            here = f"{path}.{word}"
            if word in MAPS and isinstance(value, Mapping):
                if with_definitions or word not in ("$defs", "definitions"):
                    waiting += [(f"{here}.{key}", item) for key, item in value.items()]
            elif word in LISTS and isinstance(value, list):
                waiting += [(f"{here}[{i}]", item) for i, item in enumerate(value)]
            elif word in SINGLES:
                waiting.append((here, value))


def _coarse(value: object) -> int | float | None:
    """A number in a constant that llguidance would write as another one."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | Mapping):
            waiting += one.values() if isinstance(one, Mapping) else one
        elif isinstance(one, int | float) and (abs(one) > _MAX_CONSTANT or float(one) != one):
            return one
    return None
