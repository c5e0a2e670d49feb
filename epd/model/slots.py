"""Which tensor of a file is which part of which parameter, for reading and writing alike.

A model's parameters have one form (fused plain qkv, stacked experts); files have several (apart or fused q, k, v, plain
or shard by shard). `file_slots` names every tensor of a file and says where its rows belong.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from epd.model.attention import Attention
from epd.model.config import TextConfig
from epd.model.hybrid import DecoderLayer, HybridModel
from epd.model.inventory import MTP_PREFIX
from epd.model.moe import DenseMlp, Moe
from epd.model.mtp import MtpHead

Fused = Literal["interleaved", "plain"] | None


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows of a file tensor that stay together: file rows from `file_row` go to `slot_row` and on."""

    file_row: int
    slot_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class FileSlot:
    """The part of a parameter one file tensor fills, or is read from.

    The parameter is `attribute` of `owner`, of it the matrix of `expert` where experts are stacked, and of that the
    rows [start_row, start_row + num_rows); None for all. `shard_rows`, for a fused projection stored shard by shard, is
    the query, key and value rows of one shard. `may_pack` is whether the owner multiplies by it through `linear`, so
    that it need not be dequantised on load.
    """

    owner: nn.Module
    attribute: str
    expert: int | None = None
    start_row: int = 0
    num_rows: int | None = None
    num_shards: int = 1
    shard_rows: tuple[int, int, int] | None = None
    may_pack: bool = False

    @property
    def target(self) -> Tensor:
        """A view, shaped like the file tensor, of the parameter as it is now; it must not be packed."""
        whole = getattr(self.owner, self.attribute)
        assert isinstance(whole, Tensor), f"{self.attribute} is packed"
        matrix = whole.detach() if self.expert is None else whole.detach()[self.expert]
        return matrix if self.num_rows is None else matrix[self.start_row : self.start_row + self.num_rows]

    def runs(self, num_rows: int) -> Iterator[RowRun]:
        """Yield where the file tensor's `num_rows` rows belong, in the order of the file."""
        if self.shard_rows is None:
            yield RowRun(0, 0, num_rows)
            return
        file_row = 0
        for shard in range(self.num_shards):
            part_row = 0
            for part_rows in self.shard_rows:
                yield RowRun(file_row, part_row + shard * part_rows, part_rows)
                file_row += part_rows
                part_row += self.num_shards * part_rows

    def scale_rows(self, file_row: int, num_rows: int, *, rows: int, block_rows: int) -> Tensor:
        """Return the row of scales, int64 [num_rows], of each file row from `file_row` on, out of `rows` in all.

        Blocks start anew at each shard's first row; the last of a shard may be partial.
        """
        shard_rows = rows // self.num_shards
        file_rows = torch.arange(file_row, file_row + num_rows)
        return file_rows // shard_rows * -(-shard_rows // block_rows) + file_rows % shard_rows // block_rows


def scale_name(name: str) -> str:
    """Return the name of an fp8 tensor's scales."""
    return f"{name}_scale_inv"


def mxfp4_scale_name(name: str) -> str:
    """Return the name of a 4-bit tensor's exponents."""
    return f"{name}_scale"


def scale_shape(slot: FileSlot, block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of an fp8 tensor's scales."""
    rows, columns = slot.target.shape
    return slot.num_shards * -(-(rows // slot.num_shards) // block[0]), -(-columns // block[1])


def is_router(name: str) -> bool:
    """Whether a file tensor decides on experts: those stay fp32 in memory and in files."""
    return name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))


def file_slots(model: HybridModel, fused: Fused) -> Iterator[tuple[str, FileSlot]]:
    """Yield (file name, slot) of every tensor. `fused` None means q, k, v apart. Pieces of one matrix come in order."""
    yield "model.embed_tokens.weight", FileSlot(model, "embed_tokens")
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{i}"
        yield f"{prefix}.input_layernorm.weight", FileSlot(layer.input_layernorm, "weight")
        yield from _attention_slots(f"{prefix}.self_attn", layer.self_attn, model.config, fused)
        yield f"{prefix}.post_attention_layernorm.weight", FileSlot(layer.post_attention_layernorm, "weight")
        if isinstance(layer.mlp, Moe):
            yield from _moe_slots(f"{prefix}.mlp", layer.mlp)
        else:
            yield from _mlp_slots(f"{prefix}.mlp", layer.mlp)
    yield "model.norm.weight", FileSlot(model.norm, "weight")
    if not model.config.tie_word_embeddings:
        yield "lm_head.weight", FileSlot(model, "lm_head", may_pack=True)
    for k, head in enumerate(model.mtp):
        assert isinstance(head, MtpHead)
        prefix = f"{MTP_PREFIX}{k}"
        yield f"{prefix}.enorm.weight", FileSlot(head.enorm, "weight")
        yield f"{prefix}.hnorm.weight", FileSlot(head.hnorm, "weight")
        yield f"{prefix}.eh_proj.weight", FileSlot(head, "eh_proj", may_pack=True)
        yield f"{prefix}.input_layernorm.weight", FileSlot(head.input_layernorm, "weight")
        yield from _attention_slots(f"{prefix}.self_attn", head.self_attn, model.config, fused)
        yield f"{prefix}.pre_mlp_layernorm.weight", FileSlot(head.pre_mlp_layernorm, "weight")
        yield from _mlp_slots(f"{prefix}.mlp", head.mlp)
        yield f"{prefix}.final_layernorm.weight", FileSlot(head.final_layernorm, "weight")


def _attention_slots(
    prefix: str, attention: Attention, config: TextConfig, fused: Fused
) -> Iterator[tuple[str, FileSlot]]:
    rows = attention.layer.qkv_rows
    if fused == "interleaved":
        shards = config.num_qkv_shards
        shard_rows = rows[0] // shards, rows[1] // shards, rows[2] // shards
        slot = FileSlot(attention, "qkv_proj", num_shards=shards, shard_rows=shard_rows, may_pack=True)
        yield f"{prefix}.qkv_proj.weight", slot
    elif fused == "plain":
        yield f"{prefix}.qkv_proj.weight", FileSlot(attention, "qkv_proj", may_pack=True)
    else:
        start_row = 0
        for kind, num_rows in zip("qkv", rows, strict=True):
            slot = FileSlot(attention, "qkv_proj", start_row=start_row, num_rows=num_rows, may_pack=True)
            yield f"{prefix}.{kind}_proj.weight", slot
            start_row += num_rows
    yield f"{prefix}.o_proj.weight", FileSlot(attention, "o_proj", may_pack=True)
    if attention.sink is not None:
        yield f"{prefix}.attention_sink_bias", FileSlot(attention, "sink")


def _mlp_slots(prefix: str, mlp: DenseMlp) -> Iterator[tuple[str, FileSlot]]:
    yield from _swiglu_slots(prefix, mlp, None, mlp.inner_size)


def _moe_slots(prefix: str, moe: Moe) -> Iterator[tuple[str, FileSlot]]:
    yield f"{prefix}.gate.weight", FileSlot(moe, "router")
    yield f"{prefix}.gate.e_score_correction_bias", FileSlot(moe, "correction_bias")
    for e in range(moe.num_experts):
        yield from _swiglu_slots(f"{prefix}.experts.{e}", moe, e, moe.inner_size)


def _swiglu_slots(prefix: str, owner: nn.Module, expert: int | None, inner_size: int) -> Iterator[tuple[str, FileSlot]]:
    gate = FileSlot(owner, "gate_up", expert, start_row=0, num_rows=inner_size, may_pack=True)
    yield f"{prefix}.gate_proj.weight", gate
    up = FileSlot(owner, "gate_up", expert, start_row=inner_size, num_rows=inner_size, may_pack=True)
    yield f"{prefix}.up_proj.weight", up
    yield f"{prefix}.down_proj.weight", FileSlot(owner, "down", expert, may_pack=True)
