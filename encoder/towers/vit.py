"""The vision tower: patches of images and video frames to one embedding row per 2x2 unit.

Every temporal slice (one `h x w` patch grid) is its own attention sequence, so slices of one shape form a batch
whatever media they belong to. Blocks are of three types: -1 attends to the whole slice; 0 attends to a 1-D band of
`window_patches` to each side in merge order (units row-major, four patches each); 1 does the same after the units
were put in column-major order. For a slice of 2 x 3 units, written as unit indices of the row-major order:

    row order     0 1 2 3 4 5
    column order  0 3 1 4 2 5

Shape legend: P patches of the call, B slices of one shape, S patches per slice, C channels, H query heads, D head dim.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.config import SinkForm, VisionConfig
from encoder.towers.layers import (
    CenteredNorm,
    GatedMlp,
    RmsNorm,
    attend,
    init_linear_stack,
    rotate_half,
    split_heads,
)

Grid = tuple[int, int, int]

ROPE_BASE = 10_000.0
# Slices up to this many windows long take one dense mask; longer ones go through band blocks.
DENSE_WINDOWS = 6
# Band blocks of all slices that go through attention at once: bounds the memory of gathered keys and values.
BLOCKS_PER_PASS = 64


@dataclass(frozen=True, slots=True)
class _SliceGroup:
    """Consecutive packed rows holding `num_slices` slices of one shape, with the rotary tables of both orders."""

    num_slices: int
    height: int
    width: int
    rotary_rows: tuple[Tensor, Tensor]
    rotary_columns: tuple[Tensor, Tensor]

    @property
    def num_patches(self) -> int:
        return self.num_slices * self.height * self.width

    def to_columns(self, x: Tensor) -> Tensor:
        """Units of each slice from row-major to column-major order; `[num_patches, C]` both ways."""
        return self._swap(x, self.height // 2, self.width // 2)

    def to_rows(self, x: Tensor) -> Tensor:
        """The inverse of `to_columns`."""
        return self._swap(x, self.width // 2, self.height // 2)

    def _swap(self, x: Tensor, major: int, minor: int) -> Tensor:
        return x.reshape(self.num_slices, major, minor, 4, -1).transpose(1, 2).reshape(x.shape)


def merge_order_coordinates(height: int, width: int, device: torch.device) -> Tensor:
    """Patch (row, column) of one slice in merge order, int64 `[height * width, 2]`."""
    rows = torch.arange(height, device=device)[:, None].expand(height, width)
    columns = torch.arange(width, device=device)[None, :].expand(height, width)
    grid = torch.stack((rows, columns), dim=-1)
    return grid.reshape(height // 2, 2, width // 2, 2, 2).permute(0, 2, 1, 3, 4).reshape(-1, 2)


def rotary_2d(coordinates: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """fp32 cos and sin `[S, head_dim]`: a quarter of the channels turns by row, a quarter by column, then repeated."""
    quarter = head_dim // 4
    exponents = torch.arange(quarter, device=coordinates.device, dtype=torch.float32) * 2 / (head_dim // 2)
    angles = (coordinates.float()[:, :, None] * ROPE_BASE**-exponents).flatten(1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _band_bias(
    queries: Tensor,
    keys: Tensor,
    num_positions: int,
    window: int,
    sinks: Tensor | None,
    form: SinkForm,
    dtype: torch.dtype,
) -> Tensor:
    """Additive logits `[..., H or 1, queries, keys]`, with one more key column when the sink is a denominator term.

    Hidden pairs get the smallest finite value, not -inf: rows of padding see nothing and must stay finite.
    """
    distance = queries[..., :, None] - keys[..., None, :]
    seen = (distance.abs() <= window) & (keys >= 0)[..., None, :] & (keys < num_positions)[..., None, :]
    hidden = torch.finfo(dtype).min
    bias = torch.zeros_like(distance, dtype=dtype).masked_fill(~seen, hidden)[..., None, :, :]
    if sinks is None:
        return bias
    sinks_H11 = sinks.to(dtype)[:, None, None]
    if form == "denominator":
        bias = bias.expand(*bias.shape[:-3], sinks.shape[0], *bias.shape[-2:])
        return torch.cat((bias, sinks_H11.expand(*bias.shape[:-1], 1)), dim=-1)
    first_key = ((keys == 0)[..., None, :] & seen)[..., None, :, :]
    return bias + first_key.to(dtype) * sinks_H11


def band_attention(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, window: int, sinks: Tensor | None, form: SinkForm
) -> Tensor:
    """Attention of query i to keys |i - j| <= window, with a per-head sink; `[B, H, S, D]`.

    Long slices are cut into query blocks of one window, each of which needs the keys of three blocks at most. Blocks in
    the middle share one mask; the outer ones, which meet key 0 or the end of the slice, get their own.
    """
    num_positions = q_BHSD.shape[2]
    if num_positions <= DENSE_WINDOWS * window:
        positions = torch.arange(num_positions, device=q_BHSD.device)
        bias = _band_bias(positions, positions, num_positions, window, sinks, form, q_BHSD.dtype)
        return _attend_with_sink(q_BHSD, k_BHSD, v_BHSD, bias)
    num_blocks = -(-num_positions // window)
    tail = num_blocks * window - num_positions
    q_BHSD = F.pad(q_BHSD, (0, 0, 0, tail))
    k_BHSD, v_BHSD = (F.pad(x, (0, 0, window, tail + window)) for x in (k_BHSD, v_BHSD))
    step = max(1, BLOCKS_PER_PASS // q_BHSD.shape[0])
    edges = [0, 2, *range(2 + step, num_blocks - 2, step), num_blocks - 2, num_blocks]
    outputs = []
    for start, stop in itertools.pairwise(edges):
        blocks = torch.arange(start, stop, device=q_BHSD.device)
        if start >= 2 and stop <= num_blocks - 2:
            blocks = blocks[:1]
        queries = blocks[:, None] * window + torch.arange(window, device=q_BHSD.device)
        keys = (blocks[:, None] - 1) * window + torch.arange(3 * window, device=q_BHSD.device)
        bias = _band_bias(queries, keys, num_positions, window, sinks, form, q_BHSD.dtype)
        outputs.append(_attend_blocks(q_BHSD, k_BHSD, v_BHSD, bias, start, stop, window))
    return torch.cat(outputs, dim=2)[:, :, :num_positions]


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, start: int, stop: int, window: int) -> Tensor:
    """Blocks `[start, stop)` of q `[B, H, N * window, D]` against k, v padded by one window at both ends."""
    num_slices, num_blocks = q.shape[0], stop - start
    q_blocks = q[:, :, start * window : stop * window].unfold(2, window, window).permute(0, 2, 1, 4, 3)
    k_blocks, v_blocks = (
        x[:, :, start * window : (stop + 2) * window].unfold(2, 3 * window, window).permute(0, 2, 1, 4, 3)
        for x in (k, v)
    )
    if bias.shape[0] > 1:
        bias = bias.expand(num_slices, *bias.shape).flatten(0, 1)
    out = _attend_with_sink(q_blocks.flatten(0, 1), k_blocks.flatten(0, 1), v_blocks.flatten(0, 1), bias)
    return out.reshape(num_slices, num_blocks, *out.shape[1:]).transpose(1, 2).flatten(2, 3)


def _attend_with_sink(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    if bias.shape[-1] > k.shape[2]:
        # The sink column of the denominator form: a key whose logit is all bias and whose value is zero.
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return attend(q, k, v, bias if bias.dim() == 4 else bias[None])


class VisionAttention(nn.Module):
    """Grouped-query attention inside slices, global or banded."""

    def __init__(self, config: VisionConfig, block_type: int) -> None:
        super().__init__()
        self.config = config
        self.is_banded = block_type != -1
        self.q_width = config.num_heads * config.head_dim
        self.kv_width = config.num_kv_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, self.q_width + 2 * self.kv_width)
        self.proj = nn.Linear(self.q_width, config.hidden_size)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if self.is_banded and config.use_sink else None

    def forward(self, x: Tensor, groups: Sequence[_SliceGroup], *, by_columns: bool) -> Tensor:
        qkv = self.qkv(x)
        outputs, start = [], 0
        for group in groups:
            rows = qkv[start : start + group.num_patches].reshape(group.num_slices, -1, qkv.shape[-1])
            q, k, v = rows.split((self.q_width, self.kv_width, self.kv_width), dim=-1)
            cos, sin = group.rotary_columns if by_columns else group.rotary_rows
            q = rotate_half(split_heads(q, self.config.num_heads), cos, sin)
            k = rotate_half(split_heads(k, self.config.num_kv_heads), cos, sin)
            v = split_heads(v, self.config.num_kv_heads)
            outputs.append(self._mix(q, k, v).transpose(1, 2).reshape(group.num_patches, self.q_width))
            start += group.num_patches
        mixed: Tensor = self.proj(torch.cat(outputs))
        return mixed

    def _mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.is_banded:
            return attend(q, k, v)
        return band_attention(q, k, v, window=self.config.window_patches, sinks=self.sinks, form=self.config.sink_form)


class VisionBlock(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: VisionConfig, block_type: int) -> None:
        super().__init__()
        self.norm1 = RmsNorm(config.hidden_size, config.norm_eps)
        self.norm2 = RmsNorm(config.hidden_size, config.norm_eps)
        self.attn = VisionAttention(config, block_type)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, bias=True)

    def forward(self, x: Tensor, groups: Sequence[_SliceGroup], *, by_columns: bool) -> Tensor:
        x = x + self.attn(self.norm1(x), groups, by_columns=by_columns)
        merged: Tensor = x + self.mlp(self.norm2(x))
        return merged


class PatchMerger(nn.Module):
    """Four normalised patches of a unit, concatenated, through a two-layer MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        norm = CenteredNorm if config.merger_norm == "layernorm" else RmsNorm
        width = config.hidden_size * config.patches_per_unit
        self.ln_q = norm(config.hidden_size, config.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, width, bias=config.merger_bias),
            nn.GELU(),
            nn.Linear(width, config.out_hidden_size, bias=config.merger_bias),
        )
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = self.mlp(self.ln_q(x).reshape(-1, self.width))
        return merged


class PatchEmbed(nn.Module):
    """A convolution whose kernel equals its stride, computed as a matrix product over patch columns."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel, bias=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return F.linear(pixel_values.to(self.proj.weight.dtype), self.proj.weight.flatten(1))


class VisionTower(nn.Module):
    """The whole tower. Parameter names are the checkpoint's without the `visual.` prefix."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config, kind) for kind in config.block_types)
        self.merger = PatchMerger(config)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """`pixel_values [P, 1536]` in merge order and one (t, h, w) in patches per medium -> `[P / 4, out_hidden]`.

        Rows of the result follow the media in the order given. Raises ValueError if the grids and rows disagree.
        """
        check_grids(pixel_values.shape, grids, self.config)
        order = sorted(range(len(grids)), key=lambda i: grids[i][1:])
        lengths = [t * h * w for t, h, w in grids]
        pieces = torch.split(pixel_values, lengths)
        x = self.patch_embed(torch.cat([pieces[i] for i in order]) if len(order) > 1 else pixel_values)
        groups = self._groups([grids[i] for i in order], x.device)
        by_columns = False
        for kind, block in zip(self.config.block_types, self.blocks, strict=True):
            if by_columns != (kind == 1):
                by_columns = kind == 1
                x = _reorder(x, groups, to_columns=by_columns)
            x = block(x, groups, by_columns=by_columns)
        if by_columns:
            x = _reorder(x, groups, to_columns=False)
        rows: Tensor = self.merger(x)
        if len(order) == 1:
            return rows
        pieces = torch.split(rows, [lengths[i] // self.config.patches_per_unit for i in order])
        return torch.cat([pieces[order.index(i)] for i in range(len(order))])

    def init_weights(self, generator: torch.Generator) -> None:
        """Fresh weights for training: normal(0, 0.02), narrower where a residual stream is written; sinks zero."""
        init_linear_stack(self, generator, residual_names=("attn.proj", "mlp.down_proj"), depth=self.config.depth)

    def _groups(self, grids: Sequence[Grid], device: torch.device) -> list[_SliceGroup]:
        slices: dict[tuple[int, int], int] = {}
        for t, h, w in grids:
            slices[h, w] = slices.get((h, w), 0) + t
        groups = []
        for (height, width), num_slices in slices.items():
            coordinates = merge_order_coordinates(height, width, device)
            by_column = coordinates.reshape(height // 2, width // 2, 4, 2).transpose(0, 1).reshape(-1, 2)
            tables = (rotary_2d(order, self.config.head_dim) for order in (coordinates, by_column))
            groups.append(_SliceGroup(num_slices, height, width, *tables))
        return groups


def check_grids(shape: Sequence[int], grids: Sequence[Grid], config: VisionConfig) -> None:
    """Raises ValueError if media of these grids do not have patches of this shape."""
    if not grids:
        raise ValueError("no media: grids is empty")
    for grid in grids:
        if min(grid) < 1 or grid[1] % 2 or grid[2] % 2:
            raise ValueError(f"grid {grid} must be positive with even height and width")
    expected = (sum(t * h * w for t, h, w in grids), config.patch_width)
    if tuple(shape) != expected:
        raise ValueError(f"pixel_values is {tuple(shape)}, the grids need {expected}")


def _reorder(x: Tensor, groups: Sequence[_SliceGroup], *, to_columns: bool) -> Tensor:
    pieces = torch.split(x, [group.num_patches for group in groups])
    swapped = [g.to_columns(piece) if to_columns else g.to_rows(piece) for g, piece in zip(groups, pieces, strict=True)]
    return torch.cat(swapped) if len(swapped) > 1 else swapped[0]
