"""The tiers of one worker's cache, built from its settings: pages on the device, in the host's memory, in a store."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from epd.cache.l3.base import NodeFailed
from epd.cache.l3.open import open_store
from epd.cache.prefix import PrefixCache
from epd.cache.tiers.bridge import BridgeSettings, BridgeStats, StoreBridge
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.tiered import TieredCache
from epd.config import EngineConfig, without_password
from epd.engine.settling import settle
from epd.engine.sizing import WorkerPlan
from epd.kv.copies import MoverStats
from epd.kv.host_storage import HostStorage
from epd.kv.layout import KvLayout, PoolPlan
from epd.kv.storage import KvStorage
from epd.kv.stream_mover import StreamMover
from epd.model.config import TextConfig

logger = logging.getLogger(__name__)

# At the end, for copies that are under way, and then for the store to take what it was given.
_SETTLE_S = 1.0
_FLUSH_S = 2.0
_SHM_DIR = "/dev/shm"
_STORE_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Tiers:
    """`host`, `mover` and `bridge` are None where there is no such tier."""

    cache: TieredCache
    host: HostStorage | None = None
    mover: StreamMover | None = None
    bridge: StoreBridge | None = None

    def copies(self) -> MoverStats | None:
        """Of copies between device and host."""
        return None if self.mover is None else self.mover.stats()

    def transfers(self) -> BridgeStats | None:
        """Of what goes to the store and comes from it."""
        return None if self.bridge is None else self.bridge.bridge_stats()

    def close(self) -> None:
        """The store gets what is on its way there, within seconds; threads end. Nothing may be asked for afterwards."""
        if not settle(self.cache, _SETTLE_S if self.bridge is None else _SETTLE_S + _FLUSH_S):
            logger.warning("KV was still on its way to the host or the store, and is given up")
        if self.bridge is not None:
            self.bridge.close(_FLUSH_S)
        if self.mover is not None:
            self.mover.close()


def build_tiers(
    config: EngineConfig,
    plan: WorkerPlan,
    text: TextConfig,
    device: PrefixCache,
    storage: KvStorage,
    *,
    wake: Callable[[], None],
) -> Tiers:
    """`wake` is called by threads of the store when there is something to do. Raises ValueError, naming the setting,
    for memory that cannot be had and for a store that cannot be opened."""
    if plan.host is None:
        if config.host_budget_bytes:
            logger.info("no host tier and no store of KV: engine.prefix_cache is off")
        return Tiers(TieredCache(device))
    host = _host_storage(config, plan.layout, plan.host, pinned=storage.device.type == "cuda")
    tier = HostTier(num_full_pages=plan.host.num_full_pages, num_window_pages=plan.host.num_window_pages)
    mover = StreamMover(storage, host)
    bridge = _bridge(config, plan, text, tier, host, device, wake) if config.kv_store else None
    cache = TieredCache(device, host=tier, mover=mover, store=bridge, hit_threshold=config.host_hit_threshold)
    _log_tiers(config, plan.layout, plan.host)
    return Tiers(cache, host, mover, bridge)


def _host_storage(config: EngineConfig, layout: KvLayout, pools: PoolPlan, *, pinned: bool) -> HostStorage:
    try:
        return HostStorage(
            layout, num_full_pages=pools.num_full_pages, num_window_pages=pools.num_window_pages, pinned=pinned
        )
    except RuntimeError as error:
        kind = "pinned memory" if pinned else "memory"
        raise ValueError(
            f"engine.host_budget_bytes is {config.host_budget_bytes:,}: {pools.size_bytes:,} bytes of {kind} cannot be "
            f"had on this host: {error}"
        ) from error


def _bridge(
    config: EngineConfig,
    plan: WorkerPlan,
    text: TextConfig,
    tier: HostTier,
    host: HostStorage,
    device: PrefixCache,
    wake: Callable[[], None],
) -> StoreBridge:
    layout, memory_bytes = plan.layout, store_memory_bytes(config)
    try:
        client = open_store(
            config.kv_store,
            memory_bytes=memory_bytes,
            disk_bytes=config.kv_store_disk_bytes,
            io_bytes=config.kv_store_io_bytes,
            timeout_s=config.kv_store_timeout_s,
            ttl_s=config.kv_store_ttl_s,
            value_bytes=lambda key: layout.full_page_bytes if key[:1] == b"f" else layout.window_page_bytes,
            largest_bytes=max(layout.full_page_bytes, layout.window_page_bytes),
        )
    except (OSError, ValueError, NodeFailed) as error:
        raise ValueError(f"engine.kv_store is {without_password(config.kv_store)!r}: {error}") from error
    settings = BridgeSettings(
        prefetch_timeout_s=config.prefetch_timeout_s,
        prefetch_page_timeout_s=config.prefetch_page_timeout_s,
        ttl_s=config.kv_store_ttl_s,
        # Windows that the store lacks are healed where that is cheaper than computing: not for less than this.
        heal_pages=sum(layer.window_left or 0 for layer in text.layers) // config.page_size,
    )
    return StoreBridge(
        client,
        tier,
        host.page_view,
        page_size=config.page_size,
        window_pages=device.window_pages,
        settings=settings,
        wake=wake,
    )


def store_memory_bytes(config: EngineConfig) -> int:
    """Shared memory for the store of this host; 0 for another. Raises ValueError for more than there is, if it was
    asked for."""
    if not config.kv_store.startswith("local"):
        return 0
    wanted_bytes = config.kv_store_memory_bytes
    try:
        found = os.statvfs(_SHM_DIR)
    except OSError:
        return wanted_bytes or _STORE_MEMORY_BYTES  # The store itself says what it lacks.
    total_bytes = found.f_frsize * found.f_blocks
    if wanted_bytes is None:
        return min(_STORE_MEMORY_BYTES, total_bytes // 4)
    if wanted_bytes > total_bytes:
        raise ValueError(
            f"engine.kv_store_memory_bytes is {wanted_bytes:,}; allowed: less than {_SHM_DIR} has, "
            f"{total_bytes:,} (docker run --shm-size)"
        )
    return wanted_bytes


def _log_tiers(config: EngineConfig, layout: KvLayout, pools: PoolPlan) -> None:
    stores = f"; store {without_password(config.kv_store)}" if config.kv_store else "; no store"
    if config.kv_store.startswith("local"):
        memory, disk = f"{store_memory_bytes(config):,}", f"{config.kv_store_disk_bytes:,}"
        stores += f" of {memory} bytes in memory and {disk} on disk"
    logger.info(
        "KV in host memory: %s bytes as %d full pages (%d tokens) and %d window pages (%d tokens)%s",
        f"{pools.size_bytes:,}",
        pools.num_full_pages,
        pools.num_full_pages * layout.page_size,
        pools.num_window_pages,
        pools.num_window_pages * layout.page_size,
        stores,
    )
