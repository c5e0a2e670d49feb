"""Seeded damage: what a number makes of a valid file, the same every time."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Final

Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], None]

_EXTREMES: Final = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 2**63, -1)
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES: Final = 1024 * 1024


def mutate(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """One to four kinds of damage on a copy. `others` are files of other formats, to be spliced in."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        rng.choice(_MUTATIONS)(rng, data, others)
        del data[_MAX_BYTES:]
    if data.startswith(_PNG) and rng.random() < 0.7:
        # Else nothing but the checksums is ever tested.
        _mend_png(data)
    return bytes(data)


def _place(rng: random.Random, data: bytearray) -> int:
    """An offset; headers at either end of a file are where the decisions are."""
    size = max(1, len(data))
    where = rng.random()
    if where < 0.4:
        return rng.randrange(min(size, 256))
    if where < 0.55:
        return size - 1 - rng.randrange(min(size, 1024))
    return rng.randrange(size)


def _length(rng: random.Random, data: bytearray) -> int:
    return min(len(data), int(2 ** rng.uniform(0, 13)))


def _flip_bits(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64)) if data else 0):
        data[_place(rng, data)] ^= 1 << rng.randrange(8)


def _set_bytes(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    for _ in range(rng.choice((1, 2, 8)) if data else 0):
        data[_place(rng, data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _run(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, length = _place(rng, data), _length(rng, data)
    fill = rng.choice((b"\0", b"\xff", None))
    data[start : start + length] = rng.randbytes(length) if fill is None else fill * length


def _cut_end(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[_place(rng, data) :]


def _cut_start(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[: _place(rng, data)]


def _cut_out(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(rng, data)
    del data[start : start + _length(rng, data)]


def _insert(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(rng, data)
    data[start:start] = rng.randbytes(_length(rng, data))


def _duplicate(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start, length = _place(rng, data), _length(rng, data)
    piece = bytes(data[start : start + length])
    at = _place(rng, data) if rng.random() < 0.5 else start
    data[at:at] = piece * rng.choice((1, 1, 2, 16))


def _swap(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    length = _length(rng, data)
    first, second = sorted((_place(rng, data), _place(rng, data)))
    if second + length <= len(data) and first + length <= second:
        piece = data[first : first + length]
        data[first : first + length] = data[second : second + length]
        data[second : second + length] = piece


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    start = rng.randrange(max(1, len(other)))
    piece = other[start : start + int(2 ** rng.uniform(2, 14))]
    at = _place(rng, data)
    replaced = len(piece) if rng.random() < 0.5 else 0
    data[at : at + replaced] = piece


def _head_of_another(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    head = rng.choice(others)[: rng.choice((4, 12, 32, 512))]
    data[: len(head)] = head


def _length_field(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """An extreme number where a size, a count or an offset might be."""
    size = rng.choice((1, 2, 2, 4, 4, 4, 8))
    start = _place(rng, data)
    if rng.random() < 0.7:
        start -= start % min(size, 4)
    value = rng.choice(_EXTREMES) if rng.random() < 0.8 else rng.choice((len(data), 1 << rng.randrange(40)))
    order = "big" if rng.random() < 0.5 else "little"
    data[start : start + size] = (value % (1 << 8 * size)).to_bytes(size, order)  # type: ignore[arg-type]


def _nudge_field(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    size = rng.choice((1, 2, 4))
    start = _place(rng, data)
    order = "big" if rng.random() < 0.5 else "little"
    value = int.from_bytes(data[start : start + size], order) + rng.choice((-16, -2, -1, 1, 2, 16, 255))  # type: ignore[arg-type]
    data[start : start + size] = (value % (1 << 8 * size)).to_bytes(size, order)  # type: ignore[arg-type]


def _mend_png(data: bytearray) -> None:
    """Right checksums for all chunks that are whole."""
    at = len(_PNG)
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            return
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4


_MUTATIONS: Final[tuple[Mutation, ...]] = (
    _flip_bits,
    _flip_bits,
    _set_bytes,
    _run,
    _cut_end,
    _cut_start,
    _cut_out,
    _insert,
    _duplicate,
    _swap,
    _splice,
    _head_of_another,
    _length_field,
    _length_field,
    _length_field,
    _nudge_field,
)
