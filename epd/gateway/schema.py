"""The shapes of a chat completion request. Unknown fields are errors at every level, so are values we do not honour.

This is the only untrusted shape; it goes no further than `epd.gateway.conversation` and `epd.gateway.render`.
Fields whose other values are not supported are typed with the values that are: `n` is 1, `response_format` is text.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from epd.errors import InvalidRequest

# Loc elements that pydantic adds for a union; they name no field of the body.
_TAG = "~"


LOW_DETAIL_PIXELS = 512 * 512


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ImageUrl(_Shape):
    """`detail` low means at most `LOW_DETAIL_PIXELS`; auto and high are the processor's own limit."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


class VideoUrl(_Shape):
    url: str
    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    use_audio: bool | None = None


class AudioUrl(_Shape):
    url: str


class InputAudio(_Shape):
    """`data` is base64; the format is also recognised from the bytes themselves, which win."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm"]


class TextPart(_Shape):
    type: Literal["text"]
    text: str


class ImagePart(_Shape):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(_Shape):
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
    return f"{_TAG}parts" if isinstance(value, list | tuple) else f"{_TAG}text"


_String = Annotated[str, Tag(f"{_TAG}text")]
TextContent = Annotated[_String | Annotated[list[TextPart], Tag(f"{_TAG}parts")], Discriminator(_content_kind)]
MediaContent = Annotated[
    _String | Annotated[list[Part], Field(min_length=1), Tag(f"{_TAG}parts")], Discriminator(_content_kind)
]


class SystemMessage(_Shape):
    role: Literal["system"]
    content: TextContent


class UserMessage(_Shape):
    role: Literal["user"]
    content: MediaContent


class FunctionCall(_Shape):
    name: str
    arguments: str


class CallOfTool(_Shape):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(_Shape):
    """A turn of the model, as a client sends it back. The fields typed None are those the SDK echoes empty."""

    role: Literal["assistant"]
    content: TextContent | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallOfTool] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "AssistantMessage":
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("an assistant message needs content or tool_calls")
        return self


class ToolMessage(_Shape):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(_Shape):
    """`parameters` is a JSON schema and belongs to the client: it is passed on as it is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Literal[False] | None = None


class Tool(_Shape):
    type: Literal["function"]
    function: FunctionDefinition


class StreamOptions(_Shape):
    include_usage: bool = False


class ResponseFormat(_Shape):
    type: Literal["text"]


class ChatTemplateKwargs(_Shape):
    enable_thinking: bool | None = None
    keep_all_reasoning: bool | None = None


_StopString = Annotated[str, Field(min_length=1, max_length=256)]


class ChatBody(_Shape):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            Annotated[_StopString, Tag(f"{_TAG}text")]
            | Annotated[list[_StopString], Field(max_length=16), Tag(f"{_TAG}parts")],
            Discriminator(_content_kind),
        ]
        | None
    ) = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False
    chat_template_kwargs: ChatTemplateKwargs | None = None
    reasoning_effort: Literal["none"] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; give one"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given; it needs stream to be true")
        thinking = self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs else None
        if self.reasoning_effort == "none" and thinking:
            raise ValueError("reasoning_effort is 'none' and chat_template_kwargs.enable_thinking is true; give one")
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


_UNION: dict[str, type[BaseModel]] = {
    "system": SystemMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
    "text": TextPart,
    "image_url": ImagePart,
    "video_url": VideoPart,
    "audio_url": AudioPart,
    "input_audio": InputAudioPart,
}


_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def parse_body(body: object) -> ChatBody:
    """Raises InvalidRequest for the first fault, with the path of the field as `param`."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {_JSON_NAMES.get(type(body), 'value')}; it must be an object")
    try:
        return ChatBody.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> InvalidRequest:
    fault = error.errors(include_url=False, include_context=True)[0]
    path, owner = _walk(fault["loc"])
    given = _shown(fault["input"])
    context = fault.get("ctx", {})
    match fault["type"]:
        case "extra_forbidden":
            allowed = ", ".join(owner.model_fields) if owner is not None else "none"
            text = f"unknown field {path} (value {given}); allowed fields: {allowed}"
        case "missing":
            text = f"field {path} is required"
        case "literal_error":
            text = f"{path} is {given}; allowed: {context['expected']}"
        case "union_tag_invalid":
            path = f"{path}.{str(context['discriminator']).strip(chr(39))}"
            text = f"{path} is {context['tag']!r}; allowed: {context['expected_tags']}"
        case "union_tag_not_found":
            path = f"{path}.{str(context['discriminator']).strip(chr(39))}"
            text = f"field {path} is required"
        case "value_error":
            text = str(context["error"])
        case _:
            text = f"{path} is {given}; {fault['msg'][:1].lower()}{fault['msg'][1:]}"
    return InvalidRequest(text, param=path or None)


def _walk(loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel] | None]:
    """Pydantic's location as `messages[0].content[1].image_url.url`, and the shape that holds the last element.

    A tag follows every index into a union (a message, a part) and names the member taken.
    """
    path = ""
    shape: type[BaseModel] | None = ChatBody
    holder = shape
    in_union = False
    for element in loc:
        if isinstance(element, int):
            path += f"[{element}]"
            # Lists of one shape (tools, text-only content) have no tag.
            in_union = shape is None
        elif element.startswith(_TAG):
            continue
        elif in_union:
            shape = holder = _UNION.get(element)
            in_union = False
        else:
            path += f".{element}" if path else element
            holder = shape
            shape = _shape_of(shape, element)
    return path, holder


def _shape_of(shape: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    """The one shape a field holds, directly or in a list; None for plain values and for unions of shapes."""
    if shape is None or name not in shape.model_fields:
        return None
    found = _shapes_in(shape.model_fields[name].annotation)
    return found[0] if len(found) == 1 else None


def _shapes_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [shape for argument in getattr(annotation, "__args__", ()) for shape in _shapes_in(argument)]


def _shown(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
