"""The shapes of a chat completion request. Unknown fields are errors at every level, so are values we do not honour.

This is the only untrusted shape; it goes no further than `epd.gateway.conversation` and `epd.gateway.render`.
Fields whose other values are not supported are typed with the values that are: `n` is 1, `response_format` is text.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

TAG = "~"
"""Begins the elements that pydantic adds to a location for a union; they name no field of the body."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""What travels to other processes must fit their integers; whether it makes sense is judged with the medium."""


class Conflict(ValueError):
    """Two fields do not go together; `param` is the one to change."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ImageOptions(_Shape):
    """Options of a picture. Clients of other servers write them inside the URL object or beside it; both are taken."""

    detail: Literal["auto", "low", "high"] | None = None
    min_pixels: Int32 | None = None
    max_pixels: Int32 | None = None


class ImageUrl(ImageOptions):
    url: str


class VideoOptions(_Shape):
    """Options of a video, inside the URL object or beside it.

    `media_resolution` is a field of the model maker's own service. Its two levels are the same here, where the default
    is the best there is: the processor's own limits.
    """

    fps: float | None = None
    max_frames: Int32 | None = None
    min_frames: Int32 | None = None
    num_frames: Int32 | None = None
    min_pixels: Int32 | None = None
    max_pixels: Int32 | None = None
    use_audio: bool | None = None
    media_resolution: Literal["default", "max"] | None = None


class VideoUrl(VideoOptions):
    url: str


class AudioUrl(_Shape):
    url: str


class InputAudio(_Shape):
    """`data` is base64, or an http, https or data URL. The format is recognised from the bytes, whatever is said."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm"] | None = None


class TextPart(_Shape):
    type: Literal["text"]
    text: str


class ImagePart(ImageOptions):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(VideoOptions):
    type: Literal["video_url"]
    video_url: VideoUrl


class AudioPart(_Shape):
    type: Literal["audio_url"]
    audio_url: AudioUrl


class InputAudioPart(_Shape):
    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | ImagePart | VideoPart | AudioPart | InputAudioPart, Field(discriminator="type")]


def _content_kind(value: object) -> str:
    return f"{TAG}parts" if isinstance(value, list | tuple) else f"{TAG}text"


_String = Annotated[str, Tag(f"{TAG}text")]
TextContent = Annotated[
    _String | Annotated[list[TextPart], Field(fail_fast=True), Tag(f"{TAG}parts")], Discriminator(_content_kind)
]
MediaContent = Annotated[
    _String | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag(f"{TAG}parts")],
    Discriminator(_content_kind),
]


class _Message(_Shape):
    """`name` tells people apart for other servers; this model's prompt has no place for it."""

    name: str | None = None


class SystemMessage(_Message):
    """`developer` is another word for system."""

    role: Literal["system", "developer"]
    content: TextContent


class UserMessage(_Message):
    role: Literal["user"]
    content: MediaContent


class FunctionCall(_Shape):
    name: str
    arguments: str


class CallOfTool(_Shape):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(_Message):
    """A turn of the model, as a client sends it back. The fields typed None are those the SDK echoes empty."""

    role: Literal["assistant"]
    content: TextContent | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[CallOfTool], Field(fail_fast=True)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "AssistantMessage":
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("an assistant message needs content or tool_calls")
        return self


class ToolMessage(_Message):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(_Shape):
    """`parameters` is a JSON schema and belongs to the client: it is passed on as it is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Shape):
    type: Literal["function"]
    function: FunctionDefinition


class StreamOptions(_Shape):
    include_usage: bool | None = None


class ResponseFormat(_Shape):
    type: Literal["text"]


class ChatTemplateKwargs(_Shape):
    enable_thinking: bool | None = None
    keep_all_reasoning: bool | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
THINKING_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
"""The model thinks or does not; it has no degrees. The efforts below these mean that it does not."""


_StopString = Annotated[str, Field(min_length=1, max_length=256)]


class ChatBody(_Shape):
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
            Discriminator(_content_kind),
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


ROLES_AND_PARTS: dict[str, type[BaseModel]] = {
    "system": SystemMessage,
    "developer": SystemMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
    "text": TextPart,
    "image_url": ImagePart,
    "video_url": VideoPart,
    "audio_url": AudioPart,
    "input_audio": InputAudioPart,
}
