"""Calls of functions as a grammar: the format that `epd.gateway.toolcalls` reads, with arguments that fit.

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>VALUE</parameter>\\n ... </function>\\n</tool_call>

Parameters come in the order of the schema, each once; those that are not required may be left out. A value is written
as the reader takes it: raw text where the schema says string (or string and null), JSON everywhere else.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd.gateway.grammar_faults import Unenforceable
from epd.gateway.grammar_options import Exclusion, check_exclusive
from epd.gateway.grammar_regex import (
    ANY_TEXT,
    CLOSING_TAGS,
    FORMATS,
    found_in,
    has_tag,
    literal,
    regex,
    without,
)
from epd.gateway.grammar_schema import enforceable
from epd.gateway.grammar_words import ANNOTATIONS, KNOWN, check_reference, check_shapes
from epd.gateway.toolcalls import kinds_of, resolve

_KEY = re.compile(r"[^<>\s](?:[^<>]*[^<>\s])?")
_END = "</parameter>"
_OPTIONS = ("anyOf", "oneOf", "allOf")
_RAW_WORDS = ANNOTATIONS.union(
    ("type", "nullable", "enum", "const", "pattern", "minLength", "maxLength", "format", "$ref", *_OPTIONS)
)
_TOP_WORDS = ANNOTATIONS.union(("type", "properties", "required", "additionalProperties"))
_NULL = r"~/\s*[nN][uU][lL][lL]\s*/"
_MAX_FOLLOWED = 32


@dataclass(slots=True)
class Rules:
    """Lark, rule by rule. `probes` are terminals that must match something, with the part of a schema each is of;
    `schemas` are those inside, with theirs."""

    lines: list[str] = field(default_factory=list)
    probes: list[tuple[str, str]] = field(default_factory=list)
    schemas: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    _num_rules: int = 0

    def rule(self, body: str, *, options: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{self._num_rules}"
        self._num_rules += 1
        self.lines.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{self._num_rules}"
        self._num_rules += 1
        self.lines.append(f"{name}: {body}")
        return name

    def json(self, schema: Mapping[str, Any], path: str) -> str:
        self.schemas.append((schema, path))
        return self.rule(f"%json {json.dumps(schema)}")

    def until(self, text: str, end: str) -> str:
        """A rule of a terminal and the text after it, which the terminal does not hold."""
        return self.rule(self.terminal(f"({text}) {literal(end)}"), options="[lazy]")

    def raw(self) -> str:
        """Any raw value and the tag that closes it."""
        return self.until(without(CLOSING_TAGS), _END)


def exact_function(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    """The rule of a call whose arguments fit the schema. Raises Unenforceable."""
    check_shapes(schema)
    _check_top(schema)
    properties, required = _declared(schema)
    parts = [literal(f"<function={name}>\n")]
    for key, value in properties.items():
        if _KEY.fullmatch(key) is None:
            if key in required:
                raise Unenforceable(".required", f"{json.dumps(key)} is no name that a call can hold")
            continue
        path = f".properties.{key}"
        if value is False and key not in required:
            continue
        body = rules.rule(f"{literal(f'<parameter={key}>')} {_value(rules, value, schema, path)} {literal(chr(10))}")
        parts.append(body if key in required else f"{body}?")
    return rules.rule(" ".join([*parts, literal("</function>")]))


def loose_function(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    """The rule of a call that can be read, whatever its arguments are: of those that are declared, if any are."""
    properties = schema.get("properties")
    keys = [key for key in properties if _KEY.fullmatch(key)] if isinstance(properties, Mapping) else []
    named = " | ".join(map(literal, keys)) if keys else r"/[^<>\s]{1,64}/"
    parameter = rules.rule(f'"<parameter=" ({named}) ">" {rules.raw()} "\\n"')
    return rules.rule(f"{literal(f'<function={name}>{chr(10)}')} {parameter}* {literal('</function>')}")


def _check_top(schema: Mapping[str, Any]) -> None:
    if schema.get("type", "object") != "object":
        raise Unenforceable(".type", f'it is {json.dumps(schema["type"])}; allowed: "object"')
    for word in schema:
        if word not in _TOP_WORDS:
            inside = "; allowed inside of one" if word in KNOWN - {"patternProperties", "uniqueItems"} else ""
            raise Unenforceable(f".{word}", f"it is not supported for all arguments of a function together{inside}")


def _declared(schema: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Properties with those that are only required, and which are required."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    declared = dict(properties)
    for key in required:
        if key not in declared:
            declared[key] = schema.get("additionalProperties", True)
            if declared[key] is False:
                raise Unenforceable(".required", f"{json.dumps(key)} is not among the properties")
    return declared, frozenset(required)


def _value(rules: Rules, schema: Any, root: Mapping[str, Any], path: str) -> str:
    """The rule of a value and the tag that closes it."""
    kinds = kinds_of(schema, root)
    if not set(kinds) <= {"string", "null"} or kinds == ("null",):
        return _json_value(rules, schema, root, kinds, path)
    texts = _Texts(root)
    text, may_be_null = texts.of(schema, path), "null" in kinds and texts.fits_null(schema)
    # The reader takes the word for the value where null is among the types.
    if text is not None and "null" in kinds and not may_be_null:
        text = f"({text}) & {_NULL}"
    options = [f"({text}) & {without(CLOSING_TAGS)}"] if text is not None else []
    if may_be_null:
        options.append('"null"')
    if not options:
        raise Unenforceable(path, "no text fits it")
    whole = " | ".join(f"({option})" for option in options)
    rules.probes.append((whole, path))
    return rules.until(whole, _END)


def _json_value(rules: Rules, schema: Any, root: Mapping[str, Any], kinds: tuple[str, ...], path: str) -> str:
    if not isinstance(schema, Mapping):
        raise Unenforceable(path, "it must be an object")
    whole = dict(schema)
    if whole.get("nullable") is True and isinstance(whole.get("type"), str):
        whole["type"] = [whole["type"], "null"]
    if '"$ref"' in json.dumps(whole):
        whole |= {word: root[word] for word in ("$defs", "definitions") if word in root}
    try:
        result = enforceable(whole, in_tags=True)
    except Unenforceable as error:
        # Definitions are those of all arguments.
        where = error.path if error.path.startswith((".$defs.", ".definitions.")) else f"{path}{error.path}"
        raise Unenforceable(where, str(error)) from error
    if not _is_typed(whole, root):
        # What the reader goes by, see `epd.gateway.toolcalls.convert`.
        result["type"] = list(kinds)
    return f'{rules.json(result, path)} "{_END}"'


def _is_typed(schema: object, root: Mapping[str, Any], num_followed: int = 0) -> bool:
    """Whether the schema says for every value of which types it may be: those that `kinds_of` finds."""
    if not isinstance(schema, Mapping):
        return schema is False
    if "$ref" in schema and num_followed < _MAX_FOLLOWED:
        return _is_typed(resolve(str(schema["$ref"]), root), root, num_followed + 1)
    either = schema.get("anyOf", schema.get("oneOf"))
    return (
        any(word in schema for word in ("type", "enum", "const"))
        or (isinstance(either, list) and all(_is_typed(option, root, num_followed + 1) for option in either))
        or any(_is_typed(option, root, num_followed + 1) for option in schema.get("allOf", ())[:1])
    )


class _Texts:
    """Schemas of strings as terminals."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_followed = 0
        self._exclusion = Exclusion(root, closes=False)

    def of(self, schema: Any, path: str) -> str | None:
        """A terminal of the texts that fit, None if none does. Raises Unenforceable."""
        if isinstance(schema, bool):
            return ANY_TEXT if schema else None
        if not isinstance(schema, Mapping):
            raise Unenforceable(path, "it must be an object")
        for word in schema:
            if word not in _RAW_WORDS:
                raise Unenforceable(f"{path}.{word}", "it is not supported for a string")
        kinds = _types(schema)
        for kind in kinds or ():
            if kind not in ("string", "null"):
                raise Unenforceable(f"{path}.type", f"it is {json.dumps(kind)[:80]}; allowed: a type of JSON schema")
        if kinds is not None and "string" not in kinds:
            return None
        parts: list[str | None] = [self._listed(schema, path), self._bounded(schema)]
        if "pattern" in schema:
            parts.append(found_in(schema["pattern"]))
        if "format" in schema:
            parts.append(self._format(schema["format"], f"{path}.format"))
        if "$ref" in schema:
            parts.append(self._followed(schema["$ref"], path))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                parts.append(self._either(schema[word], f"{path}.{word}"))
        if "oneOf" in schema:
            check_exclusive(self._exclusion, schema, path)
        if "allOf" in schema:
            parts += [self.of(option, f"{path}.allOf[{i}]") for i, option in enumerate(schema["allOf"])]
        if any(part is None for part in parts):
            return None
        return " & ".join(f"({part})" for part in parts if part and part != ANY_TEXT) or ANY_TEXT

    def fits_null(self, schema: Any) -> bool:
        """Whether null is a value of it, too. For schemas that `of` takes."""
        if not isinstance(schema, Mapping):
            return bool(schema)
        kinds = _types(schema)
        return all(
            (
                kinds is None or "null" in kinds or schema.get("nullable") is True,
                None in schema.get("enum", (None,)),
                schema.get("const") is None,
                "$ref" not in schema or self.fits_null(resolve(schema["$ref"], self._root)),
                any(map(self.fits_null, schema.get("anyOf", (True,)))),
                any(map(self.fits_null, schema.get("oneOf", (True,)))),
                all(map(self.fits_null, schema.get("allOf", ()))),
            )
        )

    def _listed(self, schema: Mapping[str, Any], path: str) -> str | None:
        found: list[str] | None = None
        for word, values in (("enum", schema.get("enum") or []), ("const", [schema.get("const")])):
            if word not in schema:
                continue
            texts = [value for value in values if isinstance(value, str)]
            if any(map(has_tag, texts)):
                raise Unenforceable(f"{path}.{word}", "a value spells a tag of the call format")
            found = texts if found is None else [text for text in found if text in texts]
        if found is None:
            return ANY_TEXT
        return " | ".join(map(literal, dict.fromkeys(found))) or None

    def _bounded(self, schema: Mapping[str, Any]) -> str | None:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if most != "" and most < least:
            return None
        return ANY_TEXT if (least, most) == (0, "") else f"/(?s:.){{{least},{most}}}/"

    def _format(self, name: str, path: str) -> str:
        if name not in FORMATS:
            listed = ", ".join(sorted(FORMATS))
            raise Unenforceable(path, f"it is {json.dumps(name)[:80]}; allowed: {listed}")
        return regex(FORMATS[name])

    def _followed(self, reference: Any, path: str) -> str | None:
        self._num_followed += 1
        check_reference(reference, path, self._root, in_tags=False)
        if self._num_followed > _MAX_FOLLOWED:
            raise Unenforceable(f"{path}.$ref", f"{json.dumps(reference)[:80]} leads in circles")
        return self.of(resolve(reference, self._root), path)

    def _either(self, options: Any, path: str) -> str | None:
        texts = [text for i, option in enumerate(options) if (text := self.of(option, f"{path}[{i}]")) is not None]
        return " | ".join(f"({text})" for text in texts) or None


def _types(schema: Mapping[str, Any]) -> list[Any] | None:
    kinds = schema.get("type")
    return kinds if kinds is None or isinstance(kinds, list) else [kinds]
