"""File layouts that only checkpoints have: fused shards, fp8 blocks and 4-bit experts, made in the plainest way."""

import torch
from torch import Tensor

QUANT: dict[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "store_dtype": "fp8",
}
MXFP4 = QUANT | {"store_dtype": "mxfp4", "mxfp4_block_size": 32}
QUANTIZED = ("qkv_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")


def fuse(state: dict[str, Tensor], *, num_shards: int) -> dict[str, Tensor]:
    """Replace q, k, v by one matrix of `num_shards` shards of [Q_s; K_s; V_s]; one shard is the plain form."""
    fused = dict(state)
    for name in [name for name in state if name.endswith("q_proj.weight")]:
        parts = [fused.pop(name.replace("q_proj", f"{kind}_proj")).chunk(num_shards) for kind in "qkv"]
        rows = [part[s] for s in range(num_shards) for part in parts]
        fused[name.replace("q_proj", "qkv_proj")] = torch.cat(rows)
    return fused


def quantize(weight: Tensor, *, num_shards: int = 1) -> tuple[Tensor, Tensor]:
    """Quantise block by block, written as loops: 128 x 128 blocks that start anew at each shard."""
    quantized, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), []
    shard_rows = weight.shape[0] // num_shards
    for shard in range(num_shards):
        for row in range(0, shard_rows, 128):
            top, bottom = shard * shard_rows + row, shard * shard_rows + min(row + 128, shard_rows)
            scale_row = []
            for left in range(0, weight.shape[1], 128):
                block = weight[top:bottom, left : left + 128].float()
                scale_row.append(block.abs().max() / 448)
                quantized[top:bottom, left : left + 128] = (block / scale_row[-1]).to(torch.float8_e4m3fn)
            scales.append(torch.stack(scale_row))
    return quantized, torch.stack(scales)


def quantize_state(
    state: dict[str, Tensor], *, num_shards: int, suffixes: tuple[str, ...] = QUANTIZED
) -> dict[str, Tensor]:
    """fp8 weights and their scales in place of the matrices that published files hold in fp8."""
    out = dict(state)
    for name, weight in state.items():
        if name.endswith(suffixes):
            shards = num_shards if "qkv" in name else 1
            out[name], out[f"{name}_scale_inv"] = quantize(weight, num_shards=shards)
    return out


def random_mxfp4(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any bytes are a valid matrix: uint8 [rows, columns / 2] and exponents around 2^-4, uint8 [rows, columns / 32]."""
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 126, (rows, -(-columns // 32)), generator=generator, dtype=torch.uint8)
    return packed, exponents
