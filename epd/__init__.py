"""Gateway, router and engine of the pipeline. Importing this loads no torch: names load when asked for."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.engine.worker import REFUSALS, EngineThread, run_worker
    from epd.gateway.app import create_app, start_gateway
    from epd.gateway.process import fetch_limits, run_gateway
    from epd.gateway.render import Renderer
    from epd.kv.layout import KvLayout
    from epd.model.checkpoint import Findings, Inspection, inspect_checkpoint
    from epd.model.config_ranges import MAX_MTP_LAYERS
    from epd.model.gguf.checkpoint import import_gguf
    from epd.model.gguf.errors import CacheError, GgufError
    from epd.transport.memory import MemoryNetwork

__all__ = [
    "MAX_MTP_LAYERS",
    "REFUSALS",
    "CacheError",
    "EngineThread",
    "Findings",
    "GgufError",
    "Inspection",
    "KvLayout",
    "MemoryNetwork",
    "Renderer",
    "create_app",
    "fetch_limits",
    "import_gguf",
    "inspect_checkpoint",
    "run_gateway",
    "run_worker",
    "start_gateway",
]

_HOMES = {
    "MAX_MTP_LAYERS": "epd.model.config_ranges",
    "REFUSALS": "epd.engine.worker",
    "CacheError": "epd.model.gguf.errors",
    "EngineThread": "epd.engine.worker",
    "Findings": "epd.model.checkpoint",
    "GgufError": "epd.model.gguf.errors",
    "Inspection": "epd.model.checkpoint",
    "KvLayout": "epd.kv.layout",
    "MemoryNetwork": "epd.transport.memory",
    "Renderer": "epd.gateway.render",
    "create_app": "epd.gateway.app",
    "fetch_limits": "epd.gateway.process",
    "import_gguf": "epd.model.gguf.checkpoint",
    "inspect_checkpoint": "epd.model.checkpoint",
    "run_gateway": "epd.gateway.process",
    "run_worker": "epd.engine.worker",
    "start_gateway": "epd.gateway.app",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
