"""What the first bytes of a packet say, where a container's flags are not proof enough.

A container marks packets as points to start from; some mark too many. A start is proven here if the codec's own
header promises that every picture from there on, in display order, decodes exactly without anything before it:

    h264         an IDR picture, or a recovery point SEI with frame count 0 and exact match
    hevc         an IDR, CRA or BLA picture
    vp8, vp9     a key frame
    mpeg4        an I-VOP
    mjpeg, prores, dnxhd    every packet

Sources: ITU-T H.264 7.3.1, D.1.8; H.265 7.3.1.2, 7.4.2.2; RFC 6386 9.1; VP9 bitstream 6.2; ISO 14496-2 6.2.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Buffer = bytes | memoryview

PROVABLE_CODECS: Final = frozenset({"h264", "hevc", "vp8", "vp9", "mpeg4", "mjpeg", "prores", "dnxhd"})
SKIPPING_CODECS: Final = frozenset({"h264", "hevc"})
"""Of these FFmpeg's own decoders can leave out single pictures that no other needs."""

_START_CODE: Final = b"\0\0\1"
_SEI_RECOVERY_POINT: Final = 6
_HEVC_IRAP: Final = range(16, 22)
_HEVC_VCL_END: Final = 32
_VOP_START: Final = b"\0\0\1\xb6"


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one packet."""

    is_start: bool
    """Decoding can start here; see above. Only asked of packets that the container marks."""
    is_shown: bool = True
    layer: int = 0
    """HEVC's temporal layer."""
    may_be_left_out: bool = False
    """HEVC: no picture of the same layer refers to it. Pictures of higher layers may."""


class BitstreamReader:
    """Reads the packets of one stream. `codec` is FFmpeg's name of it, `extradata` its global headers."""

    def __init__(self, codec: str, extradata: bytes) -> None:
        self._codec = codec
        self.length_bytes = _length_bytes(codec, extradata)
        """Size of the length before each NAL unit; 0 where start codes part them instead."""
        self.reads_every_packet = codec in ("hevc", "vp8")
        """Otherwise only the packets that the container marks as starts need reading."""

    def facts(self, packet: Buffer) -> Facts:
        """What is known of a packet; of a damaged one, or of an unknown codec's, that it is no start."""
        match self._codec:
            case "h264":
                return Facts(self._starts_h264(packet))
            case "hevc":
                return self._hevc(packet)
            case "vp8":
                # Bit 0 is 0 for a key frame, bit 4 is 1 for a frame that is shown.
                return Facts(packet[0] & 1 == 0, is_shown=bool(packet[0] & 0x10))
            case "vp9":
                return Facts(_starts_vp9(packet[0]))
            case "mpeg4":
                at = bytes(packet[:4096]).find(_VOP_START)
                return Facts(0 <= at < len(packet) - 4 and packet[at + 4] >> 6 == 0)
        return Facts(self._codec in PROVABLE_CODECS)

    def _starts_h264(self, packet: Buffer) -> bool:
        recovers = False
        for nal in self.nals(packet):
            kind = nal[0] & 31
            if kind == 6:
                recovers = recovers or _promises_recovery(nal[1:])
            elif 1 <= kind <= 5:
                return kind == 5 or recovers
        return False

    def _hevc(self, packet: Buffer) -> Facts:
        for nal in self.nals(packet):
            kind = nal[0] >> 1 & 63
            is_base_layer = len(nal) > 1 and not nal[0] & 1 and nal[1] >> 3 == 0
            if kind < _HEVC_VCL_END and is_base_layer:
                # Below 16, the even kinds are those that their own layer does not refer to.
                droppable = kind < _HEVC_IRAP.start and kind % 2 == 0
                return Facts(kind in _HEVC_IRAP, layer=(nal[1] & 7) - 1, may_be_left_out=droppable)
        return Facts(is_start=False)

    def nals(self, packet: Buffer) -> Iterator[Buffer]:
        """The NAL units of a packet that have at least their header."""
        if not self.length_bytes:
            yield from _nals_between_start_codes(bytes(packet))
            return
        at = 0
        while at + self.length_bytes < len(packet):
            start = at + self.length_bytes
            at = start + int.from_bytes(packet[at:start], "big")
            if at > len(packet) or at == start:
                return
            yield packet[start:at]


def _length_bytes(codec: str, extradata: bytes) -> int:
    """Size of the length before each NAL unit; 0 where start codes part them instead."""
    if codec == "h264" and len(extradata) > 4 and extradata[0] == 1:
        return (extradata[4] & 3) + 1
    if codec == "hevc" and len(extradata) > 21 and not extradata.startswith((_START_CODE, b"\0" + _START_CODE)):
        return (extradata[21] & 3) + 1
    return 0


def _nals_between_start_codes(packet: bytes) -> Iterator[bytes]:
    at = packet.find(_START_CODE)
    while at >= 0:
        start = at + len(_START_CODE)
        at = packet.find(_START_CODE, start)
        nal = packet[start : at if at >= 0 else len(packet)]
        if nal:
            yield nal


def _promises_recovery(sei: Buffer) -> bool:
    """Whether an H.264 SEI unit holds a recovery point at this very picture that matches exactly."""
    at = 0
    while at + 2 <= len(sei):
        fields = []
        for _ in range(2):
            total = 0
            while at < len(sei) and sei[at] == 255:
                total, at = total + 255, at + 1
            if at >= len(sei):
                return False
            fields.append(total + sei[at])
            at += 1
        kind, size = fields
        if kind == _SEI_RECOVERY_POINT and at < len(sei):
            # A frame count of 0 is the bit 1, the flag for an exact match follows.
            return sei[at] & 0xC0 == 0xC0
        at += size
    return False


def _starts_vp9(first: int) -> bool:
    if first >> 6 != 2:
        return False
    # Profile 3 has one more bit before "shows an existing frame" and "is no key frame"; both must be 0.
    is_profile_3 = first & 0x30 == 0x30
    return not first & (0x06 if is_profile_3 else 0x0C)
