"""Rows in safetensors files: found where they lie, and written by streaming, never held together in memory.

A volume is a safetensors file that `mimo encode` wrote: each tensor has an entry of the metadata under its own name,
which tells what the rows are and what they were made from. So every output says for itself what of it is done.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import xxhash

# The safetensors library reads no longer header.
MAX_HEADER_BYTES: Final = 100_000_000
METADATA: Final = "__metadata__"
"""No name for a tensor: the format has its own use for it."""
_LENGTH_BYTES: Final = 8
_COPY_BYTES: Final = 1 << 20
_DTYPES: Final = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


class NotAVolume(Exception):
    """A file that is no whole output of `mimo encode`."""


class HeaderTooLarge(Exception):
    """So many tensors, or of so long names, that nothing could read the file."""


class RowsDamaged(Exception):
    """Rows that are no longer what was written."""


class About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one tensor; JSON in the metadata of its file."""

    model: str
    key: str
    """Identity of the content together with the settings in force, as the encoder server names it."""
    settings: str
    """Identity of all that decides about rows but the content; see `LocalEncoder.settings`."""
    modality: str
    rows: int
    width: int
    dtype: str
    grid_thw: tuple[int, int, int] | None
    timestamps_s: tuple[float, ...]
    num_audio_rows: int
    warnings: tuple[str, ...]
    checksum: str
    """xxh3_64 of the rows, 16 hexadecimal digits."""
    input: str | None = None
    """The path or URL as given, where the tensor is named otherwise."""

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * _DTYPES[self.dtype][1]


@dataclass(slots=True, eq=False)
class Volume:
    """A file that may move while rows in it are known."""

    path: Path


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Rows on disk: `about.num_bytes` bytes from `offset` of the volume."""

    about: About
    name: str
    volume: Volume
    offset: int

    @property
    def source(self) -> str:
        """The path or URL that the rows were made from, as it was given."""
        return self.about.input or self.name


def header_of(tensors: Iterable[tuple[str, About]]) -> bytes:
    """The head of a file that holds these tensors in this order. The same tensors give the same bytes.

    Raises HeaderTooLarge.
    """
    metadata: dict[str, str] = {}
    entries: dict[str, Any] = {METADATA: metadata}
    start = 0
    for name, about in tensors:
        stop = start + about.num_bytes
        code = _DTYPES[about.dtype][0]
        entries[name] = {"dtype": code, "shape": [about.rows, about.width], "data_offsets": [start, stop]}
        metadata[name] = msgspec.json.encode(about).decode()
        start = stop
    text = msgspec.json.encode(entries)
    # Rows begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise HeaderTooLarge(f"names and metadata of {len(metadata)} tensors take {len(text)} bytes")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_rows(path: Path, name: str, about: About, rows: memoryview) -> Stored:
    """A file of one tensor."""
    header = header_of([(name, about)])
    with path.open("wb", buffering=0) as file:
        for part in (memoryview(header), rows):
            while part:
                part = part[file.write(part) or 0 :]
    return Stored(about, name, Volume(path), len(header))


def write_volume(path: Path, header: bytes, tensors: Sequence[Stored], *, durable: bool) -> None:
    """A file of these rows, copied from where they are. `durable`: safe from a power failure when this returns.

    Raises RowsDamaged, OSError.
    """
    with path.open("wb") as file:
        file.write(header)
        opened: tuple[Path, IO[bytes]] | None = None
        try:
            for stored in tensors:
                if opened is None or opened[0] != stored.volume.path:
                    if opened is not None:
                        opened[1].close()
                    opened = (stored.volume.path, stored.volume.path.open("rb"))
                copy_rows(stored, opened[1], file)
        finally:
            if opened is not None:
                opened[1].close()
        if durable:
            file.flush()
            os.fsync(file.fileno())


def copy_rows(stored: Stored, source: IO[bytes], target: IO[bytes]) -> None:
    """Raises RowsDamaged when they are not what was written."""
    digest = xxhash.xxh3_64()
    source.seek(stored.offset)
    left = stored.about.num_bytes
    while left and (chunk := source.read(min(left, _COPY_BYTES))):
        digest.update(chunk)
        target.write(chunk)
        left -= len(chunk)
    if left or digest.hexdigest() != stored.about.checksum:
        raise RowsDamaged(f"{stored.volume.path}: the rows of {stored.name} are not what was written there")


def read_volume(path: Path) -> list[Stored]:
    """What a file says to hold, in the order of the file.

    Raises NotAVolume for anything that is not whole, OSError for a file that cannot be read.
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
            raise NotAVolume(f"{path}: no safetensors file")
        start = _LENGTH_BYTES + header_bytes
        found = _tensors(file.read(header_bytes), Volume(path), start)
        if size_bytes != start + sum(stored.about.num_bytes for stored in found):
            raise NotAVolume(f"{path}: not as long as its header says")
    return found


def sound_tensors(stored: Sequence[Stored]) -> list[Stored]:
    """Those whose rows are what was written: all are read. Raises OSError."""
    found = []
    with open(os.devnull, "wb") as nowhere:
        for one in stored:
            with one.volume.path.open("rb") as file:
                try:
                    copy_rows(one, file, nowhere)
                except RowsDamaged:
                    continue
            found.append(one)
    return found


def _tensors(header: bytes, volume: Volume, start: int) -> list[Stored]:
    try:
        entries = json.loads(header)
        metadata = entries.pop(METADATA)
        found = []
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            about = msgspec.json.decode(metadata[name], type=About)
            first, last = entry["data_offsets"]
            if first != end or last - first != about.num_bytes or entry["shape"] != [about.rows, about.width]:
                raise NotAVolume(f"{volume.path}: {name} is not what its metadata says")
            end = last
            found.append(Stored(about, name, volume, start + first))
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise NotAVolume(f"{volume.path}: not written by mimo encode") from error
    return found
