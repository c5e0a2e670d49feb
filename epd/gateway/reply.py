"""The answer in OpenAI's shapes: `chat.completion` whole, `chat.completion.chunk` in pieces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from epd.gateway.account import Account
from epd.gateway.answer import Content, Piece, Reasoning
from epd.gateway.call_stream import CallArguments, CallBegin, CallEnd
from epd.gateway.vocabulary import Vocabulary
from epd.types import FinishReason, TokenLogprob, Usage
from preprocess.types import Modality

_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What became known of choice `index` since its last part. `logprobs` belong to the tokens read, not to the text
    shown; `num_tokens` are those of the choice so far."""

    pieces: tuple[Piece, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of the whole answer. Of several choices the prompt is counted once."""

    usage: Usage
    num_reasoning_tokens: int
    num_media_tokens: Mapping[Modality, int]
    warnings: tuple[str, ...]
    """What of the media was damaged or left out, each naming its part of the request."""
    media: Sequence[Mapping[str, Any]] = ()
    """What the media are called, where the client is told."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of choice `index`. `stop_reason` is the client's stop string or stop token that ended it; `usage` is its
    own, prompt included; `answer` is set when it is the last choice to end."""

    index: int
    finish_reason: str
    """stop, length or tool_calls."""
    stop_reason: str | int | None
    usage: Usage
    num_reasoning_tokens: int = 0
    answer: AnswerEnd | None = None


AnswerEvent = AnswerPart | ChoiceEnd


class Writer(Protocol):
    """Events of an answer to JSON. Use either `add` and `message`, or the chunks as they come."""

    def opening(self) -> list[dict[str, Any]]:
        """Before everything else in a stream."""
        ...

    def chunks(self, event: AnswerEvent) -> list[dict[str, Any]]: ...

    def usage_chunk(self, end: AnswerEnd) -> dict[str, Any]:
        """After all choices, if asked for."""
        ...

    def add(self, event: AnswerEvent) -> None: ...

    def message(self, end: AnswerEnd) -> dict[str, Any]: ...


def finish_reason(reason: FinishReason, *, has_tool_calls: bool = False) -> str:
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


def spelled_token(token_id: int, vocabulary: Vocabulary, *, as_id: bool) -> tuple[str, bytes]:
    """How log-probabilities write a token: as text, or `token_id:7`; and its bytes.

    Part of a character is written by its bytes, so that different tokens are different texts.
    """
    spelling = vocabulary.spell([token_id])
    if as_id:
        return f"token_id:{token_id}", spelling
    try:
        return spelling.decode(), spelling
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling), spelling


def finite(logprob: float) -> float:
    """JSON has no infinity; an impossible token gets the number that clients know for it."""
    return max(logprob, _LEAST_LOGPROB)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStyle:
    """What the client asked to see beside the text. `num_choices` is of all prompts together."""

    num_choices: int = 1
    with_logprobs: bool = False
    tokens_as_ids: bool = False
    with_timings: bool = False
    with_usage: bool = False
    """In a stream: usage after the last choice, null before."""
    with_running_usage: bool = False
    """In a stream: usage so far in every chunk."""
    system_fingerprint: Callable[[], str] = str
    """Asked once, when the answer begins: before, workers may not be known yet."""
    service_tier: str | None = None


@dataclass(slots=True)
class ReplyHead:
    """What all answers have in common, and what only their end knows."""

    kind: str
    account: Account
    created_unix_s: int
    style: ReplyStyle
    _fingerprint: str | None = None

    def json(self, *, kind: str | None = None) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = self.style.system_fingerprint()
        tier = {} if self.style.service_tier is None else {"service_tier": "default"}
        return {
            "id": self.account.request_id,
            "object": kind or self.kind,
            "created": self.created_unix_s,
            "model": self.account.model,
            "system_fingerprint": self._fingerprint,
            **tier,
        }

    def running_usage(self, num_tokens: int) -> dict[str, Any]:
        """The field of one chunk; of the chunk's own choice."""
        if self.style.with_running_usage:
            num_prompt = self.account.prompt_tokens
            usage = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            }
            return {"usage": usage}
        return {"usage": None} if self.style.with_usage else {}

    def extras(self, end: AnswerEnd | None) -> dict[str, Any]:
        """Fields that OpenAI's answers do not have: left out while there is nothing to say."""
        if end is None:
            return {}
        warnings = {"warnings": list(end.warnings)} if end.warnings else {}
        timings = {"timings": self.account.receipt().to_json()} if self.style.with_timings else {}
        media = {"media": list(end.media)} if end.media else {}
        return {**warnings, **media, **timings}


@dataclass(slots=True)
class _Message:
    """One choice, collected."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    end: ChoiceEnd | None = None


class ChatWriter:
    """A conversation's answer; see `Writer`."""

    def __init__(self, *, account: Account, created_unix_s: int, vocabulary: Vocabulary, style: ReplyStyle) -> None:
        self._head = ReplyHead("chat.completion", account, created_unix_s, style)
        self._vocabulary = vocabulary
        self._style = style
        self._messages = [_Message() for _ in range(style.num_choices)]
        self._num_calls = [0] * style.num_choices

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta) for index in range(self._style.num_choices)]

    def chunks(self, event: AnswerEvent) -> list[dict[str, Any]]:
        """One chunk per piece; log-probabilities ride on the first, or on an empty one. The last chunk of a choice has
        its finish reason, and that of the last choice what is known at the end of everything."""
        if isinstance(event, ChoiceEnd):
            last = self._chunk(event.index, {}, end=event, num_tokens=event.usage.completion_tokens)
            return [{**last, **self._head.extras(event.answer)}]
        deltas = [self._delta(piece, event.index) for piece in event.pieces if not isinstance(piece, CallEnd)]
        logprobs = self._logprobs(event.logprobs) if self._style.with_logprobs else []
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        return [
            self._chunk(event.index, delta, logprobs if i == 0 else None, num_tokens=event.num_tokens)
            for i, delta in enumerate(deltas)
        ]

    def usage_chunk(self, end: AnswerEnd) -> dict[str, Any]:
        return {**self._head.json(kind="chat.completion.chunk"), "choices": [], "usage": usage_json(end)}

    def add(self, event: AnswerEvent) -> None:
        message = self._messages[event.index]
        if isinstance(event, ChoiceEnd):
            message.end = event
            return
        for piece in event.pieces:
            match piece:
                case Reasoning(text):
                    message.reasoning.append(text)
                case Content(text):
                    message.content.append(text)
                case CallBegin(name):
                    message.calls.append(self._begun(name, event.index))
                case CallArguments(text):
                    message.calls[-1]["function"]["arguments"] += text
        if self._style.with_logprobs:
            message.logprobs += self._logprobs(event.logprobs)

    def message(self, end: AnswerEnd) -> dict[str, Any]:
        choices = [self._choice(index, message) for index, message in enumerate(self._messages)]
        return {**self._head.json(), "choices": choices, "usage": usage_json(end), **self._head.extras(end)}

    def _choice(self, index: int, collected: _Message) -> dict[str, Any]:
        assert collected.end is not None, "every choice has ended"
        content = "".join(collected.content)
        said = content if content or not collected.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if collected.reasoning:
            message["reasoning_content"] = "".join(collected.reasoning)
        if collected.calls:
            message["tool_calls"] = collected.calls
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": collected.logprobs} if self._style.with_logprobs else None,
            "finish_reason": collected.end.finish_reason,
            "stop_reason": collected.end.stop_reason,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        *,
        end: ChoiceEnd | None = None,
        num_tokens: int = 0,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": None if end is None else end.finish_reason,
        }
        if end is not None:
            choice["stop_reason"] = end.stop_reason
        head = self._head.json(kind="chat.completion.chunk")
        return {**head, "choices": [choice], **self._head.running_usage(num_tokens)}

    def _delta(self, piece: Reasoning | Content | CallBegin | CallArguments, index: int) -> dict[str, Any]:
        match piece:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text}
            case CallBegin(name):
                return {"tool_calls": [{"index": self._num_calls[index], **self._begun(name, index)}]}
            case CallArguments(text):
                return {"tool_calls": [{"index": self._num_calls[index] - 1, "function": {"arguments": text}}]}

    def _begun(self, name: str, index: int) -> dict[str, Any]:
        """A call, its arguments still to come. Ids are unique over all choices."""
        answer_id = self._head.account.request_id.removeprefix("chatcmpl-")
        choice = f"_{index}" if index else ""
        call_id = f"call_{answer_id}{choice}_{self._num_calls[index]}"
        self._num_calls[index] += 1
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **self._scored(entry.token_id, entry.logprob),
                "top_logprobs": [self._scored(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, spelling = spelled_token(token_id, self._vocabulary, as_id=self._style.tokens_as_ids)
        return {"token": text, "logprob": finite(logprob), "bytes": list(spelling)}
