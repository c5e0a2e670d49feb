"""Safetensors files of a checkpoint directory: finding them, checking their headers, reading bytes. No torch.

A file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range), then the tensors without gaps.
Several files have an index beside them, `model.safetensors.index.json`, that says which file holds which tensor.

Bytes are read with `pread` into memory of the caller rather than mapped: mapped pages count as memory of the process
for as long as the kernel keeps them, so a mapped file next to a filled model would look like twice the model.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from encoder.files import MAX_TEXT_BYTES, CheckpointError, file_size, open_file, read_json_object, read_text
from preprocess.ranges import printable, shown_value

__all__ = [
    "INDEX_FILE",
    "ITEM_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_TEXT_BYTES",
    "CheckpointError",
    "FileTensor",
    "Scan",
    "TensorReader",
    "file_size",
    "find_tensors",
    "mismatches",
    "read_header",
    "read_json_object",
    "read_text",
    "scan_tensors",
    "shown",
]

INDEX_FILE = "model.safetensors.index.json"
# The format's own limit; a longer header is a file of another kind.
MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# More than any published model has; each costs memory before anything is compared.
MAX_TENSORS = 4_000_000
_LENGTH_BYTES = 8
_MAX_FILE_NAME_BYTES = 255
_MAX_DIMS = 16
_TOO_LARGE = 2**63
_NUM_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where one tensor lies: `size_bytes` from `offset` of `file`, row-major; `dtype` as the header spells it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class TensorReader:
    """Reads tensors' bytes; files are opened when first needed and closed at the end of the `with`."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, tensor: FileTensor, buffer: memoryview, *, start_byte: int = 0) -> None:
        """Fill a writable buffer of bytes from the tensor's byte `start_byte` on. Raises CheckpointError."""
        if start_byte + len(buffer) > tensor.size_bytes:
            raise ValueError(f"{tensor.name} has {tensor.size_bytes} bytes, asked for [{start_byte}, +{len(buffer)})")
        if tensor.file not in self._descriptors:
            self._descriptors[tensor.file] = open_file(tensor.file)
        done = 0
        while done < len(buffer):
            # One call reads 2 GiB at most.
            count = os.preadv(self._descriptors[tensor.file], [buffer[done:]], tensor.offset + start_byte + done)
            if count == 0:
                raise CheckpointError(
                    f"{printable(tensor.file.name)} ended inside {printable(tensor.name)}: it was cut while being read"
                )
            done += count


@dataclass(frozen=True, slots=True)
class Scan:
    """What the weight files of a directory hold, as far as they can be read.

    `faults` are files that cannot be used, a line each, and `unread` the tensors that the index puts into those.
    Without an index nobody knows what a damaged file was to hold: then `knows_all` is false. `conflicts` are files and
    index contradicting each other. `absent` are tensors, by file, that are in no file though the index says so.
    """

    tensors: dict[str, FileTensor] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    unread: frozenset[str] = frozenset()
    absent: dict[str, list[str]] = field(default_factory=dict)
    knows_all: bool = True

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, a line each."""
        promises = [
            f"{printable(file)} lacks {shown(names)}, which {INDEX_FILE} says it holds"
            for file, names in self.absent.items()
        ]
        return [*self.faults, *self.conflicts, *promises]


def scan_tensors(directory: Path, wanted: Callable[[str], bool]) -> Scan:
    """Read the headers of a directory's weight files: the index's, or every file without an index.

    Files that hold nothing wanted are not opened where there is an index. Raises CheckpointError for a directory
    without weights and for an index that cannot be used; what is wrong with files is in the result.
    """
    index = directory / INDEX_FILE
    has_index = os.path.lexists(index)
    if has_index:
        promised = _read_index(index, wanted)
    else:
        promised = {path.name: [] for path in directory.glob("*.safetensors")}
        if not promised:
            raise CheckpointError(f"*.safetensors is missing: {printable(directory.name)} has no .safetensors file")
    tensors: dict[str, FileTensor] = {}
    faults: list[str] = []
    conflicts: list[str] = []
    unread: list[str] = []
    lacking: dict[str, list[str]] = {}
    for file, names in sorted(promised.items()):
        if has_index and not os.path.lexists(directory / file):
            faults.append(f"{printable(file)} is missing: {index.name} says it holds {shown(names, most=3)}")
            unread += names
            continue
        try:
            header = read_header(directory / file)
        except CheckpointError as error:
            faults.append(str(error).removeprefix(f"{printable(str(directory))}/"))
            unread += names
            continue
        if absent := [name for name in names if name not in header]:
            lacking[file] = absent
        found = {name: tensor for name, tensor in header.items() if wanted(name)}
        if len(tensors) + len(found) > MAX_TENSORS:
            raise CheckpointError(f"{printable(directory.name)} has more than {MAX_TENSORS:,} tensors")
        if twice := sorted(tensors.keys() & found.keys()):
            conflicts += _duplicates(tensors, twice, file)
        tensors |= found
    absent_anywhere = {file: [n for n in names if n not in tensors] for file, names in lacking.items()}
    misplaced = [name for names in lacking.values() for name in names if name in tensors]
    if misplaced:
        conflicts.append(
            f"{index.name} puts tensors into files that do not hold them, though others do: {shown(misplaced)}"
        )
    return Scan(
        tensors=tensors,
        faults=faults,
        conflicts=conflicts,
        unread=frozenset(unread),
        absent={file: names for file, names in absent_anywhere.items() if names},
        knows_all=has_index or not faults,
    )


def find_tensors(directory: Path, wanted: Callable[[str], bool]) -> dict[str, FileTensor]:
    """Return the wanted tensors of a directory by name, when every file is as it should be.

    Raises CheckpointError for a directory without weights, and for all files at once when one is missing or damaged,
    lacks a tensor the index says it holds, or holds one that another file holds too.
    """
    scan = scan_tensors(directory, wanted)
    if scan.problems:
        raise CheckpointError(
            f"weight files of {printable(directory.name)} cannot be used\n" + "\n".join(scan.problems)
        )
    return scan.tensors


def _duplicates(tensors: Mapping[str, FileTensor], twice: Sequence[str], file: str) -> list[str]:
    by_file: dict[str, list[str]] = {}
    for name in twice:
        by_file.setdefault(tensors[name].file.name, []).append(name)
    return [
        f"{shown(names)} {'is' if len(names) == 1 else 'are'} in {printable(other)} and in {printable(file)}"
        for other, names in by_file.items()
    ]


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return a file's tensors by name. Raises CheckpointError naming the file and, where there is one, the tensor."""
    size_bytes, shown_name = file_size(path), printable(path.name)
    with os.fdopen(open_file(path), "rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + header_bytes
        if size_bytes < _LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(f"{shown_name} is not a safetensors file ({size_bytes} bytes)")
        if start > size_bytes:
            raise CheckpointError(f"{shown_name} is cut short: its header ends at byte {start} of {size_bytes}")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise CheckpointError(f"{shown_name} has no readable header: it is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{shown_name} has no readable header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{shown_name} has no readable header: it is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(
            f"{shown_name} has {shown_value(metadata)} as __metadata__, allowed is an object of text by name"
        )
    tensors = {name: _file_tensor(path, start, name, entry) for name, entry in header.items()}
    _check_ranges(path, tensors.values(), start, size_bytes)
    return tensors


def shown(names: Iterable[str], *, most: int = _NUM_NAMES_SHOWN) -> str:
    """Names for a message: joined, the first of them, each on one line however it is spelled."""
    listed = list(names)
    more = len(listed) - most
    first = ", ".join(map(printable, listed[:most]))
    return first + (f" and {more:,} more" if more > 0 else "")


def mismatches(
    needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], not_implemented: Sequence[str] = ()
) -> list[str]:
    """Compare shapes by name: a line per kind of difference that lists its tensors; empty where all is as needed.

    `not_implemented` are tensors, each with its dtype, that the caller cannot read.
    """
    shapes = [
        f"{name} (expected {list(shape)}, found {list(found[name])})"
        for name, shape in needed.items()
        if name in found and found[name] != shape
    ]
    problems: dict[str, Sequence[str]] = {
        "missing": sorted(needed.keys() - found.keys()),
        "unexpected": sorted(found.keys() - needed.keys()),
        "of the wrong shape": shapes,
        "of a dtype that is not implemented": not_implemented,
    }
    return [f"{len(names):,} {kind}: {shown(names)}" for kind, names in problems.items() if names]


def _read_index(index: Path, wanted: Callable[[str], bool]) -> dict[str, list[str]]:
    """The wanted names of each file, sorted. A file name with a folder in it is refused: it could lead elsewhere."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index.name} has no weight_map of tensor names to file names")
    for name, file in weight_map.items():
        is_name = file not in ("", ".", "..") and not any(char in file for char in "/\\\0")
        if not is_name or len(os.fsencode(file)) > _MAX_FILE_NAME_BYTES:
            raise CheckpointError(
                f"{index.name} puts {printable(name)} into {shown_value(file)}, which is "
                "not a file name in its directory"
            )
    names: dict[str, list[str]] = {}
    for name, file in sorted(weight_map.items()):
        if wanted(name):
            names.setdefault(file, []).append(name)
    return names


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"it names {shown(twice)} twice")
    return content


def _file_tensor(path: Path, start: int, name: str, entry: Any) -> FileTensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{printable(path.name)} describes {printable(name)} with {shown_value(entry)}") from None
    # A tensor of many dimensions, or of 2^60 elements in each, is not worth the arithmetic.
    if len(shape) > _MAX_DIMS or not all(type(n) is int and 0 <= n < _TOO_LARGE for n in (*shape, begin, end)):
        raise CheckpointError(f"{printable(path.name)} describes {printable(name)} with {shown_value(entry)}")
    # An unknown dtype is for the reader to refuse, by the tensor's name.
    if dtype in ITEM_BYTES and prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise CheckpointError(
            f"{printable(path.name)} gives {printable(name)} {end - begin} bytes for {dtype} {list(shape)}"
        )
    return FileTensor(name, path, dtype, shape, start + begin, end - begin)


def _check_ranges(path: Path, tensors: Iterable[FileTensor], start: int, size_bytes: int) -> None:
    """The tensors must fill the file from the header to its end, without gaps and without overlap."""
    position, file = start, printable(path.name)
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.size_bytes)):
        name = printable(tensor.name)
        if tensor.offset != position:
            raise CheckpointError(f"{file} has {name} at byte {tensor.offset}, expected at {position}")
        position += tensor.size_bytes
        if position > size_bytes:
            raise CheckpointError(f"{file} is cut short: {name} ends at byte {position} of {size_bytes}")
    if position < size_bytes:
        raise CheckpointError(f"{file} has {size_bytes - position} bytes after its last tensor")
