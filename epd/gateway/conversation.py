"""A request's messages in the two forms the rest needs: dictionaries for the chat template, and the list of media.

Every string of the client passes through `guard`, so that the template's output keeps it apart from special tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd.errors import InvalidRequest
from epd.gateway.answer import THINK_CLOSE, THINK_OPEN
from epd.gateway.json_text import depth_at_most, json_fault
from epd.gateway.library import Library
from epd.gateway.media_parts import MediaPart, read_medium
from epd.gateway.schema import ChatBody, ReasoningEffort
from epd.gateway.schema_parts import (
    AssistantMessage,
    Message,
    NamedMedia,
    TextPart,
    ToolMessage,
    UserMessage,
)
from epd.gateway.validation import shown

Guard = Callable[[str], str]

_MAX_ARGUMENT_DEPTH = 128


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
    tells_media: bool = False
    """The answer says what the media are called, so that they can be asked for again by name."""


@dataclass(frozen=True, slots=True)
class _Media:
    """Of the whole request, in order."""

    library: Library | None
    are_told: bool
    parts: list[MediaPart] = field(default_factory=list)


def read_conversation(body: ChatBody, guard: Guard, library: Library | None = None) -> Conversation:
    """`guard` is `Vocabulary.guard`, `library` what the client may refer to. Blocks where a file is referred to.

    Raises ServeError for a value that only its content shows to be wrong.
    """
    _check_tool_messages(body.messages)
    media = _Media(library, bool(body.return_media) or any(_names_media(message) for message in body.messages))
    messages = [_message(message, f"messages[{i}]", guard, media) for i, message in enumerate(body.messages)]
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    shown_tools = [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in tools or ()]
    return Conversation(
        messages=messages,
        tools=[_guarded(tool, guard) for tool in shown_tools] or None,
        tool_schemas={tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None,
        options=body.chat_template_kwargs.model_dump(exclude_none=True) if body.chat_template_kwargs else {},
        reasoning_effort=body.reasoning_effort,
        media=tuple(media.parts),
        tells_media=media.are_told,
    )


def _check_tool_messages(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest for the result of a call that nobody made."""
    calls: set[str] = set()
    for i, message in enumerate(messages):
        match message:
            case AssistantMessage(tool_calls=list() as made):
                calls.update(call.id for call in made)
            case ToolMessage(tool_call_id=call_id) if call_id not in calls:
                param = f"messages[{i}].tool_call_id"
                raise InvalidRequest(
                    f"{param} is {shown(call_id)}; allowed: the id of a call in an assistant message before it",
                    param=param,
                )
            case _:
                pass


def _names_media(message: Message) -> bool:
    content = message.content if isinstance(message, UserMessage) else ""
    return any(isinstance(part, NamedMedia) and (part.uuid or part.key) for part in content)


def _message(message: Message, path: str, guard: Guard, media: _Media) -> dict[str, Any]:
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


def _parts(parts: list[Any], path: str, guard: Guard, media: _Media) -> str | list[dict[str, Any]]:
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
        medium = read_medium(part, f"{path}[{i}]", media.library, is_told=media.are_told)
        media.parts.append(medium)
        kind = medium.source.modality.value
        rendered.append({"type": kind, kind: ""})
    if pending:
        rendered.append({"type": "text", "text": guard(pending)})
    return rendered


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
