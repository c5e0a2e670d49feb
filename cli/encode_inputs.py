"""What `mimo encode` is to encode: files, directories, patterns, URLs and manifests, each input with its options."""

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args
from urllib.parse import urlsplit

import msgspec

from cli.encode_volumes import METADATA
from cli.load import ConfigError
from cli.media_files import MediaFileError, expand_paths, media_files, modality_of, path_text
from cli.media_search import Unreadable, matches, walk
from preprocess.errors import OptionInvalid
from preprocess.types import OPTIONS_OF, Detail, MediaOptions, Modality

_URL_SCHEMES: Final = ("http://", "https://", "data:")
_MAX_PART_CHARS: Final = 180
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Input:
    """One medium to encode."""

    location: str
    """A path, or a URL."""
    is_url: bool
    modality: Modality | None
    """None: the content says, since the name does not."""
    options: MediaOptions
    """Of the command and of the manifest's line, those for other modalities included."""
    id: str | None = None
    fault: str | None = None
    """Of a directory that cannot be read, why: it stands for what may be in it."""

    @property
    def label(self) -> str:
        """The path or URL as given, as text: bytes of a path that are no UTF-8 become `\\xNN`."""
        return shown(self.location) if self.is_url else path_text(Path(self.location))

    @property
    def name(self) -> str:
        """Of its tensor."""
        return self.id or self.label

    @property
    def place(self) -> str:
        """Where its output lies below a directory, without the suffix: by the id, or as the input lies.

        As with tar, a leading / is dropped, and so are leading .. parts. Whatever the input's name, this one is UTF-8,
        so that the index can tell it: other bytes become `\\xNN`, and a backslash two.
        """
        if self.id is not None:
            return self.id
        if self.is_url:
            return _written(_place_of_url(self.location))
        parts = os.path.normpath(self.location).split("/")
        return _written("/".join(part for part in parts if part not in ("", "..")))


_WANTED: Final = {
    **dict.fromkeys(("path", "url", "id"), "text"),
    **dict.fromkeys(("max_frames", "min_frames", "num_frames", "min_pixels", "max_pixels"), "a whole number"),
    "fps": "a number",
    "use_audio": "true or false",
    "modality": ", ".join(Modality),
    "detail": ", ".join(get_args(Detail)),
}
"""What is allowed in a manifest's JSON, in words."""


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of a manifest in JSON."""

    path: str | None = None
    url: str | None = None
    id: str | None = None
    modality: Modality | None = None
    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    use_audio: bool | None = None
    detail: Detail | None = None


def find_inputs(
    arguments: Sequence[str],
    manifests: Sequence[str],
    *,
    modality: Modality | None,
    options: MediaOptions,
    recursive: bool,
) -> list[Input]:
    """All inputs in order, none twice. Raises ConfigError naming the argument or the line at fault."""
    found: dict[Input, None] = {}
    try:
        for argument in arguments:
            found.update(dict.fromkeys(_of_argument(argument, modality, options, recursive)))
    except MediaFileError as error:
        raise ConfigError(str(error)) from error
    for manifest in manifests:
        found.update(dict.fromkeys(_of_manifest(manifest, modality, options)))
    if not found:
        raise ConfigError("nothing to encode: name files, directories, patterns or URLs, or give --manifest FILE")
    _check_options(options, {item.modality for item in found if item.fault is None})
    return list(found)


def _of_argument(argument: str, modality: Modality | None, options: MediaOptions, recursive: bool) -> Iterator[Input]:
    if _is_url(argument):
        yield Input(argument, True, modality or _modality_of_url(argument), options)
        return
    _check_scheme(argument)
    path = Path(argument)
    faults: dict[Path, str] = {}

    def unreadable(place: Path, error: OSError) -> None:
        faults[place] = f"cannot be read: {error.strerror}"

    if glob.has_magic(argument) and not os.path.lexists(path):
        files = _of_pattern(argument, modality, recursive, unreadable)
        if not files and not faults:
            raise MediaFileError(f"{shown(argument)}: no image, video or audio file matches this pattern")
    else:
        files = expand_paths([path], modality=modality, recursive=recursive, unreadable=unreadable)
    for file, kind in files:
        yield Input(str(file), False, kind, options)
    for place, fault in faults.items():
        yield Input(str(place), False, None, options, fault=fault)


def _of_pattern(
    pattern: str, modality: Modality | None, recursive: bool, unreadable: Unreadable
) -> list[tuple[Path, Modality]]:
    """Media files that match, and those in directories that match, as if the shell had expanded it."""
    found: list[tuple[Path, Modality]] = []
    for match in matches(pattern, unreadable):
        if not match.is_dir():
            found += media_files([match] if match.is_file() else [], modality)
        elif "**" not in pattern:
            found += media_files(sorted(walk(match, unreadable, recursive=recursive)), modality)
    return found


def _of_manifest(manifest: str, modality: Modality | None, options: MediaOptions) -> Iterator[Input]:
    named = "standard input" if manifest == "-" else path_text(Path(manifest))
    for number, text in _lines(manifest, named):
        try:
            yield _of_line(text, modality, options)
        except (ValueError, MediaFileError) as error:
            # OptionInvalid is a ValueError.
            raise ConfigError(f"{named}, line {number}: {error}") from error


def _lines(manifest: str, named: str) -> Iterator[tuple[int, str]]:
    """Lines that are neither blank nor a comment (# and a blank), by their numbers from 1. A file name is any
    bytes, and so is a line."""
    try:
        with open(0 if manifest == "-" else manifest, "rb", closefd=manifest != "-") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    # As some editors on Windows begin a file.
                    line = line.removeprefix(b"\xef\xbb\xbf")
                text = os.fsdecode(line.rstrip(b"\r\n"))
                if text.strip() and not (text.startswith("#") and text[1:2].strip() == ""):
                    yield number, text
    except OSError as error:
        raise ConfigError(f"--manifest {named}: {error.strerror}") from error


def _of_line(text: str, modality: Modality | None, options: MediaOptions) -> Input:
    """Raises ValueError or MediaFileError saying what is wrong with it."""
    line = _Line(path=text) if not text.lstrip().startswith("{") else _of_json(os.fsencode(text))
    if (line.path is None) == (line.url is None):
        raise ValueError("give one of path and url")
    location = line.path or line.url or ""
    is_url = line.url is not None or (line.path is not None and _is_url(location))
    if is_url and not _is_url(location):
        raise ValueError(f"url is {location!r}, which does not begin with http:, https: or data:")
    _check_scheme(location)
    if not location or "\0" in location:
        raise ValueError("the path is empty" if not location else "the path has a zero byte")
    guessed = _modality_of_url(location) if is_url else modality_of(Path(location))
    kind = line.modality or modality or guessed
    own = {field: getattr(line, field) for field in MediaOptions.__struct_fields__}
    own = {field: value for field, value in own.items() if value is not None}
    if own and kind is None:
        raise ValueError(f"{', '.join(own)} of what: the name does not say; give modality as well")
    for field in own:
        if kind is not None and field not in OPTIONS_OF[kind]:
            raise OptionInvalid(field, f"{field} does not apply to {kind}")
    common = options if kind is None else options.applying_to(kind)
    merged = MediaOptions(**{field: getattr(common, field) for field in common.given()} | own) if own else common
    return Input(location, is_url, kind, merged, None if line.id is None else _checked_id(line.id))


def _of_json(text: bytes) -> _Line:
    """Raises ValueError."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"broken JSON: {error}") from error
    for name in fields:
        if name not in _WANTED:
            raise ValueError(f"unknown field {name!r}; allowed: {', '.join(_WANTED)}")
    try:
        return msgspec.convert(fields, _Line)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        value = msgspec.json.encode(fields.get(name)).decode()
        raise ValueError(f"{name} is {value}; allowed: {_WANTED.get(name, error)}") from error


def _check_scheme(location: str) -> None:
    """Raises MediaFileError for a URL that is not fetched."""
    scheme = _SCHEME.match(location)
    if scheme is not None and not _is_url(location) and not os.path.lexists(location):
        raise MediaFileError(f"{shown(location)}: scheme {scheme[1]} is not allowed; allowed: http, https, data")


def _checked_id(text: str) -> str:
    """An id names a tensor and a file below the output directory."""
    parts = text.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in text or text == METADATA:
        raise ValueError(f"id is {text!r}; allowed: names, with / between them, none of them . or .. or {METADATA}")
    return text


def shown(text: str) -> str:
    """A line of a file or an argument, any bytes, as text: what is no UTF-8 becomes `\\xNN`."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _written(place: str) -> str:
    return shown(place.replace("\\", "\\\\"))


def _is_url(text: str) -> bool:
    return text[:8].lower().startswith(_URL_SCHEMES)


def _modality_of_url(url: str) -> Modality | None:
    if url[:5].lower() == "data:":
        kind = url[5:100].partition("/")[0].lower()
        return Modality(kind) if kind in set(Modality) else None
    return modality_of(Path(urlsplit(url).path))


def _place_of_url(url: str) -> str:
    digest = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    if url[:5].lower() == "data:":
        return f"data/{digest}"
    split = urlsplit(url)
    parts = [split.netloc, *(part for part in split.path.split("/") if part not in ("", ".", ".."))]
    if split.query or len(parts) == 1 or any(len(part) > _MAX_PART_CHARS for part in parts):
        # What the path leaves open, the digest tells apart.
        parts = [part[:_MAX_PART_CHARS] for part in parts]
        parts[-1] += f"-{digest}"
    return "/".join(parts)


def _check_options(options: MediaOptions, modalities: set[Modality | None]) -> None:
    """Refuse an option that would do nothing. Raises ConfigError."""
    if None in modalities or not modalities:
        return
    for field_name in options.given():
        takers = [modality for modality in Modality if field_name in OPTIONS_OF[modality]]
        if modalities.isdisjoint(takers):
            flag = f"--{field_name.replace('_', '-')}"
            raise ConfigError(f"{flag} is an option for {' and '.join(takers)} files; there are none among the inputs")


def check_names(inputs: Iterable[Input]) -> None:
    """Refuse two inputs that would be one tensor. Raises ConfigError."""
    seen: dict[str, Input] = {}
    for item in inputs:
        other = seen.setdefault(item.name, item)
        if other is not item:
            raise ConfigError(
                f"2 files would be named {item.name} in the output: {other.label} and {item.label}; rename one, leave "
                "it out, or give them ids in a manifest"
            )


def check_places(inputs: Iterable[Input], suffix: str) -> None:
    """Refuse two inputs that would be one output file, or one a directory of the other. Raises ConfigError."""
    seen: dict[str, Input] = {}
    for item in inputs:
        other = seen.setdefault(item.place + suffix, item)
        if other is not item:
            raise ConfigError(
                f"{other.label} and {item.label} would both be written to {path_text(Path(item.place + suffix))}; "
                "rename one, leave it out, or give them ids in a manifest"
            )
    for item in inputs:
        for parent in Path(item.place).parents:
            if str(parent) in seen:
                raise ConfigError(
                    f"{path_text(parent)} would be the output of {seen[str(parent)].label} and a directory for that of "
                    f"{item.label}; rename one, leave it out, or give them ids in a manifest"
                )
