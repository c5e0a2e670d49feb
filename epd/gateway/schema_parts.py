"""The shapes of messages and of the media in them."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from epd.gateway.shape import TAG, Int32, Shape, content_kind

FileId = Annotated[str, Field(max_length=64)]
"""Of `POST /v1/files`."""


class ImageOptions(Shape):
    """Options of a picture. Clients of other servers write them inside the URL object or beside it; both are taken."""

    detail: Literal["auto", "low", "high"] | None = None
    min_pixels: Int32 | None = None
    max_pixels: Int32 | None = None


class FileRef(Shape):
    """Where the content is: a URL, or a file that was uploaded before. One of the two."""

    url: str | None = None
    file_id: FileId | None = None


class ImageUrl(ImageOptions, FileRef):
    pass


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


class VideoUrl(VideoOptions, FileRef):
    pass


class AudioUrl(FileRef):
    pass


class InputAudio(Shape):
    """`data` is base64, or an http, https or data URL. The format is recognised from the bytes, whatever is said."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm"] | None = None


class InlineFile(Shape):
    """A file that was uploaded before, or its content: base64, or a data: URL. The name is for the client alone."""

    file_id: FileId | None = None
    file_data: str | None = None
    filename: str | None = None


class MediaOptionsOfAll(ImageOptions, VideoOptions):
    """Which of them apply is known with the content."""


class CacheControl(Shape):
    """Of Anthropic's API, as LiteLLM's users send it. Prompts are always cached, so it has no effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Part(Shape):
    cache_control: CacheControl | None = None
    """Taken, and without effect: prompts are always cached."""


class NamedMedia(_Part):
    """What a medium is called: `uuid` by the client, `key` by this server.

    With content the uuid stands for it from now on. Without content (null or absent) the part is what its name stands
    for.
    """

    uuid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None


class TextPart(_Part):
    type: Literal["text"]
    text: str


class ImagePart(ImageOptions, NamedMedia):
    type: Literal["image_url"]
    image_url: ImageUrl | None = None


class VideoPart(VideoOptions, NamedMedia):
    type: Literal["video_url"]
    video_url: VideoUrl | None = None


class AudioPart(NamedMedia):
    type: Literal["audio_url"]
    audio_url: AudioUrl | None = None


class InputAudioPart(NamedMedia):
    type: Literal["input_audio"]
    input_audio: InputAudio | None = None


class FilePart(MediaOptionsOfAll, NamedMedia):
    """A picture, video or sound: which of them is found from its bytes."""

    type: Literal["file"]
    file: InlineFile


Part = Annotated[TextPart | ImagePart | VideoPart | AudioPart | InputAudioPart | FilePart, Field(discriminator="type")]


_String = Annotated[str, Tag(f"{TAG}text")]
TextContent = Annotated[
    _String | Annotated[list[TextPart], Field(fail_fast=True), Tag(f"{TAG}parts")], Discriminator(content_kind)
]
MediaContent = Annotated[
    _String | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag(f"{TAG}parts")],
    Discriminator(content_kind),
]


class _Message(Shape):
    name: str | None = None
    """Taken, and without effect: the prompt has no place for it."""
    cache_control: CacheControl | None = None
    """Taken, and without effect: prompts are always cached."""


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
