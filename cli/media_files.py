"""Media named on a command line: which files, of which modality, and how they travel in a chat request."""

import base64
import mimetypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cli.media_search import Unreadable, walk
from cli.terminal import os_words
from preprocess.types import Modality

# Containers and codecs that the standard table does not know on every system.
_EXTRA_TYPES = {
    ".mkv": "video/x-matroska",
    ".webm": "video/webm",
    ".ts": "video/mp2t",
    ".m4a": "audio/mp4",
    ".flac": "audio/flac",
    ".opus": "audio/opus",
    ".ogg": "audio/ogg",
    ".wav": "audio/wav",
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".heic": "image/heic",
}

_NAMES = {Modality.IMAGE: "a picture", Modality.VIDEO: "a video", Modality.AUDIO: "a sound"}
_MOVING_PICTURES = frozenset({"GIF", "WebP", "AVIF"})


class MediaFileError(Exception):
    """A path that names no usable medium; the message says which and why."""


def path_text(path: Path) -> str:
    """The path as text. A file name is any bytes: those that are no UTF-8 become `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def media_type(path: Path) -> str:
    """MIME type by file name; "" when the name says nothing."""
    return _EXTRA_TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or ""


def modality_of(path: Path) -> Modality | None:
    """image, video or audio by file name, None for anything else."""
    kind = media_type(path).partition("/")[0]
    return Modality(kind) if kind in set(Modality) else None


def media_files(paths: Iterable[Path], modality: Modality | None = None) -> list[tuple[Path, Modality]]:
    """Those whose names tell what they are; all of them, as `modality`, where that is given."""
    named = [(path, modality or modality_of(path)) for path in paths]
    return [(path, kind) for path, kind in named if kind is not None]


def kind_of_file(mode: int) -> str | None:
    """What a path of this mode leads to, in words; None for a regular file, which alone can be read as a medium."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def refuse_unreadable(path: Path, error: OSError) -> None:
    """Raises MediaFileError."""
    raise MediaFileError(f"{path_text(path)}: {os_words(error)}") from error


def expand_paths(
    paths: Iterable[Path],
    *,
    modality: Modality | None = None,
    recursive: bool = True,
    unreadable: Unreadable = refuse_unreadable,
) -> list[tuple[Path, Modality]]:
    """Files as named; directories become the media files in them, sorted, and those below where `recursive`.

    All files are of `modality` where that is given, whatever their names. `unreadable` is told of directories that
    cannot be read. Raises MediaFileError.
    """
    found: list[tuple[Path, Modality]] = []
    for path in paths:
        if path.is_dir():
            told: list[Path] = []

            def tell(place: Path, error: OSError, told: list[Path] = told) -> None:
                told.append(place)
                unreadable(place, error)

            media = media_files(sorted(walk(path, tell, recursive=recursive)), modality)
            if not media and not told:
                raise MediaFileError(f"{path_text(path)}: no image, video or audio files in this directory")
            found += media
        elif not path.is_file():
            kind_of = kind_of_file(path.stat().st_mode) if path.exists() else None
            raise MediaFileError(f"{path_text(path)}: {f'is {kind_of}, no file' if kind_of else 'no such file'}")
        elif (kind := modality or modality_of(path)) is None:
            raise MediaFileError(
                f"{path_text(path)}: cannot tell image, video or audio from this name; rename it, or use --modality"
            )
        else:
            found.append((path, kind))
    return found


def recognised_part(path: Path, wanted: Modality | None) -> tuple[Modality, dict[str, Any]]:
    """`chat_part` of a file whose bytes are what is wanted; of what they are, where that is None.

    A video serves where a sound is wanted, and a moving picture where a video is. Raises MediaFileError.
    """
    # Only here: completion and help are quick.
    from preprocess.recognise import modality_of as modality_of_content
    from preprocess.sniff import sniff

    content = _read(path)
    kind, found = sniff(content), modality_of_content(content)
    if found is None:
        raise MediaFileError(f"{path_text(path)} is no picture, video or sound but {kind}")
    serves = wanted is None or found is wanted
    serves |= (wanted, found) == (Modality.AUDIO, Modality.VIDEO)
    serves |= (wanted, found) == (Modality.VIDEO, Modality.IMAGE) and kind in _MOVING_PICTURES
    if not serves:
        raise MediaFileError(f"{path_text(path)} is {_NAMES[found]} ({kind}): attach it as {found.value}")
    modality = wanted or found
    return modality, _part(path, modality, content)


def chat_part(path: Path, modality: Modality) -> dict[str, Any]:
    """The file as a content part of a chat message, its bytes in a data: URL. Raises MediaFileError."""
    return _part(path, modality, _read(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MediaFileError(f"{path_text(path)}: {os_words(error)}") from error


def _part(path: Path, modality: Modality, content: bytes) -> dict[str, Any]:
    kind = media_type(path) or f"{modality}/octet-stream"
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}
