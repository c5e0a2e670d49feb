"""Gateway, router and engine of the pipeline. Importing this loads no torch: names load when asked for."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.cache.l3.local_report import (
        LocalStoreReport,
        clear_local_store,
        local_store_reports,
        remove_local_store,
    )
    from epd.cache.l3.open import open_store
    from epd.cache.prefix import PrefixCache, PrefixHit
    from epd.cache.retention import RetentionPolicy
    from epd.cache.sequence_pages import SequencePages
    from epd.cache.tiers.host import HostTier
    from epd.cache.tiers.tiered import TieredCache
    from epd.cache.victims import make_policy
    from epd.engine.heal_cost import HealCost, heal_cost
    from epd.engine.heal_rows import ring_pages
    from epd.engine.sizing import WorkerPlan, count_heads, plan_worker, text_config
    from epd.engine.trial import EngineTrial, TrialFailed
    from epd.engine.worker import REFUSALS, EngineThread, run_worker
    from epd.gateway.app import create_app, start_gateway
    from epd.gateway.health import StageHealth, encoder_health, serving_health, worker_health
    from epd.gateway.process import check_gateway, fetch_limits, run_gateway
    from epd.gateway.render import Renderer
    from epd.kernels.native import kernel_states
    from epd.kv.copies import InstantMover
    from epd.kv.dual import DualPool
    from epd.kv.errors import NoPages, PoolTooSmall
    from epd.kv.layout import KvLayout, PoolPlan, cached_sequence_bytes, plan_host, plan_pools
    from epd.model.checkpoint import Findings, Inspection, inspect_checkpoint
    from epd.model.config import TextConfig
    from epd.model.config_ranges import MAX_MTP_LAYERS
    from epd.model.gguf.checkpoint import import_gguf
    from epd.model.gguf.errors import CacheError, GgufError
    from epd.model.random_checkpoint import write_random_checkpoint
    from epd.store_address import mooncake_parts, redis_nodes
    from epd.transport.memory import MemoryNetwork

__all__ = [
    "MAX_MTP_LAYERS",
    "REFUSALS",
    "CacheError",
    "DualPool",
    "EngineThread",
    "EngineTrial",
    "Findings",
    "GgufError",
    "HealCost",
    "HostTier",
    "Inspection",
    "InstantMover",
    "KvLayout",
    "LocalStoreReport",
    "MemoryNetwork",
    "NoPages",
    "PoolPlan",
    "PoolTooSmall",
    "PrefixCache",
    "PrefixHit",
    "Renderer",
    "RetentionPolicy",
    "SequencePages",
    "StageHealth",
    "TextConfig",
    "TieredCache",
    "TrialFailed",
    "WorkerPlan",
    "cached_sequence_bytes",
    "check_gateway",
    "clear_local_store",
    "count_heads",
    "create_app",
    "encoder_health",
    "fetch_limits",
    "heal_cost",
    "import_gguf",
    "inspect_checkpoint",
    "kernel_states",
    "local_store_reports",
    "make_policy",
    "mooncake_parts",
    "open_store",
    "plan_host",
    "plan_pools",
    "plan_worker",
    "redis_nodes",
    "remove_local_store",
    "ring_pages",
    "run_gateway",
    "run_worker",
    "serving_health",
    "start_gateway",
    "text_config",
    "worker_health",
    "write_random_checkpoint",
]

_HOMES = {
    "MAX_MTP_LAYERS": "epd.model.config_ranges",
    "REFUSALS": "epd.engine.worker",
    "CacheError": "epd.model.gguf.errors",
    "DualPool": "epd.kv.dual",
    "EngineThread": "epd.engine.worker",
    "EngineTrial": "epd.engine.trial",
    "Findings": "epd.model.checkpoint",
    "GgufError": "epd.model.gguf.errors",
    "HealCost": "epd.engine.heal_cost",
    "HostTier": "epd.cache.tiers.host",
    "Inspection": "epd.model.checkpoint",
    "InstantMover": "epd.kv.copies",
    "KvLayout": "epd.kv.layout",
    "LocalStoreReport": "epd.cache.l3.local_report",
    "MemoryNetwork": "epd.transport.memory",
    "NoPages": "epd.kv.errors",
    "PoolPlan": "epd.kv.layout",
    "PoolTooSmall": "epd.kv.errors",
    "PrefixCache": "epd.cache.prefix",
    "PrefixHit": "epd.cache.prefix",
    "Renderer": "epd.gateway.render",
    "RetentionPolicy": "epd.cache.retention",
    "SequencePages": "epd.cache.sequence_pages",
    "StageHealth": "epd.gateway.health",
    "TextConfig": "epd.model.config",
    "TieredCache": "epd.cache.tiers.tiered",
    "TrialFailed": "epd.engine.trial",
    "WorkerPlan": "epd.engine.sizing",
    "cached_sequence_bytes": "epd.kv.layout",
    "check_gateway": "epd.gateway.process",
    "clear_local_store": "epd.cache.l3.local_report",
    "count_heads": "epd.engine.sizing",
    "create_app": "epd.gateway.app",
    "encoder_health": "epd.gateway.health",
    "fetch_limits": "epd.gateway.process",
    "heal_cost": "epd.engine.heal_cost",
    "import_gguf": "epd.model.gguf.checkpoint",
    "inspect_checkpoint": "epd.model.checkpoint",
    "kernel_states": "epd.kernels.native",
    "local_store_reports": "epd.cache.l3.local_report",
    "make_policy": "epd.cache.victims",
    "mooncake_parts": "epd.store_address",
    "open_store": "epd.cache.l3.open",
    "plan_host": "epd.kv.layout",
    "plan_pools": "epd.kv.layout",
    "plan_worker": "epd.engine.sizing",
    "redis_nodes": "epd.store_address",
    "remove_local_store": "epd.cache.l3.local_report",
    "ring_pages": "epd.engine.heal_rows",
    "run_gateway": "epd.gateway.process",
    "run_worker": "epd.engine.worker",
    "serving_health": "epd.gateway.health",
    "start_gateway": "epd.gateway.app",
    "text_config": "epd.engine.sizing",
    "worker_health": "epd.gateway.health",
    "write_random_checkpoint": "epd.model.random_checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
