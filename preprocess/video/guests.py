"""Which files decoders other than our own may be given.

They know none of our limits and open whatever their FFmpeg recognises, playlists that name other files included. So
they get only files that can be nothing but MP4 or Matroska, and that our own pass over the packets found sound. Each
of them must then show the first frame as we do, and what else comes out is checked frame by frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from preprocess.container import open_container
from preprocess.video.index import VideoIndex
from preprocess.video.look import FirstLook
from preprocess.video.stream import pick_video_stream

_AV1: Final = frozenset({"libdav1d", "libaom-av1", "av1"})
_EBML: Final = b"\x1aE\xdf\xa3"
_HEAD_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Guest:
    """A file that another decoder may have: what it is told, and compared with."""

    content: bytes
    index: VideoIndex
    look: FirstLook
    stream_index: int
    time_base: Fraction
    num_video_streams: int
    codec: str
    """FFmpeg's name of it, or of the library that decodes it."""

    @property
    def is_av1(self) -> bool:
        return self.codec in _AV1


def admit(content: bytes, index: VideoIndex, look: FirstLook) -> Guest | str:
    """The file for other decoders, or why none gets it."""
    if not _is_nothing_else(content):
        return "it is neither MP4 nor Matroska"
    if look.oddity is not None:
        return look.oddity
    if index.warnings:
        return index.warnings[0]
    if index.times_s is None:
        return "its frames have no times of their own"
    with open_container(content, "a video") as container:
        stream = pick_video_stream(container, content)
        num_streams, codec = len(container.streams.video), stream.codec_context.codec.name
        guest = Guest(content, index, look, stream.index, stream.time_base, num_streams, codec)
    # Of AV1 our own pass proves nothing but the count and the times.
    return guest if index.scan_reason is None or guest.is_av1 else index.scan_reason


def _is_nothing_else(content: bytes) -> bool:
    """Whether the first bytes leave no choice to whoever guesses the format from them.

    MP4 by its brand box, Matroska by its signature and a document type. Playlists begin with text.
    """
    if content.startswith(_EBML):
        return b"matroska" in content[:_HEAD_BYTES] or b"webm" in content[:_HEAD_BYTES]
    return content[:3] == b"\0\0\0" and content[4:8] == b"ftyp"
