"""Opening media containers with PyAV, confined: content comes from memory and may not name other files or hosts."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import av
import av.error
import av.logging
from av.stream import Discard

from preprocess.errors import MediaUndecodable, MediaUnsupported
from preprocess.sniff import IMAGE_KINDS, describe, sniff

if TYPE_CHECKING:
    from av.container import InputContainer

# FFmpeg logs through a callback that needs the interpreter; decoder threads writing to it can deadlock at exit.
av.logging.set_level(None)

# Playlists and scripts (hls, dash, concat, sdp) are absent: they would make FFmpeg open what they name.
_DEMUXERS: Final = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,h264,hevc,obu,ivf,flv,asf,gif,apng,"
    "webp_anim,ogg,wav,w64,mp3,aac,flac,aiff,caf,au,amr,ac3,eac3,loas,tta,wv,ape"
)
_OPTIONS: Final = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"}
_TEXT_KINDS: Final = frozenset({"text", "JSON text", "empty file"})
# FFmpeg opens these as videos of one frame.
_STILL_KINDS: Final = frozenset({"AVIF", "HEIC"})
_REFUSED_KINDS: Final = frozenset(
    {"SVG", "HTML page", "XML text", "PDF document", "ZIP archive", "gzip archive", "PostScript document"}
    | {"ELF program", "HLS playlist"}
)


def open_container(content: bytes, wanted: str) -> InputContainer:
    """An open container over the bytes; the caller closes it. `wanted` ("a video") is for the message.

    Raises MediaUndecodable or MediaUnsupported, saying what was found.
    """
    kind = sniff(content)
    if kind in _TEXT_KINDS:
        raise MediaUndecodable(f"expected {wanted}, found {describe(content)}")
    if kind in _STILL_KINDS:
        raise MediaUnsupported(f"expected {wanted}, found {describe(content)}")
    try:
        return av.open(io.BytesIO(content), mode="r", options=dict(_OPTIONS), metadata_errors="replace")
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if kind in IMAGE_KINDS or kind in _REFUSED_KINDS:
            raise MediaUnsupported(f"expected {wanted}, found {describe(content)}") from error
        raise MediaUndecodable(
            f"expected {wanted}, but the file ({describe(content)}) cannot be opened: damaged, or of another kind"
        ) from error


def read_only(container: InputContainer, stream: Any) -> None:
    """Lets the demuxer pass over the data of all other streams."""
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all


class PacketReader:
    """Packets of one stream, in file order. A damaged file ends early instead of failing; `damage` then says how."""

    def __init__(self, container: InputContainer, stream: Any) -> None:
        self._container = container
        self._stream = stream
        self.damage: str | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._container.demux(self._stream)
        except IndexError:
            # A track that appears on the way is missing from PyAV's list, and trips it after the last packet.
            pass
        except (av.error.FFmpegError, OSError) as error:
            # FFmpeg's own words carry error numbers and "<none>" for the file's name.
            damage = "data ends too soon" if isinstance(error, av.error.EOFError) else "damaged data"
            self.damage = f"reading stopped before the end of the file: {damage}"


class FrameReader:
    """Decoded frames of one stream, in display order, drained at the end of the file.

    Packets that do not decode are skipped and counted in `num_bad_packets`. `check_deadline` is called at every packet
    and may raise.
    """

    def __init__(
        self, container: InputContainer, stream: Any, check_deadline: Callable[[], None] = lambda: None
    ) -> None:
        self._packets = PacketReader(container, stream)
        self._stream = stream
        self._check_deadline = check_deadline
        self.num_bad_packets = 0

    def __iter__(self) -> Iterator[Any]:
        drained = False
        for packet in self._packets:
            self._check_deadline()
            drained = packet.size == 0
            yield from self._decode(packet)
        if not drained:
            yield from self._decode(None)

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [self._packets.damage] if self._packets.damage is not None else []
        if self.num_bad_packets:
            found.append(f"{self.num_bad_packets} damaged packets were skipped")
        return tuple(found)

    def _decode(self, packet: Any) -> list[Any]:
        try:
            return list(self._stream.codec_context.decode(packet))
        except av.error.EOFError:
            return []
        except (av.error.FFmpegError, ValueError):
            self.num_bad_packets += 1
            return []
