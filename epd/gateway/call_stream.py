"""A `<tool_call>` block to the pieces of a call, as it is written.

    lead --first tag of a known function--> between <-> value --</function>--> after --</tool_call>--> done
      | no call                                |
      v                                        v something that is no tag
    foreign --</tool_call>--> done, as text   after

A call begins once its function is known and what follows is its own: until then the block may yet be text, and from
then on it is a call, and what cannot be read as its arguments ends it and is text. Strings are passed on as they come,
values of other types when they are whole. Of a parameter given twice the first counts.

A value ends at `</parameter>` if a tag follows that can, before `<parameter=KEY>` if the schema waits for that key, and
before `</function></tool_call>`. Anything else that looks like a tag is the value's. Every character is looked at a
bounded number of times, however the stream is cut.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from epd.gateway.toolcalls import CALL_CLOSE, Tools, convert, kinds_of, properties_of

_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
_PARAMETER_OPEN, _PARAMETER_CLOSE = "<parameter=", "</parameter>"
# Possessive where white space repeats: what was skipped is not tried again, so a long run of it stays linear.
_BEGUN = re.compile(r"<function=\s*+([^\s<>]*+)\s*+>\s*+(?=</function>|<parameter=[^<>]{0,1024}+>)")
_MAY_BEGIN = re.compile(r"<function=\s*+(?:[^\s<>]++\s*+(?:>\s*+(?:<[^<>]*+)?)?)?\Z")
_PARAMETER = re.compile(r"<parameter=([^<>]{0,1024}+)>")
_MAY_BE_PARAMETER = re.compile(r"<parameter=[^<>]{0,1024}+\Z")
_TAG = re.compile(r"</(?:parameter|function|tool_call)>|<parameter=")
# Characters before its first tag, beyond which a block has no call.
_LONGEST_LEAD = 4096
_TAGS = (_PARAMETER_CLOSE, _PARAMETER_OPEN, _FUNCTION_CLOSE, CALL_CLOSE)
_LONGEST_TAG = max(map(len, _TAGS))
# A text of a parameter that may be null is held back while it may be that word.
_MAY_BE_NULL = re.compile(r"\s*(?:n(?:u(?:l(?:l\s*)?)?)?)?\Z", re.IGNORECASE)
_LONGEST_NULL = 64


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of this function. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments, a JSON object as text, of the call that was begun last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole. Without this its arguments are a beginning."""


@dataclass(frozen=True, slots=True)
class CallText:
    """Text of a block, outside of its call: before it, after it, or all of a block that has none."""

    text: str


CallPiece = CallBegin | CallArguments | CallEnd | CallText


class CallStream:
    """The blocks of one answer, one at a time. A schema is walked once, however often its function is called."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._kinds: dict[tuple[str, str], tuple[str, ...]] = {}
        self._opening = self._text = ""
        self._reset()

    def open(self, tag: str) -> None:
        """A block begins, with the tag that opens it."""
        self._reset()
        self._opening = tag

    def push(self, text: str) -> tuple[list[CallPiece], str | None]:
        """What became known, and what stands behind the block; None while it goes on."""
        pieces: list[CallPiece] = []
        self._text += text
        while True:
            match self._state:
                case "lead":
                    goes_on = self._lead(pieces)
                case "between":
                    goes_on = self._between(pieces)
                case "value":
                    goes_on = self._value(pieces)
                case "foreign" | "after":
                    goes_on = self._outside(pieces)
                case "done":
                    rest, self._text = self._text, ""
                    return pieces, rest
            if not goes_on:
                return pieces, None

    def close(self, *, is_cut: bool) -> list[CallPiece]:
        """The answer ends inside a block. `is_cut`: by a limit or a stop of the client's, so that what has begun to be
        a call is no text."""
        pieces: list[CallPiece] = []
        match self._state:
            case "lead" if not (is_cut and _may_lead(self._text)):
                pieces.append(CallText(self._opening + self._text))
            case "foreign":
                pieces.append(CallText(self._text))
            case "after":
                self._tell(pieces, self._text)
            case "value" if self._is_string:
                # The rest is held back as the beginning of a tag.
                self._flush(pieces, _start_of_tag(self._text))
                self._say(pieces)
        self._reset()
        return pieces

    def _reset(self) -> None:
        self._state: Literal["lead", "between", "value", "foreign", "after", "done"] = "lead"
        self._text = ""
        """Read and not yet understood."""
        self._looked = 0
        """Characters of it in which there is nothing to find."""
        self._name = ""
        self._given: set[str] = set()
        self._key = ""
        self._value_texts: list[str] = []
        """What has come of a value that is passed on when it is whole."""
        self._is_string = self._is_muted = self._is_said = self._spoken = False
        """`_is_said`: some of the value was passed on; `_spoken`: some of the text behind the call."""

    # -- states: each returns whether there may be more to do ----------------------------------------------------------

    def _lead(self, pieces: list[CallPiece]) -> bool:
        end = self._text.find(CALL_CLOSE, self._looked)
        start = self._text.find(_FUNCTION_OPEN, self._looked)
        begun = None
        if start >= 0 and not 0 <= end < start:
            begun = _BEGUN.match(self._text, start)
            self._looked = start
            may_begin = end < 0 and _MAY_BEGIN.match(self._text, start) is not None
        else:
            self._looked = max(0, len(self._text) - _LONGEST_TAG)
            may_begin = end < 0
        if begun is None and may_begin and len(self._text) <= _LONGEST_LEAD:
            return False
        if begun is None or begun[1] not in self._tools:
            self._text, self._looked, self._state = self._opening + self._text, 0, "foreign"
            return True
        self._name = begun[1]
        self._tell(pieces, self._text[:start])
        pieces.append(CallBegin(self._name))
        self._go("between", begun.end())
        return True

    def _between(self, pieces: list[CallPiece]) -> bool:
        text = self._text = self._text.lstrip()
        if text.startswith(_FUNCTION_CLOSE):
            self._end_call(pieces, len(_FUNCTION_CLOSE))
            return True
        opened = _PARAMETER.match(text)
        if opened is not None:
            self._key = opened[1].strip()
            self._is_muted = self._key in self._given
            kinds = self._kinds_of(self._key)
            self._is_string = tuple(kind for kind in kinds if kind != "null") in ((), ("string",))
            self._is_said = False
            self._go("value", opened.end())
            return True
        if _FUNCTION_CLOSE.startswith(text) or _PARAMETER_OPEN.startswith(text) or _MAY_BE_PARAMETER.match(text):
            return False
        self._end_call(pieces, 0)
        return True

    def _value(self, pieces: list[CallPiece]) -> bool:
        text = self._text
        while (tag := _TAG.search(text, self._looked)) is not None:
            stop = self._ending(tag.start())
            if stop is None:
                # Too little has come to know.
                self._flush(pieces, tag.start())
                return False
            if stop:
                length = len(_PARAMETER_CLOSE) if text.startswith(_PARAMETER_CLOSE, tag.start()) else 0
                self._finish_value(pieces, text[: tag.start()])
                self._go("between", tag.start() + length)
                return True
            self._looked = tag.start() + 1
        safe = len(text) - _num_held(text)
        self._looked = max(self._looked, safe)
        self._flush(pieces, safe)
        return False

    def _ending(self, at: int) -> bool | None:
        """Whether the value ends before the tag there; None if that is not known yet."""
        text = self._text
        if text.startswith(CALL_CLOSE, at):
            return True
        if text.startswith(_PARAMETER_CLOSE, at):
            return _follows(text, at + len(_PARAMETER_CLOSE), (_PARAMETER_OPEN, _FUNCTION_CLOSE, CALL_CLOSE))
        if text.startswith(_FUNCTION_CLOSE, at):
            return _follows(text, at + len(_FUNCTION_CLOSE), (CALL_CLOSE,))
        opened = _PARAMETER.match(text, at)
        if opened is not None:
            key = opened[1].strip()
            return key in self._declared and key != self._key and key not in self._given
        if _MAY_BE_PARAMETER.match(text, at):
            return None
        return False

    def _outside(self, pieces: list[CallPiece]) -> bool:
        """Text goes on as it comes, but for white space behind a call, which may be all there is."""
        text, is_foreign = self._text, self._state == "foreign"
        end = text.find(CALL_CLOSE, max(0, self._looked - _LONGEST_TAG))
        stop = end if end >= 0 else len(text) - _num_held(text)
        self._spoken = self._spoken or is_foreign or bool(text[self._looked : stop].strip())
        if end >= 0:
            # The closing tag of a block that is no call is text as well.
            told = text[: end + len(CALL_CLOSE)] if is_foreign else text[:end]
            pieces += [CallText(told)] if self._spoken and told else []
            self._go("done", end + len(CALL_CLOSE))
            return True
        self._looked = stop
        if self._spoken and stop:
            pieces.append(CallText(text[:stop]))
            self._text, self._looked = text[stop:], 0
        return False

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _flush(self, pieces: list[CallPiece], stop: int) -> None:
        """So much of the text is the value's, whatever comes."""
        text, self._text = self._text[:stop], self._text[stop:]
        self._looked = max(0, self._looked - stop)
        self._value_texts.append(text)
        if not self._is_string:
            return
        if not self._is_said and self._may_be_null:
            whole = "".join(self._value_texts)
            if len(whole) <= _LONGEST_NULL and _MAY_BE_NULL.match(whole):
                return
        self._say(pieces)

    def _say(self, pieces: list[CallPiece]) -> None:
        """What there is of a string. It is not closed."""
        text = self._taken()
        if self._is_muted or not text:
            return
        opening = "" if self._is_said else self._key_json() + '"'
        self._is_said = True
        pieces.append(CallArguments(opening + json.dumps(text, ensure_ascii=False)[1:-1]))

    def _finish_value(self, pieces: list[CallPiece], rest: str) -> None:
        text = self._taken() + rest
        if self._is_said:
            pieces.append(CallArguments(json.dumps(text, ensure_ascii=False)[1:]))
        elif not self._is_muted:
            value = convert(text, self._kinds_of(self._key))
            pieces.append(CallArguments(self._key_json() + json.dumps(value, ensure_ascii=False)))
        self._given.add(self._key)

    def _taken(self) -> str:
        text = "".join(self._value_texts)
        self._value_texts.clear()
        return text

    def _key_json(self) -> str:
        return f"{', ' if self._given else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _end_call(self, pieces: list[CallPiece], num_read: int) -> None:
        pieces.append(CallArguments("}" if self._given else "{}"))
        pieces.append(CallEnd())
        self._go("after", num_read)

    def _go(self, state: Literal["between", "value", "after", "done"], num_read: int) -> None:
        self._state, self._text, self._looked = state, self._text[num_read:], 0

    @staticmethod
    def _tell(pieces: list[CallPiece], text: str) -> None:
        """Words a model puts inside a block, around its function, are not lost."""
        if text.strip():
            pieces.append(CallText(text))

    # -- schemas -------------------------------------------------------------------------------------------------------

    @property
    def _declared(self) -> Mapping[str, Any]:
        return properties_of(self._tools[self._name])

    @property
    def _may_be_null(self) -> bool:
        return self._kinds_of(self._key) != ("string",)

    def _kinds_of(self, key: str) -> tuple[str, ...]:
        if key not in self._declared:
            return ()
        if (self._name, key) not in self._kinds:
            self._kinds[self._name, key] = kinds_of(self._declared[key], self._tools[self._name])
        return self._kinds[self._name, key]


def _follows(text: str, at: int, tags: tuple[str, ...]) -> bool | None:
    """Whether one of the tags stands there, after white space; None while it may yet."""
    rest = text[at : at + 1024].lstrip()
    if any(rest.startswith(tag) for tag in tags):
        return True
    return None if at + 1024 > len(text) and any(tag.startswith(rest) for tag in tags) else False


def _may_lead(text: str) -> bool:
    """Whether a call is all that a block can have begun with."""
    text = text.lstrip()
    return _FUNCTION_OPEN.startswith(text) or text.startswith(_FUNCTION_OPEN)


def _start_of_tag(text: str) -> int:
    """Where a tag begins that the text ends in or with; the length of the text if there is none."""
    found = _TAG.search(text)
    return len(text) - _num_held(text) if found is None else found.start()


def _num_held(text: str) -> int:
    """Characters at the end that may be the beginning of a tag."""
    for length in range(min(_LONGEST_TAG - 1, len(text)), 0, -1):
        if any(tag.startswith(text[len(text) - length :]) for tag in _TAGS):
            return length
    return 0
