"""A cheap identity of a checkpoint's weights, for media keys and for telling two replicas apart. No torch."""

import struct
from pathlib import Path

import xxhash

WHOLE_FILE_BYTES = 32 * 2**20
NUM_SAMPLES = 64
SAMPLE_BYTES = 16 * 2**10
CONFIG_FILES = ("config.json", "audio_tokenizer/config.json")


def checkpoint_fingerprint(model_dir: Path) -> str:
    """32 hex digits over configs, safetensors headers and weights: whole small files, samples of large ones.

    Sampled ranges are spread evenly, so a fine-tune of any large part moves the value; a change that touches only
    bytes between samples and keeps every header does not. Raises FileNotFoundError without config.json or weights.
    """
    digest = xxhash.xxh3_128()
    if not (model_dir / CONFIG_FILES[0]).is_file():
        raise FileNotFoundError(f"{model_dir} has no {CONFIG_FILES[0]}")
    for name in CONFIG_FILES:
        path = model_dir / name
        if path.is_file():
            _add(digest, name, path.read_bytes())
    weights = sorted([*model_dir.glob("*.safetensors"), *model_dir.glob("audio_tokenizer/*.safetensors")])
    if not weights:
        raise FileNotFoundError(f"{model_dir} has no .safetensors file")
    for path in weights:
        _add_weights(digest, path.relative_to(model_dir).as_posix(), path)
    return digest.hexdigest()


def _add(digest: "xxhash.xxh3_128", name: str, content: bytes) -> None:
    digest.update(f"{name}:{len(content)}:".encode())
    digest.update(content)


def _add_weights(digest: "xxhash.xxh3_128", name: str, path: Path) -> None:
    size_bytes = path.stat().st_size
    digest.update(f"{name}:{size_bytes}:".encode())
    with path.open("rb") as file:
        if size_bytes <= WHOLE_FILE_BYTES:
            digest.update(file.read())
            return
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        digest.update(file.read(header_bytes))
        start = 8 + header_bytes
        stride = max(1, (size_bytes - start - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
        for index in range(NUM_SAMPLES):
            file.seek(start + index * stride)
            digest.update(file.read(SAMPLE_BYTES))
