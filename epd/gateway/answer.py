"""Answer text to its parts: reasoning, content, tool calls. Works on a stream, wherever it is cut.

    <think>REASONING</think>CONTENT<tool_call> <function=NAME> <parameter=KEY>VALUE</parameter> </function> </tool_call>

`<think>` counts only at the start of the answer. A tool call is emitted when its block is complete; a block that is not
a call of a known function is text.
"""

import ast
import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

_FUNCTION = re.compile(r"<function=(.*?)>(.*?)</function>", re.DOTALL)
# The last parameter of a sloppy block may lack its closing tag; the next opening tag or the end closes it.
_PARAMETER = re.compile(r"<parameter=(.*?)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object as text, the way the API carries it."""

    name: str
    arguments: str


Piece = Reasoning | Content | ToolCall


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring texts of one kind as one."""
    result: list[Piece] = []
    for piece in pieces:
        match result[-1] if result else None, piece:
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case _:
                result.append(piece)
    return result


def _partial_at_end(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag` without completing it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[len(text) - length :]):
            return length
    return 0


class AnswerParser:
    """States: start -> (reasoning ->) content <-> call. `tools` is None when the request declared none."""

    def __init__(self, *, tools: Mapping[str, Mapping[str, Any]] | None, in_reasoning: bool = False) -> None:
        """`tools` maps a function name to its parameters schema. `in_reasoning`: the prompt opened `<think>`."""
        self._tools = tools
        self._state = "reasoning" if in_reasoning else "start"
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """The rest. An unfinished block is text, unfinished reasoning is reasoning."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._state == "reasoning" else Content(held)]

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take one step; False when more text is needed."""
        match self._state:
            case "start":
                return self._start()
            case "reasoning":
                return self._until(THINK_CLOSE, "content", pieces, Reasoning)
            case "content":
                if self._tools is None:
                    return self._until(None, "content", pieces, Content)
                return self._until(CALL_OPEN, "call", pieces, Content)
            case _:
                return self._call(pieces)

    def _start(self) -> bool:
        """Decide whether the answer opens with `<think>`; white space before it is dropped with it."""
        stripped = self._held.lstrip()
        if stripped.startswith(THINK_OPEN):
            self._held = stripped[len(THINK_OPEN) :]
            self._state = "reasoning"
            return True
        if THINK_OPEN.startswith(stripped):
            return False
        self._state = "content"
        return True

    def _until(self, tag: str | None, then: str, pieces: list[Piece], kind: type[Reasoning] | type[Content]) -> bool:
        """Emit text up to `tag` and move on, or all that cannot be the beginning of the tag."""
        at = self._held.find(tag) if tag is not None else -1
        if tag is not None and at >= 0:
            # A call keeps its opening tag: an unfinished or foreign block is given back as text, whole.
            skipped = 0 if then == "call" else len(tag)
            text, self._held = self._held[:at], self._held[at + skipped :]
            self._state = then
        else:
            keep = _partial_at_end(self._held, tag) if tag is not None else 0
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if text:
            pieces.append(kind(text))
        return at >= 0

    def _call(self, pieces: list[Piece]) -> bool:
        at = self._held.find(CALL_CLOSE)
        if at < 0:
            return False
        block, self._held = self._held[: at + len(CALL_CLOSE)], self._held[at + len(CALL_CLOSE) :]
        call = parse_call(block, self._tools or {})
        pieces.append(call if call is not None else Content(block))
        self._state = "content"
        return True


def parse_call(block: str, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    """The first function of a block, or None when there is none or its name is not among `tools`."""
    found = _FUNCTION.search(block)
    if found is None:
        return None
    name = found[1].strip()
    if name not in tools:
        return None
    properties = tools[name].get("properties") or {}
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(found[2]):
        key = parameter[1].strip()
        schema = properties.get(key)
        kind = schema.get("type") if isinstance(schema, Mapping) else "string"
        arguments[key] = convert(parameter[2], kind)
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def convert(raw: str, kind: object) -> Any:
    """A parameter's text as the schema's type; text that does not fit stays a string.

    HTML entities are unescaped, the word null in any case is None, an integral number is an int.
    """
    value = html.unescape(raw)
    if value.strip().lower() == "null":
        return None
    if isinstance(kind, list):  # ["integer", "null"]: null was dealt with above
        kind = next((name for name in kind if name != "null"), "string")
    match kind:
        case "integer":
            return _number(value, int)
        case "number":
            number = _number(value, float)
            return int(number) if isinstance(number, float) and number.is_integer() else number
        case "boolean":
            return value.strip().lower() == "true"
        case "string" | None:
            return value
        case _:
            return _structured(value)


def _number(value: str, kind: type[int] | type[float]) -> int | float | str:
    try:
        number = kind(value.strip())
    except ValueError:
        return value
    # JSON has no infinities and no NaN.
    return number if number == number and abs(number) != float("inf") else value


def _structured(value: str) -> Any:
    """JSON, else a Python literal that JSON can carry, else the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return _portable(read(value.strip()))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return value


def _portable(value: Any) -> Any:
    """The value as JSON carries it. Raises ValueError or TypeError for NaN, lone surrogates, sets and the like."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return json.loads(encoded)
