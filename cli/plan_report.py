"""Everything `mimo plan` says, as JSON has it."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from cli.plan_memory import (
    Asked,
    WorkerMemory,
    fewest_for_weights,
    sequence_bytes,
    tower_bytes,
    tp_choices,
)
from cli.plan_units import GPUS, gib
from cli.plan_work import StageWork, Workload, healing, replica_ratio, transfer_bytes
from epd import Inspection, PoolTooSmall, plan_host
from epd.config import DTYPE_BYTES

_CURVE: Final = tuple(1 << power for power in range(10, 21))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked. `gpu_name` None: only memory is known."""

    model: str
    gpu_name: str | None
    asked: Asked
    workload: Workload
    num_sessions: int | None
    link_bytes_per_s: float
    mfu: float
    mbu: float


def build_report(inspection: Inspection, question: Question, memory: WorkerMemory, work: StageWork) -> dict[str, Any]:
    """Bytes are exact for the configuration, seconds are estimates."""
    config, asked = inspection.inventory.config, question.asked
    parts = dict(memory.whole_weight_bytes)
    gpu = None if question.gpu_name is None else GPUS[question.gpu_name]
    return {
        "model": question.model,
        "gpu": {
            "name": question.gpu_name,
            "memory_bytes": asked.gpu_memory_bytes,
            "usable_share": asked.usable_share,
            "bfloat16_tflops": None if gpu is None else gpu.bfloat16_tflops,
            "bandwidth_gb_per_s": None if gpu is None else gpu.bandwidth_gb_per_s,
        },
        "fits": memory.fits,
        "why_not": None if memory.fits else why_not(inspection, memory, asked),
        "weights": {
            "held_as": asked.weights,
            "total_bytes": sum(parts.values()),
            "tower_bytes": tower_bytes(inspection, parts),
            "parts": parts,
            "num_params": inspection.inventory.num_params,
            "num_active_params": inspection.inventory.num_active_params,
        },
        "kv": _kv(inspection, asked, memory),
        "worker": _worker(memory),
        "settings": _settings(asked, memory),
        "healing": _healing(inspection, asked),
        "work": _work(question, memory, work),
        "host": _host(question, memory),
        "transfer": _transfer(question, memory, work),
        "model_positions": config.max_position_embeddings,
    }


def why_not(inspection: Inspection, memory: WorkerMemory, asked: Asked) -> str:
    """In one sentence, with what would help."""
    tp = memory.tp
    more_gpus = [choice for choice in tp_choices(inspection) if choice > tp]
    if memory.kv_budget_bytes <= 0:
        usable = gib(asked.gpu_memory_bytes * asked.usable_share)
        fewest = fewest_for_weights(inspection, asked)
        ways = [] if fewest is None else [f"{fewest} GPUs a worker (--tp {fewest})"]
        needed_bytes = memory.weight_bytes / asked.usable_share
        ways.append(f"GPUs of more than {gib(needed_bytes)} (--gpu, --memory)")
        reason = f"weights take {gib(memory.weight_bytes)} of each GPU's usable {usable} at --tp {tp}"
        return f"this does not fit: {reason}; take {_either(ways)}"
    if memory.num_sequences < memory.num_running:
        reason = (
            f"{memory.num_sequences} sequences of {asked.context_tokens:,} tokens fit beside the weights at --tp "
            f"{tp}, not {memory.num_running}"
        )
    else:
        reason = memory.too_small or "the pools do not fit"
    ways = [f"more GPUs a worker (--tp {more_gpus[0]})"] if more_gpus else []
    ways += ["a shorter --context", "a smaller --chunk"] if not memory.num_sequences else ["a shorter --context"]
    ways += ["a lower --concurrency"] if memory.num_running > 1 else []
    return f"this does not fit: {reason}; take {_either(ways)}"


def _either(ways: list[str]) -> str:
    return " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)


def _kv(inspection: Inspection, asked: Asked, memory: WorkerMemory) -> dict[str, Any]:
    """Of whole sequences: the trunk's arithmetic without pages, draft heads apart."""
    config, num_heads = inspection.inventory.config, inspection.inventory.num_mtp_layers
    layers = [layer.attention for layer in config.layers]
    dtype_bytes = DTYPE_BYTES[asked.dtype]
    per_layer = [(spec.is_window, spec.num_kv_heads * (spec.qk_dim + spec.v_dim) * dtype_bytes) for spec in layers]
    full = sum(size for is_window, size in per_layer if not is_window)
    windowed = sum(size for is_window, size in per_layer if is_window)
    window_tokens = 0 if config.window_layer is None else (config.window_layer.window_left or 0) + 1
    context = asked.context_tokens
    trunk = full * context + windowed * min(context, window_tokens)
    curve = sorted({*(length for length in _CURVE if length <= config.max_position_embeddings), context})
    return {
        "dtype": asked.dtype,
        "full_bytes_per_token": full,
        "window_bytes_per_token": windowed,
        "window_tokens": window_tokens,
        "draft_heads": num_heads,
        "draft_bytes_per_token": memory.whole_layout.window_bytes_per_token - windowed,
        "context_tokens": context,
        "sequence_bytes": trunk,
        "single_pool_bytes": (full + windowed) * context,
        "ratio": trunk / ((full + windowed) * context),
        "contexts": [
            {"num_tokens": length, "size_bytes": size, "single_pool_bytes": (full + windowed) * length}
            for length, size in zip(curve, _trunk_bytes(memory, windowed, window_tokens, curve), strict=True)
        ],
    }


def _trunk_bytes(memory: WorkerMemory, windowed: int, window_tokens: int, curve: list[int]) -> list[int]:
    draft = memory.whole_layout.window_bytes_per_token - windowed
    whole = sequence_bytes(memory.whole_layout, window_tokens, curve)
    return [size - draft * min(tokens, window_tokens) for size, tokens in zip(whole, curve, strict=True)]


def _worker(memory: WorkerMemory) -> dict[str, Any]:
    """Of one GPU of the worker."""
    return {
        "tp": memory.tp,
        "weight_bytes": memory.weight_bytes,
        "kv_budget_bytes": memory.kv_budget_bytes,
        "running_sequence_bytes": memory.running_sequence_bytes,
        "num_sequences": memory.num_sequences,
        "single_pool_sequence_bytes": memory.single_pool_sequence_bytes,
        "num_single_pool_sequences": memory.num_single_pool_sequences,
        "num_running": memory.num_running,
        "pools": None if memory.pools is None else asdict(memory.pools),
        "full_page_bytes": memory.layout.full_page_bytes,
        "window_page_bytes": memory.layout.window_page_bytes,
    }


def _settings(asked: Asked, memory: WorkerMemory) -> dict[str, Any] | None:
    """Of `mimo serve`, for one GPU."""
    if not memory.fits:
        return None
    return {
        "engine.kv_budget_bytes": memory.kv_budget_bytes,
        "engine.max_running": memory.num_running,
        "engine.expected_sequence_tokens": asked.context_tokens,
        "engine.chunk_tokens": asked.chunk_tokens,
        "engine.page_size": asked.page_size,
        "engine.dtype": asked.dtype,
        "engine.weights": asked.weights,
    }


def _healing(inspection: Inspection, asked: Asked) -> dict[str, Any]:
    num_tokens, share = healing(inspection, page_size=asked.page_size, context_tokens=asked.context_tokens)
    return {"num_tokens": num_tokens, "share_of_prefill": share}


def _work(question: Question, memory: WorkerMemory, work: StageWork) -> dict[str, Any]:
    """Replicas by seconds of a worker where they are known, else by FLOPs, which flatter decode."""
    flops = {"encode": work.media.flops, "prefill": work.prefill_flops, "decode": work.decode_flops}
    times = {"encode": work.encode_s, "prefill": work.prefill_s, "decode": work.decode_s}
    known = {stage: duration_s for stage, duration_s in times.items() if duration_s is not None}
    return {
        "request": asdict(question.workload),
        "prompt_tokens": work.prompt_tokens,
        "media_tokens": work.media.num_tokens,
        "flops": flops,
        "flops_ratio": {stage: count / work.prefill_flops for stage, count in flops.items()},
        "worker_seconds": known or None,
        "decode_step_s": work.decode_step_s,
        "decode_is_memory_bound": work.decode_is_memory_bound,
        "assumed": {"mfu": question.mfu, "mbu": question.mbu, "decode_batch": memory.num_running},
        "replicas": replica_ratio(known or {stage: float(count) for stage, count in flops.items()}),
        "replicas_from": "seconds" if known else "flops",
    }


def _host(question: Question, memory: WorkerMemory) -> dict[str, Any]:
    """Host memory of one GPU for idle conversations, split as the engine does, and a store for ten times as many."""
    num_sessions = question.num_sessions or 4 * memory.num_running
    size_bytes = num_sessions * memory.cached_sequence_bytes
    try:
        pools = asdict(
            plan_host(
                memory.layout,
                size_bytes,
                expected_sequence_tokens=question.asked.context_tokens,
                retention_stride_tokens=question.asked.retention_stride_tokens,
            )
        )
    except PoolTooSmall:
        pools = None
    return {
        "num_sessions": num_sessions,
        "cached_sequence_bytes": memory.cached_sequence_bytes,
        "host_budget_bytes": size_bytes,
        "pools": pools,
        "store_bytes": 10 * size_bytes * memory.tp,
    }


def _transfer(question: Question, memory: WorkerMemory, work: StageWork) -> dict[str, Any]:
    size_bytes = transfer_bytes(memory, work.prompt_tokens)
    layout = memory.whole_layout
    single = work.prompt_tokens * (layout.full_bytes_per_token + layout.window_bytes_per_token)
    return {
        "prompt_tokens": work.prompt_tokens,
        "kv_bytes": size_bytes,
        "single_pool_bytes": single,
        "link_bytes_per_s": question.link_bytes_per_s,
        "kv_s": size_bytes / question.link_bytes_per_s,
    }
