"""The encoder: a server that turns media into embedding rows, and the towers it runs.

Importing this package loads no torch; the gateway depends on that. The names below are loaded when they are asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from encoder.cache.host import embedding_arena
    from encoder.cache.report import ArenaReport, arena_reports, clear_arena
    from encoder.front.config import FrontConfig
    from encoder.front.process import run_front
    from encoder.inventory import (
        Part,
        StoredDtype,
        TensorSpec,
        audio_encoder_tensors,
        audio_tokenizer_tensors,
        used_tokenizer_name,
        vision_tensors,
    )
    from encoder.links import MemoryLink
    from encoder.local import LocalEmbedding, LocalEncoder, LocalRows
    from encoder.process import open_server, run_encoder
    from encoder.sglang.config import SglangConfig
    from encoder.towers.weights import load_towers

__all__ = [
    "ArenaReport",
    "FrontConfig",
    "LocalEmbedding",
    "LocalEncoder",
    "LocalRows",
    "MemoryLink",
    "Part",
    "SglangConfig",
    "StoredDtype",
    "TensorSpec",
    "arena_reports",
    "audio_encoder_tensors",
    "audio_tokenizer_tensors",
    "clear_arena",
    "embedding_arena",
    "load_towers",
    "open_server",
    "run_encoder",
    "run_front",
    "used_tokenizer_name",
    "vision_tensors",
]

_HOMES = {
    "ArenaReport": "encoder.cache.report",
    "FrontConfig": "encoder.front.config",
    "LocalEmbedding": "encoder.local",
    "LocalEncoder": "encoder.local",
    "LocalRows": "encoder.local",
    "MemoryLink": "encoder.links",
    "Part": "encoder.inventory",
    "SglangConfig": "encoder.sglang.config",
    "StoredDtype": "encoder.inventory",
    "TensorSpec": "encoder.inventory",
    "arena_reports": "encoder.cache.report",
    "audio_encoder_tensors": "encoder.inventory",
    "audio_tokenizer_tensors": "encoder.inventory",
    "clear_arena": "encoder.cache.report",
    "embedding_arena": "encoder.cache.host",
    "load_towers": "encoder.towers.weights",
    "open_server": "encoder.process",
    "run_encoder": "encoder.process",
    "run_front": "encoder.front.process",
    "used_tokenizer_name": "encoder.inventory",
    "vision_tensors": "encoder.inventory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
