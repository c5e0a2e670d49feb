"""Ogg files that are several files one after the other, as radio stations and recorders write them, or damaged.

libsndfile plays the first of them only, and FFmpeg stops where the next one has another number of channels. libsndfile
also joins what is left of a damaged file without a word; FFmpeg tells where it belongs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from preprocess.truncation import ogg_page_end

_FIRST_PAGE_FLAG: Final = 2
_CHECKSUM_AT: Final = 22
_ALL_ONES: Final = 0xFFFFFFFF
_REVERSED_BITS: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


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


def is_intact(link: bytes) -> bool:
    """Whether pages follow each other without gaps to the end, each with the checksum of its bytes."""
    at = 0
    while at < len(link):
        end = ogg_page_end(link, at)
        if end > len(link) or not link.startswith(b"OggS", at):
            return False
        page = bytearray(link[at:end])
        declared = int.from_bytes(page[_CHECKSUM_AT : _CHECKSUM_AT + 4], "little")
        page[_CHECKSUM_AT : _CHECKSUM_AT + 4] = bytes(4)
        if _checksum(page) != declared:
            return False
        at = end
    return True


def _checksum(page: bytearray) -> int:
    """The CRC of Ogg: that of zlib with the bits of bytes and result the other way round, from 0 and not inverted."""
    reversed_crc = zlib.crc32(page.translate(_REVERSED_BITS), _ALL_ONES) ^ _ALL_ONES
    return int.from_bytes(reversed_crc.to_bytes(4, "little").translate(_REVERSED_BITS), "big")
