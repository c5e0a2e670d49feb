"""Memory of one worker of `mimo plan`: weights, KV of one sequence, how many fit, and the split of the two pools.

The arithmetic is the engine's own (`epd.kv.layout`). With tensor parallelism each GPU of a worker holds its share of
the heads: KV heads are split as far as they go, and repeated beyond that. Routers and norms are on every GPU; towers
are the encoder stage's and on none of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, get_args

from encoder import Part
from epd import Inspection, KvLayout, PoolPlan, PoolTooSmall, RetentionPolicy, cached_sequence_bytes, plan_pools
from epd.config import DTYPE_BYTES

TOWERS: Final = frozenset({"vision", "speech_embeddings", "audio_encoder"})
_ON_EVERY_GPU: Final = frozenset({"router", "norms"})
TP_CHOICES: Final = (1, 2, 4, 8, 16, 32, 64)
WEIGHTS: Final = ("keep", "bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a worker is to do. `usable_share` of the memory is for weights and KV; the rest is for activations."""

    gpu_memory_bytes: int
    usable_share: float
    context_tokens: int
    concurrency: int | None
    weights: str
    dtype: str
    tp: int | None
    page_size: int
    chunk_tokens: int
    retention_stride_tokens: int
    release_interval_tokens: int


@dataclass(frozen=True, slots=True)
class ShardedLayer:
    """A layer's KV on one of `tp` GPUs."""

    index: int
    window_left: int | None
    num_kv_heads: int
    qk_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Bytes are those of one GPU of the worker's `tp`, those named `whole` of the model, by part of the weights."""

    tp: int
    weight_bytes: int
    whole_weight_bytes: Mapping[str, int]
    kv_budget_bytes: int
    running_sequence_bytes: int
    cached_sequence_bytes: int
    single_pool_sequence_bytes: int
    num_sequences: int
    num_single_pool_sequences: int
    num_running: int
    pools: PoolPlan | None
    layout: KvLayout
    whole_layout: KvLayout
    too_small: str | None

    @property
    def fits(self) -> bool:
        """Weights, and pools in which `num_running` sequences of the asked context have room."""
        return self.pools is not None and self.num_sequences >= self.num_running


def weight_bytes_by_part(inspection: Inspection, weights: str) -> dict[str, int]:
    """Bytes of each part as a worker holds it: as the files do ("keep"), or as one dtype."""
    sums: dict[str, int] = dict.fromkeys(get_args(Part), 0)
    for spec in inspection.inventory.main:
        sums[spec.part] += spec.size_bytes if weights == "keep" else spec.num_params * DTYPE_BYTES[weights]
    return {part: size_bytes for part, size_bytes in sums.items() if size_bytes}


def tower_bytes(inspection: Inspection, parts: Mapping[str, int]) -> int:
    """Of an encoder: its towers, the audio tokenizer's own file among them."""
    own = sum(spec.size_bytes for spec in inspection.inventory.audio_tokenizer)
    return own + sum(parts.get(part, 0) for part in TOWERS)


def kv_layout(inspection: Inspection, *, tp: int, dtype: str, page_size: int, num_heads: int | None = None) -> KvLayout:
    """Of one GPU; draft heads (all, or `num_heads`) are window layers, as in the engine."""
    config = inspection.inventory.config
    num_heads = inspection.inventory.num_mtp_layers if num_heads is None else num_heads
    layers = [*config.layers, *(config.mtp_layer(k) for k in range(num_heads))]
    specs = [
        ShardedLayer(
            index=layer.attention.index,
            window_left=layer.attention.window_left,
            num_kv_heads=-(-layer.attention.num_kv_heads // tp),
            qk_dim=layer.attention.qk_dim,
            v_dim=layer.attention.v_dim,
        )
        for layer in layers
    ]
    return KvLayout.from_specs(
        [spec for spec in specs if spec.window_left is None],
        [spec for spec in specs if spec.window_left is not None],
        page_size=page_size,
        dtype_bytes=DTYPE_BYTES[dtype],
    )


def plan_worker_memory(inspection: Inspection, asked: Asked) -> WorkerMemory:
    """With `asked.tp`, or the fewest GPUs that do; the most there are to choose from where none does.

    Raises ValueError for a number of GPUs that the model's heads cannot be shared out to.
    """
    parts = weight_bytes_by_part(inspection, asked.weights)
    if asked.tp is not None:
        if num_left := _heads_left(inspection, asked.tp):
            shown = ", ".join(str(tp) for tp in TP_CHOICES if not _heads_left(inspection, tp))
            raise ValueError(f"--tp is {asked.tp}; the model's {num_left} heads are shared out to {shown} GPUs")
        return _worker(inspection, parts, asked, asked.tp)
    for tp in tp_choices(inspection):
        found = _worker(inspection, parts, asked, tp)
        if found.fits:
            break
    return found


def tp_choices(inspection: Inspection) -> list[int]:
    """GPUs that a worker of this model can have; 1 at least."""
    return [tp for tp in TP_CHOICES if not _heads_left(inspection, tp)]


def _heads_left(inspection: Inspection, tp: int) -> int | None:
    """A number of heads that `tp` does not divide; None where it divides those of every layer."""
    counts = sorted({layer.attention.num_heads for layer in inspection.inventory.config.layers})
    return next((count for count in counts if count % tp), None)


def fewest_for_weights(inspection: Inspection, asked: Asked) -> int | None:
    """GPUs a worker beside whose share of the weights there is room for anything; None where no number of them do."""
    parts = weight_bytes_by_part(inspection, asked.weights)
    usable_bytes = int(asked.gpu_memory_bytes * asked.usable_share)
    return next((tp for tp in tp_choices(inspection) if _share_bytes(parts, tp) < usable_bytes), None)


def _share_bytes(parts: Mapping[str, int], tp: int) -> int:
    """Weights on each of `tp` GPUs."""
    return sum(
        size_bytes if part in _ON_EVERY_GPU else -(-size_bytes // tp)
        for part, size_bytes in parts.items()
        if part not in TOWERS
    )


def _worker(inspection: Inspection, parts: Mapping[str, int], asked: Asked, tp: int) -> WorkerMemory:
    weight_bytes = _share_bytes(parts, tp)
    layout = kv_layout(inspection, tp=tp, dtype=asked.dtype, page_size=asked.page_size)
    budget_bytes = int(asked.gpu_memory_bytes * asked.usable_share) - weight_bytes
    running_bytes = running_sequence_bytes(layout, asked)
    chunk_bytes = -(-asked.chunk_tokens // asked.page_size) * layout.window_page_bytes
    single_bytes = asked.context_tokens * (layout.full_bytes_per_token + layout.window_bytes_per_token)
    num_sequences = max(0, budget_bytes - chunk_bytes) // running_bytes
    num_running = asked.concurrency or max(1, min(num_sequences, 256))
    pools, too_small = None, None
    try:
        pools = plan_pools(
            layout,
            max(0, budget_bytes),
            expected_sequence_tokens=asked.context_tokens,
            max_running=num_running,
            chunk_tokens=asked.chunk_tokens,
            retention_stride_tokens=asked.retention_stride_tokens,
            tail_pages=RetentionPolicy().tail_pages,
        )
    except PoolTooSmall as error:
        too_small = str(error)
    return WorkerMemory(
        tp=tp,
        weight_bytes=weight_bytes,
        whole_weight_bytes=parts,
        kv_budget_bytes=budget_bytes,
        running_sequence_bytes=running_bytes,
        cached_sequence_bytes=cached_sequence_bytes(
            layout,
            asked.context_tokens,
            retention_stride_tokens=asked.retention_stride_tokens,
            tail_pages=RetentionPolicy().tail_pages,
        ),
        single_pool_sequence_bytes=single_bytes,
        num_sequences=num_sequences,
        num_single_pool_sequences=max(0, budget_bytes) // single_bytes,
        num_running=num_running,
        pools=pools,
        layout=layout,
        whole_layout=kv_layout(inspection, tp=1, dtype=asked.dtype, page_size=asked.page_size),
        too_small=too_small,
    )


def running_sequence_bytes(layout: KvLayout, asked: Asked) -> int:
    """Of a sequence that runs at the asked context: its full pages and one more for its frontier, and its window with
    the tail, a partial page at either end, and what it writes before windows are let go."""
    page_size = asked.page_size
    full_bytes = (-(-asked.context_tokens // page_size) + 1) * layout.full_page_bytes
    if not layout.window_layers:
        return full_bytes
    kept_pages = (
        -(-(layout.window_tokens + asked.release_interval_tokens) // page_size) + RetentionPolicy().tail_pages + 2
    )
    return full_bytes + min(kept_pages, -(-asked.context_tokens // page_size) + 1) * layout.window_page_bytes


def sequence_bytes(layout: KvLayout, window_tokens: int, context_tokens: Iterable[int]) -> list[int]:
    """KV of one sequence at each context, in whole tokens: the published arithmetic, without pages."""
    return [
        layout.full_bytes_per_token * tokens + layout.window_bytes_per_token * min(tokens, window_tokens)
        for tokens in context_tokens
    ]
