"""The shapes of a chat completion request. Unknown fields are errors at every level, so are values we do not honour.

An untrusted shape; it goes no further than `epd.gateway.conversation` and `epd.gateway.render`.
Fields whose other values are not supported are typed with the values that are.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from epd.gateway.schema_parts import Message
from epd.gateway.schema_sampling import MAX_LOGPROBS, GenerationBody
from epd.gateway.schema_tools import ResponseFormat, Tool, ToolChoices
from epd.gateway.shape import Conflict, Shape


class ChatTemplateKwargs(Shape):
    enable_thinking: bool | None = None
    keep_all_reasoning: bool | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
THINKING_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
"""The model thinks or does not; it has no degrees. The efforts below these mean that it does not."""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoices | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, min_length=1)] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    return_media: bool | None = None
    # Of OpenAI, vLLM and SGLang: what means nothing else than what happens anyway.
    audio: None = None
    functions: None = None
    function_call: None = None
    prediction: None = None
    moderation: None = None
    prompt_cache_options: None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    chat_template: None = None
    documents: None = None
    mm_processor_kwargs: None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise Conflict(
                "max_completion_tokens",
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; give one",
            )
        if self.top_logprobs and not self.logprobs:
            raise Conflict("top_logprobs", f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
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
