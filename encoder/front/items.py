"""What a request asks for: the JSON of `POST /v1/encode`, read into media sources with every field checked.

    {"input": [{"type": "image_url", "image_url": {"url": ...}, "max_pixels": 100000}, {"type": "file", ...}],
     "model": ..., "encoding_format": "base64"}

Parts have the fields they have in a chat completion. Faults of the request itself end all of it; a part that is well
formed may still fail by itself later.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from encoder.front.problems import Refused, invalid, placed
from encoder.quoting import shown
from preprocess.errors import OptionInvalid
from preprocess.types import MediaKey, MediaOptions, MediaSource, Modality

EncodingFormat = Literal["base64", "float"]
FORMATS: Final[tuple[EncodingFormat, ...]] = ("base64", "float")

_AUDIO_TYPES: Final = {"mp3": "audio/mpeg", "m4a": "audio/mp4", "opus": "audio/ogg"}
_AUDIO_FORMATS: Final = ("wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm")
# No base64 has a colon.
_URL_STARTS: Final = ("http://", "https://", "data:")
_MAX_NAME_CHARS: Final = 200
_KEY: Final = re.compile(r"[0-9a-f]{32}")
_INT32: Final = range(-(2**31), 2**31)

OptionShapes = Mapping[str, type | tuple[str, ...]]
"""A type, or the words that are allowed."""
OPTION_SHAPES: Final[Mapping[Modality, OptionShapes]] = {
    Modality.IMAGE: {"detail": ("auto", "low", "high"), "min_pixels": int, "max_pixels": int},
    Modality.VIDEO: {
        "fps": float,
        "max_frames": int,
        "min_frames": int,
        "num_frames": int,
        "min_pixels": int,
        "max_pixels": int,
        "use_audio": bool,
        # A field of the model maker's own service; its levels are the same here, the processor's own limits.
        "media_resolution": ("default", "max"),
    },
    Modality.AUDIO: {},
}
_OPTIONS_OF_ALL: Final[OptionShapes] = {
    name: shape for shapes in OPTION_SHAPES.values() for name, shape in shapes.items()
}
OPTION_NAMES: Final = tuple(_OPTIONS_OF_ALL)
PARTS: Final[Mapping[str, Modality]] = {
    "image_url": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}
_JSON_NAMES: Final[Mapping[type, str]] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "an array",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One medium of a request, and the field that names it. `content` came with the request, or `source` has a URL."""

    param: str
    source: MediaSource
    content: bytes | None = None
    option_params: Mapping[str, str] = field(default_factory=dict)
    """Where in the request each option was given."""
    path: str = ""
    """The part itself."""
    file_id: str | None = None
    """Of an uploaded file with the content."""
    key: MediaKey | None = None
    """Beside content, what its key must be; without, all there is."""

    def param_of(self, option: str | None) -> str:
        """The field to change when an option is at fault, or the medium itself."""
        return self.option_params.get(option or "", self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileItem:
    """A file whose kind decides what it is: an uploaded one, or what is in `data_url`."""

    param: str
    path: str
    file_id: str | None
    data_url: str
    key: MediaKey | None
    options: Mapping[str, Any]
    option_params: Mapping[str, str]

    def param_of(self, option: str | None) -> str:
        """As of `Item`."""
        return self.option_params.get(option or "", self.param)

    def as_item(self, modality: Modality, content: bytes | None) -> Item:
        """Raises Refused for options that do not apply."""
        return Item(
            self.param,
            _source(modality, "", self.options, self.option_params),
            content,
            self.option_params,
            path=self.path,
            file_id=self.file_id,
            key=self.key,
        )


@dataclass(frozen=True, slots=True)
class EncodeBody:
    """A request. In the place of an item that cannot even be tried stands why."""

    items: tuple[Item | FileItem | Refused, ...]
    model: str | None
    encoding_format: EncodingFormat


def read_encode_body(body: object, *, max_items: int) -> EncodeBody:
    """Raises Refused for what is wrong with the whole; what is wrong with one item stands in its place."""
    if not isinstance(body, dict):
        raise invalid(f"the body is {shown(body)}; it must be an object")
    _check_fields(body, ("input", "model", "encoding_format"), "")
    if "input" not in body:
        raise invalid("field input is required", "input")
    if body["input"] is None:
        raise invalid("input is null; it must be an array", "input")
    parts = _typed(body, "input", list, "")
    if not parts:
        raise invalid("input is []; it must not be empty", "input")
    if len(parts) > max_items:
        raise invalid(f"input has {len(parts)} items; allowed: at most {max_items}", "input")
    encoding_format = body.get("encoding_format")
    return EncodeBody(
        items=tuple(_item_or_fault(part, f"input[{i}]") for i, part in enumerate(parts)),
        model=_typed(body, "model", str, ""),
        encoding_format="base64" if encoding_format is None else checked_format(encoding_format),
    )


def checked_format(value: object) -> EncodingFormat:
    """Raises Refused."""
    for known in FORMATS:
        if value == known:
            return known
    allowed = ", ".join(json.dumps(known) for known in FORMATS)
    raise invalid(f"encoding_format is {shown(value)}; allowed: {allowed}", "encoding_format")


def _item_or_fault(part: object, path: str) -> Item | FileItem | Refused:
    try:
        return _item(part, path)
    except Refused as fault:
        return fault


def _item(part: object, path: str) -> Item | FileItem:
    if not isinstance(part, dict):
        raise invalid(f"{path} is {shown(part)}; it must be an object", path)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in (*PARTS, "file"):
        allowed = ", ".join(json.dumps(known) for known in (*PARTS, "file"))
        words = (
            f"{path}.type is {shown(kind)}; allowed: {allowed}" if "type" in part else f"field {path}.type is required"
        )
        raise invalid(words, f"{path}.type")
    options = _OPTIONS_OF_ALL if kind == "file" else OPTION_SHAPES[PARTS[kind]]
    # The last one has no effect, as in a chat: what was encoded is always kept.
    _check_fields(part, ("type", kind, *options, "key", "cache_control"), path)
    inner_path = f"{path}.{kind}"
    inner, key = _typed(part, kind, dict, path), _key(part, path)
    if kind == "file":
        return _file_item(part, inner, path, key)
    modality = PARTS[kind]
    if inner is None and key is not None:
        _, params = _options(part, {}, options, path, kind)
        _check_no_options(params, path)
        return Item(inner_path, MediaSource(modality, ""), path=path, key=key)
    if inner is None:
        raise invalid(f"field {inner_path} is required", inner_path)
    if kind == "input_audio":
        _check_fields(inner, ("data", "format"), inner_path)
        url = _audio_url(
            _required_text(inner, "data", inner_path), _choice(inner, "format", _AUDIO_FORMATS, inner_path)
        )
        return Item(inner_path, MediaSource(modality, url), path=path, key=key)
    _check_fields(inner, ("url", "file_id", *options), inner_path)
    file_id: str | None = _typed(inner, "file_id", str, inner_path)
    url = "" if file_id is not None else _required_text(inner, "url", inner_path)
    if file_id is not None and inner.get("url") is not None:
        raise invalid(f"{inner_path}.url and {inner_path}.file_id are both given; give one", f"{inner_path}.file_id")
    given, params = _options(part, inner, options, path, kind)
    source = _source(modality, url, given, params)
    return Item(inner_path, source, option_params=params, path=path, file_id=file_id, key=key)


def _file_item(part: dict[str, Any], inner: dict[str, Any] | None, path: str, key: MediaKey | None) -> FileItem:
    param = f"{path}.file"
    if inner is None:
        raise invalid(f"field {param} is required", param)
    _check_fields(inner, ("file_id", "file_data", "filename"), param)
    file_id: str | None = _typed(inner, "file_id", str, param)
    data: str | None = _typed(inner, "file_data", str, param)
    _typed(inner, "filename", str, param)
    if (file_id is None) == (data is None):
        both = "both absent" if file_id is None else "both given"
        raise invalid(f"{param}.file_id and {param}.file_data are {both}; give one", param)
    head = (data or "")[:16].lower()
    if head.startswith(("http:", "https:", "file:")):
        raise invalid(f"{param}.file_data is a URL; allowed: base64, or a data: URL", f"{param}.file_data")
    given, params = _options(part, {}, _OPTIONS_OF_ALL, path, "file")
    return FileItem(
        param=param,
        path=path,
        file_id=file_id,
        data_url=data if data is not None and head.startswith("data:") else f"data:;base64,{data or ''}",
        key=key,
        options=given,
        option_params=params,
    )


def _key(part: dict[str, Any], path: str) -> MediaKey | None:
    text: str | None = _typed(part, "key", str, path)
    if text is not None and _KEY.fullmatch(text) is None:
        raise invalid(f"{path}.key is {shown(text)}; it must be 32 hexadecimal digits in small letters", f"{path}.key")
    return None if text is None else MediaKey(text)


def _check_no_options(params: Mapping[str, str], path: str) -> None:
    for place in params.values():
        words = (
            f"{place} is given and {path}.key is too, without content; a key stands for content and options, give one"
        )
        raise invalid(words, place)


def _source(modality: Modality, url: str, given: Mapping[str, Any], params: Mapping[str, str]) -> MediaSource:
    """Raises Refused."""
    try:
        return MediaSource(modality, url, MediaOptions(**given))
    except OptionInvalid as error:
        place = params[error.field]
        raise invalid(placed(str(error), error.field, place), place) from error


def _options(
    part: dict[str, Any], inner: dict[str, Any], known: OptionShapes, path: str, kind: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Options inside the URL object and beside it, and the place of each; where both stand they must agree."""
    given: dict[str, Any] = {}
    params: dict[str, str] = {}
    for holder, place in ((inner, f"{path}.{kind}"), (part, path)):
        for name, value in _given_options(holder, known, place).items():
            if name in given and given[name] != value:
                both = f"{params[name]} is {json.dumps(given[name])} and {place}.{name} is {json.dumps(value)}"
                raise invalid(f"{both}; give one", f"{place}.{name}")
            given.setdefault(name, value)
            params.setdefault(name, f"{place}.{name}")
    given.pop("media_resolution", None)
    return given, params


def form_source(modality: Modality, values: Mapping[str, Any]) -> MediaSource:
    """A file's source: it has options, and no URL. Raises Refused."""
    known = OPTION_SHAPES[modality]
    given = _given_options({name: value for name, value in values.items() if name in known}, known, "")
    given.pop("media_resolution", None)
    try:
        return MediaSource(modality, "", MediaOptions(**given))
    except OptionInvalid as error:
        raise invalid(str(error), error.field) from error


def _given_options(holder: dict[str, Any], known: OptionShapes, path: str) -> dict[str, Any]:
    found = {}
    for name, shape in known.items():
        value = _choice(holder, name, shape, path) if isinstance(shape, tuple) else _typed(holder, name, shape, path)
        if value is not None:
            found[name] = value
    return found


def _check_fields(holder: dict[str, Any], allowed: tuple[str, ...], path: str) -> None:
    for name, value in holder.items():
        if name not in allowed:
            full = f"{path}.{name}" if path else name
            raise invalid(
                f"unknown field {full[:_MAX_NAME_CHARS]} (value {shown(value)}); allowed fields: {', '.join(allowed)}",
                full,
            )


def _typed(holder: dict[str, Any], name: str, kind: type, path: str) -> Any:
    """The value, None for an absent one or null. Numbers are not strings, and true is no number."""
    value = holder.get(name)
    if value is None:
        return None
    full = f"{path}.{name}" if path else name
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (kind in (int, float) and isinstance(value, bool)):
        raise invalid(f"{full} is {shown(value)}; it must be {_JSON_NAMES[kind]}", full)
    if kind in (int, float) and not _INT32.start <= value < _INT32.stop:
        raise invalid(f"{full} is {shown(value)}; it must be a smaller number", full)
    return value


def _choice(holder: dict[str, Any], name: str, allowed: tuple[str, ...], path: str) -> str | None:
    value: str | None = _typed(holder, name, str, path)
    if value is not None and value not in allowed:
        full = f"{path}.{name}" if path else name
        raise invalid(f"{full} is {shown(value)}; allowed: {', '.join(json.dumps(a) for a in allowed)}", full)
    return value


def _required_text(holder: dict[str, Any], name: str, path: str) -> str:
    value = _typed(holder, name, str, path)
    if value is None:
        raise invalid(f"field {path}.{name} is required", f"{path}.{name}")
    text: str = value
    return text


def _audio_url(data: str, audio_format: str | None) -> str:
    # A slice: the data may be hundreds of megabytes.
    if data[:8].lower().startswith(_URL_STARTS):
        return data
    if audio_format is None:
        return f"data:;base64,{data}"
    return f"data:{_AUDIO_TYPES.get(audio_format, f'audio/{audio_format}')};base64,{data}"
