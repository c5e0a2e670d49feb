"""The shapes of messages and of the media in them."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from epd.gateway.shape import TAG, Int32, Shape, content_kind


class ImageOptions(Shape):
    """Options of a picture. Clients of other servers write them inside the URL object or beside it; both are taken."""

    detail: Literal["auto", "low", "high"] | None = None
    min_pixels: Int32 | None = None
    max_pixels: Int32 | None = None


class ImageUrl(ImageOptions):
    url: str


class VideoOptions(Shape):
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


class AudioUrl(Shape):
    url: str


class InputAudio(Shape):
    """`data` is base64, or an http, https or data URL. The format is recognised from the bytes, whatever is said."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm"] | None = None


class TextPart(Shape):
    type: Literal["text"]
    text: str


class ImagePart(ImageOptions):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(VideoOptions):
    type: Literal["video_url"]
    video_url: VideoUrl


class AudioPart(Shape):
    type: Literal["audio_url"]
    audio_url: AudioUrl


class InputAudioPart(Shape):
    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | ImagePart | VideoPart | AudioPart | InputAudioPart, Field(discriminator="type")]


_String = Annotated[str, Tag(f"{TAG}text")]
TextContent = Annotated[
    _String | Annotated[list[TextPart], Field(fail_fast=True), Tag(f"{TAG}parts")], Discriminator(content_kind)
]
MediaContent = Annotated[
    _String | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag(f"{TAG}parts")],
    Discriminator(content_kind),
]


class _Message(Shape):
    """`name` tells people apart for other servers; this model's prompt has no place for it."""

    name: str | None = None


class SystemMessage(_Message):
    """`developer` is another word for system."""

    role: Literal["system", "developer"]
    content: TextContent


class UserMessage(_Message):
    role: Literal["user"]
    content: MediaContent


class FunctionCall(Shape):
    name: str
    arguments: str


class CallOfTool(Shape):
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
