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
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
# The format's own limit; a longer header is a file of another kind.
MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_LENGTH_BYTES = 8
_NUM_NAMES_SHOWN = 50


class CheckpointError(ValueError):
    """A checkpoint is damaged or does not hold what its config promises. The message names files and tensors."""


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
            self._descriptors[tensor.file] = os.open(tensor.file, os.O_RDONLY)
        done = 0
        while done < len(buffer):
            # One call reads 2 GiB at most.
            count = os.preadv(self._descriptors[tensor.file], [buffer[done:]], tensor.offset + start_byte + done)
            if count == 0:
                raise CheckpointError(f"{tensor.file.name} ended inside {tensor.name}: it was cut while being read")
            done += count


def find_tensors(directory: Path, wanted: Callable[[str], bool]) -> dict[str, FileTensor]:
    """Return the wanted tensors of a directory by name: those of the index's files, or of every file without an index.

    Files that hold nothing wanted are not opened where there is an index. Raises CheckpointError for a directory
    without weights, and for all files at once when one is missing or damaged, lacks a tensor the index says it holds,
    or holds one that another file holds too.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        promised = _read_index(index, wanted)
    else:
        promised = {path.name: [] for path in directory.glob("*.safetensors")}
        if not promised:
            raise CheckpointError(f"{directory.name} has no .safetensors file")
    tensors: dict[str, FileTensor] = {}
    problems = []
    for file, names in sorted(promised.items()):
        if not (directory / file).is_file():
            problems.append(f"{file} is missing: {index.name} says it holds {shown(names)}")
            continue
        try:
            header = read_header(directory / file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        absent = [name for name in names if name not in header]
        if absent:
            problems.append(f"{file} lacks {shown(absent)}, which {index.name} says it holds")
        found = {name: tensor for name, tensor in header.items() if wanted(name)}
        problems += [
            f"{name} is in {tensors[name].file.name} and in {file}" for name in sorted(tensors.keys() & found.keys())
        ]
        tensors |= found
    if problems:
        raise CheckpointError(f"weight files of {directory.name} cannot be used\n" + "\n".join(problems))
    return tensors


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return a file's tensors by name. Raises CheckpointError naming the file and, where there is one, the tensor."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + header_bytes
        if size_bytes < _LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path.name} is not a safetensors file ({size_bytes} bytes)")
        if start > size_bytes:
            raise CheckpointError(f"{path.name} is cut short: its header ends at byte {start} of {size_bytes}")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise CheckpointError(f"{path.name} has no readable header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name} has no readable header: it is not an object")
    header.pop("__metadata__", None)
    tensors = {name: _file_tensor(path, start, name, entry) for name, entry in header.items()}
    _check_ranges(path, tensors.values(), start, size_bytes)
    return tensors


def shown(names: Iterable[str]) -> str:
    """Names for a message: joined, the first fifty of them."""
    listed = list(names)
    more = len(listed) - _NUM_NAMES_SHOWN
    return ", ".join(listed[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


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
    return [f"{len(names)} {kind}: {shown(names)}" for kind, names in problems.items() if names]


def _read_index(index: Path, wanted: Callable[[str], bool]) -> dict[str, list[str]]:
    """The wanted names of each file, sorted. A file name with a folder in it is refused: it could lead elsewhere."""
    try:
        content = json.loads(index.read_text())
    except ValueError as error:
        raise CheckpointError(f"{index.name} is not JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index.name} has no weight_map of tensor names to file names")
    for name, file in weight_map.items():
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index.name} puts {name} into {file!r}, which is not a file name in its directory")
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
        raise CheckpointError(f"{path.name} describes {name} with {entry!r}") from None
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{path.name} describes {name} with {entry!r}")
    # An unknown dtype is for the reader to refuse, by the tensor's name.
    if dtype in ITEM_BYTES and prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise CheckpointError(f"{path.name} gives {name} {end - begin} bytes for {dtype} {list(shape)}")
    return FileTensor(name, path, dtype, shape, start + begin, end - begin)


def _check_ranges(path: Path, tensors: Iterable[FileTensor], start: int, size_bytes: int) -> None:
    """The tensors must fill the file from the header to its end, without gaps and without overlap."""
    position = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.size_bytes)):
        if tensor.offset != position:
            raise CheckpointError(f"{path.name} has {tensor.name} at byte {tensor.offset}, expected at {position}")
        position += tensor.size_bytes
        if position > size_bytes:
            raise CheckpointError(f"{path.name} is cut short: {tensor.name} ends at byte {position} of {size_bytes}")
    if position < size_bytes:
        raise CheckpointError(f"{path.name} has {size_bytes - position} bytes after its last tensor")
