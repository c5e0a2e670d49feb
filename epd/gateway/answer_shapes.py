"""The shapes of what the API answers, for the document that describes it and for the tests that hold us to it.

Nothing that serves builds these: `epd.gateway.reply` and its neighbours write JSON, and every answer that the tests of
the gateway see is compared with its shape. A field with a default is sometimes left out; a field that may be null says
so.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class AnswerShape(BaseModel):
    """What we send has no fields but these."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(AnswerShape):
    """`param` names the field, the part or the header at fault; `code` is in snake_case."""

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: Annotated[str, Field(pattern="^[a-z0-9_]+$")]


class Error(AnswerShape):
    """Every refusal and every failure."""

    error: ErrorDetail


class ModelCard(AnswerShape):
    id: str
    object: Literal["model"]
    created: NonNegative
    owned_by: str
    max_model_len: Annotated[int, Field(ge=1)]
    """Prompt and answer together, in tokens."""


class ModelList(AnswerShape):
    object: Literal["list"]
    data: list[ModelCard]


class Health(AnswerShape):
    status: Literal["ok"]


class Ready(AnswerShape):
    status: Literal["ready"]


class NotReady(AnswerShape):
    """`waiting_for` has the reasons by stage."""

    status: Literal["waiting", "draining"]
    waiting_for: dict[str, list[str]] = Field(default_factory=dict)


class TokenScore(AnswerShape):
    """`bytes` are those of the token, since part of a character is no text."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class TokenScores(TokenScore):
    top_logprobs: Annotated[list[TokenScore], Field(max_length=20)]


class ChoiceLogprobs(AnswerShape):
    content: list[TokenScores]


class FunctionCalled(AnswerShape):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallMade(AnswerShape):
    id: str
    type: Literal["function"]
    function: FunctionCalled


class ToolCallPiece(ToolCallMade):
    """A call in a stream. It comes whole, in one chunk."""

    index: NonNegative


class AnswerMessage(AnswerShape):
    """`content` is null where the model only calls tools."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = Field(default_factory=str)
    tool_calls: Annotated[list[ToolCallMade], Field(min_length=1)] = Field(default_factory=list)


class Delta(AnswerShape):
    role: Literal["assistant"] = Field(default_factory=lambda: "assistant")
    content: str = Field(default_factory=str)
    reasoning_content: str = Field(default_factory=str)
    tool_calls: Annotated[list[ToolCallPiece], Field(min_length=1)] = Field(default_factory=list)


FinishReasonName = Literal["stop", "length", "tool_calls"]


class ChatChoice(AnswerShape):
    index: NonNegative
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReasonName


class ChunkChoice(AnswerShape):
    index: NonNegative
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReasonName | None


class PromptTokensDetails(AnswerShape):
    """`host_tokens` and `store_tokens` are those of the cached tokens that came from the host's memory and the store;
    `healed_tokens` were run again only to restore the windows of a cached prefix."""

    cached_tokens: NonNegative
    host_tokens: NonNegative
    store_tokens: NonNegative
    healed_tokens: NonNegative
    image_tokens: NonNegative = Field(default_factory=int)
    video_tokens: NonNegative = Field(default_factory=int)
    audio_tokens: NonNegative = Field(default_factory=int)


class CompletionTokensDetails(AnswerShape):
    reasoning_tokens: NonNegative


class UsageAnswer(AnswerShape):
    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    total_tokens: NonNegative
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class _Head(AnswerShape):
    id: str
    created: NonNegative
    model: str


class ChatCompletion(_Head):
    """`warnings` tells what of the media was damaged or left out."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: UsageAnswer
    warnings: Annotated[list[str], Field(min_length=1)] = Field(default_factory=list)


class ChatCompletionChunk(_Head):
    """`choices` is empty in the chunk that has the usage. `warnings` come with the finish reason."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: UsageAnswer = Field(default_factory=UsageAnswer.model_construct)
    warnings: Annotated[list[str], Field(min_length=1)] = Field(default_factory=list)
