"""JSON schemas as clients write them, at random: every keyword that is enforced, in every place it can stand."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = ("city", "unit", "a b", "größe", "x-y_z.1", 'say "hi"', "back\\slash", "日本", "tab\tbed", "<b>")
_WORDS = ("", "a", "null", "Null ", "12", "true", "a<b", "</p>", "line\nfeed", 'q"uote', "é😀", "{}", "<parameter>")
_PATTERNS = ("^[a-z]{1,4}$", "b", "^(ab|cd)+$", "^x|y$", r"^\d{3}-\w+$", "^[^<>]{0,3}$", "^$|^z")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "uri", "duration")


def strings() -> st.SearchStrategy[Schema]:
    plain = st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"minLength": st.integers(0, 3), "maxLength": st.integers(3, 9)}
    )
    return st.one_of(
        plain,
        st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(_FORMATS).map(lambda name: {"type": "string", "format": name}),
        st.lists(st.sampled_from(_WORDS), min_size=1, max_size=4, unique=True).map(lambda words: {"enum": words}),
        st.sampled_from(_WORDS).map(lambda word: {"type": "string", "const": word}),
    )


def numbers() -> st.SearchStrategy[Schema]:
    def bounded(kind: str, least: int, size: int, words: tuple[str, str]) -> Schema:
        return {"type": kind, words[0]: least, words[1]: least + size}

    words = st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")])
    return st.one_of(
        st.builds(bounded, st.sampled_from(["integer", "number"]), st.integers(-50, 50), st.integers(2, 300), words),
        st.sampled_from([{"type": "integer"}, {"type": "number"}, {"type": "integer", "minimum": 3}]),
        st.just({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 40}),
    )


def _either(options: list[Schema]) -> Schema:
    return {"anyOf": options}


def values() -> st.SearchStrategy[Schema]:
    """Schemas of any value; objects in them may leave their keys open."""
    leaves = st.one_of(
        strings(),
        numbers(),
        st.sampled_from(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"enum": [1, "a", None, True, [2]]},
                {"const": {"a": [1.5, "x"]}},
                {"type": ["string", "null"], "maxLength": 4},
                {"type": ["string", "null"], "enum": ["a", "null"]},
                {"type": ["integer", "string", "boolean"], "maxLength": 3},
                {"$ref": "#/$defs/tree"},
                {"$ref": "#/$defs/name"},
                {"type": "object"},
                {},
            ]
        ),
    )
    return st.recursive(leaves, lambda inner: st.one_of(arrays(inner), objects(inner), eithers(inner)), max_leaves=6)


def arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def array(item: Schema, least: int, more: int) -> Schema:
        return {"type": "array", "items": item, "minItems": least, "maxItems": least + more}

    pair = st.lists(items, min_size=2, max_size=2).map(
        lambda pair: {"type": "array", "prefixItems": pair, "items": False, "minItems": 2}
    )
    return st.one_of(st.builds(array, items, st.integers(0, 2), st.integers(0, 2)), pair)


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def closed(properties: Schema, num_required: int, extra: dict[str, Any]) -> Schema:
        return {"type": "object", "properties": properties, "required": list(properties)[:num_required], **extra}

    extras = st.sampled_from([{"additionalProperties": False}, {}])
    properties = st.dictionaries(st.sampled_from(_NAMES), inner, max_size=3)
    maps = inner.map(lambda value: {"type": "object", "additionalProperties": value, "maxProperties": 2})
    return st.one_of(st.builds(closed, properties, st.integers(0, 3), extras), maps)


def eithers(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(_either)


DEFS: Schema = {
    "tree": {
        "type": "object",
        "properties": {"leaf": {"type": "integer"}, "more": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "required": ["leaf"],
    },
    "name": {"type": "string", "pattern": "^[A-Z][a-z]{0,5}$"},
}


def whole() -> st.SearchStrategy[Schema]:
    return values().map(lambda schema: {**schema, "$defs": DEFS})


def parameters() -> st.SearchStrategy[Schema]:
    """Of a function."""
    names = [name for name in _NAMES if "<" not in name]

    def schema(properties: Schema, num_required: int, closed: bool) -> Schema:
        required = list(properties)[:num_required]
        extra: Schema = {"additionalProperties": False} if closed else {}
        return {"type": "object", "properties": properties, "required": required, "$defs": DEFS, **extra}

    return st.builds(
        schema, st.dictionaries(st.sampled_from(names), values(), max_size=4), st.integers(0, 4), st.booleans()
    )
