"""Whether a sound file is cut short, from what its own headers declare; the decoders play what is there without a word.

    WAV, RF64, AIFF, AU   the size of the data chunk against the bytes that follow
    Ogg                   the length of the last page against the bytes that follow, and its end-of-stream mark
    FLAC                  the number of samples, to compare with those decoded

Recorders that write to a pipe do not know the size and leave 0 or the largest number there is: that declares nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from preprocess.sniff import sniff

# Placeholders for an unknown size lie just below or at 2^31 and at 2^32 - 1; no file that long is let in.
_LEAST_UNKNOWN_SIZE: Final = 0x7FFF0000
# Some writers count their own header into the size of the data.
_SLACK_BYTES: Final = 64
_OGG_HEADER_BYTES: Final = 27
_OGG_END_FLAG: Final = 4


def num_missing_bytes(content: bytes) -> int:
    """Bytes that the headers declare beyond the end of the content; 0 for a whole file and for other kinds of file."""
    measure = _DECLARED_END.get(sniff(content))
    end = None if measure is None else measure(content)
    if end is None:
        return 0
    slack = 0 if sniff(content) == "Ogg" else _SLACK_BYTES
    return end - len(content) if end > len(content) + slack else 0


def num_declared_samples(content: bytes) -> int | None:
    """Samples per channel that a FLAC header declares; None for an unknown number and for other kinds of file."""
    if content[:4] != b"fLaC" or len(content) < 26 or content[4] & 0x7F:
        return None
    # STREAMINFO, always first: 20 bits of rate, 3 of channels, 5 of depth, 36 of samples.
    packed = int.from_bytes(content[18:26], "big")
    return packed & ((1 << 36) - 1) or None


def lacks_end_mark(content: bytes) -> bool:
    """Whether an Ogg file ends without its end-of-stream mark, as one cut between pages does, and a captured stream."""
    if sniff(content) != "Ogg":
        return False
    at = _last_ogg_page(content)
    return not content[at + 5] & _OGG_END_FLAG if at + _OGG_HEADER_BYTES <= len(content) else True


def _riff_end(content: bytes) -> int | None:
    end = _chunk_end(content, b"data", "<")
    if content[:4] == b"RF64" and content[12:16] == b"ds64" and len(content) >= 36:
        start = content.find(b"data", 36)
        size = int.from_bytes(content[28:36], "little")
        return start + 8 + size if start >= 0 and 0 < size < 1 << 62 else None
    return end


def _aiff_end(content: bytes) -> int | None:
    return _chunk_end(content, b"SSND", ">")


def _chunk_end(content: bytes, wanted: bytes, order: str) -> int | None:
    """Where the wanted chunk ends by its own size; None when there is no such chunk, or its size says nothing."""
    at = 12
    while at + 8 <= len(content):
        (size,) = struct.unpack_from(f"{order}I", content, at + 4)
        if content[at : at + 4] == wanted:
            return None if size == 0 or size >= _LEAST_UNKNOWN_SIZE else at + 8 + size
        at += 8 + size + size % 2
    return None


def _au_end(content: bytes) -> int | None:
    if len(content) < 12:
        return None
    start, size = struct.unpack_from(">II", content, 4)
    return None if size == 0 or size >= _LEAST_UNKNOWN_SIZE else int(start + size)


def _ogg_end(content: bytes) -> int | None:
    return _ogg_page_end(content, _last_ogg_page(content))


def _last_ogg_page(content: bytes) -> int:
    at = 0
    while (end := _ogg_page_end(content, at)) < len(content) and content.startswith(b"OggS", end):
        at = end
    return at


def _ogg_page_end(content: bytes, at: int) -> int:
    if at + _OGG_HEADER_BYTES > len(content):
        return at + _OGG_HEADER_BYTES
    table = at + _OGG_HEADER_BYTES
    num_segments = content[table - 1]
    return table + num_segments + sum(content[table : table + num_segments])


_DECLARED_END: Final[dict[str, Callable[[bytes], int | None]]] = {
    "WAV": _riff_end,
    "AIFF": _aiff_end,
    "AU": _au_end,
    "Ogg": _ogg_end,
}
