"""The shapes of completions of bare prompts and of the tokenizer's answers. See `answer_shapes`."""

from typing import Annotated, Literal

from pydantic import Field

from epd.gateway.answer_shapes import AnswerHead, AnswerShape, NonNegative, RunningUsage, UsageAnswer


class TextLogprobs(AnswerShape):
    """One entry per token. `text_offset` is the character of the choice's text at which the token begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[NonNegative]


class TextChoice(AnswerShape):
    index: NonNegative
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """Null in a stream, until the choice ends."""
    stop_reason: str | int | None
    """The client's own stop string or stop token that ended it."""


class TextCompletion(AnswerHead):
    """Whole, or one chunk of a stream: `choices` is empty in the chunk that has the whole usage, which is null in the
    others, or a running one."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageAnswer | RunningUsage | None = None


class Tokenized(AnswerShape):
    count: NonNegative
    max_model_len: Annotated[int, Field(ge=1)]
    """Prompt and answer together, in tokens."""
    tokens: list[NonNegative]
    token_strs: list[str] | None
    """When asked for. Part of a character shows as U+FFFD."""


class Detokenized(AnswerShape):
    prompt: str
