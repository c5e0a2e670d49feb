"""Texts of tool calls as regular expressions: what a raw parameter may hold, for each JSON schema of a string.

A terminal is an expression of llguidance's Lark: literals, regexes, `&` for both, `|` for either, `~` for not.
"""

import json
from collections.abc import Iterable

from llguidance import regex_to_lark

CLOSING_TAGS = ("</parameter>", "</tool_call>", "<parameter=")
"""What ends a raw value for the reader of calls, see `epd.gateway.toolcalls`."""

ANY_TEXT = "/(?s:.*)/"


def has_tag(text: str) -> bool:
    return any(tag in text for tag in CLOSING_TAGS)


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A whole text, with what JSON schemas mean by classes such as \\d."""
    return f"/{regex_to_lark(pattern, 'dw')}/"


def without(texts: Iterable[str]) -> str:
    """Every text that holds none of these."""
    listed = "|".join(_escaped(text) for text in texts)
    return f"(/(?s:.*)/ & ~/(?s:.*)({listed})(?s:.*)/)"


def found_in(pattern: str) -> str:
    """Every text that the pattern is found in, as JSON schemas mean it: anchored only where it says so."""
    wanted = []
    for option in _options(pattern):
        start, end = option.startswith("^"), option.endswith("$") and not _is_escaped(option)
        core = option[1 if start else 0 : len(option) - (1 if end else 0)]
        wanted.append(f"{'' if start else '(?s:.*)'}({core}){'' if end else '(?s:.*)'}")
    return regex("|".join(wanted))


def _options(pattern: str) -> list[str]:
    """Its alternatives at the outermost level."""
    options, depth, in_class, skipped = [""], 0, False, False
    for character in pattern:
        if skipped:
            skipped = False
        elif character == "\\":
            skipped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            options.append("")
            continue
        options[-1] += character
    return options


def _is_escaped(text: str) -> bool:
    """Whether the last character is."""
    before = text[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _escaped(text: str) -> str:
    """In a regex, also inside a class. Not more than needed: the engine reads a backslash before < as a word's edge."""
    return "".join(f"\\{character}" if character in "\\/.+*?()|[]{}^$-&~#" else character for character in text)


def _tag_free() -> str:
    """A plain regex of the texts that hold no tag, for places where `~` cannot be written.

    All tags begin with the same character and have it nowhere else: between two of it stands what continues no tag.
    """
    first = CLOSING_TAGS[0][0]

    def rest(words: list[str]) -> str:
        heads = sorted({word[0] for word in words})
        shown = "".join(_escaped(head) for head in heads)
        options = [f"[^{first}{shown}][^{first}]*"]
        for head in heads:
            tails = [word[1:] for word in words if word[0] == head]
            if all(tails):
                options.append(_escaped(head) + rest(tails))
        return f"({'|'.join(options)})?"

    return f"^[^{first}]*({first}{rest([tag[1:] for tag in CLOSING_TAGS])})*$"


TAG_FREE = _tag_free()
"""A pattern of JSON schema."""

_LABEL = "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
_YEAR = r"[12]\d{3}"
_LEAP = r"([12]\d(0[48]|[2468][048]|[13579][26])|(1[26]|2[048])00)"
_LONG = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])"
_SHORT = r"(0[469]|11)-(0[1-9]|[12]\d|30)"
FORMATS = {
    "date": f"{_YEAR}-(({_LONG})|({_SHORT})|02-(0[1-9]|1\\d|2[0-8]))|{_LEAP}-02-29",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "email": rf"[A-Za-z0-9_+-]{{1,40}}(\.[A-Za-z0-9_+-]{{1,20}}){{0,3}}@({_LABEL}\.){{1,4}}[a-z]{{2,16}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,6}}",
    "uri": r"[a-z][a-z0-9+.-]{1,15}:(//)?[A-Za-z0-9_.~!$&'()*+,;=:@/?#%\[\]-]{1,2000}",
    "duration": r"P(\d{1,9}W|(\d{1,9}Y)?(\d{1,9}M)?\d{1,9}D(T\d{1,9}H(\d{1,9}M)?(\d{1,9}S)?)?|T\d{1,9}[HMS])",
}
"""Whole texts, a part of what each format allows: none is so long that a model could lose itself in it."""
FORMATS["date-time"] = f"({FORMATS['date']})T{FORMATS['time']}"
