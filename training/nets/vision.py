"""Vision tower for training: slices of one size go through together.

Legend: S slices, L patches per slice, D width, N query heads, K key heads, H head width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


class RmsNorm(nn.Module):
    """RMS normalisation with a weight and no offset."""

    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


@functools.lru_cache(maxsize=64)
def patch_positions(rows: int, columns: int) -> Tensor:
    """(row, column) of every patch in merge order, `[rows*columns, 2]`."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1)
    return grid.reshape(rows // 2, 2, columns // 2, 2, 2).permute(0, 2, 1, 3, 4).reshape(-1, 2)


@functools.lru_cache(maxsize=64)
def column_order(rows: int, columns: int) -> Tensor:
    """Patch index that comes at each place when units are listed column by column."""
    units = torch.arange(rows * columns // 4).reshape(rows // 2, columns // 2).T.reshape(-1)
    return (units[:, None] * 4 + torch.arange(4)).reshape(-1)


@functools.lru_cache(maxsize=64)
def rope_tables(rows: int, columns: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of both coordinates, `[L, width]` float32."""
    half = width // 2
    frequencies = 10000.0 ** (-torch.arange(0, half, 2).float() / half)
    angles = (patch_positions(rows, columns).float()[:, :, None] * frequencies).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation over the whole last axis."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class VisionBlock(nn.Module):
    """Attention (global, row band or column band) and a gated MLP, both pre-norm."""

    def __init__(self, config: dict[str, Any], kind: int) -> None:
        super().__init__()
        width, inner, head = config["hidden_size"], config["intermediate_size"], config["qk_channels"]
        self.kind, self.head = kind, head
        self.num_heads, self.num_kv = config["num_heads"], config["num_key_value_heads"]
        self.reach = config["visual_token_window_size"]
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.qkv = nn.Linear(width, (self.num_heads + 2 * self.num_kv) * head)
        self.proj = nn.Linear(self.num_heads * head, width)
        self.gate_proj, self.up_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads)) if kind >= 0 else None

    def attend(self, x_SLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        num_slices, length, _ = x_SLD.shape
        qkv = self.qkv(x_SLD).float().view(num_slices, length, -1, self.head)
        query_key = rotate(qkv[:, :, : self.num_heads + self.num_kv], cos_LH[:, None], sin_LH[:, None])
        group = self.num_heads // self.num_kv
        query = query_key[:, :, : self.num_heads].transpose(1, 2)
        key = query_key[:, :, self.num_heads :].transpose(1, 2).repeat_interleave(group, dim=1)
        value = qkv[:, :, self.num_heads + self.num_kv :].transpose(1, 2).repeat_interleave(group, dim=1)
        with torch.autocast("cpu", enabled=False):
            mixed = self.mix(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(num_slices, length, -1)).float()

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Softmax attention with the band and the bias on key 0 where the block has them."""
        length = query.shape[2]
        scores = query @ key.mT * self.head**-0.5
        if self.sinks is not None:
            place = torch.arange(length)
            hidden = (place[:, None] - place[None, :]).abs() > self.reach
            first = F.pad(self.sinks[:, None, None].expand(-1, length, 1), (0, length - 1))
            scores = (scores + first).masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ value

    def forward(self, x_SLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        x_SLD = x_SLD + self.attend(self.norm1(x_SLD), cos_LH, sin_LH)
        inner = self.norm2(x_SLD)
        return x_SLD + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner)).float()


class VisionNet(nn.Module):
    """Patches `[S*L, 1536]` of slices of one grid -> units `[S, L/4, out]`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.head = config["qk_channels"]
        self.patch_embed = nn.Linear(1536, width, bias=False)
        self.blocks = nn.ModuleList(VisionBlock(config, kind) for kind in config["vit_window_attn_types"])
        self.ln_q = nn.LayerNorm(width, eps=EPS, bias=False)
        self.merge_in = nn.Linear(width * 4, width * 4, bias=False)
        self.merge_out = nn.Linear(width * 4, config["out_hidden_size"], bias=False)

    def forward(self, patches_PX: Tensor, rows: int, columns: int) -> Tensor:
        x_SLD = self.patch_embed(patches_PX).float().view(-1, rows * columns, self.patch_embed.out_features)
        cos_LH, sin_LH = rope_tables(rows, columns, self.head)
        order = column_order(rows, columns)
        for block in self.blocks:
            if block.kind == 1:
                x_SLD = block(x_SLD[:, order], cos_LH[order], sin_LH[order])[:, torch.argsort(order)]
            else:
                x_SLD = block(x_SLD, cos_LH, sin_LH)
        units = self.ln_q(x_SLD).reshape(x_SLD.shape[0], -1, self.merge_in.in_features)
        return self.merge_out(F.gelu(self.merge_in(units))).float()


def export_names(net: VisionNet) -> dict[str, Tensor]:
    """Tensors under their checkpoint names."""
    tensors = {"visual.patch_embed.proj.weight": net.patch_embed.weight.reshape(-1, 3, 2, 16, 16)}
    for place, block in enumerate(net.blocks):
        assert isinstance(block, VisionBlock)
        stem = f"visual.blocks.{place}."
        for norm in ("norm1", "norm2"):
            tensors[f"{stem}{norm}.weight"] = getattr(block, norm).weight
        for group, names in (("attn", ("qkv", "proj")), ("mlp", ("gate_proj", "up_proj", "down_proj"))):
            for name in names:
                tensors[f"{stem}{group}.{name}.weight"] = getattr(block, name).weight
                tensors[f"{stem}{group}.{name}.bias"] = getattr(block, name).bias
        if block.sinks is not None:
            tensors[f"{stem}attn.sinks"] = block.sinks
    tensors["visual.merger.ln_q.weight"] = net.ln_q.weight
    tensors["visual.merger.mlp.0.weight"] = net.merge_in.weight
    tensors["visual.merger.mlp.2.weight"] = net.merge_out.weight
    return {name: tensor.detach() for name, tensor in tensors.items()}
