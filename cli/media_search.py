"""Files below directories and files that match patterns; a directory that cannot be read is told, not skipped."""

import glob
import os
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

Unreadable = Callable[[Path, OSError], None]
"""Told of each directory that could not be read."""
# What only says that there is nothing there.
_NOTHING: Final = (FileNotFoundError, NotADirectoryError)
_PARTS: Final = re.compile(r"/+")


def walk(directory: Path, unreadable: Unreadable, *, recursive: bool = True) -> Iterator[Path]:
    """The files of a directory and, where `recursive`, below it, in no order; links to directories are not followed."""
    for entry in _entries(str(directory), unreadable):
        path = directory / entry.name
        if entry.is_dir(follow_symlinks=False):
            if recursive:
                yield from walk(path, unreadable)
        elif _is_file(entry, unreadable):
            yield path


def matches(pattern: str, unreadable: Unreadable) -> list[Path]:
    """What there is by this pattern, as the shell would expand it, sorted. `**` is any number of directories, those
    behind links included; what begins with a dot has to be asked for."""
    root = "/" if pattern.startswith("/") else ""
    parts = [part for part in _PARTS.split(pattern) if part]
    return sorted({Path(found) for found in _matches(root, parts, (), unreadable) if found})


def _matches(base: str, parts: list[str], above: tuple[str, ...], unreadable: Unreadable) -> Iterator[str]:
    """`above` are the real paths of the directories that the present `**` went through: a link may lead back."""
    if not parts:
        yield base
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _matches(base, rest, (), unreadable)
        real = os.path.realpath(base or ".")
        if real in above:
            return
        for entry in _entries(base or ".", unreadable):
            path = os.path.join(base, entry.name)
            if entry.name.startswith("."):
                continue
            if _is_directory(entry):
                yield from _matches(path, parts, (*above, real), unreadable)
            elif not rest:
                yield path
    elif glob.has_magic(part):
        for entry in _entries(base or ".", unreadable):
            is_asked_for = part.startswith(".") or not entry.name.startswith(".")
            if is_asked_for and fnmatchcase(entry.name, part):
                yield from _matches(os.path.join(base, entry.name), rest, (), unreadable)
    elif os.path.lexists(path := os.path.join(base, part)):
        yield from _matches(path, rest, (), unreadable)


def _entries(directory: str, unreadable: Unreadable) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except _NOTHING:
        return []
    except OSError as error:
        unreadable(Path(directory), error)
        return []


def _is_file(entry: "os.DirEntry[str]", unreadable: Unreadable) -> bool:
    try:
        return entry.is_file()
    except OSError as error:
        unreadable(Path(entry.path), error)
        return False


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
