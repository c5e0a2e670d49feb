"""Whether a sound file is cut short, from what its own headers declare; the decoders play what is there without a word.

    WAV, RF64, RIFX, Wave64, AIFF, AU, CAF   the size of the data chunk against the bytes that follow
    MP4, M4A                                 the size of the media data against the bytes that follow
    Matroska, WebM                           the size of the segment against the bytes that follow
    AVI                                      the size of the outermost chunk against the bytes that follow
    Ogg                                      the length of the last page, and its end-of-stream mark
    FLAC                                     the number of samples, to compare with those decoded
    MP3                                      the same where there is a Xing header, but it is often a little off

MP4, Matroska and AVI tell where each piece of sound belongs, so what is left of such a file is right as far as it goes,
and is given with a warning, as it is of a video. The others are refused.

Recorders that write to a pipe do not know the size and leave 0 or the largest number there is: that declares nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final

from preprocess.sniff import sniff

# Placeholders for an unknown size lie just below or at 2^31 and at 2^32 - 1; no file that long is let in.
_LEAST_UNKNOWN_SIZE: Final = 0x7FFF0000
_LEAST_UNKNOWN_LONG_SIZE: Final = 1 << 62
# Some writers count their own header into the size of the data.
_SLACK_BYTES: Final = 64
# Chunks, boxes or blocks in front of the sound; files have tens. More are walked past for seconds, and say nothing.
_MAX_CHUNKS: Final = 200_000
_TABLED: Final = frozenset({"MP4", "M4A", "Matroska", "AVI"})
_OGG_HEADER_BYTES: Final = 27
_OGG_END_FLAG: Final = 4


def num_missing_bytes(content: bytes) -> int:
    """Bytes that the headers declare beyond the end of the content; 0 for a whole file and for other kinds of file."""
    kind = sniff(content)
    measure = _DECLARED_END.get(kind)
    end = None if measure is None else measure(content)
    if end is None:
        return 0
    slack = 0 if kind == "Ogg" else _SLACK_BYTES
    return end - len(content) if end > len(content) + slack else 0


def may_be_cut(content: bytes) -> bool:
    """Whether the sound of a file of this kind is given as far as it goes."""
    return sniff(content) in _TABLED


def num_declared_samples(content: bytes) -> int | None:
    """Samples per channel that a FLAC header declares; None for an unknown number and for other kinds of file."""
    if content[:4] != b"fLaC" or len(content) < 26 or content[4] & 0x7F:
        return None
    # STREAMINFO, always first: 20 bits of rate, 3 of channels, 5 of depth, 36 of samples.
    packed = int.from_bytes(content[18:26], "big")
    return packed & ((1 << 36) - 1) or None


def num_announced_samples(content: bytes) -> int | None:
    """Samples per channel that the Xing header of an MP3 file announces, without priming and padding; None without one.

    Joined and edited files keep the header of their first part, so it is no more than an announcement.
    """
    at = _behind_id3(content)
    head = content[at : at + 4]
    # Layer III, any version.
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    is_mpeg1, is_mono = head[1] & 0x18 == 0x18, head[3] & 0xC0 == 0xC0
    at += 4 + ((17 if is_mono else 32) if is_mpeg1 else (9 if is_mono else 17))
    tag = content[at : at + 8 + 4 + 4 + 100 + 4 + 24]
    if tag[:4] not in (b"Xing", b"Info") or len(tag) < 12 or not tag[7] & 1:
        return None
    num_samples = int.from_bytes(tag[8:12], "big") * (1152 if is_mpeg1 else 576)
    encoder = tag[8 + 4 + 4 * bool(tag[7] & 2) + 100 * bool(tag[7] & 4) + 4 * bool(tag[7] & 8) :]
    if encoder[:4] in (b"LAME", b"Lavf", b"Lavc") and len(encoder) >= 24:
        trimmed = int.from_bytes(encoder[21:24], "big")
        num_samples -= (trimmed >> 12) + (trimmed & 0xFFF)
    return num_samples if num_samples > 0 else None


def _behind_id3(content: bytes) -> int:
    """Where the sound starts behind ID3 tags, which may hold megabytes of cover pictures."""
    at = 0
    while content.startswith(b"ID3", at) and at + 10 <= len(content):
        size = sum((content[at + 6 + place] & 0x7F) << 7 * (3 - place) for place in range(4))
        at += 10 + size + 10 * bool(content[at + 5] & 0x10)
    return at


def lacks_end_mark(content: bytes) -> bool:
    """Whether an Ogg file ends without its end-of-stream mark, as one cut between pages does, and a captured stream."""
    if sniff(content) != "Ogg":
        return False
    at = _last_ogg_page(content)
    return not content[at + 5] & _OGG_END_FLAG if at + _OGG_HEADER_BYTES <= len(content) else True


def _riff_end(content: bytes) -> int | None:
    end = _chunk_end(content, b"data", ">" if content[:4] == b"RIFX" else "<")
    if content[:4] in (b"RF64", b"BW64") and content[12:16] == b"ds64" and len(content) >= 36:
        start = content.find(b"data", 36)
        size = int.from_bytes(content[28:36], "little")
        return start + 8 + size if start >= 0 and 0 < size < _LEAST_UNKNOWN_LONG_SIZE else None
    return end


def _avi_end(content: bytes) -> int | None:
    """Of the first gigabyte; what follows in longer files declares itself."""
    size = int.from_bytes(content[4:8], "little")
    return 8 + size if 0 < size < _LEAST_UNKNOWN_SIZE else None


def _w64_end(content: bytes) -> int | None:
    """Wave64: chunks are named by 16 bytes, and their sizes of 8 bytes count those 24 too and are padded to 8."""
    at = 40
    for _ in range(_MAX_CHUNKS):
        if at + 24 > len(content):
            break
        (size,) = struct.unpack_from("<Q", content, at + 16)
        if content.startswith(b"data", at):
            return int(at + size) if 24 < size < _LEAST_UNKNOWN_LONG_SIZE else None
        at += max(24, size + -size % 8)
    return None


def _caf_end(content: bytes) -> int | None:
    at = 8
    for _ in range(_MAX_CHUNKS):
        if at + 12 > len(content):
            break
        (size,) = struct.unpack_from(">Q", content, at + 4)
        if content.startswith(b"data", at):
            return int(at + 12 + size) if size < _LEAST_UNKNOWN_LONG_SIZE else None
        at += 12 + size
    return None


def _mp4_end(content: bytes) -> int | None:
    """The furthest end of a box of media data."""
    return max((end for name, end in mp4_boxes(content) if name == b"mdat"), default=None)


def mp4_boxes(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Names and ends of the outermost boxes, up to a number that no file has."""
    at = 0
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(content):
            return
        size = int.from_bytes(content[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(content[at + 8 : at + 16], "big")
        # 0 means up to the end of the file.
        if size < 8:
            return
        yield content[at + 4 : at + 8], at + size
        at += size


def _matroska_end(content: bytes) -> int | None:
    head_size, at = _ebml_size(content, 4)
    if head_size is None or content[at + head_size : at + head_size + 4] != b"\x18\x53\x80\x67":
        return None
    size, start = _ebml_size(content, at + head_size + 4)
    return None if size is None else start + size


def _ebml_size(content: bytes, at: int) -> tuple[int | None, int]:
    """A size of 1 to 8 bytes, None for the unknown one, and where it ends."""
    first = content[at : at + 1]
    if not first or not first[0]:
        return None, at
    num_bytes = 9 - first[0].bit_length()
    mask = (1 << 7 * num_bytes) - 1
    size = int.from_bytes(content[at : at + num_bytes], "big") & mask
    return (None if size == mask else size), at + num_bytes


def _aiff_end(content: bytes) -> int | None:
    return _chunk_end(content, b"SSND", ">")


def _chunk_end(content: bytes, wanted: bytes, order: str) -> int | None:
    """Where the wanted chunk ends by its own size; None when there is no such chunk, or its size says nothing."""
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(content):
            break
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
    return ogg_page_end(content, _last_ogg_page(content))


def _last_ogg_page(content: bytes) -> int:
    at = 0
    while (end := ogg_page_end(content, at)) < len(content) and content.startswith(b"OggS", end):
        at = end
    return at


def ogg_page_end(content: bytes, at: int) -> int:
    """Where the page that starts at `at` ends by its own header."""
    if at + _OGG_HEADER_BYTES > len(content):
        return at + _OGG_HEADER_BYTES
    table = at + _OGG_HEADER_BYTES
    num_segments = content[table - 1]
    return table + num_segments + sum(content[table : table + num_segments])


_DECLARED_END: Final[dict[str, Callable[[bytes], int | None]]] = {
    "WAV": _riff_end,
    "Wave64": _w64_end,
    "AIFF": _aiff_end,
    "AU": _au_end,
    "CAF": _caf_end,
    "MP4": _mp4_end,
    "M4A": _mp4_end,
    "Matroska": _matroska_end,
    "AVI": _avi_end,
    "Ogg": _ogg_end,
}
