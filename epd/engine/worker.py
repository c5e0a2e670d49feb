"""A worker process: load the model, size the pools, run the loop until told to stop."""

import logging
import signal
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType

import torch

from encoder.cluster import ClusterKeys
from epd.cache.prefix import PrefixCache
from epd.cache.tiers.tiered import TieredCache
from epd.cache.victims import make_policy
from epd.cache.window import num_window_pages
from epd.config import EngineConfig
from epd.engine.admission import Limits
from epd.engine.clock import Clock
from epd.engine.drafting import DraftPolicy
from epd.engine.feed import EmbeddingFeed, RowSource
from epd.engine.fetching import NO_STORE, StorePrefixes, WithGrammars
from epd.engine.grammar import Answers, Grammars
from epd.engine.graphs import DecodeGraphs, ScratchPages, make_graphs
from epd.engine.handoff import KvMover
from epd.engine.heal_cost import heal_cost
from epd.engine.identity import WorkerIdentity, kv_arithmetic, kv_fingerprint, new_incarnation
from epd.engine.loop import EngineLoop
from epd.engine.row_source import HostSource
from epd.engine.runner import Runner
from epd.engine.scheduler import Scheduler, SchedulerConfig
from epd.engine.sizing import WorkerPlan, count_heads, plan_worker
from epd.engine.staging import KvStager
from epd.engine.tiers import Tiers, build_tiers
from epd.engine.tokens import count_token_ids
from epd.kernels.backends import make_backend
from epd.kernels.base import AttentionBackend
from epd.kv.dual import DualPool
from epd.kv.errors import PoolTooSmall
from epd.kv.layout import KvLayout, PoolPlan
from epd.kv.storage import KvStorage
from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel
from epd.model.weights import load_text_model
from epd.token_table import load_token_table
from epd.transport.base import Endpoint
from epd.transport.sockets import WorkerEndpoint

logger = logging.getLogger(__name__)

_FLUSH_S = 1.0
_EXIT_REFUSED = 2
# What `build_engine` raises about settings and checkpoints, as opposed to a machine that fails.
REFUSALS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError, PoolTooSmall)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Engine:
    """A built worker; the parts are for those who look inside (tests, metrics)."""

    loop: EngineLoop
    tiers: Tiers
    scheduler: Scheduler
    feed: EmbeddingFeed
    identity: WorkerIdentity

    @property
    def cache(self) -> TieredCache:
        return self.tiers.cache


def run_worker(
    config: EngineConfig, *, address: str, advertise: str | None = None, keys: ClusterKeys | None = None
) -> None:
    """A whole worker process at a ZMQ address: returns after SIGTERM, when what was running has finished.

    `advertise` is where other workers reach it, None for at `address`; `keys` are those of its cluster. Settings or a
    checkpoint that cannot work end it with one line in the log and exit code 2: starting again is no use.
    """
    endpoint = WorkerEndpoint(address, advertise=advertise, keys=keys)
    try:
        serve(config, endpoint, embeddings=HostSource(timeout_s=config.embedding_timeout_s, keys=keys))
    finally:
        # The last Finish of a drain may still be on its way.
        endpoint.close(flush_s=_FLUSH_S)


def serve(config: EngineConfig, endpoint: Endpoint, *, embeddings: RowSource | None = None) -> None:
    """Build the engine on `endpoint` and run it in the main thread; SIGTERM drains it."""
    torch.set_num_threads(config.threads)
    try:
        engine = build_engine(config, endpoint, embeddings=embeddings)
    except REFUSALS as error:
        logger.error("worker %s cannot start: %s", config.name, " ".join(str(error).split()))
        sys.exit(_EXIT_REFUSED)

    def drain(signum: int, frame: FrameType | None) -> None:
        engine.loop.drain()

    # SIGINT is the supervisor's: a Ctrl-C reaches every stage at once and would drain them in no order.
    signal.signal(signal.SIGTERM, drain)
    logger.info("worker %s (%s) serves %s at %s", config.name, config.role, config.model_name, endpoint.address)
    engine.loop.run()


class EngineThread:
    """A worker in a thread of this process, for the unified mode. Torch's thread count stays the process's own."""

    def __init__(self, config: EngineConfig, endpoint: Endpoint) -> None:
        """Load the model, in the calling thread: what is wrong with the settings is raised here."""
        self._endpoint = endpoint
        self._engine = build_engine(config, endpoint)
        self._thread = threading.Thread(target=self._engine.loop.run, name=f"engine {config.name}", daemon=True)

    @property
    def engine(self) -> Engine:
        return self._engine

    def start(self) -> None:
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Finish what runs, refusing the rest; whether that was done in time. Blocks."""
        self._engine.loop.drain()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End after the step at hand and close the endpoint; what still runs is not answered. Blocks for that step."""
        self._engine.loop.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._endpoint.close()


def build_engine(
    config: EngineConfig,
    endpoint: Endpoint,
    *,
    model: HybridModel | None = None,
    embeddings: RowSource | None = None,
    clock: Clock | None = None,
) -> Engine:
    """Everything a worker consists of. `model` saves loading it again where several workers share a process.

    Raises one of REFUSALS: PoolTooSmall naming the settings when `kv_budget_bytes` is not enough to run at all,
    ValueError for a setting, the others for a checkpoint that is not there or is damaged.
    """
    dtype, device = _DTYPES[config.dtype], _device(config)
    if model is None:
        model = load_text_model(
            config.model_dir,
            dtype=dtype,
            device=device,
            window_left=config.window_left,
            with_mtp=config.draft_tokens != 0,
            qkv_layout=config.qkv_layout,
            weights=config.weights,
        ).eval()
    config = replace(config, draft_tokens=count_heads(config, model.num_mtp_layers))
    clock = Clock() if clock is None else clock
    plan = plan_worker(config, model.config, num_heads=config.draft_tokens or 0)
    layout, pools = plan.layout, plan.pools
    _log_split(layout, pools)
    has_graphs = _has_graphs(config, device)
    storage = _storage(layout, pools, dtype, device, num_scratch=int(has_graphs))
    attention = make_backend(config.attention, storage, page_size=config.page_size, device_type=device.type)
    logger.info('attention over pages: "%s" on %s', attention.name, device)
    tiers = build_tiers(config, plan, model.config, _cache(config, model.config, plan), storage, wake=endpoint.wake)
    cache = tiers.cache
    fingerprint = kv_fingerprint(config.model_dir, layout, arithmetic=kv_arithmetic(config))
    identity = _identity(config, model.config, pools)
    feed = EmbeddingFeed(
        HostSource(timeout_s=config.embedding_timeout_s) if embeddings is None else embeddings,
        limit_bytes=config.embedding_buffer_bytes,
        wake=endpoint.wake,
    )
    stager = KvStager(cache, tiers.host)
    text = model.config
    grammars = Grammars(partial(load_token_table, config.model_dir), text.eos_token_ids)
    scheduler = Scheduler(
        _scheduler_config(config, model.config, identity, fingerprint),
        cache,
        clock,
        feed,
        WithGrammars(
            NO_STORE if tiers.bridge is None else StorePrefixes(cache, tiers.bridge, clock),
            grammars,
            wake=endpoint.wake,
        ),
        stager,
    )
    mover = KvMover(storage, fingerprint=fingerprint, hidden_size=text.hidden_size, vocab_size=text.vocab_size)
    loop = EngineLoop(
        identity=identity,
        endpoint=endpoint,
        scheduler=scheduler,
        runner=Runner(
            model,
            storage,
            mover,
            feed,
            attention,
            num_token_ids=count_token_ids(config.model_dir),
            num_heads=config.draft_tokens or 0,
            graphs=_graphs(config, model, attention, identity, pools, device) if has_graphs else None,
            answers=Answers(grammars, text.eos_token_ids, max_states=config.max_running),
        ),
        mover=mover,
        tiers=tiers,
        stager=stager,
        feed=feed,
        clock=clock,
        peer_timeout_s=config.peer_timeout_s,
        max_waiting=config.max_waiting,
    )
    return Engine(loop, tiers, scheduler, feed, identity)


def _identity(config: EngineConfig, text: TextConfig, pools: PoolPlan) -> WorkerIdentity:
    return WorkerIdentity(
        name=config.name,
        role=config.role,
        model=config.model_name,
        # One page stays free for the token that is computed while the sequence is at its longest.
        max_context_tokens=min(text.max_position_embeddings, (pools.num_full_pages - 1) * config.page_size),
        eos_token_ids=text.eos_token_ids,
        incarnation=new_incarnation(),
    )


def _scheduler_config(
    config: EngineConfig, text: TextConfig, identity: WorkerIdentity, fingerprint: str
) -> SchedulerConfig:
    return SchedulerConfig(
        role=config.role,
        limits=Limits(
            max_context_tokens=identity.max_context_tokens,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            max_waiting=config.max_waiting,
        ),
        eos_token_ids=frozenset(text.eos_token_ids),
        page_size=config.page_size,
        key_seed=fingerprint.encode(),
        chunk_tokens=config.chunk_tokens,
        max_running=config.max_running,
        heal_cost=heal_cost(text, page_size=config.page_size),
        waiting_credit_tokens_per_s=config.waiting_credit_tokens_per_s,
        drafting=DraftPolicy(config.draft_tokens or 0, config.draft_max_batch_tokens),
    )


def _device(config: EngineConfig) -> torch.device:
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine.device is {config.device!r}, torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    return device


def _has_graphs(config: EngineConfig, device: torch.device) -> bool:
    return config.cuda_graphs and device.type == "cuda"


def _graphs(
    config: EngineConfig,
    model: HybridModel,
    attention: AttentionBackend,
    identity: WorkerIdentity,
    pools: PoolPlan,
    device: torch.device,
) -> DecodeGraphs | None:
    return make_graphs(
        model,
        attention,
        max_rows=config.max_running * (1 + (config.draft_tokens or 0)),
        max_table_pages=-(-identity.max_context_tokens // config.page_size),
        # Those after the pools' own.
        scratch=ScratchPages(full=pools.num_full_pages, window=pools.num_window_pages),
        page_size=config.page_size,
        device=device,
    )


def _storage(
    layout: KvLayout, pools: PoolPlan, dtype: torch.dtype, device: torch.device, *, num_scratch: int
) -> KvStorage:
    """The pages of both pools, and `num_scratch` in each that no pool knows of, on top of the budget."""
    try:
        return KvStorage(
            layout,
            num_full_pages=pools.num_full_pages + num_scratch,
            num_window_pages=pools.num_window_pages + num_scratch,
            dtype=dtype,
            device=device,
        )
    except RuntimeError as error:
        raise ValueError(f"KV memory of {pools.size_bytes:,} bytes cannot be had on {device}: {error}") from error


def _cache(config: EngineConfig, text: TextConfig, plan: WorkerPlan) -> PrefixCache:
    layout, pools, retention = plan.layout, plan.pools, plan.retention
    policy = make_policy(
        config.window_eviction,
        window_pages=num_window_pages(layout.window_tokens, config.page_size),
        tail_pages=retention.tail_pages,
        page_size=config.page_size,
        num_window_pages=pools.num_window_pages,
        heal_tokens=sum(layer.window_left or 0 for layer in text.layers),
    )
    return PrefixCache(
        DualPool(num_full_pages=pools.num_full_pages, num_window_pages=pools.num_window_pages),
        page_size=config.page_size,
        window_tokens=layout.window_tokens,
        retention=retention,
        enabled=config.prefix_cache,
        policy=policy,
    )


def _log_split(layout: KvLayout, pools: PoolPlan) -> None:
    page_size = layout.page_size
    logger.info(
        "KV: %s bytes as %d full pages (%d tokens, %d bytes each) and %d window pages (%d tokens, %d bytes each)",
        f"{pools.size_bytes:,}",
        pools.num_full_pages,
        pools.num_full_pages * page_size,
        layout.full_page_bytes,
        pools.num_window_pages,
        pools.num_window_pages * page_size,
        layout.window_page_bytes,
    )
