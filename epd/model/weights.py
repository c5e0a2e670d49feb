"""Weight files in the Hugging Face layout: reading them into a `HybridModel` and naming a model's tensors for writing.

The model's parameters have one form; files have several (apart or fused q, k, v; fp8 blocks or plain). Both directions
go through `file_slots`, which says for each file tensor which part of which parameter it is. Reading streams: one file
tensor at a time is in memory besides the model.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from epd.model.attention import Attention
from epd.model.config import TextConfig
from epd.model.hybrid import DecoderLayer, HybridModel
from epd.model.moe import DenseMlp, Moe
from epd.model.mtp import MtpHead

QkvLayout = Literal["auto", "interleaved", "plain"]

_TOWER_PREFIXES = ("visual.", "audio_encoder.", "speech_embeddings.")
_MTP_PREFIX = "model.mtp."
_FP8 = "F8_E4M3"
_PLAIN_DTYPES = ("F32", "BF16", "F16")
_NUM_NAMES_SHOWN = 50


class WeightsError(ValueError):
    """A weight directory does not hold exactly the tensors the configuration calls for. The message names them."""


@dataclass(frozen=True, slots=True)
class FileSlot:
    """The part of a parameter one file tensor fills, or is read from; `target` is a view, shaped like the file tensor.

    `shard_rows`, for a fused projection stored shard by shard, is the query, key and value rows of one shard.
    """

    target: Tensor
    num_shards: int = 1
    shard_rows: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a file's header says of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def load_text_model(
    model_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    window_left: int | None = None,
    with_mtp: bool = True,
    qkv_layout: QkvLayout = "auto",
) -> HybridModel:
    """Load the text model and, with `with_mtp`, as many draft heads as the files hold. Tower tensors are passed over.

    `qkv_layout` says how fused q, k, v rows lie in the files: shard by shard ("interleaved", what "auto" means for
    them) or as plain [Q; K; V], as some re-exports hold under the same name and shape. It is never guessed.
    fp8 blocks are dequantised. Raises ConfigError, or WeightsError naming every tensor that is missing, unexpected, of
    the wrong shape or of a dtype that is not implemented.
    """
    config_hf = json.loads((model_dir / "config.json").read_text())
    config = TextConfig.from_hf(config_hf, window_left)
    if config.projection_layout == "split" and qkv_layout != "auto":
        raise WeightsError(f"qkv_layout {qkv_layout!r} applies to fused projections, the files hold q, k, v apart")
    fused = None if config.projection_layout == "split" else "interleaved" if qkv_layout == "auto" else qkv_layout
    with ExitStack() as stack:
        files = {p.name: stack.enter_context(safe_open(p, framework="pt")) for p in _weight_files(model_dir)}
        entries = {name: entry for name, entry in _entries(files) if not name.startswith(_TOWER_PREFIXES)}
        if not with_mtp:
            entries = {name: entry for name, entry in entries.items() if not name.startswith(_MTP_PREFIX)}
        model = HybridModel(config, _num_mtp_layers(entries), dtype=dtype, device=device)
        slots = dict(file_slots(model, fused))
        _check(entries, slots, config)
        for name, entry in entries.items():
            if name in slots:
                scales = scale_name(name)
                scale = files[entries[scales].file].get_tensor(scales) if entry.dtype == _FP8 else None
                _fill(slots[name], files[entry.file].get_tensor(name), scale, config.quant_block)
    return model


def export_text_state(model: HybridModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return contiguous CPU copies under Hugging Face names: q, k, v apart, one tensor per expert matrix.

    Everything is `dtype` but routers and correction biases, which stay fp32. The `config.json` beside them must name
    the "split" `attention_projection_layout`.
    """
    return {
        name: slot.target.detach().to("cpu", torch.float32 if _is_router(name) else dtype, copy=True).contiguous()
        for name, slot in file_slots(model, None)
    }


def dequantize(weight: Tensor, scale: Tensor, *, block: tuple[int, int], num_shards: int = 1) -> Tensor:
    """Return the fp32 [rows, columns] matrix of fp8 blocks.

    `scale` is fp32 [num_shards * ceil(rows per shard / block rows), ceil(columns / block columns)]: in a matrix stored
    shard by shard the blocks start anew at each shard's first row. The scale multiplies, whatever its name says.
    """
    rows, columns = weight.shape
    shard_rows = rows // num_shards
    scale_SBC = torch.unflatten(scale, 0, (num_shards, -1)).repeat_interleave(block[0], dim=1)[:, :shard_rows]
    full_scale = scale_SBC.repeat_interleave(block[1], dim=2)[..., :columns].reshape(rows, columns)
    return weight.float() * full_scale


def _weight_files(model_dir: Path) -> list[Path]:
    """Return the weight files, by the index where there is one."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
        if (model_dir / "model_mtp.safetensors").exists():
            names.append("model_mtp.safetensors")
    absent = [name for name in names if not (model_dir / name).exists()]
    if absent:
        raise WeightsError(f"weight files are missing from {model_dir.name}: {', '.join(absent)}")
    return [model_dir / name for name in names]


def _entries(files: dict[str, Any]) -> Iterator[tuple[str, _Entry]]:
    for file_name, file in files.items():
        for name in file.keys():  # noqa: SIM118 (a safetensors handle is not iterable)
            header = file.get_slice(name)
            yield name, _Entry(file=file_name, shape=tuple(header.get_shape()), dtype=header.get_dtype())


def _num_mtp_layers(entries: dict[str, _Entry]) -> int:
    """Count the draft heads: the configuration does not say."""
    indices = {int(name.split(".")[3]) for name in entries if name.startswith(f"{_MTP_PREFIX}layers.")}
    return max(indices, default=-1) + 1


def _check(entries: dict[str, _Entry], slots: dict[str, FileSlot], config: TextConfig) -> None:
    """Compare the headers with what the model needs, before any tensor is read."""
    needed = {name: tuple(slot.target.shape) for name, slot in slots.items()}
    dtypes = []
    for name, slot in slots.items():
        entry = entries.get(name)
        if entry is not None and entry.dtype == _FP8 and config.quant_block is not None and len(entry.shape) == 2:
            needed[scale_name(name)] = scale_shape(slot, config.quant_block)
        elif entry is not None and entry.dtype not in _PLAIN_DTYPES:
            dtypes.append(f"{name} ({entry.dtype})")
    shapes = [
        f"{name} (expected {list(shape)}, found {list(entries[name].shape)})"
        for name, shape in needed.items()
        if name in entries and entries[name].shape != shape
    ]
    problems = {
        "missing": sorted(needed.keys() - entries.keys()),
        "unexpected": sorted(entries.keys() - needed.keys()),
        "of the wrong shape": shapes,
        "of a dtype that is not implemented": dtypes,
    }
    lines = [f"{len(names)} {kind}: {_shown(names)}" for kind, names in problems.items() if names]
    if lines:
        raise WeightsError("weight files do not match the configuration\n" + "\n".join(lines))


def _shown(names: list[str]) -> str:
    more = len(names) - _NUM_NAMES_SHOWN
    return ", ".join(names[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def scale_name(name: str) -> str:
    """Return the name of an fp8 tensor's scales."""
    return f"{name}_scale_inv"


def scale_shape(slot: FileSlot, block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of a slot's scales; blocks start anew at each shard."""
    rows, columns = slot.target.shape
    shard_rows = rows // slot.num_shards
    return slot.num_shards * -(-shard_rows // block[0]), -(-columns // block[1])


def _is_router(name: str) -> bool:
    return name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))


@torch.no_grad()
def _fill(slot: FileSlot, value: Tensor, scale: Tensor | None, block: tuple[int, int] | None) -> None:
    if scale is not None:
        assert block is not None
        value = dequantize(value, scale, block=block, num_shards=slot.num_shards)
    if slot.shard_rows is not None:
        sharded = torch.unflatten(value, 0, (slot.num_shards, -1))
        value = torch.cat([part.flatten(0, 1) for part in torch.split(sharded, list(slot.shard_rows), dim=1)])
    slot.target.copy_(value)


def file_slots(model: HybridModel, fused: Literal["interleaved", "plain"] | None) -> Iterator[tuple[str, FileSlot]]:
    """Yield (file name, slot) of every tensor. `fused` None means q, k, v apart."""
    yield "model.embed_tokens.weight", FileSlot(model.embed_tokens)
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{i}"
        yield f"{prefix}.input_layernorm.weight", FileSlot(layer.input_layernorm.weight)
        yield from _attention_slots(f"{prefix}.self_attn", layer.self_attn, model.config, fused)
        yield f"{prefix}.post_attention_layernorm.weight", FileSlot(layer.post_attention_layernorm.weight)
        if isinstance(layer.mlp, Moe):
            yield from _moe_slots(f"{prefix}.mlp", layer.mlp)
        else:
            yield from _mlp_slots(f"{prefix}.mlp", layer.mlp)
    yield "model.norm.weight", FileSlot(model.norm.weight)
    if not model.config.tie_word_embeddings:
        yield "lm_head.weight", FileSlot(model.lm_head)
    for k, head in enumerate(model.mtp):
        assert isinstance(head, MtpHead)
        prefix = f"{_MTP_PREFIX}layers.{k}"
        yield f"{prefix}.enorm.weight", FileSlot(head.enorm.weight)
        yield f"{prefix}.hnorm.weight", FileSlot(head.hnorm.weight)
        yield f"{prefix}.eh_proj.weight", FileSlot(head.eh_proj)
        yield f"{prefix}.input_layernorm.weight", FileSlot(head.input_layernorm.weight)
        yield from _attention_slots(f"{prefix}.self_attn", head.self_attn, model.config, fused)
        yield f"{prefix}.pre_mlp_layernorm.weight", FileSlot(head.pre_mlp_layernorm.weight)
        yield from _mlp_slots(f"{prefix}.mlp", head.mlp)
        yield f"{prefix}.final_layernorm.weight", FileSlot(head.final_layernorm.weight)


def _attention_slots(
    prefix: str, attention: Attention, config: TextConfig, fused: Literal["interleaved", "plain"] | None
) -> Iterator[tuple[str, FileSlot]]:
    rows = attention.layer.qkv_rows
    if fused == "interleaved":
        shards = config.num_qkv_shards
        shard_rows = rows[0] // shards, rows[1] // shards, rows[2] // shards
        yield f"{prefix}.qkv_proj.weight", FileSlot(attention.qkv_proj, num_shards=shards, shard_rows=shard_rows)
    elif fused == "plain":
        yield f"{prefix}.qkv_proj.weight", FileSlot(attention.qkv_proj)
    else:
        for kind, part in zip("qkv", torch.split(attention.qkv_proj.detach(), list(rows)), strict=True):
            yield f"{prefix}.{kind}_proj.weight", FileSlot(part)
    yield f"{prefix}.o_proj.weight", FileSlot(attention.o_proj)
    if attention.sink is not None:
        yield f"{prefix}.attention_sink_bias", FileSlot(attention.sink)


def _mlp_slots(prefix: str, mlp: DenseMlp) -> Iterator[tuple[str, FileSlot]]:
    yield from _swiglu_slots(prefix, mlp.gate_up.detach(), mlp.down.detach())


def _moe_slots(prefix: str, moe: Moe) -> Iterator[tuple[str, FileSlot]]:
    yield f"{prefix}.gate.weight", FileSlot(moe.router)
    yield f"{prefix}.gate.e_score_correction_bias", FileSlot(moe.correction_bias)
    for e, (gate_up, down) in enumerate(zip(moe.gate_up.detach(), moe.down.detach(), strict=True)):
        yield from _swiglu_slots(f"{prefix}.experts.{e}", gate_up, down)


def _swiglu_slots(prefix: str, gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, FileSlot]]:
    gate, up = gate_up.chunk(2)
    yield f"{prefix}.gate_proj.weight", FileSlot(gate)
    yield f"{prefix}.up_proj.weight", FileSlot(up)
    yield f"{prefix}.down_proj.weight", FileSlot(down)
