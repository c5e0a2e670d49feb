"""Who a worker is, and what its KV depends on."""

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

import xxhash

from encoder.checkpoint import read_json_object
from epd.config import EngineConfig
from epd.kv.layout import KvLayout
from epd.types import Role

# Of a weight file only its size and both ends are read: reading hundreds of GB at start would cost minutes.
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """`incarnation` is new with every start."""

    name: str
    role: Role
    model: str
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    incarnation: str


def new_incarnation() -> str:
    return uuid.uuid4().hex


def kv_arithmetic(config: EngineConfig) -> str:
    """What decides the values of KV beside files and layout: dtypes, and the order in which fused rows are read.

    Matrices kept as in the files are those that loading them as `dtype` gives.
    """
    stored = config.dtype if config.weights in (None, "keep") else config.weights
    rows = "plain" if config.qkv_layout == "plain" else "interleaved"
    return f"{config.dtype}, matrices {stored}, fused rows {rows}"


def kv_fingerprint(model_dir: Path, layout: KvLayout, *, arithmetic: str) -> str:
    """32 hex digits over weights, configuration, KV layout and `kv_arithmetic`: equal means KV may be exchanged."""
    digest = xxhash.xxh3_128()
    config = read_json_object(model_dir / "config.json")
    for part in (json.dumps(config, sort_keys=True), layout.identity, arithmetic):
        digest.update(part.encode())
    for path in sorted(model_dir.glob("*.safetensors")):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}:{size_bytes}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size_bytes - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
