"""What weight files say of themselves: safetensors headers, read without tensors and without torch.

A file is eight bytes with the header's length, a JSON header naming every tensor with dtype, shape and place, and the
tensors. So hundreds of gigabytes are checked in the time it takes to read a few megabytes, truncated files included.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encoder import TensorSpec

INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
# The format's own limit; a larger number is no safetensors file.
_MAX_HEADER_BYTES = 100_000_000


class HeaderError(ValueError):
    """A file that is not a whole safetensors file, or an index that is not one. The message says what to do."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a header says of one tensor; `dtype` as safetensors spells it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file and how many tensors it holds."""

    name: str
    size_bytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Headers:
    """All files of a directory. `faults` are files that cannot be used and what the index says wrongly."""

    files: tuple[WeightFile, ...]
    tensors: dict[str, StoredTensor]
    faults: tuple[str, ...]

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype by tensor name."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Findings:
    """How headers differ from an inventory, each entry a sentence that names its tensor."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen or self.wrong_dtype)


def read_headers(directory: Path) -> Headers | None:
    """Read the headers of the files the index names, without an index of all there are; None without weights.

    Raises HeaderError for an index that cannot be read. Files that cannot be read are among the faults.
    """
    index = _read_index(directory / INDEX_FILE)
    names = (
        sorted(path.name for path in directory.glob("*.safetensors")) if index is None else sorted({*index.values()})
    )
    if not names:
        return None
    files, tensors, faults = [], dict[str, StoredTensor](), []
    for name in names:
        path = directory / name
        try:
            found = read_header(path)
        except HeaderError as error:
            faults.append(str(error))
            continue
        files.append(WeightFile(name, path.stat().st_size, len(found)))
        faults += [f"{key} is in {tensors[key].file} and again in {name}" for key in found.keys() & tensors.keys()]
        tensors |= found
    wrong = [key for key, name in (index or {}).items() if key in tensors and tensors[key].file != name]
    faults += [f"{INDEX_FILE} says {key} is in {(index or {})[key]}, it is in {tensors[key].file}" for key in wrong]
    return Headers(tuple(files), tensors, tuple(faults))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. Raises HeaderError when the file is absent, cut short or something else."""
    if not path.is_file():
        raise HeaderError(f"{path.name} is missing; download it")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
            raise HeaderError(f"{path.name} has no safetensors header ({size_bytes:,} bytes); download it again")
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        tensors = {name: _entry(path.name, entry) for name, entry in entries.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise HeaderError(f"{path.name} has no safetensors header; download it again") from error
    expected_bytes = _LENGTH_BYTES + length + max(ends, default=0)
    if size_bytes != expected_bytes:
        raise HeaderError(
            f"{path.name} has {size_bytes:,} bytes, its header says {expected_bytes:,}; download it again"
        )
    return tensors


def compare(expected: Iterable[TensorSpec], found: Mapping[str, StoredTensor]) -> Findings:
    """Compare names, shapes and dtypes; `expected` should have been taken with the found dtypes (`stored`)."""
    findings = Findings()
    specs = {spec.name: spec for spec in expected}
    findings.missing.extend(sorted(specs.keys() - found.keys()))
    findings.unexpected.extend(sorted(found.keys() - specs.keys()))
    for name, spec in specs.items():
        tensor = found.get(name)
        if tensor is None:
            continue
        if tensor.shape != spec.shape:
            findings.misshapen.append(f"{name} is {list(tensor.shape)}, expected {list(spec.shape)}")
        if tensor.dtype != spec.dtype:
            findings.wrong_dtype.append(f"{name} is {tensor.dtype}, expected {spec.dtype}")
    return findings


def _entry(file: str, entry: dict[str, Any]) -> StoredTensor:
    return StoredTensor(file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))


def _read_index(path: Path) -> dict[str, str] | None:
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeaderError(f"{path.name} is no index of safetensors files; download it again") from error
