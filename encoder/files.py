"""Opening the small files of a checkpoint. They come from elsewhere: whatever is wrong with one is said in one line.

Re-exported by `encoder.checkpoint`, where other packages find it.
"""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preprocess.ranges import printable

# Configurations take kilobytes, tokenizers megabytes, the index of a thousand shards some tens.
MAX_TEXT_BYTES = 256 << 20
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class CheckpointError(ValueError):
    """A checkpoint is damaged or does not hold what its config promises. The message names files and tensors."""


def file_size(path: Path) -> int:
    """Bytes of a regular file, links followed. Raises CheckpointError saying what is there instead."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{printable(str(path))} {_trouble(path, error)}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(status.st_mode)), "no file")
        raise CheckpointError(f"{printable(str(path))} is {kind}, expected a file")
    return status.st_size


def open_file(path: Path) -> int:
    """A descriptor of a regular file, open for reading. Raises CheckpointError."""
    file_size(path)
    try:
        # Should a pipe come in between, it is not waited for.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{printable(str(path))} {_trouble(path, error)}") from error


def read_text(path: Path) -> str:
    """The content as UTF-8, a byte order mark in front left away. Raises CheckpointError."""
    if (size_bytes := file_size(path)) > MAX_TEXT_BYTES:
        raise CheckpointError(
            f"{printable(str(path))} has {size_bytes:,} bytes; a file of this kind has at most {MAX_TEXT_BYTES:,}"
        )
    try:
        with os.fdopen(open_file(path), encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{printable(str(path))} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{printable(str(path))} {_trouble(path, error)}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object. Raises CheckpointError."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{printable(str(path))} is nested too deeply to be a file of a checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{printable(str(path))} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{printable(str(path))} holds no JSON object; download it again")
    return content


def _trouble(path: Path, error: OSError | ValueError) -> str:
    """The end of a sentence that begins with the path."""
    if not isinstance(error, OSError):
        return f"is no file name: {error}"
    if error.errno == errno.ENOENT:
        return "is a link to a file that is missing" if path.is_symlink() else "is missing"
    if error.errno == errno.ELOOP:
        return "is a symbolic link that leads to itself"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "cannot be read: permission denied"
    if error.errno == errno.ENAMETOOLONG:
        return "has a name too long for a file"
    return f"cannot be read: {error.strerror or error}"
