"""FLAC files that are several files one after the other: libsndfile plays the first of them only."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from preprocess.errors import MediaTooLarge
from preprocess.truncation import num_declared_samples

# The signature and the head of STREAMINFO, which always comes first and has this length; last block or not.
_START: Final = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")
# Opening one costs the same however little is in it.
_MAX_LINKS: Final = 1000


def flac_links(content: bytes) -> Iterator[bytes]:
    """The files that `content` is a chain of; `content` itself when it is one file. Raises MediaTooLarge."""
    found = _START.finditer(content, _head_end(content))
    starts = [match.start() for match in itertools.islice(found, _MAX_LINKS)]
    if len(starts) == _MAX_LINKS:
        raise MediaTooLarge(f"the FLAC file is a chain of more than {_MAX_LINKS} files, which is the limit")
    ends = [*starts, len(content)]
    for start, end in zip([0, *starts], ends, strict=True):
        yield content[start:end] if starts else content


def num_chained_samples(content: bytes) -> int | None:
    """Samples per channel that the headers of all links declare together; None where one declares none."""
    total = 0
    for link in flac_links(content):
        num_samples = num_declared_samples(link)
        if num_samples is None:
            return None
        total += num_samples
    return total


def _head_end(content: bytes) -> int:
    """Where the first file's sound begins: its pictures and notes may hold anything."""
    at, is_last = 4, False
    while not is_last and at + 4 <= len(content):
        is_last = bool(content[at] & 0x80)
        at += 4 + int.from_bytes(content[at + 1 : at + 4], "big")
    return at
