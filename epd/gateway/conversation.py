"""A request's messages in the two forms the rest needs: dictionaries for the chat template, and the list of media.

Every string of the client passes through `guard`, so that the template's output keeps it apart from special tokens.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd.errors import InvalidRequest
from epd.gateway.answer import THINK_CLOSE, THINK_OPEN
from epd.gateway.json_text import depth_at_most, json_fault
from epd.gateway.schema import ChatBody, ReasoningEffort
from epd.gateway.schema_parts import (
    AssistantMessage,
    AudioPart,
    ImageOptions,
    ImagePart,
    InputAudio,
    InputAudioPart,
    Message,
    TextPart,
    ToolMessage,
    UserMessage,
    VideoOptions,
    VideoPart,
)
from preprocess.errors import OptionInvalid
from preprocess.types import MediaOptions, MediaSource, Modality

Guard = Callable[[str], str]

_MAX_ARGUMENT_DEPTH = 128
_AUDIO_TYPES = {"mp3": "audio/mpeg", "m4a": "audio/mp4", "opus": "audio/ogg"}
# No base64 has a colon.
_URL_STARTS = ("http://", "https://", "data:")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One medium of the request, and the field of the body that names it."""

    param: str
    source: MediaSource
    option_params: Mapping[str, str] = field(default_factory=dict)
    """Where in the body each option was given."""

    def param_of(self, option: str | None) -> str:
        """The field of the body to change when an option is at fault, or the medium itself."""
        return self.option_params.get(option or "", self.param)


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_schemas: Mapping[str, Mapping[str, Any]] | None
    """Parameters of each function, unguarded; None when the answer is not to be searched for calls."""
    options: dict[str, Any]
    """Variables for the chat template that the client set."""
    reasoning_effort: ReasoningEffort | None
    media: tuple[MediaPart, ...]


def read_conversation(body: ChatBody, guard: Guard) -> Conversation:
    """`guard` is `Vocabulary.guard`. Raises InvalidRequest for a value that only its content shows to be wrong."""
    media: list[MediaPart] = []
    messages = [_message(message, f"messages[{i}]", guard, media) for i, message in enumerate(body.messages)]
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    return Conversation(
        messages=messages,
        tools=[_guarded(tool.model_dump(exclude_none=True), guard) for tool in tools] if tools else None,
        tool_schemas={tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None,
        options=body.chat_template_kwargs.model_dump(exclude_none=True) if body.chat_template_kwargs else {},
        reasoning_effort=body.reasoning_effort,
        media=tuple(media),
    )


def _message(message: Message, path: str, guard: Guard, media: list[MediaPart]) -> dict[str, Any]:
    match message:
        case UserMessage(content=list() as parts):
            return {"role": "user", "content": _parts(parts, f"{path}.content", guard, media)}
        case AssistantMessage():
            return _assistant(message, path, guard)
        case ToolMessage():
            return {
                "role": "tool",
                "content": guard(_text(message.content)),
                "tool_call_id": guard(message.tool_call_id),
            }
        case _:
            role = "system" if message.role == "developer" else message.role
            return {"role": role, "content": guard(_text(message.content))}


def _text(content: str | list[Any]) -> str:
    """Text-only content as one string. Joined before it is guarded: a special token cannot hide in a seam."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _parts(parts: list[Any], path: str, guard: Guard, media: list[MediaPart]) -> str | list[dict[str, Any]]:
    """Parts for the template: neighbouring texts joined, media by their kind alone. All text is one string."""
    if all(isinstance(part, TextPart) for part in parts):
        return guard(_text(parts))
    rendered: list[dict[str, Any]] = []
    pending = ""
    for i, part in enumerate(parts):
        if isinstance(part, TextPart):
            pending += part.text
            continue
        if pending:
            rendered.append({"type": "text", "text": guard(pending)})
            pending = ""
        medium = _medium(part, f"{path}[{i}]")
        media.append(medium)
        kind = medium.source.modality.value
        rendered.append({"type": kind, kind: ""})
    if pending:
        rendered.append({"type": "text", "text": guard(pending)})
    return rendered


def _medium(part: ImagePart | VideoPart | AudioPart | InputAudioPart, path: str) -> MediaPart:
    param = f"{path}.{part.type}"
    options: dict[str, Any] = {}
    option_params: dict[str, str] = {}
    match part:
        case ImagePart(image_url=image):
            modality, url = Modality.IMAGE, image.url
            options, option_params = _media_options(part, image, ImageOptions, path)
        case VideoPart(video_url=video):
            modality, url = Modality.VIDEO, video.url
            options, option_params = _media_options(part, video, VideoOptions, path)
            options.pop("media_resolution", None)
        case AudioPart(audio_url=audio):
            modality, url = Modality.AUDIO, audio.url
        case InputAudioPart(input_audio=inline):
            modality, url = Modality.AUDIO, _audio_url(inline)
    try:
        source = MediaSource(modality, url, MediaOptions(**options))
    except OptionInvalid as error:
        raise InvalidRequest(f"{param}: {error}", param=option_params[error.field]) from error
    return MediaPart(param, source, option_params)


def _media_options(
    part: ImagePart | VideoPart,
    inner: ImageOptions | VideoOptions,
    shape: type[ImageOptions | VideoOptions],
    path: str,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Options that stand beside the URL object and inside it, and the place of each. Raises InvalidRequest where the
    two differ."""
    options: dict[str, Any] = {}
    params: dict[str, str] = {}
    for holder, place in ((inner, f"{path}.{part.type}"), (part, path)):
        for name in shape.model_fields:
            value = getattr(holder, name)
            if value is None:
                continue
            if name in options and options[name] != value:
                both = f"{params[name]} is {json.dumps(options[name])} and {place}.{name} is {json.dumps(value)}"
                raise InvalidRequest(f"{both}; give one", param=f"{place}.{name}")
            options.setdefault(name, value)
            params.setdefault(name, f"{place}.{name}")
    return options, params


def _audio_url(inline: InputAudio) -> str:
    # A slice: the data may be hundreds of megabytes.
    if inline.data[:8].lower().startswith(_URL_STARTS):
        return inline.data
    if inline.format is None:
        return f"data:;base64,{inline.data}"
    return f"data:{_AUDIO_TYPES.get(inline.format, f'audio/{inline.format}')};base64,{inline.data}"


def _assistant(message: AssistantMessage, path: str, guard: Guard) -> dict[str, Any]:
    content = _text(message.content or "")
    reasoning = message.reasoning_content
    # A client that stores the raw answer sends the reasoning back inside the content.
    if reasoning is None and content.startswith(THINK_OPEN) and THINK_CLOSE in content:
        reasoning, _, content = content[len(THINK_OPEN) :].partition(THINK_CLOSE)
    rendered: dict[str, Any] = {"role": "assistant", "content": guard(content)}
    if reasoning is not None:
        rendered["reasoning_content"] = guard(reasoning)
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": guard(call.id),
                "type": "function",
                "function": {
                    "name": guard(call.function.name),
                    "arguments": _arguments(call.function.arguments, f"{path}.tool_calls[{i}]", guard),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return rendered


def _arguments(text: str, path: str, guard: Guard) -> Any:
    """Templates iterate over arguments, the API carries them as JSON text."""
    param = f"{path}.function.arguments"
    try:
        arguments = msgspec.json.decode(text or "{}")
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested far too deeply", param=param) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{param} is no JSON: {json_fault(text, error)}", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{param} is {json.dumps(text[:80], ensure_ascii=False)}; it must be a JSON object", param=param
        )
    if not depth_at_most(arguments, _MAX_ARGUMENT_DEPTH):
        raise InvalidRequest(f"{param} is nested too deeply; allowed: {_MAX_ARGUMENT_DEPTH} levels", param=param)
    return _guarded(arguments, guard)


def _guarded(value: Any, guard: Guard) -> Any:
    """A JSON value with every string guarded, keys included."""
    match value:
        case str():
            return guard(value)
        case dict():
            return {guard(key): _guarded(item, guard) for key, item in value.items()}
        case list():
            return [_guarded(item, guard) for item in value]
        case _:
            return value
