"""The answer in OpenAI's shapes: `chat.completion` whole, `chat.completion.chunk` in pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd.gateway.answer import Content, Piece, Reasoning
from epd.gateway.toolcalls import ToolCall
from epd.gateway.vocabulary import Vocabulary
from epd.types import FinishReason, TokenLogprob, Usage
from preprocess.types import Modality

_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What became known since the last one. `logprobs` belong to the tokens read, not to the text shown."""

    pieces: tuple[Piece, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    finish_reason: str
    """stop, length or tool_calls."""
    usage: Usage
    num_reasoning_tokens: int
    num_media_tokens: Mapping[Modality, int]
    warnings: tuple[str, ...]
    """What of the media was damaged or left out, each naming its part of the request."""


def finish_reason(reason: FinishReason, *, has_tool_calls: bool) -> str:
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_tool_calls else "stop"


def usage_json(end: AnswerEnd) -> dict[str, Any]:
    usage = end.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            # Not among OpenAI's: those of the cached tokens that came from the host's memory and from the store, and
            # tokens that were run again only to restore the windows of a cached prefix.
            "host_tokens": usage.host_tokens,
            "store_tokens": usage.store_tokens,
            "healed_tokens": usage.healed_tokens,
            **{f"{modality}_tokens": count for modality, count in end.num_media_tokens.items()},
        },
        "completion_tokens_details": {"reasoning_tokens": end.num_reasoning_tokens},
    }


def _warnings_json(end: AnswerEnd) -> dict[str, Any]:
    """A field that OpenAI's answers do not have: left out while there is nothing to say."""
    return {"warnings": list(end.warnings)} if end.warnings else {}


def logprob_json(entries: Sequence[TokenLogprob], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    return [
        {
            **_scored(entry.token_id, entry.logprob, vocabulary),
            "top_logprobs": [_scored(token_id, logprob, vocabulary) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def _scored(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    spelling = vocabulary.spell([token_id])
    # JSON has no infinity; an impossible token gets the number that clients know for it.
    finite = max(logprob, _LEAST_LOGPROB)
    return {"token": spelling.decode("utf-8", "replace"), "logprob": finite, "bytes": list(spelling)}


@dataclass(slots=True)
class ReplyWriter:
    """Builds the JSON of one answer. Use either `message` at the end, or the chunks as they come."""

    completion_id: str
    model: str
    created_unix_s: int
    vocabulary: Vocabulary
    with_logprobs: bool
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    _num_calls: int = 0

    def first_chunk(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def chunks(self, part: AnswerPart) -> list[dict[str, Any]]:
        """One chunk per piece; log-probabilities ride on the first, or on an empty one."""
        deltas = [self._delta(piece) for piece in part.pieces]
        logprobs = logprob_json(part.logprobs, self.vocabulary) if self.with_logprobs else []
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        return [self._chunk(delta, None, logprobs if i == 0 else None) for i, delta in enumerate(deltas)]

    def last_chunk(self, end: AnswerEnd) -> dict[str, Any]:
        """The one with the finish reason, and the warnings. Usage comes after it, if asked for."""
        return {**self._chunk({}, end.finish_reason), **_warnings_json(end)}

    def usage_chunk(self, end: AnswerEnd) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_json(end)}

    def add(self, part: AnswerPart) -> None:
        """Collect for `message`."""
        for piece in part.pieces:
            match piece:
                case Reasoning(text):
                    self._reasoning.append(text)
                case Content(text):
                    self._content.append(text)
                case ToolCall():
                    self._calls.append(self._call(piece))
        if self.with_logprobs:
            self._logprobs += logprob_json(part.logprobs, self.vocabulary)

    def message(self, end: AnswerEnd) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._logprobs} if self.with_logprobs else None,
            "finish_reason": end.finish_reason,
        }
        head = self._head("chat.completion")
        return {**head, "choices": [choice], "usage": usage_json(end), **_warnings_json(end)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.completion_id, "object": kind, "created": self.created_unix_s, "model": self.model}

    def _chunk(
        self, delta: dict[str, Any], reason: str | None, logprobs: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": reason,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text}
            case ToolCall():
                index = self._num_calls
                return {"tool_calls": [{"index": index, **self._call(piece)}]}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        call_id = f"call_{self.completion_id.removeprefix('chatcmpl-')}_{self._num_calls}"
        self._num_calls += 1
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
