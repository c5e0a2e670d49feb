"""The encoder: a server that turns media into embedding rows, and the towers it runs.

Importing this package loads no torch; the gateway depends on that. The names below are loaded when they are asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from encoder.cache.host import embedding_arena
    from encoder.cache.report import ArenaReport, arena_reports, clear_arena
    from encoder.front.config import EncodeLimits, FrontConfig
    from encoder.front.desk import EncodeDesk
    from encoder.front.endpoint import EncodeEndpoint
    from encoder.front.problems import Refused
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
    from encoder.pace import Pace, PaceLimits
    from encoder.process import open_server, run_encoder
    from encoder.ring import Ring
    from encoder.sglang.config import SglangConfig
    from encoder.towers.flops import audio_flops, vision_flops
    from encoder.towers.serving import ServingTowers
    from encoder.towers.trial import TowerTrial, audio_trial, matmul_flops_per_s, num_threads, vision_trial
    from encoder.towers.weights import load_towers

__all__ = [
    "ArenaReport",
    "EncodeDesk",
    "EncodeEndpoint",
    "EncodeLimits",
    "FrontConfig",
    "LocalEmbedding",
    "LocalEncoder",
    "LocalRows",
    "MemoryLink",
    "Pace",
    "PaceLimits",
    "Part",
    "Refused",
    "Ring",
    "ServingTowers",
    "SglangConfig",
    "StoredDtype",
    "TensorSpec",
    "TowerTrial",
    "arena_reports",
    "audio_encoder_tensors",
    "audio_flops",
    "audio_tokenizer_tensors",
    "audio_trial",
    "clear_arena",
    "embedding_arena",
    "load_towers",
    "matmul_flops_per_s",
    "num_threads",
    "open_server",
    "run_encoder",
    "run_front",
    "used_tokenizer_name",
    "vision_flops",
    "vision_tensors",
    "vision_trial",
]

_HOMES = {
    "ArenaReport": "encoder.cache.report",
    "EncodeDesk": "encoder.front.desk",
    "EncodeEndpoint": "encoder.front.endpoint",
    "EncodeLimits": "encoder.front.config",
    "FrontConfig": "encoder.front.config",
    "LocalEmbedding": "encoder.local",
    "LocalEncoder": "encoder.local",
    "LocalRows": "encoder.local",
    "MemoryLink": "encoder.links",
    "Pace": "encoder.pace",
    "PaceLimits": "encoder.pace",
    "Part": "encoder.inventory",
    "Refused": "encoder.front.problems",
    "Ring": "encoder.ring",
    "ServingTowers": "encoder.towers.serving",
    "SglangConfig": "encoder.sglang.config",
    "StoredDtype": "encoder.inventory",
    "TensorSpec": "encoder.inventory",
    "TowerTrial": "encoder.towers.trial",
    "arena_reports": "encoder.cache.report",
    "audio_encoder_tensors": "encoder.inventory",
    "audio_flops": "encoder.towers.flops",
    "audio_tokenizer_tensors": "encoder.inventory",
    "audio_trial": "encoder.towers.trial",
    "clear_arena": "encoder.cache.report",
    "embedding_arena": "encoder.cache.host",
    "load_towers": "encoder.towers.weights",
    "matmul_flops_per_s": "encoder.towers.trial",
    "num_threads": "encoder.towers.trial",
    "open_server": "encoder.process",
    "run_encoder": "encoder.process",
    "run_front": "encoder.front.process",
    "used_tokenizer_name": "encoder.inventory",
    "vision_flops": "encoder.towers.flops",
    "vision_tensors": "encoder.inventory",
    "vision_trial": "encoder.towers.trial",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
