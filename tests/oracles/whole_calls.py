"""The slow truth beside `epd.gateway.call_stream`: a whole `<tool_call>` block to a call, looking ahead at will.

A closing tag closes only where the next tag of the grammar can follow it, so a text value may hold tags of its own.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from epd.gateway.answer import Content, Piece, Reasoning
from epd.gateway.call_stream import CallArguments, CallBegin
from epd.gateway.toolcalls import CALL_CLOSE, CALL_OPEN, Tools, convert, kinds_of, properties_of

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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object as text, the way the API carries it."""

    name: str
    arguments: str


def with_whole_calls(pieces: Iterable[Piece]) -> list[Content | Reasoning | ToolCall]:
    """Each call as one, whole or not."""
    found: list[Content | Reasoning | ToolCall] = []
    for piece in pieces:
        match piece:
            case CallBegin(name):
                found.append(ToolCall(name, ""))
            case CallArguments(text):
                begun = found[-1]
                assert isinstance(begun, ToolCall)
                found[-1] = ToolCall(begun.name, begun.arguments + text)
            case Content() | Reasoning():
                found.append(piece)
    return found


class CallReader:
    """Reads the blocks of one answer. A schema is walked once, however often its function is called."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._kinds: dict[tuple[str, str], tuple[str, ...]] = {}

    def read(self, block: str) -> tuple[str, ToolCall, str] | None:
        """The first function of a block, and the text before and after it inside the block.

        None where the block is text: no function, one that is not among the tools, or something between its parameters.
        Of a parameter given twice the first one counts; the closing tag of a parameter may be missing before the next
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
        texts = _parameters(inner[first:stop], properties_of(self._tools[name]))
        if texts is None:
            return None
        arguments = {key: convert(text, self._kinds_of(name, key)) for key, text in texts.items()}
        return inner[:start], ToolCall(name, json.dumps(arguments, ensure_ascii=False)), inner[rest:]

    def _kinds_of(self, name: str, key: str) -> tuple[str, ...]:
        schema = self._tools[name]
        declared = properties_of(schema)
        if key not in declared:
            return ()
        if (name, key) not in self._kinds:
            self._kinds[name, key] = kinds_of(declared[key], schema)
        return self._kinds[name, key]


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
        texts.setdefault(key, body[start:stop])
        at = _past_space(body, stop if following is not None or closing is None else closing.end())
    return texts if at == len(body) else None


def _opens_next(key: str, current: str, given: Mapping[str, str], declared: Mapping[str, Any]) -> bool:
    """Whether an opening tag before the closing one ends the value: it does where the schema waits for that key."""
    return key in declared and key != current and key not in given


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
