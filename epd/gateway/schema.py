"""The shapes of a chat completion request. Unknown fields are errors at every level, so are values we do not honour.

An untrusted shape; it goes no further than `epd.gateway.conversation` and `epd.gateway.render`.
Fields whose other values are not supported are typed with the values that are.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from epd.gateway.schema_parts import Message
from epd.gateway.schema_sampling import MAX_LOGPROBS, GenerationBody
from epd.gateway.schema_tools import ResponseFormat, Tool, ToolChoices
from epd.gateway.shape import Conflict, EmptyList, EmptyObject, Shape


class ChatTemplateKwargs(Shape):
    enable_thinking: bool | None = None
    keep_all_reasoning: bool | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
THINKING_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
"""The model thinks or does not; it has no degrees. The efforts below these mean that it does not."""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    """The conversation so far."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The same as `max_tokens`."""
    logprobs: bool | None = None
    """The answer tells the log-probability of every token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """For each token, how many of the most probable ones are told besides."""
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoices | None = None
    """Whether functions are called, and which."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    response_format: ResponseFormat | None = None
    """What the text must look like."""
    chat_template_kwargs: ChatTemplateKwargs | None = None
    """Options of the model's chat template."""
    reasoning_effort: ReasoningEffort | None = None
    """Whether the model thinks first; it has no degrees."""
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, min_length=1)] | None = None
    """Answers are text."""
    store: Literal[False] | None = None
    """Answers are not kept."""
    safety_identifier: str | None = None
    """Taken, and without effect."""
    metadata: dict[str, str] | None = None
    """Taken, and without effect."""
    return_media: bool | None = None
    """The answer tells what its media are called."""
    # Of OpenAI, vLLM and SGLang: what means nothing else than what happens anyway.
    audio: None = None
    """Answers are text."""
    functions: EmptyList | None = None
    """The older word for `tools`, which takes its place."""
    function_call: None = None
    """The older word for `tool_choice`, which takes its place."""
    prediction: None = None
    """Nothing is predicted by clients."""
    moderation: None = None
    """Nothing is moderated."""
    prompt_cache_options: None = None
    """The server shares prompts by itself."""
    verbosity: Literal["medium"] | None = None
    """The model has no degrees of it."""
    web_search_options: None = None
    """There is no search."""
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    """Prompts are kept as long as there is room."""
    best_of: Literal[1] | None = None
    """Answers are not ranked."""
    echo: Literal[False] | None = None
    """The prompt is not repeated."""
    add_generation_prompt: Literal[True] | None = None
    """The model always writes the next turn."""
    continue_final_message: Literal[False] | None = None
    """The model always begins a turn of its own."""
    add_special_tokens: Literal[False] | None = None
    """The chat template has them already."""
    include_reasoning: Literal[True] | None = None
    """Reasoning is always shown, as `reasoning_content`."""
    separate_reasoning: Literal[True] | None = None
    """Reasoning is always apart from the text."""
    stream_reasoning: Literal[True] | None = None
    """Reasoning is streamed as it is written."""
    chat_template: None = None
    """The model's own is used."""
    documents: EmptyList | None = None
    """The chat template has no place for them."""
    mm_processor_kwargs: EmptyObject | None = None
    """Options of media stand in their parts."""

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
