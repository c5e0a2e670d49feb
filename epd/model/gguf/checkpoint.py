"""A GGUF file becomes a checkpoint directory, once: whoever asks first makes it, everybody else finds it.

The directory's name holds the hash of the file and the version of this code, so another file, or a newer import of the
same one, is another directory. It appears under its name only when it is whole; a lock lets one process make it at a
time, and what a killed one left half done is removed by the next.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from epd.model.gguf.errors import GgufError
from epd.model.gguf.metadata import check_keys, generation_config, model_config
from epd.model.gguf.tensors import is_tied, write_tensors
from epd.model.gguf.vocabulary import tokenizer_config, tokenizer_json

# To be raised whenever the same file would give another directory.
_VERSION = 1
_READ_BYTES = 1 << 22


def import_gguf(path: Path, cache_dir: Path, *, on_start: Callable[[Path], None]) -> Path:
    """The checkpoint directory of a GGUF file, under `cache_dir`; `on_start` is told before a new one is made.

    Raises GgufError for a file that cannot be imported, OSError for one that cannot be read or a directory that cannot
    be written, ModuleNotFoundError without the package `gguf`.
    """
    target = cache_dir / f"{path.stem}-{_digest(path)}-v{_VERSION}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{target.name}.lock"):
        if target.is_dir():
            return target
        on_start(target)
        partial = cache_dir / f"{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            write_checkpoint(path, partial)
            partial.rename(target)
        except (OSError, GgufError):
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def write_checkpoint(path: Path, folder: Path) -> None:
    """Write configuration, tokenizer and weights into an empty directory. Raises like `import_gguf`."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise GgufError(f"{path.name} is no GGUF file, or is damaged: {error}") from error
    if reader.byte_order != "I":
        raise GgufError(f"{path.name} has the byte order of another kind of machine")
    try:
        check_keys(metadata)
        config = model_config(metadata, tied=is_tied(reader.tensors))
        files: dict[str, Any] = {
            "config.json": config,
            "generation_config.json": generation_config(metadata),
            "tokenizer.json": tokenizer_json(metadata),
            "tokenizer_config.json": tokenizer_config(metadata),
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        weights = folder / "model.safetensors"
        write_tensors(reader.tensors, config, weights)
    except GgufError as error:
        raise GgufError(f"{path.name}: {error}") from error
    # The rename must not reach the disk before the data does.
    with weights.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    """16 hex digits over the whole file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system gives it back when its holder dies."""
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
