"""The parts of a message that are media, read: where the content is, what is asked of it, what it is called."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd.errors import InvalidRequest
from epd.gateway.library import Library
from epd.gateway.schema_parts import (
    AudioPart,
    FilePart,
    FileRef,
    ImageOptions,
    ImagePart,
    InputAudio,
    InputAudioPart,
    MediaOptionsOfAll,
    VideoOptions,
    VideoPart,
)
from preprocess.errors import OptionInvalid
from preprocess.types import MediaKey, MediaOptions, MediaSource, Modality

AnyMediaPart = ImagePart | VideoPart | AudioPart | InputAudioPart | FilePart

_AUDIO_TYPES = {"mp3": "audio/mpeg", "m4a": "audio/mp4", "opus": "audio/ogg"}
# No base64 has a colon.
_URL_STARTS = ("http://", "https://", "data:")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One medium of the request, and the field of the body that names it.

    Its content is at `source.url`, or it is `content`, or it is in the file `file_id`. With none of these it is only
    called by a name, `uuid` or `key`.
    """

    param: str
    source: MediaSource
    option_params: Mapping[str, str] = field(default_factory=dict)
    """Where in the body each option was given."""
    path: str = ""
    """The part itself."""
    library: Library | None = None
    content: bytes | None = None
    file_id: str | None = None
    uuid: str | None = None
    key: MediaKey | None = None
    is_told: bool = False
    """The client is told the key, and may ask for the medium by it."""

    @property
    def has_source(self) -> bool:
        return bool(self.source.url) or self.content is not None or self.file_id is not None

    def param_of(self, option: str | None) -> str:
        """The field of the body to change when an option is at fault, or the medium itself."""
        return self.option_params.get(option or "", self.param)


@dataclass(slots=True)
class _Found:
    """What a part says, while it is being read."""

    modality: Modality
    url: str = ""
    content: bytes | None = None
    file_id: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    option_params: dict[str, str] = field(default_factory=dict)


def read_medium(part: AnyMediaPart, path: str, library: Library | None, *, is_told: bool) -> MediaPart:
    """May block: what a file is stands on disk. Raises ServeError naming the field."""
    param = f"{path}.{part.type}"
    found = _found(part, path, library)
    found.options.pop("media_resolution", None)
    key = None if part.key is None else MediaKey(part.key)
    has_source = bool(found.url) or found.content is not None or found.file_id is not None
    if not has_source and part.uuid is None and key is None:
        raise InvalidRequest(f"field {param} is required, or else {path}.uuid or {path}.key", param=param)
    if not has_source and key is not None and found.options:
        first = next(iter(found.option_params.values()))
        raise InvalidRequest(
            f"{first} is given and {path}.key is too, without content; a key stands for content and options, give one",
            param=first,
        )
    try:
        source = MediaSource(found.modality, found.url, MediaOptions(**found.options))
    except OptionInvalid as error:
        raise InvalidRequest(f"{param}: {error}", param=found.option_params[error.field]) from error
    return MediaPart(
        param=param,
        source=source,
        option_params=found.option_params,
        path=path,
        library=library,
        content=found.content,
        file_id=found.file_id,
        uuid=part.uuid,
        key=key,
        is_told=is_told,
    )


def _found(part: AnyMediaPart, path: str, library: Library | None) -> _Found:
    is_named = part.uuid is not None or part.key is not None
    match part:
        case ImagePart(image_url=image):
            found = _referred(Modality.IMAGE, image, f"{path}.image_url", is_named)
            found.options, found.option_params = _media_options(part, image, ImageOptions, path)
        case VideoPart(video_url=video):
            found = _referred(Modality.VIDEO, video, f"{path}.video_url", is_named)
            found.options, found.option_params = _media_options(part, video, VideoOptions, path)
        case AudioPart(audio_url=audio):
            found = _referred(Modality.AUDIO, audio, f"{path}.audio_url", is_named)
        case InputAudioPart(input_audio=inline):
            given = None if inline is None or (is_named and inline.data == "") else inline
            found = _Found(Modality.AUDIO, url="" if given is None else _audio_url(given))
        case FilePart():
            found = _file(part, f"{path}.file", library)
            found.options, found.option_params = _media_options(part, None, MediaOptionsOfAll, path)
    return found


def _referred(modality: Modality, ref: FileRef | None, param: str, is_named: bool) -> _Found:
    # Clients of vLLM write a medium that they only name with an empty URL as often as with null.
    if ref is None or (is_named and not ref.url and ref.file_id is None):
        return _Found(modality)
    if (ref.url is None) == (ref.file_id is None):
        if ref.url is None:
            raise InvalidRequest(f"field {param}.url is required", param=f"{param}.url")
        raise InvalidRequest(f"{param}.url and {param}.file_id are both given; give one", param=f"{param}.file_id")
    if ref.url == "":
        raise InvalidRequest(f"{param}.url is empty; allowed: an http, https, data or file URL", param=f"{param}.url")
    return _Found(modality, url=ref.url or "", file_id=ref.file_id)


def _file(part: FilePart, param: str, library: Library | None) -> _Found:
    """What a file is decides how it is used. Raises ServeError."""
    given = part.file
    if (given.file_id is None) == (given.file_data is None):
        which = "are both given; give one" if given.file_id is not None else "are both absent; give one"
        raise InvalidRequest(f"{param}.file_id and {param}.file_data {which}", param=param)
    if library is None:
        raise InvalidRequest(f"{param} is given; files are not taken here", param=param)
    if given.file_id is not None:
        return _Found(library.kind_of_file(given.file_id, f"{param}.file_id"), file_id=given.file_id)
    content, modality = library.inline(given.file_data or "", f"{param}.file_data")
    return _Found(modality, content=content)


def _media_options(
    part: ImagePart | VideoPart | FilePart,
    inner: ImageOptions | VideoOptions | None,
    shape: type[ImageOptions | VideoOptions],
    path: str,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Options that stand beside the URL object and inside it, and the place of each. Raises InvalidRequest where the
    two differ."""
    options: dict[str, Any] = {}
    params: dict[str, str] = {}
    for holder, place in ((inner, f"{path}.{part.type}"), (part, path)):
        for name in shape.model_fields if holder is not None else ():
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
