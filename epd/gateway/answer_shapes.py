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
    """`bytes` are those of the token. Part of a character is no text: `token` is then as `bytes:\\xe2\\x82`."""

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


class FunctionPiece(AnswerShape):
    """`arguments` goes on where the piece before ended."""

    name: str = Field(default_factory=str)
    arguments: str


class ToolCallPiece(AnswerShape):
    """A call in a stream: the first of its index has its id and name, all others more of its arguments."""

    index: NonNegative
    id: str = Field(default_factory=str)
    type: Literal["function"] = Field(default_factory=lambda: "function")
    function: FunctionPiece


class AnswerMessage(AnswerShape):
    """`content` is null where the model only calls tools. `refusal` is for clients that look for it."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
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
    stop_reason: str | int | None
    """The client's own stop string or stop token that ended it."""


class ChunkChoice(AnswerShape):
    index: NonNegative
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: str | int | None = None
    """In the last chunk of a choice."""


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


class RunningUsage(AnswerShape):
    """Of one choice, so far."""

    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    total_tokens: NonNegative


class StepAnswer(AnswerShape):
    """One measured piece of work or wait, in seconds since the request's arrival. `item` is the part of the request or
    the choice that it was for; empty for the whole request."""

    stage: Literal["gateway", "encode", "prefill", "transfer", "decode"]
    name: str
    item: str
    start_s: Seconds
    duration_s: Seconds


class CacheTokensAnswer(AnswerShape):
    """By where they came from: the device, the host's memory, the store; and those run again to restore windows."""

    l1: NonNegative
    l2: NonNegative
    l3: NonNegative
    healed: NonNegative


class ReceiptAnswer(AnswerShape):
    """Where the time of a request went, and what it took. `error` is the code of the error that ended it."""

    request_id: str
    model: str
    route: str
    arrival_unix_s: Seconds
    duration_s: Seconds
    first_token_s: Seconds | None
    status: int
    finish_reason: str
    error: str | None
    num_attempts: NonNegative
    num_choices: NonNegative
    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    reasoning_tokens: NonNegative
    media_tokens: dict[str, NonNegative]
    num_media: NonNegative
    cached_media: NonNegative
    cache_tokens: CacheTokensAnswer
    steps: list[StepAnswer]


class MediumAnswer(AnswerShape):
    """What a medium of the request is called: by the client, and by its content. `param` is its field."""

    param: str
    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    uuid: str | None
    modality: Literal["image", "video", "audio"]
    tokens: NonNegative
    cached: bool


class AnswerHead(AnswerShape):
    """`service_tier` is there when the request says one. `timings` come when asked for, `media` too or when a part has
    a uuid or a key, `warnings` when something of the media was damaged or left out; in a stream they come with the last
    finish reason."""

    id: str
    created: NonNegative
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] = Field(default_factory=lambda: "default")
    warnings: Annotated[list[str], Field(min_length=1)] = Field(default_factory=list)
    media: Annotated[list[MediumAnswer], Field(min_length=1)] = Field(default_factory=list)
    timings: ReceiptAnswer = Field(default_factory=ReceiptAnswer.model_construct)


class ChatCompletion(AnswerHead):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: UsageAnswer


class ChatCompletionChunk(AnswerHead):
    """`choices` is empty in the chunk that has the whole usage, which is null in the others, or a running one."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: UsageAnswer | RunningUsage | None = None
