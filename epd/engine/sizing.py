"""What the settings of a worker come to: KV layout, retention and pools, from config.json alone. Free of torch.

A worker builds its memory from this, and a deployment is checked with it before any process starts.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from epd.cache.retention import RetentionPolicy
from epd.config import DTYPE_BYTES, MAX_DRAFT_TOKENS, EngineConfig
from epd.kv.errors import PoolTooSmall
from epd.kv.layout import KvLayout, PoolPlan, plan_host, plan_pools
from epd.model.config import TextConfig


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The KV memory of one worker. `host` is None without a host tier."""

    layout: KvLayout
    retention: RetentionPolicy
    pools: PoolPlan
    host: PoolPlan | None = None


def text_config(config: EngineConfig, config_hf: Mapping[str, object]) -> TextConfig:
    """The text model with the settings' window. Raises epd.model.config.ConfigError, a ValueError, for a `config.json`
    that is refused, and ValueError naming `engine.window_left` where the model has no room or no use for it."""
    text = TextConfig.from_hf(config_hf)
    reach = config.window_left
    if reach is None:
        return text
    if text.window_layer is None:
        raise ValueError(f"engine.window_left is {reach:,}, but this model has no window layers; leave it out")
    if reach >= text.max_position_embeddings:
        raise ValueError(
            f"engine.window_left is {reach:,}; allowed: 0 to {text.max_position_embeddings - 1:,}, since the model has "
            f"{text.max_position_embeddings:,} positions"
        )
    return TextConfig.from_hf(config_hf, window_left=reach)


def count_heads(config: EngineConfig, num_held: int) -> int:
    """Draft heads to run of the `num_held` that the model has: all unless the settings say how many. Raises
    ValueError."""
    if config.draft_tokens is None:
        return min(num_held, MAX_DRAFT_TOKENS)
    if config.draft_tokens > num_held:
        raise ValueError(
            f"engine.draft_tokens is {config.draft_tokens}, {config.model_dir.name} holds {num_held} draft heads"
        )
    return config.draft_tokens


def plan_worker(config: EngineConfig, text: TextConfig, *, num_heads: int) -> WorkerPlan:
    """Split the budget; refuse a split in which a single sequence could get stuck.

    A usual sequence counts for no more than the model's positions. Raises PoolTooSmall, or ValueError for memory that
    this host does not have; both name the settings and their values.
    """
    layout, retention = _layout(text, config, num_heads), _retention(config)
    expected_tokens = min(config.expected_sequence_tokens, text.max_position_embeddings)
    try:
        pools = plan_pools(
            layout,
            config.kv_budget_bytes,
            expected_sequence_tokens=expected_tokens,
            max_running=config.max_running,
            chunk_tokens=config.chunk_tokens,
            retention_stride_tokens=config.retention_stride_tokens,
            tail_pages=retention.tail_pages,
        )
    except PoolTooSmall as error:
        raise PoolTooSmall(f"{_shares(config, text, expected_tokens)}: {error}") from error
    kept_tokens = layout.window_tokens + config.decode_release_interval_tokens
    needed_window = -(-kept_tokens // config.page_size) + retention.tail_pages + 2
    if layout.window_layers and pools.num_window_pages < needed_window:
        raise PoolTooSmall(
            f"engine.kv_budget_bytes is {config.kv_budget_bytes:,}, which gives {pools.num_window_pages:,} window "
            f"pages; one sequence alone needs {needed_window:,} ({layout.window_tokens:,} tokens of window, "
            f"engine.decode_release_interval_tokens {config.decode_release_interval_tokens:,}, engine.page_size "
            f"{config.page_size:,}): raise the first or lower the others"
        )
    host = _plan_host(config, layout, retention, expected_tokens) if config.host_budget_bytes else None
    _require_memory(config, pools, host)
    return WorkerPlan(layout, retention, pools, host)


def _plan_host(
    config: EngineConfig, layout: KvLayout, retention: RetentionPolicy, expected_tokens: int
) -> PoolPlan | None:
    """None when nothing is ever looked up. Raises PoolTooSmall for less than a page and a window."""
    if not config.prefix_cache:
        return None
    window_pages = -(-layout.window_tokens // config.page_size)
    least_bytes = layout.full_page_bytes + window_pages * layout.window_page_bytes
    if config.host_budget_bytes < least_bytes:
        raise PoolTooSmall(
            f"engine.host_budget_bytes is {config.host_budget_bytes:,}; allowed: 0 for no host tier, or "
            f"{least_bytes:,} and more, which are a page of {layout.full_page_bytes:,} bytes and {window_pages:,} of "
            f"{layout.window_page_bytes:,} for a window (engine.page_size {config.page_size:,})"
        )
    return plan_host(
        layout,
        config.host_budget_bytes,
        expected_sequence_tokens=expected_tokens,
        retention_stride_tokens=config.retention_stride_tokens,
        tail_pages=retention.tail_pages,
    )


def _shares(config: EngineConfig, text: TextConfig, expected_tokens: int) -> str:
    """The settings that the least budget follows from."""
    own = f" (the model's {text.max_position_embeddings:,} positions)"
    clamped = own if expected_tokens < config.expected_sequence_tokens else ""
    window = "" if text.window_layer is None else f", a window of {text.window_layer.window_left or 0:,} earlier tokens"
    named = "" if config.window_left is None else " (engine.window_left)"
    return (
        f"engine.kv_budget_bytes is {config.kv_budget_bytes:,}, too little for engine.page_size {config.page_size:,}, "
        f"engine.max_running {config.max_running:,}, engine.chunk_tokens {config.chunk_tokens:,}, "
        f"engine.expected_sequence_tokens {config.expected_sequence_tokens:,}{clamped}{window}{named}"
    )


def _require_memory(config: EngineConfig, pools: PoolPlan, host: PoolPlan | None) -> None:
    # Linux grants memory that is not there and kills the process once it is used: better to ask first.
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device_bytes = pools.size_bytes if config.device.startswith("cpu") else 0
    if device_bytes > host_bytes:
        raise ValueError(
            f"engine.kv_budget_bytes is {config.kv_budget_bytes:,}: KV memory of {pools.size_bytes:,} bytes cannot be "
            f"had: this host has {host_bytes:,}"
        )
    if host is not None and device_bytes + host.size_bytes > host_bytes:
        beside = f" beside engine.kv_budget_bytes, {config.kv_budget_bytes:,}," if device_bytes else ""
        raise ValueError(
            f"engine.host_budget_bytes is {config.host_budget_bytes:,}: so many bytes cannot be had{beside} of this "
            f"host's {host_bytes:,}"
        )


def _layout(text: TextConfig, config: EngineConfig, num_heads: int) -> KvLayout:
    heads = [text.mtp_layer(k) for k in range(num_heads)]
    specs = [layer.attention for layer in (*text.layers, *heads)]
    return KvLayout.from_specs(
        [spec for spec in specs if not spec.is_window],
        [spec for spec in specs if spec.is_window],
        page_size=config.page_size,
        dtype_bytes=DTYPE_BYTES[config.dtype],
    )


def _retention(config: EngineConfig) -> RetentionPolicy:
    return RetentionPolicy(
        dense_retention_tokens=config.dense_retention_tokens,
        retention_stride_tokens=config.retention_stride_tokens,
        release_interval_tokens=config.decode_release_interval_tokens,
    )
