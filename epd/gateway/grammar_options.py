"""Questions about a JSON schema as a whole: whether its options exclude each other, whether its documents can end.

The answers are safe: options that are said to exclude each other do, though not all that do are seen.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from epd.gateway.grammar_faults import Unenforceable
from epd.gateway.toolcalls import resolve

_KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))
_MAX_DEPTH = 12
_MAX_FORMS = 64
_MAX_COMPARED = 1_000_000
_MAX_PASSES = 64

_Form = Sequence[Mapping[str, Any]]
"""Schemas without references and options; what fits all of them fits."""


class Exclusion:
    """Whether options exclude each other. `closes`: keys that an object with `properties` does not name, nor says
    anything of, are never written."""

    def __init__(self, root: Mapping[str, Any], *, closes: bool) -> None:
        self._root = root
        self._closes = closes
        self._num_compared = 0

    def overlap(self, options: Sequence[object], beside: Mapping[str, Any]) -> tuple[int, int] | None:
        """Two that a value may fit both, or None. `beside` is the schema they are in, without them."""
        forms = [self._forms({"allOf": [beside, option]}, 0) for option in options]
        for second, others in enumerate(forms):
            for first, ones in enumerate(forms[:second]):
                if not self._all_exclude(ones, others, 0):
                    return first, second
        return None

    def _all_exclude(self, ones: Sequence[_Form], others: Sequence[_Form], depth: int) -> bool:
        return all(self._excludes(one, other, depth) for one in ones for other in others)

    def _forms(self, schema: object, depth: int) -> list[_Form]:
        """Alternatives that together take in all that fits."""
        if schema is False:
            return []
        self._num_compared += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._num_compared > _MAX_COMPARED:
            return [[]]
        forms: list[_Form] = [[schema]]
        conjuncts = [self._forms(part, depth + 1) for part in schema.get("allOf") or ()]
        if "$ref" in schema:
            conjuncts.append(self._forms(resolve(schema["$ref"], self._root), depth + 1))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                conjuncts.append([form for option in schema[word] for form in self._forms(option, depth + 1)])
        for more in conjuncts:
            if len(forms) * len(more) <= _MAX_FORMS:
                forms = [[*form, *added] for form in forms for added in more]
        return forms

    def _excludes(self, one: _Form, other: _Form, depth: int) -> bool:
        values = _values(one), _values(other)
        self._num_compared += 1 + sum(len(listed or ()) for listed in values) // 4
        if depth > _MAX_DEPTH or self._num_compared > _MAX_COMPARED:
            return False
        if values[0] is not None and values[1] is not None:
            return {_identity(value) for value in values[0]}.isdisjoint(map(_identity, values[1]))
        for listed, rest in ((values[0], other), (values[1], one)):
            if listed is not None:
                return all(self._excludes([_form_of(value)], rest, depth + 1) for value in listed)
        return all(self._excludes_as(kind, one, other, depth) for kind in _kinds(one) & _kinds(other))

    def _excludes_as(self, kind: str, one: _Form, other: _Form, depth: int) -> bool:
        """Of values of one type."""
        both = [*one, *other]
        match kind:
            case "number":
                return _is_empty(both, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
            case "string":
                return _is_empty(both, ("minLength",), ("maxLength",))
            case "array":
                return _is_empty(both, ("minItems",), ("maxItems",))
            case "object":
                return self._exclude_objects(one, other, depth)
        return False

    def _exclude_objects(self, one: _Form, other: _Form, depth: int) -> bool:
        needed = [{key for part in form for key in part.get("required") or ()} for form in (one, other)]
        for key in needed[0] | needed[1]:
            mine, yours = ({"allOf": [_of_key(part, key) for part in form]} for form in (one, other))
            if self._all_exclude(self._forms(mine, depth + 1), self._forms(yours, depth + 1), depth + 1):
                return True
        named = [_written(form) if self._closes else None for form in (one, other)]
        # What is written as one lacks something of the other, and the other way round.
        return all(
            names is not None and not theirs <= names for names, theirs in zip(named, reversed(needed), strict=True)
        )


def check_exclusive(exclusion: Exclusion, schema: Mapping[str, Any], path: str) -> None:
    """Raises Unenforceable where a value may fit more than one option of the schema's oneOf."""
    beside = {word: value for word, value in schema.items() if word != "oneOf"}
    pair = exclusion.overlap(schema["oneOf"], beside)
    if pair is not None:
        raise Unenforceable(
            f"{path}.oneOf",
            f"a value may fit both options {pair[0]} and {pair[1]}; allowed: options that differ in type, in const or "
            "enum, in the range of numbers or lengths, or in a required property that does; or anyOf",
        )


def endless(root: Mapping[str, Any], references: Iterator[str]) -> str | None:
    """The first of the references that only a document without an end fits."""
    waiting, ending = list(dict.fromkeys(references)), set[str]()
    for _ in range(_MAX_PASSES):
        num_ending = len(ending)
        # What is met last leads to the least.
        for one in reversed(waiting):
            if one not in ending and _ends(resolve(one, root), ending):
                ending.add(one)
        if len(ending) == num_ending:
            break
    return next((one for one in waiting if one not in ending), None)


def _ends(schema: object, ending: set[str]) -> bool:
    """Whether something short fits, where the references of `ending` have something that does. Nothing at all does not
    fit in another way: that is found elsewhere."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if not all(_ends(part, ending) for part in schema.get("allOf") or ()):
        return False
    for word in ("anyOf", "oneOf"):
        if schema.get(word) and not any(_ends(option, ending) for option in schema[word]):
            return False
    kinds = _kinds([schema])
    if kinds - {"array", "object"}:
        return True
    if "array" in kinds:
        first, rest = schema.get("prefixItems") or [], schema.get("items", True)
        least = schema.get("minItems") or 0
        if all(_ends(item, ending) for item in first[:least]) and (least <= len(first) or _ends(rest, ending)):
            return True
    return "object" in kinds and all(_ends(_of_key(schema, key), ending) for key in schema.get("required") or ())


def _of_key(schema: Mapping[str, Any], key: str) -> Any:
    """What its value must fit, as far as it is simple to say."""
    if key in schema.get("properties", ()):
        return schema["properties"][key]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _written(form: _Form) -> set[str] | None:
    """The only keys that are ever written; None where there may be others."""
    closed = [
        part
        for part in form
        if "properties" in part
        and "patternProperties" not in part
        and part.get("additionalProperties", False) in (False, None)
    ]
    if not closed:
        return None
    return {key for part in closed for word in ("properties", "required") for key in part.get(word) or ()}


def _kinds(form: _Form) -> frozenset[str]:
    kinds = _KINDS
    for part in form:
        if "type" in part:
            named = part["type"] if isinstance(part["type"], list) else [part["type"]]
            some = {"number" if kind == "integer" else kind for kind in named}
            kinds &= some | {"null"} if part.get("nullable") is True else some
    return kinds


def _values(form: _Form) -> list[Any] | None:
    """Those that the form lists, of the shortest list; None if it lists none."""
    lists = [[part["const"]] if "const" in part else part["enum"] for part in form if {"const", "enum"} & part.keys()]
    return min(lists, key=len, default=None)


def _form_of(value: object) -> Mapping[str, Any]:
    """A schema that the value fits, and few others."""
    match value:
        case None:
            return {"type": "null"}
        case bool():
            return {"type": "boolean"}
        case int() | float():
            return {"type": "number", "minimum": value, "maximum": value}
        case str():
            return {"type": "string", "minLength": len(value), "maxLength": len(value)}
        case list():
            return {"type": "array", "minItems": len(value), "maxItems": len(value)}
        case Mapping():
            properties = {key: {"const": item} for key, item in value.items()}
            closed = {"required": list(value), "additionalProperties": False}
            return {"type": "object", "properties": properties, **closed}
    return {}


def _identity(value: object) -> Hashable:
    """The same for values that are one to JSON: 1 and 1.0, not 1 and true."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return ("text", value)
        case list():
            return ("list", *map(_identity, value))
        case Mapping():
            return frozenset((key, _identity(item)) for key, item in value.items())
        case int() | float():
            return value
    return None


def _is_empty(form: _Form, lower: Sequence[str], upper: Sequence[str]) -> bool:
    """Whether a lower bound is beyond an upper one. The second word of each is of a bound that is no value itself."""
    low = max(((part[word], at) for part in form for at, word in enumerate(lower) if word in part), default=None)
    high = min(((part[word], -at) for part in form for at, word in enumerate(upper) if word in part), default=None)
    return low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and low[1] - high[1] > 0))
