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
from typing import BinaryIO

import xxhash

from encoder.checkpoint import CheckpointError, read_header, read_json_object
from epd.model.config import ConfigError, TextConfig
from epd.model.gguf.errors import CacheError, GgufError
from epd.model.gguf.metadata import check_keys, generation_config, model_config
from epd.model.gguf.tensors import is_tied, write_tensors
from epd.model.gguf.vocabulary import tokenizer_config, tokenizer_json

# To be raised whenever the same file would give another directory.
_VERSION = 1
_JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_WEIGHTS = "model.safetensors"
_READ_BYTES = 1 << 22


def import_gguf(
    path: Path,
    cache_dir: Path,
    *,
    on_start: Callable[[Path], None],
    check: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """The checkpoint directory of a GGUF file, under `cache_dir`; `on_start` is told before a new one is made.

    `check` sees a new directory before anybody else does, and raises GgufError for what nobody should be given. One
    that was made before and has been damaged since is made again. Raises GgufError for a file that cannot be imported,
    OSError for one that cannot be read, CacheError for a directory that cannot be written, ModuleNotFoundError without
    the package `gguf`.
    """
    target = cache_dir / f"{path.stem}-{_digest(path)}-v{_VERSION}"
    if _is_whole(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{target.name}.lock"):
            if _is_whole(target):
                return target
            on_start(target)
            partial = cache_dir / f"{target.name}.partial"
            for left in (partial, target):
                shutil.rmtree(left, ignore_errors=True)
            try:
                partial.mkdir()
                write_checkpoint(path, partial)
                check(partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CacheError(error.errno, f"{cache_dir} cannot be written: {error.strerror or error}") from error
    return target


def write_checkpoint(path: Path, folder: Path) -> None:
    """Write configuration, tokenizer and weights into an empty directory. Raises like `import_gguf`."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except IndexError as error:
        # A read beyond the end, which says nothing of use in its own words.
        raise GgufError(
            f"{path.name} is no GGUF file, or is cut short: it has {path.stat().st_size:,} bytes"
        ) from error
    except (ValueError, KeyError, OverflowError, MemoryError) as error:
        raise GgufError(f"{path.name} is no GGUF file, or is damaged: {error}") from error
    if reader.byte_order != "I":
        raise GgufError(f"{path.name} has the byte order of another kind of machine")
    try:
        check_keys(metadata)
        config = model_config(metadata, tied=is_tied(reader.tensors))
        TextConfig.from_hf(config)
        made = config, generation_config(metadata), tokenizer_json(metadata), tokenizer_config(metadata)
        for name, content in zip(_JSON_FILES, made, strict=True):
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        weights = folder / _WEIGHTS
        write_tensors(reader.tensors, config, weights)
    except (GgufError, ConfigError) as error:
        raise GgufError(f"{path.name}: {error}") from error
    # The rename must not reach the disk before the data does.
    with weights.open("rb") as file:
        os.fsync(file.fileno())


def _is_whole(folder: Path) -> bool:
    """Whether a directory made before still has every file, readable and of the length its header says."""
    try:
        for name in _JSON_FILES:
            read_json_object(folder / name)
        read_header(folder / _WEIGHTS)
    except CheckpointError:
        return False
    return True


def _digest(path: Path) -> str:
    """16 hex digits over the whole file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system gives it back when its holder dies. The file is gone afterwards."""
    while True:
        lock = path.open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Whoever held it before has removed the file: then the lock on it keeps nobody away.
        if _is_same(lock, path):
            break
        lock.close()
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _is_same(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
