"""What a file is to be used as, found from its own bytes: a picture, a video, a sound, or none of these.

Containers that may hold either (MP4, Matroska, Ogg, ASF) are searched for their list of tracks. Nothing is decoded and
nothing is trusted: what is read is bounded, and a wrong guess is found by the decoder.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from preprocess.sniff import IMAGE_KINDS, sniff
from preprocess.types import Modality

_HEAD_BYTES: Final = 64 << 10
_VIDEO_KINDS: Final = frozenset({"AVI", "FLV", "MPEG-PS", "MPEG-TS"})
_AUDIO_KINDS: Final = frozenset(
    {"WAV", "AIFF", "FLAC", "MP3", "AAC", "CAF", "Wave64", "AMR", "AC-3", "DTS", "AU", "M4A"}
)
_MAX_BOXES: Final = 4096
_MOOV_BYTES: Final = 16 << 20
# The handler of a track: box type, version and flags, predefined, and what it handles.
_HANDLER: Final = re.compile(rb"hdlr.{8}(vide|soun)", re.DOTALL)
# TrackType, one byte long: 1 is video, 2 is audio.
_TRACK_TYPE: Final = re.compile(rb"\x83\x81([\x01\x02])")
_ASF_VIDEO: Final = b"\xc0\xef\x19\xbc\x4d\x5b\xcf\x11\xa8\xfd\x00\x80\x5f\x5c\x44\x2b"

_MIME: Final = {
    "JPEG": "image/jpeg",
    "PNG": "image/png",
    "GIF": "image/gif",
    "WebP": "image/webp",
    "BMP": "image/bmp",
    "TIFF": "image/tiff",
    "AVIF": "image/avif",
    "HEIC": "image/heic",
    "WAV": "audio/wav",
    "FLAC": "audio/flac",
    "MP3": "audio/mpeg",
    "AAC": "audio/aac",
    "M4A": "audio/mp4",
    "AIFF": "audio/aiff",
    "AVI": "video/x-msvideo",
    "FLV": "video/x-flv",
    "MPEG-TS": "video/mp2t",
    "MPEG-PS": "video/mpeg",
}


class Content(Protocol):
    """Bytes, a memoryview of them, or a mapped file."""

    def __len__(self) -> int: ...
    def __getitem__(self, piece: slice, /) -> bytes | memoryview: ...


def modality_of(content: Content) -> Modality | None:
    """None for what is no picture, video or sound. An animated picture is a picture."""
    kind = sniff(bytes(content[:_HEAD_BYTES]))
    if kind in IMAGE_KINDS:
        return Modality.IMAGE
    if kind in _VIDEO_KINDS:
        return Modality.VIDEO
    if kind in _AUDIO_KINDS:
        return Modality.AUDIO
    match kind:
        case "MP4":
            return _by_track(set(_HANDLER.findall(_moov(content))), video=b"vide", audio=b"soun")
        case "Matroska":
            return _by_track(set(_TRACK_TYPE.findall(bytes(content[:_HEAD_BYTES]))), video=b"\x01", audio=b"\x02")
        case "Ogg":
            return Modality.VIDEO if b"\x80theora" in bytes(content[:_HEAD_BYTES]) else Modality.AUDIO
        case "ASF":
            return Modality.VIDEO if _ASF_VIDEO in bytes(content[:_HEAD_BYTES]) else Modality.AUDIO
    return None


def media_type(content: Content) -> str:
    """The MIME type of a medium that a browser may be told; everything else is application/octet-stream."""
    kind = sniff(bytes(content[:_HEAD_BYTES]))
    modality = modality_of(content)
    if modality is None:
        return "application/octet-stream"
    by_container = {"MP4": "mp4", "Matroska": "webm" if b"webm" in bytes(content[:64]) else "x-matroska", "Ogg": "ogg"}
    if kind in by_container:
        return f"{modality.value}/{by_container[kind]}"
    return _MIME.get(kind, "application/octet-stream")


def _by_track(found: set[bytes], *, video: bytes, audio: bytes) -> Modality:
    """With any pictures it is a video; where no track was found the decoder may know better."""
    return Modality.AUDIO if audio in found and video not in found else Modality.VIDEO


def _moov(content: Content) -> bytes:
    """The box that lists an MP4's tracks, wherever it stands; empty if there is none."""
    position = 0
    for _ in range(_MAX_BOXES):
        head = bytes(content[position : position + 16])
        if len(head) < 8:
            break
        size_bytes = int.from_bytes(head[:4], "big")
        if size_bytes == 1:
            size_bytes = int.from_bytes(head[8:16], "big")
        if head[4:8] == b"moov":
            end = position + min(size_bytes or _MOOV_BYTES, _MOOV_BYTES)
            return bytes(content[position:end])
        if size_bytes < 8:
            break
        position += size_bytes
    return b""
