"""Answer text to its parts: reasoning, content, tool calls. Works on a stream, wherever it is cut.

    <think>REASONING</think>CONTENT<tool_call> <function=NAME> <parameter=KEY>VALUE</parameter> </function> </tool_call>

`<think>` counts only at the start of the answer; reasoning that is never closed is reasoning to the end. A tool call
comes as it is written, from its function's name on (see `epd.gateway.call_stream`); a block that is no call of a known
function is text. All text is passed on but the tags, white space before `<think>`, and white space that only sets calls
apart: before a call, between two, after the last. Every character is looked at a bounded number of times, however the
stream is cut.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from epd.gateway.call_stream import CallArguments, CallBegin, CallEnd, CallPiece, CallStream, CallText
from epd.gateway.toolcalls import CALL_OPEN, Tools

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_RUN_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


Piece = Reasoning | Content | CallBegin | CallArguments | CallEnd


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring texts of one kind as one."""
    result: list[Piece] = []
    for piece in pieces:
        match result[-1] if result else None, piece:
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case CallArguments(before), CallArguments(text):
                result[-1] = CallArguments(before + text)
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

    def __init__(self, *, tools: Tools | None, in_reasoning: bool = False) -> None:
        """`tools` maps a function name to its parameters schema. `in_reasoning`: the prompt opened `<think>`."""
        self._calls = None if tools is None else CallStream(tools)
        self._state: Literal["start", "reasoning", "content", "call"] = "reasoning" if in_reasoning else "start"
        self._held = ""
        """The end of the text so far, where it may begin a tag; shorter than a tag."""
        self._space: list[str] = []
        """White space that is content if text follows, and nothing if a call does."""
        self._after_call = False

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def in_call(self) -> bool:
        """Inside a block, which may have ended its call."""
        return self._state == "call"

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        # Each step copies what it leaves: of a short run, that the copies of many blocks stay small together.
        for start in range(0, len(text), _RUN_CHARACTERS):
            rest: str | None = text[start : start + _RUN_CHARACTERS]
            while rest is not None:
                rest = self._step(rest, pieces)
        return joined(pieces)

    def close(self, *, is_cut: bool = False) -> list[Piece]:
        """The rest. Unfinished reasoning is reasoning; a block that has no call is text, unless the answer was cut
        (`is_cut`) where a call may have begun."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return [Reasoning(held)] if held else []
        if self._state == "call":
            assert self._calls is not None
            pieces: list[Piece] = []
            self._tell(self._calls.close(is_cut=is_cut), pieces)
            return joined(pieces)
        space = self._taken(self._space)
        text = held if self._after_call and not held else space + held
        return [Content(text)] if text else []

    def _step(self, text: str, pieces: list[Piece]) -> str | None:
        """Read on in the present state; what is left for the next one, or None when more text is needed."""
        match self._state:
            case "start":
                return self._start(text)
            case "reasoning":
                return self._reason(text, pieces)
            case "content":
                return self._write(text, pieces)
            case "call":
                return self._call(text, pieces)

    def _start(self, text: str) -> str | None:
        """Decide whether the answer opens with `<think>`."""
        text = self._held + text
        stripped = text.lstrip()
        self._space.append(text[: len(text) - len(stripped)])
        if stripped.startswith(THINK_OPEN):
            self._held = ""
            self._space.clear()
            self._state = "reasoning"
            return stripped[len(THINK_OPEN) :]
        if THINK_OPEN.startswith(stripped):
            self._held = stripped
            return None
        self._held = ""
        self._state = "content"
        return stripped

    def _reason(self, text: str, pieces: list[Piece]) -> str | None:
        before, rest = self._until(THINK_CLOSE, text)
        if before:
            pieces.append(Reasoning(before))
        if rest is None:
            return None
        self._state = "content"
        return rest[len(THINK_CLOSE) :]

    def _write(self, text: str, pieces: list[Piece]) -> str | None:
        if self._calls is None:
            if text := self._taken(self._space) + text:
                pieces.append(Content(text))
            return None
        before, rest = self._until(CALL_OPEN, text)
        if shown := before.rstrip():
            pieces.append(Content(self._taken(self._space) + shown))
            self._after_call = False
        self._space.append(before[len(shown) :])
        if rest is None:
            return None
        self._state = "call"
        self._calls.open(CALL_OPEN)
        return rest[len(CALL_OPEN) :]

    def _until(self, tag: str, text: str) -> tuple[str, str | None]:
        """Text before `tag`, and the rest from the tag on; None without a tag: its possible beginning is held."""
        text, self._held = self._held + text, ""
        at = text.find(tag)
        if at >= 0:
            return text[:at], text[at:]
        at = len(text) - _partial_at_end(text, tag)
        self._held = text[at:]
        return text[:at], None

    def _call(self, text: str, pieces: list[Piece]) -> str | None:
        assert self._calls is not None
        found, rest = self._calls.push(text)
        self._tell(found, pieces)
        if rest is not None:
            self._state = "content"
        return rest

    def _tell(self, found: list[CallPiece], pieces: list[Piece]) -> None:
        for piece in found:
            # White space before a call is layout, before text it is content.
            space = self._taken(self._space)
            if isinstance(piece, CallText):
                pieces.append(Content(space + piece.text))
                self._after_call = False
            else:
                pieces.append(piece)
                self._after_call = True

    @staticmethod
    def _taken(texts: list[str]) -> str:
        whole = "".join(texts)
        texts.clear()
        return whole
