"""Files written one after the other into one, of which decoders read the first without a word.

    WAV, RIFX, AIFF    another file where the outermost chunk ends
    AU                 where the sound ends
    CAF, FLV           where another chunk or tag should be
    MP4, M4A           a second file type box behind the tables of the first; not in fragments, which may repeat it

MP3, AAC, AC-3, Ogg, FLAC, Matroska, AVI and transport streams are read on to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from preprocess.sniff import sniff
from preprocess.truncation import mp4_boxes

# A file has tens, and an hour of FLV 300,000.
_MAX_CHUNKS: Final = 1_000_000
_HEAD_BYTES: Final = 1024
_LEAST_UNKNOWN_SIZE: Final = 0x7FFF0000


def joined_warnings(content: bytes) -> tuple[str, ...]:
    """One where a file of the same kind follows the one that is read."""
    kind = sniff(content)
    follows = _FOLLOWERS.get(kind)
    if follows is None or not follows(content, kind):
        return ()
    return (f"another file follows the first ({kind}) within the same; it is left out",)


def _begins_at(content: bytes, at: int, kind: str) -> bool:
    return at < len(content) and sniff(content[at : at + _HEAD_BYTES]) == kind


def _behind_form(content: bytes, kind: str) -> bool:
    size = int.from_bytes(content[4:8], "little" if content[:4] == b"RIFF" else "big")
    if not 0 < size < _LEAST_UNKNOWN_SIZE:
        return False
    # Not everybody pads to even sizes.
    return any(_begins_at(content, 8 + end, kind) for end in {size, size + size % 2})


def _behind_au(content: bytes, kind: str) -> bool:
    start, size = int.from_bytes(content[4:8], "big"), int.from_bytes(content[8:12], "big")
    return 0 < size < _LEAST_UNKNOWN_SIZE and _begins_at(content, start + size, kind)


def _behind_caf(content: bytes, kind: str) -> bool:
    at = 8
    for _ in range(_MAX_CHUNKS):
        if at + 12 > len(content):
            break
        if content.startswith(b"caff", at):
            return True
        # An unknown size, -1, is past every end.
        at += 12 + int.from_bytes(content[at + 4 : at + 12], "big")
    return False


def _behind_tags(content: bytes, kind: str) -> bool:
    at = int.from_bytes(content[5:9], "big") + 4
    for _ in range(_MAX_CHUNKS):
        if at + 11 > len(content):
            break
        if content.startswith(b"FLV\1", at):
            return True
        at += 15 + int.from_bytes(content[at + 1 : at + 4], "big")
    return False


def _behind_boxes(content: bytes, kind: str) -> bool:
    names = [name for name, _ in mp4_boxes(content)]
    return b"moof" not in names and b"ftyp" in names[1:] and names.count(b"moov") > 1


_FOLLOWERS: Final[dict[str, Callable[[bytes, str], bool]]] = {
    "WAV": _behind_form,
    "AIFF": _behind_form,
    "AU": _behind_au,
    "CAF": _behind_caf,
    "FLV": _behind_tags,
    "MP4": _behind_boxes,
    "M4A": _behind_boxes,
}
