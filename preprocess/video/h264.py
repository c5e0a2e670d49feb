"""H.264 headers, as far as they tell which pictures a picture may refer to: parameter sets and slice headers.

And the other way round: `stand_in` writes a picture that has another's place among the references and costs nothing.

What is not understood (fields, long-term references, scaling lists, damage) is Unreadable.

Source: ITU-T H.264 7.3.2.1 and 7.3.2.2 (parameter sets), 7.3.3 (slice headers).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from preprocess.video.bitstream import BitstreamReader, Buffer

_HIGH_PROFILES: Final = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})
# A slice header with weights for 32 references fits in here many times over; what follows it does not matter.
_MAX_HEADER_BYTES: Final = 256
_OWN_PPS: Final = 255
"""Number of the parameter set for `stand_in`; a stream that has it is Unreadable."""
P_SLICE: Final = 0
B_SLICE: Final = 1
I_SLICE: Final = 2


class Unreadable(Exception):
    """The analysis does not cover this stream."""


@dataclass(slots=True)
class Picture:
    """One frame, as its slice headers have it. Pictures are named by their place in file order."""

    is_idr: bool
    is_reference: bool
    frame_num: int
    order_lsb: int
    order_delta: int | None
    """Of the other field; None where the headers leave it out."""
    is_plain: bool = True
    """Nothing but slices and remarks is in the packet."""
    slices: list[Slice] = field(default_factory=list)
    unmarked: list[int] = field(default_factory=list)
    """Differences of picture numbers: these are no references any more afterwards."""


@dataclass(frozen=True, slots=True)
class Slice:
    kind: int
    num_active: tuple[int, int]
    """Length of both reference lists."""
    moves: tuple[tuple[int, ...], tuple[int, ...]]
    """For both lists, signed differences of picture numbers that are moved to the front."""


class _Bits:
    """Exp-Golomb codes and plain bits from a NAL unit's payload."""

    def __init__(self, payload: bytes) -> None:
        clean = payload.replace(b"\0\0\3", b"\0\0")
        self._num_bits = 8 * len(clean)
        self._value = int.from_bytes(clean, "big")
        self._at = 0

    def u(self, num_bits: int) -> int:
        self._at += num_bits
        if self._at > self._num_bits:
            raise Unreadable("header is too short")
        return (self._value >> (self._num_bits - self._at)) & ((1 << num_bits) - 1)

    def ue(self) -> int:
        rest = self._value & ((1 << (self._num_bits - self._at)) - 1)
        zeros = self._num_bits - self._at - rest.bit_length()
        if not rest or zeros > 32:
            raise Unreadable("header is damaged")
        self._at += zeros
        return self.u(zeros + 1) - 1

    def se(self) -> int:
        code = self.ue()
        return (code + 1) // 2 if code % 2 else -(code // 2)


@dataclass(frozen=True, slots=True)
class Sps:
    """Of a sequence parameter set, what headers and lists depend on."""

    number: int
    num_macroblocks: int
    has_chroma: bool
    frame_num_bits: int
    order_bits: int
    max_references: int


@dataclass(frozen=True, slots=True)
class _Pps:
    sps: int
    has_order_delta: bool
    default_active: tuple[int, int]
    weighted_p: bool
    weighted_b: bool
    has_redundancy: bool


def _read_sps(payload: bytes) -> tuple[int, Sps]:
    bits = _Bits(payload)
    profile = bits.u(8)
    bits.u(16)
    number, chroma = bits.ue(), 1
    if profile in _HIGH_PROFILES:
        chroma = bits.ue()
        if chroma == 3 and bits.u(1):
            raise Unreadable("colour planes apart")
        bits.ue()
        bits.ue()
        bits.u(1)
        if bits.u(1):
            raise Unreadable("scaling lists")
    frame_num_bits = bits.ue() + 4
    if bits.ue() != 0:
        raise Unreadable("order counts of another type")
    order_bits = bits.ue() + 4
    max_references = bits.ue()
    if bits.u(1):
        raise Unreadable("gaps in numbering are allowed")
    num_macroblocks = (bits.ue() + 1) * (bits.ue() + 1)
    if not bits.u(1):
        raise Unreadable("fields")
    return number, Sps(number, num_macroblocks, chroma != 0, frame_num_bits, order_bits, max(max_references, 1))


def _read_pps(payload: bytes) -> tuple[int, _Pps]:
    bits = _Bits(payload)
    number, sps = bits.ue(), bits.ue()
    bits.u(1)
    has_order_delta = bool(bits.u(1))
    if bits.ue():
        raise Unreadable("slice groups")
    active = (bits.ue() + 1, bits.ue() + 1)
    weighted_p, weighted_b = bool(bits.u(1)), bits.u(2) == 1
    bits.se()
    bits.se()
    bits.se()
    bits.u(2)
    return number, _Pps(sps, has_order_delta, active, weighted_p, weighted_b, bool(bits.u(1)))


class HeaderReader:
    """Pictures from packets. Parameter sets come from the global headers and from packets."""

    def __init__(self, extradata: bytes) -> None:
        self._bitstream = BitstreamReader("h264", extradata)
        self.length_bytes = self._bitstream.length_bytes
        self._sps: dict[int, Sps] = {}
        self._pps: dict[int, _Pps] = {}
        for nal in _global_nals(extradata):
            self._parameters(nal)

    def read(self, packet: Buffer) -> Picture:
        """Raises Unreadable."""
        picture: Picture | None = None
        is_plain = True
        for nal in self._bitstream.nals(packet):
            kind = nal[0] & 31
            if kind in (7, 8):
                self._parameters(bytes(nal))
                is_plain = False
            elif kind in (1, 5):
                picture = self._slice(bytes(nal[:_MAX_HEADER_BYTES]), picture)
            elif kind in (2, 3, 4, 20, 21):
                raise Unreadable("data partitions or layers")
        if picture is None:
            raise Unreadable("a packet without a picture")
        picture.is_plain = is_plain
        return picture

    def parameters(self) -> Sps:
        """Raises Unreadable where pictures do not all have the same."""
        found = set(self._sps.values())
        if len(found) != 1 or _OWN_PPS in self._pps:
            raise Unreadable("several parameter sets, or no number left for another")
        return found.pop()

    def _parameters(self, nal: bytes) -> None:
        if nal[0] & 31 == 7:
            number, sps = _read_sps(nal[1:])
            if self._sps.setdefault(number, sps) != sps:
                raise Unreadable("parameters change")
        elif nal[0] & 31 == 8:
            key, pps = _read_pps(nal[1:])
            if self._pps.setdefault(key, pps) != pps:
                raise Unreadable("parameters change")

    def _slice(self, nal: bytes, picture: Picture | None) -> Picture:
        bits = _Bits(nal[1:])
        is_idr, is_reference = nal[0] & 31 == 5, bool(nal[0] & 0x60)
        bits.ue()
        kind = bits.ue() % 5
        if kind > I_SLICE:
            raise Unreadable("switching slices")
        pps = self._pps.get(bits.ue())
        sps = self._sps.get(pps.sps) if pps is not None else None
        if pps is None or sps is None:
            raise Unreadable("parameters are missing")
        frame_num = bits.u(sps.frame_num_bits)
        if is_idr:
            bits.ue()
        order_lsb = bits.u(sps.order_bits)
        order_delta = bits.se() if pps.has_order_delta else None
        if pps.has_redundancy and bits.ue():
            raise Unreadable("redundant pictures")
        if picture is None:
            picture = Picture(is_idr, is_reference, frame_num, order_lsb, order_delta)
        elif (picture.frame_num, picture.order_lsb, picture.is_reference) != (frame_num, order_lsb, is_reference):
            raise Unreadable("two pictures in a packet")
        picture.slices.append(_read_lists(bits, kind, pps, sps))
        if is_reference:
            picture.unmarked = _read_marking(bits, is_idr)
        return picture


def _global_nals(extradata: bytes) -> list[bytes]:
    """Parameter sets of an avcC box."""
    if len(extradata) < 7 or extradata[0] != 1:
        raise Unreadable("no global headers")
    nals: list[bytes] = []
    at = 5
    for mask in (31, 255):
        if at >= len(extradata):
            break
        count, at = extradata[at] & mask, at + 1
        for _ in range(count):
            size = int.from_bytes(extradata[at : at + 2], "big")
            nals.append(extradata[at + 2 : at + 2 + size])
            at += 2 + size
    return [nal for nal in nals if nal]


def _read_lists(bits: _Bits, kind: int, pps: _Pps, sps: Sps) -> Slice:
    """From the direct mode's flag to the weights."""
    if kind == I_SLICE:
        return Slice(kind, (0, 0), ((), ()))
    if kind == B_SLICE:
        bits.u(1)
    active = pps.default_active
    if bits.u(1):
        active = (bits.ue() + 1, bits.ue() + 1 if kind == B_SLICE else 0)
    active = (active[0], active[1] if kind == B_SLICE else 0)
    if max(active) > 32:
        raise Unreadable("header is damaged")
    moves: list[tuple[int, ...]] = [(), ()]
    for which in range(1 + (kind == B_SLICE)):
        moves[which] = _read_moves(bits)
    if pps.weighted_p if kind == P_SLICE else pps.weighted_b:
        bits.ue()
        if sps.has_chroma:
            bits.ue()
        for _ in range(sum(active)):
            for num_values in (2, 4) if sps.has_chroma else (2,):
                if bits.u(1):
                    for _ in range(num_values):
                        bits.se()
    return Slice(kind, active, (moves[0], moves[1]))


def _read_moves(bits: _Bits) -> tuple[int, ...]:
    moves: list[int] = []
    if bits.u(1):
        while (operation := bits.ue()) != 3:
            if operation > 1 or len(moves) > 32:
                raise Unreadable("long-term references")
            difference = bits.ue() + 1
            moves.append(difference if operation else -difference)
    return tuple(moves)


def _read_marking(bits: _Bits, is_idr: bool) -> list[int]:
    if is_idr:
        bits.u(1)
        if bits.u(1):
            raise Unreadable("long-term references")
        return []
    unmarked: list[int] = []
    if bits.u(1):
        while operation := bits.ue():
            if operation != 1 or len(unmarked) > 32:
                raise Unreadable("long-term references")
            unmarked.append(bits.ue() + 1)
    return unmarked


class _Writer:
    """Bits of a NAL unit's payload."""

    def __init__(self) -> None:
        self._bits: list[str] = []

    def u(self, value: int, num_bits: int) -> None:
        self._bits.append(f"{value:0{num_bits}b}")

    def ue(self, value: int) -> None:
        binary = f"{value + 1:b}"
        self._bits.append("0" * (len(binary) - 1) + binary)

    def se(self, value: int) -> None:
        self.ue(2 * value - 1 if value > 0 else -2 * value)

    def nal(self, header: int) -> bytes:
        """With the end mark and the bytes that keep start codes out, after its length."""
        text = "".join(self._bits) + "1"
        text += "0" * (-len(text) % 8)
        payload = bytearray()
        num_zeros = 0
        for byte in int(text, 2).to_bytes(len(text) // 8, "big"):
            if num_zeros == 2 and byte <= 3:
                payload.append(3)
                num_zeros = 0
            payload.append(byte)
            num_zeros = 0 if byte else num_zeros + 1
        return bytes([header]) + bytes(payload)


def stand_in(picture: Picture, sps: Sps, *, length_bytes: int) -> bytes:
    """A packet with a picture of the same number, order and marking, every macroblock of which is a copy of another's.

    To the pictures after it, it is the same reference picture with another content. Not for IDR pictures. It brings a
    parameter set of its own: variable length codes, no weights, no deblocking.
    """
    parameters = _Writer()
    parameters.ue(_OWN_PPS)
    parameters.ue(sps.number)
    parameters.u(0, 1)
    parameters.u(picture.order_delta is not None, 1)
    # One slice group, one reference for each list, no weights.
    for value in (0, 0, 0):
        parameters.ue(value)
    parameters.u(0, 3)
    for value in (0, 0, 0):
        parameters.se(value)
    # The deblocking filter is under control of the slice; intra prediction is not constrained, nothing redundant.
    parameters.u(0b100, 3)
    one = _Writer()
    one.ue(0)
    one.ue(P_SLICE)
    one.ue(_OWN_PPS)
    one.u(picture.frame_num, sps.frame_num_bits)
    one.u(picture.order_lsb, sps.order_bits)
    if picture.order_delta is not None:
        one.se(picture.order_delta)
    # The default length and order of the reference list.
    one.u(0, 2)
    one.u(bool(picture.unmarked), 1)
    if picture.unmarked:
        for difference in picture.unmarked:
            one.ue(1)
            one.ue(difference - 1)
        one.ue(0)
    one.se(0)
    one.ue(1)
    one.ue(sps.num_macroblocks)
    nals = (parameters.nal(0x68), one.nal(0x61))
    return b"".join(len(nal).to_bytes(length_bytes, "big") + nal for nal in nals)
