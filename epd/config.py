"""Settings of the gateway and of the workers: frozen, validated at birth, read once by `cli.load`.

Nothing below this module reads an environment variable or a file of settings.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from epd.gateway_config import FetchPolicy, GatewayConfig
from epd.setting_checks import one_of, positive, seconds, within
from epd.store_address import check_store
from epd.types import Role

__all__ = ["EngineConfig", "FetchPolicy", "GatewayConfig", "without_password"]

# What matrices are stored as: converted on load, or quantised as in the files and dequantised at each use.
WeightStorage = Literal["bfloat16", "float32", "keep"]
# How the rows of fused q, k, v projections lie in the files; "auto" is "interleaved" where they are fused.
QkvLayout = Literal["auto", "interleaved", "plain"]
# Which window KV goes first when room is short, see `epd.cache.victims`.
WindowEviction = Literal["marginal", "tail", "lru"]

# How attention over pages is computed: "auto", and the rows of `epd.kernels.backends.BACKENDS`.
Attention = Literal["auto", "reference", "cpu", "cpu-torch", "sdpa", "flex", "flashinfer"]
# Types of device on which some of them do not run.
_ATTENTION_NEEDS: Mapping[str, str] = {"cpu": "cpu", "cpu-torch": "cpu", "flashinfer": "cuda"}

# What is computed in and KV is stored as, and the bytes of a value.
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# More draft heads than this no published model has.
MAX_DRAFT_TOKENS = 3

# Longer pages or steps than these serve nobody: a page is the least that can be shared, a step what streams wait for.
MAX_PAGE_SIZE = 1024
MAX_CHUNK_TOKENS = 1 << 18
_DEVICE = re.compile(r"cpu(:0)?|cuda(:\d{1,3})?")
# Of an address of a store: all up to the last @ before the next address, since passwords may hold anything.
_USER_INFO = re.compile(r"//(?:(?!,(?:rediss?|unix)://).)*@")
_PASSWORD_OPTION = re.compile(r"(?<=[?&])((ssl_)?password)=(?:(?!,(?:rediss?|unix)://)[^&])*")
# Smaller pieces cost more calls than they are worth; a larger one holds a node up for longer than any time limit.
MIN_STORE_IO_BYTES = 64 << 10
MAX_STORE_IO_BYTES = 64 << 20


def without_password(store: str) -> str:
    """Addresses of a store as they may be shown."""
    if store.startswith("local"):
        return store
    return _USER_INFO.sub("//(hidden)@", _PASSWORD_OPTION.sub(r"\1=(hidden)", store))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One worker. `kv_budget_bytes` is split over the two pools by `epd.kv.layout.plan_pools`.

    `chunk_tokens` is the token budget of one step: prompts longer than that are computed in chunks, between which
    decode steps run. `window_left` overrides the model's sliding window (see `epd.model.config`). `threads` is torch's.

    `dtype` is that of the arithmetic and of KV; `weights` is what matrices are stored as, None for `dtype` as well.
    `qkv_layout` must be set for files that hold fused projections in plain order: their shapes do not tell.
    """

    model_dir: Path
    model_name: str
    role: Role
    name: str = "worker-0"
    device: str = "cpu"
    dtype: str = "float32"
    weights: WeightStorage | None = None
    qkv_layout: QkvLayout = "auto"
    threads: int = 1
    # How many of the model's draft heads guess next tokens (multi-token prediction), 0 to 3, None for all there are.
    # Answers are the same with any number, up to the rounding that depends on how many tokens are computed together.
    # `draft_max_batch_tokens` bounds what a step of decoding sequences computes with its drafts: the more sequences
    # decode together, the fewer drafts each has, down to none.
    draft_tokens: int | None = None
    draft_max_batch_tokens: int = 12
    # How attention over pages is computed, see `epd.kernels.backends`; "auto" takes the fastest there is here.
    attention: str = "auto"
    # On CUDA, whether steps of one token per sequence are recorded and replayed as graphs, see `epd.engine.graphs`.
    cuda_graphs: bool = True
    page_size: int = 16
    kv_budget_bytes: int = 256 << 20
    expected_sequence_tokens: int = 2048
    chunk_tokens: int = 512
    max_running: int = 16
    max_waiting: int = 256
    # Prompts with fewer tokens to compute go first, and each second of waiting counts as so many tokens less.
    waiting_credit_tokens_per_s: float = 2000.0
    prefix_cache: bool = True
    retention_stride_tokens: int = 4096
    dense_retention_tokens: int = 2048
    # Which window KV goes first when room is short, see `epd.cache.victims`: the one whose loss costs the fewest tokens
    # of later hits; or, to compare with, the least recently used one, with ends of branches kept ("tail") or without.
    window_eviction: WindowEviction = "marginal"
    decode_release_interval_tokens: int = 128
    window_left: int | None = None
    # How long a gateway may be silent before its requests are ended here. Longer than `GatewayConfig.worker_timeout_s`:
    # of two processes that cannot hear each other the gateway gives up first, since only it can try elsewhere. As
    # long a worker that has drained waits until its gateways have read the last answers.
    peer_timeout_s: float = 30.0
    # Media embeddings held for requests that wait or are being computed; see `epd.engine.feed`.
    embedding_buffer_bytes: int = 512 << 20
    # How long rows of an encoder on another host may take before they count as lost.
    embedding_timeout_s: float = 20.0
    # Memory of the host in which KV outlives its pages on the device (`epd.cache.tiers`); 0 for none.
    host_budget_bytes: int = 0
    # The lookup that copies what it hits to the host, while the request runs: with 1 the first. What a request leaves
    # behind, and what is evicted from the device, is copied without.
    host_hit_threshold: int = 2
    # Where KV outlives this process (`epd.cache.l3`): "", "local", "local:/dir", "redis://host[:port][/db][,redis://...]"
    # or "mooncake://master:port".
    kv_store: str = ""
    # Of a local store: what it may take of shared memory, and of the disk.
    # Shared memory of a local store; None: 128 MiB, or a quarter of what there is where that is less.
    kv_store_memory_bytes: int | None = None
    kv_store_disk_bytes: int = 1 << 30
    # Most bytes of one read or write; larger pages go in slices.
    kv_store_io_bytes: int = 1 << 20
    # A node that takes longer for one of them has missed.
    kv_store_timeout_s: float = 0.05
    # How long Redis keeps what nobody reads.
    kv_store_ttl_s: float = 3600.0
    # How long a request waits for its prefix to come from the store, and how much longer for each page of it. What has
    # not come by then is computed.
    prefetch_timeout_s: float = 0.2
    prefetch_page_timeout_s: float = 0.001

    def __post_init__(self) -> None:
        one_of("engine.weights", self.weights, (None, *get_args(WeightStorage)))
        one_of("engine.window_eviction", self.window_eviction, get_args(WindowEviction))
        one_of("engine.qkv_layout", self.qkv_layout, get_args(QkvLayout))
        one_of("engine.draft_tokens", self.draft_tokens, (None, *range(MAX_DRAFT_TOKENS + 1)))
        one_of("engine.dtype", self.dtype, tuple(DTYPE_BYTES))
        one_of("engine.attention", self.attention, get_args(Attention))
        if _DEVICE.fullmatch(self.device) is None:
            raise ValueError(f"engine.device is {self.device!r}; allowed: cpu, cuda, cuda:0, cuda:1, ...")
        needed = _ATTENTION_NEEDS.get(self.attention)
        if needed is not None and not self.device.startswith(needed):
            raise ValueError(
                f"engine.attention is {self.attention!r}, which needs a device of type {needed}; engine.device is "
                f"{self.device!r}"
            )
        within("engine.page_size", self.page_size, 1, MAX_PAGE_SIZE)
        within("engine.chunk_tokens", self.chunk_tokens, 1, MAX_CHUNK_TOKENS)
        within("engine.window_left", self.window_left, 0)
        within("engine.dense_retention_tokens", self.dense_retention_tokens, 0)
        positive(
            "engine",
            draft_max_batch_tokens=self.draft_max_batch_tokens,
            threads=self.threads,
            kv_budget_bytes=self.kv_budget_bytes,
            expected_sequence_tokens=self.expected_sequence_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            waiting_credit_tokens_per_s=self.waiting_credit_tokens_per_s,
            retention_stride_tokens=self.retention_stride_tokens,
            decode_release_interval_tokens=self.decode_release_interval_tokens,
            peer_timeout_s=self.peer_timeout_s,
            embedding_buffer_bytes=self.embedding_buffer_bytes,
            embedding_timeout_s=self.embedding_timeout_s,
        )
        self._check_tiers()

    def _check_tiers(self) -> None:
        within("engine.host_budget_bytes", self.host_budget_bytes, 0)
        within("engine.host_hit_threshold", self.host_hit_threshold, 1)
        positive(
            "engine",
            kv_store_memory_bytes=1 if self.kv_store_memory_bytes is None else self.kv_store_memory_bytes,
            kv_store_disk_bytes=self.kv_store_disk_bytes,
        )
        within("engine.kv_store_io_bytes", self.kv_store_io_bytes, MIN_STORE_IO_BYTES, MAX_STORE_IO_BYTES)
        seconds(
            "engine",
            may_be_zero=False,
            kv_store_timeout_s=self.kv_store_timeout_s,
            kv_store_ttl_s=self.kv_store_ttl_s,
        )
        seconds(
            "engine",
            may_be_zero=True,
            prefetch_timeout_s=self.prefetch_timeout_s,
            prefetch_page_timeout_s=self.prefetch_page_timeout_s,
        )
        try:
            check_store(self.kv_store)
        except ValueError as error:
            raise ValueError(f"engine.kv_store is {without_password(self.kv_store)!r}: {error}") from None
        if self.kv_store and not self.host_budget_bytes:
            raise ValueError(
                f"engine.kv_store is {without_password(self.kv_store)!r} and engine.host_budget_bytes is 0; allowed: "
                "more than 0 with a store, since KV passes through the host's memory on its way"
            )
