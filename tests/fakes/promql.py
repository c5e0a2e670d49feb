"""Enough of PromQL to know what a query reads: its selectors, and the labels it groups by."""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
    (?P<space>\s+) | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<duration>\[[^\]]*\]) | (?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?\b|\.\d+)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*) | (?P<op>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){},])
    """,
    re.VERBOSE,
)
_WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}
_GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
FUNCTIONS = {
    *("sum", "max", "min", "avg", "count", "rate", "increase", "changes", "histogram_quantile", "clamp_min"),
    *("vector", "label_values"),
}


class NotPromql(ValueError):
    """The text cannot be read."""


@dataclass(frozen=True)
class Selector:
    """`name` is a pattern that must match whole names; `matchers` are (label, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


@dataclass
class Query:
    selectors: list[Selector] = field(default_factory=list)
    grouped_by: set[str] = field(default_factory=set)


def read_query(text: str) -> Query:
    """Raises NotPromql for what is not sound: unknown functions, unbalanced brackets, stray characters."""
    tokens = _tokens(text)
    query, depth, at = Query(), 0, 0
    while at < len(tokens):
        kind, word = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind == "name" and word in _GROUPINGS:
            labels, at = _labels(tokens, at + 1)
            query.grouped_by |= labels if word in ("by", "on", "ignoring") else set()
            continue
        if (kind == "name" and word not in _WORDS and following == "(") or (word in FUNCTIONS and following in ("by",)):
            if word not in FUNCTIONS:
                raise NotPromql(f"{word} is no function: {text}")
        elif (kind == "name" and word not in _WORDS) or word == "{":
            selector, at = _selector(tokens, at)
            query.selectors.append(selector)
            continue
        depth += (word == "(") - (word == ")")
        if depth < 0:
            raise NotPromql(f"a bracket too many: {text}")
        at += 1
    if depth:
        raise NotPromql(f"a bracket is not closed: {text}")
    if not query.selectors:
        raise NotPromql(f"nothing is read: {text}")
    return query


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NotPromql(f"cannot read {text[at : at + 20]!r}")
        if found.lastgroup != "space":
            tokens.append((found.lastgroup or "", found[0]))
        at = found.end()
    return tokens


def _labels(tokens: list[tuple[str, str]], at: int) -> tuple[set[str], int]:
    if tokens[at][1] != "(":
        return set(), at
    labels = set()
    at += 1
    while tokens[at][1] != ")":
        if tokens[at][0] == "name":
            labels.add(tokens[at][1])
        at += 1
    return labels, at + 1


def _selector(tokens: list[tuple[str, str]], at: int) -> tuple[Selector, int]:
    name, matchers = "", []
    if tokens[at][0] == "name":
        name, at = re.escape(tokens[at][1]), at + 1
    if at < len(tokens) and tokens[at][1] == "{":
        at += 1
        while tokens[at][1] != "}":
            if tokens[at][1] == ",":
                at += 1
                continue
            (_, label), (_, operator), (kind, value) = tokens[at : at + 3]
            if kind != "string" or operator not in ("=", "!=", "=~", "!~"):
                raise NotPromql(f"no matcher: {label}{operator}{value}")
            if label == "__name__":
                name = value[1:-1] if operator == "=~" else re.escape(value[1:-1])
            else:
                matchers.append((label, operator, value[1:-1]))
            at += 3
        at += 1
    if not name:
        raise NotPromql("a selector without a name reads everything")
    if at < len(tokens) and tokens[at][0] == "duration":
        at += 1
    return Selector(name, tuple(matchers)), at
