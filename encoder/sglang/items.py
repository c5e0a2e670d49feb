"""Media as a language-only server writes them, turned into media sources.

    "https://..."  "data:..."  "file:///..."       a URL
    "/data/cat.png"                                a path, read only under the media roots
    "iVBORw0KGgo..."                               base64 and nothing else
    {"url": any of these, "fps": 1.0, ...}         with options
    [[...], ...]                                   lists in lists, depth first

Options that this encoder does not know are the business of other models' processors, and are left aside.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args
from urllib.parse import quote

import msgspec

from encoder.quoting import shown
from encoder.sglang.errors import BadRequest
from preprocess.errors import OptionInvalid
from preprocess.types import OPTIONS_OF, MediaOptions, MediaSource, Modality

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}:")
# No letter of base64 is a dot, so nothing with such an ending can be content.
_PICTURES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic")
_FILMS: Final = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
_SOUNDS: Final = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac")
_ENDINGS: Final = (*_PICTURES, *_FILMS, *_SOUNDS)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-][A-Za-z0-9+/_\s-]*={0,2}\s*", re.ASCII)
# FF D8 FF of a picture, FF E. and FF F. of a frame of sound.
_SLASHED_CONTENT: Final = ("/9j/", "//", "/+")
_SHORTEST_CONTENT_CHARS: Final = 128
# What is not base64 further on is found when it is decoded.
_LOOKED_AT: Final = 4096
_DIGEST: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MAX_DEPTH: Final = 16
# More is no number of anything that is asked for.
_TOO_LARGE: Final = 2**40
_NESTED: Final = "preprocess_kwargs"


@dataclass(frozen=True, slots=True)
class Item:
    """One medium of a part."""

    source: MediaSource
    sha256: bytes | None = None
    """What the content must have as its digest; None where the sender does not say."""


def read_items(value: object, modality: Modality, *, max_items: int, is_silent: bool = False) -> list[Item]:
    """The media of `mm_items`, in order; a single one may come without a list. Raises BadRequest naming the item.

    With `is_silent` videos are asked for without their sound.
    """
    items: list[Item] = []
    for raw in _flat(value, 0):
        if len(items) == max_items:
            raise BadRequest(f"mm_items holds more than {max_items} media, the most that one part may have")
        try:
            item = _item(raw, modality)
            items.append(_without_sound(item) if is_silent and modality is Modality.VIDEO else item)
        except OptionInvalid as error:
            raise BadRequest(f"mm_items[{len(items)}]: {error}") from error
        except BadRequest as error:
            raise BadRequest(f"mm_items[{len(items)}]: {error.message}") from error
    if not items:
        raise BadRequest("mm_items is missing or empty")
    return items


def _flat(value: Any, depth: int) -> Iterator[Any]:
    if not isinstance(value, list):
        if value is not None:
            yield value
        return
    if depth == _MAX_DEPTH:
        raise BadRequest(f"mm_items has lists within lists, more than {_MAX_DEPTH} deep")
    for inner in value:
        yield from _flat(inner, depth + 1)


def _item(raw: Any, modality: Modality) -> Item:
    match raw:
        case str():
            return Item(MediaSource(modality, _url(raw)))
        case {"url": str() as text}:
            options = _options(raw, modality)
            return Item(
                MediaSource(modality, _url(text), options), _digest(raw) if modality is Modality.IMAGE else None
            )
        case dict():
            words = f"url is {shown(raw['url'])}" if "url" in raw else "an item is an object without a url"
            raise BadRequest(f"{words}, allowed is a string; features made elsewhere are not taken")
        case _:
            raise BadRequest(f"an item is {shown(raw)}, allowed is a string or an object with a url")


def _without_sound(item: Item) -> Item:
    source = item.source
    if source.options.use_audio:
        raise BadRequest("use_audio asks for the sound of a video, which is not sent: send_video_sound is off")
    options = msgspec.structs.replace(source.options, use_audio=False)
    return Item(msgspec.structs.replace(source, options=options), item.sha256)


def _url(text: str) -> str:
    text = text.strip()
    if not text:
        raise BadRequest("the item is an empty string")
    if _SCHEME.match(text):
        return text
    if text.startswith("/") and text.lower().endswith(_ENDINGS):
        return "file://" + quote(text)
    if not _is_path(text) and _BASE64.fullmatch(text[:_LOOKED_AT]):
        return f"data:;base64,{text}"
    what = "a path with no known ending, which is not allowed" if _is_path(text) else "none of what is allowed"
    raise BadRequest(
        f"the item is {shown(text)}, {what}: a URL, base64, or an absolute path that ends in {', '.join(_ENDINGS)}"
    )


def _is_path(text: str) -> bool:
    """Whether what begins with a slash is no content: that would be of a JPEG or an MPEG sound, and longer."""
    return text.startswith("/") and (len(text) < _SHORTEST_CONTENT_CHARS or not text.startswith(_SLASHED_CONTENT))


def _digest(raw: Mapping[str, Any]) -> bytes | None:
    text = raw.get("content_hash")
    if text is None:
        return None
    found = _DIGEST.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise BadRequest(f"content_hash is {shown(text)}, allowed is sha256: and 64 hexadecimal digits")
    return bytes.fromhex(found[1])


def _options(raw: Mapping[str, Any], modality: Modality) -> MediaOptions:
    """The options that mean something here, from the item and from its `preprocess_kwargs`; the item's own win."""
    nested = raw.get(_NESTED)
    if nested is not None and not isinstance(nested, dict):
        raise BadRequest(f"{_NESTED} is {shown(nested)}, allowed is an object")
    given = {**(nested or {}), **raw}
    known: dict[str, Any] = {}
    for name, (kind, allowed) in _KINDS.items():
        if name in OPTIONS_OF[modality] and given.get(name) is not None:
            try:
                known[name] = msgspec.convert(given[name], kind, strict=True)
            except msgspec.ValidationError as error:
                raise BadRequest(f"{name} is {shown(given[name])}, allowed is {allowed}") from error
            if isinstance(known[name], (int, float)) and not abs(known[name]) < _TOO_LARGE:
                raise BadRequest(f"{name} is {shown(given[name])}, allowed is a smaller number")
    return MediaOptions(**known)


def _allowed(kind: object) -> str:
    """In words, what a field of options takes."""
    words = [json.dumps(word) for part in get_args(kind) for word in get_args(part)]
    if words:
        return ", ".join(words)
    return {int: "a whole number", float: "a number", bool: "true or false"}[get_args(kind)[0]]


_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    field.name: (field.type, _allowed(field.type)) for field in msgspec.structs.fields(MediaOptions)
}


def modality_of(value: object) -> Modality:
    """In any case of letters. Raises BadRequest."""
    names: Sequence[str] = [modality.value for modality in Modality]
    if not isinstance(value, str) or value.lower() not in names:
        raise BadRequest(f"modality is {shown(value)}, allowed is {', '.join(names).upper()}")
    return Modality(value.lower())
