"""One embedding as bytes that vouch for themselves.

    magic "MIMOEMB1" | header size, u32 little-endian | xxh3-64 of the header, u64 | header, msgpack | rows, C order

A record is used when everything fits: the header's own checksum, the key it is stored under, the number of rows of its
layout, and the checksum of the rows. So a torn write, a foreign file and another version are misses, not wrong answers.
"""

import struct
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from encoder.cache.arena import checksum
from encoder.tiers.base import Buffer
from preprocess.types import MediaKey, MediaLayout

MAGIC: Final = b"MIMOEMB1"
_PREFIX: Final = struct.Struct("<8sIQ")
_MAX_HEADER_BYTES: Final = 1 << 24
_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class RecordDamaged(Exception):
    """Bytes that are not a whole record of this key. Says why."""


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the rows `[layout.num_rows, width]`; `checksum` is theirs, xxh3-64."""

    key: MediaKey
    layout: MediaLayout
    width: int
    dtype: str
    checksum: int
    warnings: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of the rows."""
        return self.layout.num_rows * self.width * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Record:
    header: RecordHeader
    rows: memoryview


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordHeader)


def pack(header: RecordHeader, rows: Buffer) -> tuple[bytes, Buffer]:
    """A record in two pieces, the rows not copied."""
    if len(rows) != header.size_bytes:
        raise ValueError(f"{header.key} has {len(rows)} bytes of rows, its layout says {header.size_bytes}")
    encoded = _encoder.encode(header)
    return _PREFIX.pack(MAGIC, len(encoded), xxhash.xxh3_64_intdigest(encoded)) + encoded, rows


def unpack(content: Buffer, key: MediaKey) -> Record:
    """The record of `key`, its rows verified and aliasing `content`. Raises RecordDamaged."""
    view = memoryview(content)
    if len(view) < _PREFIX.size:
        raise RecordDamaged(f"{len(view)} bytes are no record")
    magic, header_bytes, header_sum = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise RecordDamaged("it begins like something else")
    end = _PREFIX.size + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or end > len(view):
        raise RecordDamaged("its header is cut off")
    encoded = view[_PREFIX.size : end]
    if xxhash.xxh3_64_intdigest(encoded) != header_sum:
        raise RecordDamaged("its header has another checksum")
    try:
        header = _decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise RecordDamaged(f"its header does not fit: {error}") from error
    if header.key != key:
        raise RecordDamaged(f"it is the record of {header.key}")
    if header.dtype not in _ITEM_BYTES or header.width < 1 or len(view) - end != header.size_bytes:
        raise RecordDamaged(f"it holds {len(view) - end} bytes of rows, which its header does not describe")
    rows = view[end:]
    if checksum(rows) != header.checksum:
        raise RecordDamaged("its rows have another checksum")
    return Record(header, rows)
