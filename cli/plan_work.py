"""Arithmetic of one request in `mimo plan`: tokens of its media, FLOPs of each stage, seconds, and replicas.

FLOPs are two per multiply-add of every matrix product, from the configuration (`epd.heal_cost`,
`encoder.vision_flops`). Seconds assume a share of the data sheet's arithmetic and bandwidth. A decode step reads every
weight that its batch touches and the KV of all its sequences, and takes whichever is longer, that or its arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.plan_memory import WorkerMemory
from cli.plan_units import Gpu
from encoder import audio_flops, vision_flops
from encoder.checkpoint import read_json_object
from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from epd import HealCost, Inspection, heal_cost
from preprocess import ProcessorConfig
from preprocess.resize import frame_max_pixels, num_sampled_frames, smart_resize

_DELIMITERS = 2
# "MM:SS" before each pair of frames.
_LABEL_TOKENS = 5
_FILMED_FPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One request. Sizes are (height, width) in pixels; `cached_share` of the prompt is found in the prefix cache."""

    num_images: int
    image_size: tuple[int, int]
    video_s: float
    video_size: tuple[int, int]
    audio_s: float
    prompt_tokens: int
    answer_tokens: int
    cached_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaWork:
    """Of all media of one request: tokens in the prompt, embedding rows, and FLOPs of the towers."""

    num_tokens: int = 0
    num_rows: int = 0
    flops: int = 0

    def __add__(self, other: "MediaWork") -> "MediaWork":
        return MediaWork(
            num_tokens=self.num_tokens + other.num_tokens,
            num_rows=self.num_rows + other.num_rows,
            flops=self.flops + other.flops,
        )

    def times(self, count: int) -> "MediaWork":
        return MediaWork(num_tokens=self.num_tokens * count, num_rows=self.num_rows * count, flops=self.flops * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """FLOPs of one request in each stage, and seconds that it takes of one worker of that stage; None without a GPU
    whose speed is known."""

    prompt_tokens: int
    media: MediaWork
    prefill_flops: int
    decode_flops: int
    encode_s: float | None
    prefill_s: float | None
    decode_s: float | None
    decode_step_s: float | None
    decode_is_memory_bound: bool | None


def image_work(vision: VisionConfig, processor: ProcessorConfig, size: tuple[int, int]) -> MediaWork:
    """Of one picture of (height, width) pixels."""
    height, width = smart_resize(*size, min_pixels=processor.image.min_pixels, max_pixels=processor.image.max_pixels)
    grid = (1, height // vision.patch_size, width // vision.patch_size)
    rows = grid[1] * grid[2] // vision.patches_per_unit
    return MediaWork(num_tokens=rows + _DELIMITERS, num_rows=rows, flops=vision_flops(vision, grid))


def video_work(vision: VisionConfig, processor: ProcessorConfig, duration_s: float, size: tuple[int, int]) -> MediaWork:
    """Of a silent video of so many seconds, filmed at 30 frames a second."""
    budget = processor.video
    num_frames = num_sampled_frames(max(1, round(duration_s * _FILMED_FPS)), _FILMED_FPS, budget)
    height, width = smart_resize(*size, min_pixels=budget.min_pixels, max_pixels=frame_max_pixels(num_frames, budget))
    num_pairs = -(-num_frames // vision.temporal_patch_size)
    grid = (num_pairs, height // vision.patch_size, width // vision.patch_size)
    rows = grid[0] * grid[1] * grid[2] // vision.patches_per_unit
    num_tokens = rows + num_pairs * (_LABEL_TOKENS + _DELIMITERS) + _DELIMITERS
    return MediaWork(num_tokens=num_tokens, num_rows=rows, flops=vision_flops(vision, grid))


def audio_work(
    tokenizer: AudioTokenizerConfig, encoder: AudioConfig, processor: ProcessorConfig, duration_s: float
) -> MediaWork:
    """Of a sound of so many seconds."""
    num_frames = max(1, round(duration_s * processor.audio.rate_hz / processor.audio.hop_length))
    num_codes = 0
    for start in range(0, num_frames, encoder.segment_frames):
        steps = (min(encoder.segment_frames, num_frames - start) - 1) // tokenizer.stride + 1
        num_codes += -(-steps // tokenizer.pool)
    rows = -(-num_codes // encoder.group_size)
    return MediaWork(num_tokens=rows + _DELIMITERS, num_rows=rows, flops=audio_flops(tokenizer, encoder, num_frames))


def media_work(inspection: Inspection, directory: Path, workload: Workload) -> MediaWork:
    """Raises ValueError for media that the model does not take."""
    config_hf: Mapping[str, Any] = inspection.config_hf
    wants_vision, total = bool(workload.num_images or workload.video_s), MediaWork()
    if not (wants_vision or workload.audio_s):
        return total
    if wants_vision and not config_hf.get("vision_config"):
        raise ValueError("this model takes no pictures and no videos; leave out --images and --video-seconds")
    if workload.audio_s and not config_hf.get("audio_config"):
        raise ValueError("this model takes no sounds; leave out --audio-seconds")
    processor = ProcessorConfig.from_hf(config_hf)
    if wants_vision:
        vision = VisionConfig.from_hf(config_hf)
        if workload.num_images:
            total += image_work(vision, processor, workload.image_size).times(workload.num_images)
        if workload.video_s:
            total += video_work(vision, processor, workload.video_s, workload.video_size)
    if workload.audio_s:
        tokenizer = AudioTokenizerConfig.from_hf(read_json_object(directory / "audio_tokenizer" / "config.json"))
        total += audio_work(tokenizer, AudioConfig.from_hf(config_hf), processor, workload.audio_s)
    return total


def stage_work(
    inspection: Inspection,
    media: MediaWork,
    workload: Workload,
    memory: WorkerMemory,
    *,
    page_size: int,
    gpu: Gpu | None,
    mfu: float,
    mbu: float,
) -> StageWork:
    """`mfu` and `mbu`: the shares of a GPU's arithmetic and bandwidth that are reached."""
    config = inspection.inventory.config
    cost = heal_cost(config, page_size=page_size)
    head_flops = 2 * config.hidden_size * config.vocab_size
    num_prompt = workload.prompt_tokens + media.num_tokens
    num_steps = workload.answer_tokens - 1
    prefill = cost.compute(min(int(num_prompt * workload.cached_share), num_prompt - 1), num_prompt) + head_flops
    decode = cost.compute(num_prompt, num_prompt + num_steps) + num_steps * head_flops
    times: dict[str, Any] = dict.fromkeys(
        ("encode_s", "prefill_s", "decode_s", "decode_step_s", "decode_is_memory_bound")
    )
    if gpu is not None:
        per_gpu, per_worker = gpu.bfloat16_tflops * 1e12 * mfu, gpu.bfloat16_tflops * 1e12 * mfu * memory.tp
        batch, middle = memory.num_running, num_prompt + num_steps // 2
        arithmetic_s = batch * (cost.compute(middle, middle + 1) + head_flops) / per_worker
        reading_s = step_bytes(inspection, memory, batch, middle) / (gpu.bandwidth_gb_per_s * 1e9 * mbu * memory.tp)
        step_s = max(arithmetic_s, reading_s)
        times = {
            "encode_s": media.flops / per_gpu,
            "prefill_s": prefill / per_worker,
            "decode_s": num_steps * step_s / batch,
            "decode_step_s": step_s,
            "decode_is_memory_bound": reading_s > arithmetic_s,
        }
    return StageWork(prompt_tokens=num_prompt, media=media, prefill_flops=prefill, decode_flops=decode, **times)


def step_bytes(inspection: Inspection, memory: WorkerMemory, batch: int, context_tokens: int) -> float:
    """What a decode step of `batch` sequences reads in a whole worker: weights outside the experts once, the experts
    that at least one row is given (each row draws evenly), and the KV that every row sees."""
    config = inspection.inventory.config
    idle = ("vision", "speech_embeddings", "audio_encoder", "embedding", "mtp", "experts")
    others = sum(size_bytes for part, size_bytes in memory.whole_weight_bytes.items() if part not in idle)
    touched = 0.0
    if config.moe is not None:
        touched = 1 - (1 - config.moe.num_experts_per_token / config.moe.num_experts) ** batch
    layout = memory.whole_layout
    kv = layout.full_bytes_per_token * context_tokens
    kv += layout.window_bytes_per_token * min(context_tokens, layout.window_tokens + 1)
    return others + memory.whole_weight_bytes.get("experts", 0) * touched + batch * kv


def transfer_bytes(memory: WorkerMemory, num_tokens: int) -> int:
    """What prefill sends to decode for a prompt: full pages of all tokens, window pages of the live window."""
    layout = memory.whole_layout
    num_pages = -(-num_tokens // layout.page_size)
    first = max(0, num_tokens // layout.page_size - -(-layout.window_tokens // layout.page_size))
    window_pages = num_pages - first if layout.window_layers else 0
    return num_pages * layout.full_page_bytes + window_pages * layout.window_page_bytes


def healing(inspection: Inspection, *, page_size: int, context_tokens: int) -> tuple[int, float]:
    """(H in tokens, healing at the asked context as a share of computing it anew)."""
    config = inspection.inventory.config
    reach = sum(layer.window_left or 0 for layer in config.layers if layer.is_window)
    cost: HealCost = heal_cost(config, page_size=page_size)
    if not reach:
        return 0, 0.0
    return min(reach, context_tokens), cost.heal(context_tokens) / cost.compute(0, context_tokens)


def replica_ratio(costs: Mapping[str, float]) -> dict[str, int]:
    """Workers of each stage per smallest stage, so that none waits for another: whole numbers, at least one where a
    stage has work."""
    working = {stage: cost for stage, cost in costs.items() if cost > 0}
    if not working:
        return dict.fromkeys(costs, 0)
    least = min(working.values())
    return {stage: max(1, round(costs[stage] / least)) if stage in working else 0 for stage in costs}
