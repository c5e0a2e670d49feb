"""Ogg files that are several files one after the other, as radio stations and recorders write them.

libsndfile plays the first of them only, and FFmpeg stops where the next one has another number of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from preprocess.truncation import ogg_page_end

_FIRST_PAGE_FLAG: Final = 2


def ogg_links(content: bytes) -> Iterator[bytes]:
    """The files that `content` is a chain of; `content` itself when it is one file, or not Ogg."""
    start = at = 0
    # Files of several tracks begin with a first page for each.
    in_head = True
    while content.startswith(b"OggS", at) and at + 5 < len(content):
        is_first = bool(content[at + 5] & _FIRST_PAGE_FLAG)
        if is_first and not in_head:
            yield content[start:at]
            start = at
        in_head = is_first
        at = ogg_page_end(content, at)
    yield content[start:] if start else content
