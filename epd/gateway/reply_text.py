"""Completions of bare prompts in OpenAI's shape, `text_completion`, whole and in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from epd.gateway.account import Account
from epd.gateway.answer import Content
from epd.gateway.detokenize import Detokenizer
from epd.gateway.reply import (
    AnswerEnd,
    AnswerEvent,
    AnswerPart,
    ChoiceEnd,
    ReplyHead,
    ReplyStyle,
    finite,
    spelled_token,
    usage_json,
)
from epd.gateway.vocabulary import Vocabulary
from epd.types import TokenLogprob


@dataclass(slots=True)
class _Text:
    """One choice. `offsets` reads the tokens again to know where in the text each begins."""

    offsets: Detokenizer
    num_characters: int
    pieces: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    end: ChoiceEnd | None = None


class TextWriter:
    """See `Writer`. `echoes` is what each prompt's choices begin with; empty without echo."""

    def __init__(
        self,
        *,
        account: Account,
        created_unix_s: int,
        vocabulary: Vocabulary,
        style: ReplyStyle,
        echoes: Sequence[str],
        shows_hidden: bool,
    ) -> None:
        """`echoes` has one text for each choice."""
        self._head = ReplyHead("text_completion", account, created_unix_s, style)
        self._vocabulary = vocabulary
        self._style = style
        self._echoes = echoes
        self._texts = [
            _Text(Detokenizer(vocabulary.token_bytes, shows_hidden=shows_hidden), len(echo), [echo] if echo else [])
            for echo in echoes
        ]

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(index, echo) for index, echo in enumerate(self._echoes) if echo]

    def chunks(self, event: AnswerEvent) -> list[dict[str, Any]]:
        """One chunk per event; that of the last choice's end has what is known at the end of everything."""
        if isinstance(event, ChoiceEnd):
            last = self._chunk(event.index, "", end=event, num_tokens=event.usage.completion_tokens)
            return [{**last, **self._head.extras(event.answer)}]
        return [self._chunk(event.index, _text_of(event), self._logprobs(event), num_tokens=event.num_tokens)]

    def usage_chunk(self, end: AnswerEnd) -> dict[str, Any]:
        return {**self._head.json(), "choices": [], "usage": usage_json(end)}

    def add(self, event: AnswerEvent) -> None:
        text = self._texts[event.index]
        if isinstance(event, ChoiceEnd):
            text.end = event
            return
        text.pieces.append(_text_of(event))
        logprobs = self._logprobs(event)
        if logprobs is not None:
            if text.logprobs is None:
                text.logprobs = {name: [] for name in logprobs}
            for name, values in logprobs.items():
                text.logprobs[name] += values

    def message(self, end: AnswerEnd) -> dict[str, Any]:
        choices = [self._choice(index, text) for index, text in enumerate(self._texts)]
        return {**self._head.json(), "choices": choices, "usage": usage_json(end), **self._head.extras(end)}

    def _choice(self, index: int, text: _Text) -> dict[str, Any]:
        assert text.end is not None, "every choice has ended"
        empty = _legacy([], [], [], []) if self._style.with_logprobs else None
        return {
            "index": index,
            "text": "".join(text.pieces),
            "logprobs": empty if text.logprobs is None else text.logprobs,
            "finish_reason": text.end.finish_reason,
            "stop_reason": text.end.stop_reason,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, list[Any]] | None = None,
        *,
        end: ChoiceEnd | None = None,
        num_tokens: int = 0,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.finish_reason,
            "stop_reason": None if end is None else end.stop_reason,
        }
        return {**self._head.json(), "choices": [choice], **self._head.running_usage(num_tokens)}

    def _logprobs(self, part: AnswerPart) -> dict[str, list[Any]] | None:
        if not self._style.with_logprobs or not part.logprobs:
            return None
        text = self._texts[part.index]
        offsets = []
        for entry in part.logprobs:
            offsets.append(text.num_characters)
            text.num_characters += len(text.offsets.push((entry.token_id,)))
        return _legacy(
            [self._spelled(entry.token_id) for entry in part.logprobs],
            [finite(entry.logprob) for entry in part.logprobs],
            [self._top(entry) for entry in part.logprobs],
            offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most probable tokens, and the drawn one whether it is among them or not."""
        scored = dict(entry.top)
        scored.setdefault(entry.token_id, entry.logprob)
        return {self._spelled(token_id): finite(logprob) for token_id, logprob in scored.items()}

    def _spelled(self, token_id: int) -> str:
        return spelled_token(token_id, self._vocabulary, as_id=self._style.tokens_as_ids)[0]


def _legacy(tokens: list[str], scores: list[float], top: list[dict[str, float]], offsets: list[int]) -> dict[str, Any]:
    return {"tokens": tokens, "token_logprobs": scores, "top_logprobs": top, "text_offset": offsets}


def _text_of(part: AnswerPart) -> str:
    return "".join(piece.text for piece in part.pieces if isinstance(piece, Content))
