"""Bytes of a body to its shape, or to one refusal that names the field, its value and what is allowed.

    bytes -> JSON -> sizes -> shape

Sizes come first and the shape is left at its first fault: a body is judged in time that its size bounds, whatever it
holds. No word of the validator's own reaches the client.
"""

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from epd.config import GatewayConfig
from epd.errors import InvalidRequest, ModelNotFound
from epd.gateway.json_text import depth_at_most, parse_json
from epd.gateway.other_servers import FIELDS
from epd.gateway.schema_parts import TextPart
from epd.gateway.shape import TAG, Conflict

Body = TypeVar("Body", bound=BaseModel)

# Bounds of the whole body. Beyond these it is no conversation, and would cost seconds of a core to judge.
_MAX_COMMAS = 1_000_000
_MAX_VALUES = 100_000
_MAX_FIELDS = 1024
_MAX_DEPTH = 128

# Longer names of fields are not compared with the known ones.
_MAX_GUESSED = 64
_COUNTED_AT_ONCE_BYTES = 4 << 20
# No set: what a client sends as a type need not be hashable.
_MEDIA_TYPES = ("image_url", "video_url", "audio_url", "input_audio", "file")
_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}

# What clients write as a bare text where an object is meant.
_OBJECTS: Mapping[str, str] = {
    **dict.fromkeys(("image_url", "video_url", "audio_url"), '{"url": ...}'),
    "input_audio": '{"data": ...}',
    "file": '{"file_id": ...} or {"file_data": ...}',
}

# What pydantic found, in words of JSON; `{}` takes the bound of the error's context that follows.
_WORDS: Mapping[str, tuple[str, str | None]] = {
    "string_type": ("it must be a string", None),
    "string_unicode": ("it must be valid Unicode", None),
    "int_type": ("it must be an integer", None),
    "int_from_float": ("it must be an integer", None),
    "int_parsing_size": ("it must be a smaller number", None),
    "float_type": ("it must be a number", None),
    "bool_type": ("it must be true or false", None),
    "list_type": ("it must be an array", None),
    "dict_type": ("it must be an object", None),
    "model_type": ("it must be an object", None),
    "model_attributes_type": ("it must be an object", None),
    "none_required": ("allowed: null", None),
    "finite_number": ("it must be a finite number", None),
    "greater_than": ("it must be greater than {}", "gt"),
    "greater_than_equal": ("it must be at least {}", "ge"),
    "less_than": ("it must be less than {}", "lt"),
    "less_than_equal": ("it must be at most {}", "le"),
    "string_too_short": ("it must have at least {} characters", "min_length"),
    "string_too_long": ("it must have at most {} characters", "max_length"),
    "too_short": ("it must have at least {} items", "min_length"),
    "too_long": ("it must have at most {} items", "max_length"),
    "string_pattern_mismatch": ("it must match {}", "pattern"),
}

_PLAIN_WORDS: Mapping[str, str] = {
    "it must have at least 1 characters": "it must not be empty",
    "it must have at least 1 items": "it must not be empty",
    "it must have at most 0 items": "it is not supported; allowed: an empty one, or null",
}


def read_body(raw: bytes | bytearray, shape: type[Body], limits: GatewayConfig) -> Body:
    """Raises InvalidRequest for the first fault, with the path of the field as `param`. Thread-safe."""
    num_commas = sum(
        raw.count(b",", start, start + _COUNTED_AT_ONCE_BYTES) for start in range(0, len(raw), _COUNTED_AT_ONCE_BYTES)
    )
    if num_commas > _MAX_COMMAS:
        raise InvalidRequest(f"the body has {num_commas} commas; allowed: at most {_MAX_COMMAS}")
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {_JSON_NAMES.get(type(body), 'value')}; it must be an object")
    _check_messages(body.get("messages"), limits)
    _check_values(body)
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, shape) from error


def _check_messages(messages: object, limits: GatewayConfig) -> None:
    """Lengths only; what is no list here is refused by its shape later."""
    if not isinstance(messages, list):
        return
    if len(messages) > limits.max_messages:
        raise InvalidRequest(
            f"messages has {len(messages)} items; allowed: at most {limits.max_messages}", param="messages"
        )
    num_parts = num_media = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        for field in ("content", "tool_calls"):
            items = message.get(field)
            if not isinstance(items, list):
                continue
            num_parts += len(items)
            if num_parts > limits.max_parts:
                raise InvalidRequest(
                    f"messages[{i}].{field} has {len(items)} items; allowed: at most {limits.max_parts} in all "
                    "messages together",
                    param=f"messages[{i}].{field}",
                )
            num_media += sum(isinstance(item, dict) and item.get("type") in _MEDIA_TYPES for item in items)
            if num_media > limits.max_media:
                raise InvalidRequest(
                    f"the messages have {num_media} media up to messages[{i}]; allowed: at most {limits.max_media}",
                    param=f"messages[{i}].{field}",
                )


def _check_values(body: dict[str, Any]) -> None:
    num_values = depth = 0
    # Each with the field of the body that it is in.
    level: list[tuple[str | None, dict[str, Any] | list[Any]]] = [(None, body)]
    while level:
        below: list[tuple[str | None, dict[str, Any] | list[Any]]] = []
        for field, holder in level:
            num_values += 1 if _is_of_integers(holder) else len(holder)
            if num_values > _MAX_VALUES:
                raise InvalidRequest(f"the body has more than {_MAX_VALUES} values, which is the most allowed")
            if isinstance(holder, dict) and len(holder) > _MAX_FIELDS:
                owner = "the body" if field is None else f"{field}: an object in it"
                raise InvalidRequest(f"{owner} has {len(holder)} fields; allowed: at most {_MAX_FIELDS}", param=field)
            named = holder.items() if isinstance(holder, dict) else ((None, value) for value in holder)
            below.extend((field or name, value) for name, value in named if isinstance(value, dict | list))
        level = below
        depth += 1
        if depth > _MAX_DEPTH:
            raise _too_deep(body)


def _is_of_integers(holder: dict[str, Any] | list[Any]) -> bool:
    """A prompt in token ids may be long, and is judged at no cost."""
    return isinstance(holder, list) and all(type(value) is int for value in holder)


def _too_deep(body: dict[str, Any]) -> InvalidRequest:
    """Names the field of the body that goes too deep."""
    field = next(name for name, value in body.items() if not depth_at_most(value, _MAX_DEPTH - 1))
    return InvalidRequest(
        f"{field} is nested more than {_MAX_DEPTH} levels deep, which is the most allowed", param=field
    )


def _refusal(error: ValidationError, shape: type[BaseModel]) -> InvalidRequest:
    fault = error.errors(include_url=False, include_context=True)[0]
    path, owner = _walk(fault["loc"], shape)
    given = shown(fault["input"])
    context = fault.get("ctx", {})
    match fault["type"]:
        case "extra_forbidden":
            allowed = ", ".join(_field_names(owner)) if owner is not None else "none"
            text = f"unknown field {path} (value {given}){_instead(path, owner)}; allowed fields: {allowed}"
        case "missing":
            text = f"field {path} is required"
        case "literal_error":
            text = f"{path} is {given}; allowed: {_as_json(context['expected'])}{_why_text_only(fault, owner)}"
        case "union_tag_invalid" | "union_tag_not_found":
            return _wrong_tag(path, fault)
        case "value_error":
            cause = context["error"]
            path = cause.param if isinstance(cause, Conflict) else path
            text = str(cause)
        case kind:
            words, bound = _WORDS.get(kind, ("this value is not allowed", None))
            if bound is None and fault["loc"][-1:] == (f"{TAG}text",):
                words = "it must be a string or an array"
            words = words.format(_number(context[bound]) if bound else "")
            name = path.rpartition(".")[2]
            if kind.startswith("model_") and name in _OBJECTS:
                words += f": {_OBJECTS[name]}"
            text = f"{path} is {given}; {_PLAIN_WORDS.get(words, words)}{_instead(path, owner)}"
    return InvalidRequest(text, param=path or None)


def _instead(path: str, owner: type[BaseModel] | None) -> str:
    """What a field of another server, or one that is misspelled, is called here."""
    names = [] if owner is None else _field_names(owner)
    named = FIELDS.get(re.sub(r"\[\d+\]", "", path))
    if named is not None and named.partition(".")[0] in names:
        return f"; use {named}"
    last = path.rpartition(".")[2]
    if last in names:
        return ""
    near = difflib.get_close_matches(last[:_MAX_GUESSED], names, n=1, cutoff=0.8)
    return f"; the nearest is {near[0]}" if near else ""


def _why_text_only(fault: ErrorDetails, owner: type[BaseModel] | None) -> str:
    """A part that is no text, in a message whose role takes none other."""
    if owner is not TextPart or fault["loc"][0] != "messages" or fault["input"] not in _MEDIA_TYPES:
        return ""
    return f' in a message of the role {shown(fault["loc"][2])}; media go into messages of the role "user"'


def _wrong_tag(path: str, fault: ErrorDetails) -> InvalidRequest:
    """The field that says which shape an object has (`role`, `type`) is absent or says nothing known."""
    name = fault["ctx"]["discriminator"].strip("'")
    field = f"{path}.{name}"
    given = fault["input"]
    if fault["type"] == "union_tag_not_found" or not isinstance(given, dict):
        return InvalidRequest(f"field {field} is required", param=field)
    return InvalidRequest(
        f"{field} is {shown(given.get(name))}; allowed: {_as_json(fault['ctx']['expected_tags'])}", param=field
    )


def _as_json(expected: str) -> str:
    """Pydantic lists what is allowed as Python would write it."""
    return expected.replace("'", '"').replace("True", "true").replace("False", "false").replace("None", "null")


def _number(bound: object) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _walk(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """Pydantic's location as `messages[0].content[1].image_url.url`, and the shape that holds the last element.

    Where several shapes are possible (messages, parts), a tag follows that names the one taken.
    """
    path = ""
    shapes = [root]
    holder: type[BaseModel] | None = root
    for element in loc:
        if isinstance(element, int):
            path += f"[{element}]"
        elif element.startswith(TAG):
            continue
        elif len(shapes) > 1:
            shapes = [shape for shape in shapes if _is_tagged(shape, element)][:1]
            holder = shapes[0] if shapes else None
        else:
            path += f".{element}" if path else element
            holder = shapes[0] if shapes else None
            shapes = _shapes_of(holder, element)
    return path, holder


def _is_tagged(shape: type[BaseModel], tag: str) -> bool:
    """Whether `tag` in a union of shapes means this one: one of its fields may only be that word."""
    return any(
        get_origin(field.annotation) is Literal and tag in get_args(field.annotation)
        for field in shape.model_fields.values()
    )


def _field_names(shape: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in shape.model_fields.items()]


def _shapes_of(shape: type[BaseModel] | None, name: str) -> list[type[BaseModel]]:
    """The shapes that a field may hold, directly or in a list; none for plain values."""
    fields = {} if shape is None else shape.model_fields
    found = next((field for key, field in fields.items() if name in (key, field.alias)), None)
    return [] if found is None else _shapes_in(found.annotation)


def _shapes_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [shape for argument in getattr(annotation, "__args__", ()) for shape in _shapes_in(argument)]


def shown(value: object, limit: int = 80) -> str:
    """A JSON value for people, short whatever its size."""
    match value:
        case str():
            return json.dumps(value[:limit], ensure_ascii=False) + ("..." if len(value) > limit else "")
        case list():
            return f"an array with {len(value)} item{'s'[: len(value) != 1]}" if value else "[]"
        case dict():
            return f"an object with {len(value)} field{'s'[: len(value) != 1]}" if value else "{}"
        case int() if value.bit_length() > 4 * limit:
            return "a number too large to show"
        case _:
            return json.dumps(value)


def unknown_model(name: str, config: GatewayConfig) -> ModelNotFound:
    """To be raised for a model that is not served here."""
    return ModelNotFound(f"model {shown(name)} is not served here; served: {shown(config.model_name)}", param="model")
