"""The shapes of requests that bring text or tokens instead of a conversation: completions, and the tokenizer's own."""

from typing import Annotated, Literal, cast

from pydantic import Discriminator, Field, Tag, model_validator

from epd.gateway.schema import ChatTemplateKwargs
from epd.gateway.schema_parts import Message
from epd.gateway.schema_sampling import MAX_LOGPROBS, GenerationBody, TokenId
from epd.gateway.schema_tools import Tool
from epd.gateway.shape import TAG, Conflict, EmptyObject, Shape

TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


def _prompt_kind(value: object) -> str:
    if not isinstance(value, list | tuple):
        return f"{TAG}text"
    first = value[0] if value else ""
    if isinstance(first, list | tuple):
        return f"{TAG}lists"
    return f"{TAG}tokens" if isinstance(first, int) and not isinstance(first, bool) else f"{TAG}parts"


PromptInput = Annotated[
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag(f"{TAG}parts")]
    | Annotated[TokenIds, Tag(f"{TAG}tokens")]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1), Tag(f"{TAG}lists")],
    Discriminator(_prompt_kind),
]


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is a text, several, token ids, or several lists of them."""

    prompt: PromptInput
    """A text, several, token ids, or several lists of them."""
    echo: bool | None = None
    """The text begins with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """For each token, how many of the most probable ones are told."""
    add_special_tokens: bool | None = None
    """Whether a text is begun and ended as its tokenizer says; true when left out."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """The same as `n`: answers are not ranked."""
    suffix: Literal[""] | None = None
    """Texts are only continued."""
    prompt_embeds: None = None
    """Prompts are text or tokens."""
    store: Literal[False] | None = None
    """Answers are not kept."""
    metadata: dict[str, str] | None = None
    """Taken, and without effect."""

    @model_validator(mode="after")
    def _fields_agree(self) -> "CompletionBody":
        if self.best_of not in (None, self.num_choices):
            raise Conflict(
                "best_of", f"best_of is {self.best_of}; allowed: {self.num_choices}, the same as n: nothing is ranked"
            )
        if self.echo and self.logprobs is not None:
            raise Conflict(
                "logprobs",
                f"logprobs is {self.logprobs} and echo is true; allowed: null with echo: tokens of a prompt have no "
                "log-probabilities here",
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """All of them, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token_id for token_id in self.prompt[:1] if isinstance(token_id, int)]
        return [cast(list[int], self.prompt)] if ids else cast(list[str | list[int]], self.prompt)


class TokenizeBody(Shape):
    """POST /tokenize: of a `prompt` as /v1/completions reads it, or of `messages` as a chat's prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    chat_template: None = None
    mm_processor_kwargs: EmptyObject | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise Conflict("prompt", "give prompt or messages, one of both")
        if self.messages is None:
            of_chats = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
            for name, value in of_chats.items():
                if value is not None:
                    raise Conflict(name, f"{name} is given; it needs messages")
        elif self.add_special_tokens:
            raise Conflict("add_special_tokens", "add_special_tokens is true; with messages the template adds them")
        return self


class DetokenizeBody(Shape):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
