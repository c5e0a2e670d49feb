"""One value as bytes that vouch for themselves, cut into slices that a node moves in one go.

    magic "MIMOKV01" | value size, u64 | slice, u32 | slices, u32 | key size, u16 | key | xxh3-64 of the value, u64 | ..

All numbers little-endian. Who reads knows everything but the checksum beforehand, and takes nothing that differs. All
slices carry the checksum of the whole value, so slices of two puts never make one value. Slice 0 is kept under the key
itself and written last: while it is there, the others were.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from epd.cache.l3.base import Buffer

__all__ = ["RecordDamaged", "cut", "flat", "measure", "num_slices", "open_slice", "pack", "scatter", "slice_key"]

MAGIC: Final = b"MIMOKV01"
_FRONT: Final = struct.Struct("<8sQIIH")
_SUM: Final = struct.Struct("<Q")


class RecordDamaged(Exception):
    """Bytes that are no slice of the value asked for: torn, foreign, of another size or another put. Says why."""


def flat(buffer: Buffer) -> memoryview:
    """The same bytes, one dimension of them. Raises TypeError for what is not contiguous."""
    view = memoryview(buffer)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def num_slices(value_bytes: int, io_bytes: int) -> int:
    """Of a value; an empty one has a slice, too."""
    return max(1, -(-value_bytes // io_bytes))


def slice_key(key: bytes, index: int) -> bytes:
    """Where a node keeps this slice. Should it be another value's key, its record says so."""
    return key if index == 0 else b"%b/%d" % (key, index)


def measure(pieces: Sequence[memoryview]) -> int:
    """Checksum of the pieces as one value."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def pack(key: bytes, pieces: Sequence[memoryview], io_bytes: int) -> list[tuple[bytes, list[Buffer]]]:
    """Node key and pieces of each slice, in the order to write them; of the value nothing is copied."""
    value_bytes = sum(piece.nbytes for piece in pieces)
    count = num_slices(value_bytes, io_bytes)
    digest = _SUM.pack(measure(pieces))
    slices: list[tuple[bytes, list[Buffer]]] = []
    for index in reversed(range(count)):
        head = _front(key, index, count, value_bytes) + digest
        body = pieces if count == 1 else cut(pieces, index * io_bytes, min((index + 1) * io_bytes, value_bytes))
        slices.append((slice_key(key, index), [head, *body]))
    return slices


def open_slice(record: memoryview, key: bytes, index: int, count: int, value_bytes: int) -> tuple[int, memoryview]:
    """Checksum of the whole value, and this slice's bytes, not verified. Raises RecordDamaged."""
    front = _front(key, index, count, value_bytes)
    start = len(front) + _SUM.size
    if record.nbytes < start:
        raise RecordDamaged(f"{record.nbytes} bytes are no record")
    if record[: len(front)] != front:
        raise RecordDamaged("it begins like something else")
    return _SUM.unpack_from(record, len(front))[0], record[start:]


def scatter(payload: memoryview, targets: Sequence[memoryview], start: int) -> None:
    """Copy into the targets, taken as one value, from byte `start` on. Raises RecordDamaged when it does not fit."""
    parts = list(cut(targets, start, start + payload.nbytes))
    if sum(part.nbytes for part in parts) != payload.nbytes:
        raise RecordDamaged(f"{payload.nbytes} bytes reach beyond the value")
    done = 0
    for part in parts:
        part[:] = payload[done : done + part.nbytes]
        done += part.nbytes


def cut(pieces: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Bytes `[start, stop)` of the pieces taken as one value."""
    for piece in pieces:
        if stop <= 0:
            return
        if start < piece.nbytes:
            yield piece[max(0, start) : stop]
        start -= piece.nbytes
        stop -= piece.nbytes


def _front(key: bytes, index: int, count: int, value_bytes: int) -> bytes:
    return _FRONT.pack(MAGIC, value_bytes, index, count, len(key)) + key
