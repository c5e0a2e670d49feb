"""The shapes of a chat completion request. Unknown fields are errors at every level, so are values we do not honour.

An untrusted shape; it goes no further than `epd.gateway.conversation` and `epd.gateway.render`.
Fields whose other values are not supported are typed with the values that are: `n` is 1, `response_format` is text.
"""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from epd.gateway.schema_parts import Message
from epd.gateway.schema_tools import ResponseFormat, Tool
from epd.gateway.shape import TAG, Conflict, Shape, content_kind


class StreamOptions(Shape):
    include_usage: bool | None = None


class ChatTemplateKwargs(Shape):
    enable_thinking: bool | None = None
    keep_all_reasoning: bool | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
THINKING_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
"""The model thinks or does not; it has no degrees. The efforts below these mean that it does not."""


_StopString = Annotated[str, Field(min_length=1, max_length=256)]


class ChatBody(Shape):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            Annotated[_StopString, Tag(f"{TAG}text")]
            | Annotated[list[_StopString], Field(fail_fast=True, max_length=16), Tag(f"{TAG}parts")],
            Discriminator(content_kind),
        ]
        | None
    ) = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    reasoning_effort: ReasoningEffort | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, min_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    safety_identifier: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise Conflict(
                "max_completion_tokens",
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; give one",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise Conflict("top_logprobs", f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise Conflict("stream_options", "stream_options is given; it needs stream to be true")
        thinking = self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs else None
        effort = self.reasoning_effort
        if effort is not None and thinking not in (None, effort in THINKING_EFFORTS):
            raise Conflict(
                "reasoning_effort",
                f'reasoning_effort is "{effort}" and chat_template_kwargs.enable_thinking is '
                f"{'true' if thinking else 'false'}; give one",
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """What the client allows the answer to be, reasoning included."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
