"""The vision tower for serving: the same numbers as `vit.VisionTower` up to rounding, many media in one pass.

Everything that looks at one patch runs on tiles of a fixed number of rows, across media (see `products`); attention
runs on the slices of one shape together (see `blockwise`). No row depends on what else is in the pass. The order of
columns is never made: attention reads queries, keys and values through a transposed view into its own layout, which it
has to write anyway, and its result is written back through the same view.

Shape legend: P patches of the pass, B slices of one shape, S patches per slice, U x V units, H query heads in K groups
of G, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.config import VisionConfig
from encoder.towers import products
from encoder.towers.blockwise import Band, Blocks, band_attention, make_blocks, whole_attention
from encoder.towers.layers import CenteredNorm, GatedMlp
from encoder.towers.products import Linear, filled_up, product, product_plus, product_times, rms_norm, tiles
from encoder.towers.turning import Tables, turn_into
from encoder.towers.vit import Grid, VisionBlock, VisionTower, check_grids, merge_order_coordinates, rotary_2d
from encoder.towers.workspace import Workspace

# Shapes of slices whose tables are kept. A table takes S * D floats twice: 4 MB for the largest picture of V2.5.
MAX_KEPT_SHAPES = 16
# The merger's rows are units, a quarter of the patches; below this, products are slow.
MIN_TILE_UNITS = 64
# Of queries that go through attention at once: what is made of them stays in the cache.
ATTENTION_ELEMENTS = 2**19


class MlpWeights(NamedTuple):
    """What follows attention in a block."""

    proj: Linear
    norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class FastBlock:
    """One block's weights."""

    kind: int
    norm: Tensor
    qkv: Linear
    sinks: Tensor | None
    mlp: MlpWeights

    @classmethod
    def of(cls, block: VisionBlock, kind: int, *, packed: bool) -> "FastBlock":
        mlp, pack = block.mlp, partial(products.pack_linear, packed=packed)
        assert isinstance(mlp, GatedMlp)
        return cls(
            kind=kind,
            norm=block.norm1.weight.detach(),
            qkv=pack(block.attn.qkv),
            sinks=None if block.attn.sinks is None else block.attn.sinks.detach(),
            mlp=MlpWeights(
                proj=pack(block.attn.proj),
                norm=block.norm2.weight.detach(),
                gate=pack(mlp.gate_proj),
                up=pack(mlp.up_proj),
                down=pack(mlp.down_proj),
            ),
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Tables for slices of one shape: cos and sin `[S, D / 2]` in merge order, and the band's blocks."""

    cos: Tensor
    sin: Tensor
    blocks: Blocks | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive slices of one shape in the packed rows."""

    start: int
    num_slices: int
    height: int
    width: int
    shape: _Shape

    @property
    def length(self) -> int:
        """Patches of a slice."""
        return self.height * self.width

    @property
    def stop(self) -> int:
        return self.start + self.num_slices * self.length

    def units(self, x: Tensor, slices: slice, *, by_columns: bool) -> Tensor:
        """`[P, C]` -> a view `[B, U, V, 4, C]` of the rows of some slices, or `[B, V, U, 4, C]`."""
        rows = x[self.start + slices.start * self.length : self.start + slices.stop * self.length]
        view = rows.view(-1, self.height // 2, self.width // 2, 4, x.shape[1])
        return view.transpose(1, 2) if by_columns else view


def _before_attention(
    out: Tensor, x: Tensor, norm: Tensor, eps: float, qkv: Linear, tables: Tables, head_dim: int, num_values: int
) -> None:
    turn_into(out, product(rms_norm(x, norm, eps), qkv), tables, head_dim, num_values)


def _after_attention(x: Tensor, mixed: Tensor, eps: float, weights: MlpWeights) -> Tensor:
    x = product_plus(mixed, weights.proj, x)
    normed = rms_norm(x, weights.norm, eps)
    return product_plus(product_times(normed, weights.up, product(normed, weights.gate, "swish")), weights.down, x)


class FastVision:
    """Weights of a `VisionTower`, arranged for serving. Not for training, and used under `torch.inference_mode`."""

    def __init__(
        self, tower: VisionTower, *, tile: int | None = None, packed: bool | None = None, compiled: bool = False
    ) -> None:
        """Copies the weights. `compiled` runs the steps on tiles through `torch.compile`, which wants them plain."""
        config, weight = tower.config, tower.patch_embed.proj.weight
        device, self.dtype = weight.device, weight.dtype
        if packed is None:
            packed = not compiled and products.should_pack(config.hidden_size, self.dtype, device)
        self.config: VisionConfig = config
        self.device = device
        self.tile = tile or products.tile_rows(config.hidden_size, device)
        self._embed = products.pack(weight.flatten(1), None, packed=packed)
        self._blocks = [
            FastBlock.of(block, kind, packed=packed)  # type: ignore[arg-type]
            for block, kind in zip(tower.blocks, config.block_types, strict=True)
        ]
        norm = tower.merger.ln_q
        self._merger_centered = isinstance(norm, CenteredNorm)
        self._merger_norm = norm.weight.detach()
        self._merger = [products.pack_linear(tower.merger.mlp[index], packed=packed) for index in (0, 2)]
        self._before: Callable[..., None] = _before_attention
        self._after: Callable[..., Tensor] = _after_attention
        if compiled:
            self._before = torch.compile(_before_attention, dynamic=False, fullgraph=True)
            self._after = torch.compile(_after_attention, dynamic=False, fullgraph=True)
        self._space = Workspace(self.dtype, device)
        self._shape = lru_cache(MAX_KEPT_SHAPES)(self._make_shape)

    @property
    def width(self) -> int:
        """Of a row."""
        return self.config.out_hidden_size

    def __call__(self, pixel_values: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Per medium: `[t * h * w, 1536]` in merge order and its grid -> rows `[t * h * w / 4, out_hidden]`.

        Raises ValueError if a medium's grid and patches disagree.
        """
        for pixels, grid in zip(pixel_values, grids, strict=True):
            check_grids(pixels.shape, [grid], self.config)
        config = self.config
        order = sorted(range(len(grids)), key=lambda index: grids[index][1:])
        pieces = [pixel_values[index] for index in order]
        groups = self._groups([grids[index] for index in order])
        x = self._embedded(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
        qkv = self._space.take("qkv", x.shape[0], (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        mixed = self._space.take("mixed", x.shape[0], config.num_heads * config.head_dim)
        mixed[groups[-1].stop :] = 0
        parts = [(group.shape.cos, group.shape.sin) for group in groups for _ in range(group.num_slices)]
        tables = Tables.of(parts, x.shape[0])
        for block in self._blocks:
            self._run_block(block, x, qkv, mixed, tables, groups)
        rows = self._merged(x)
        made, start = {}, 0
        for index in order:
            t, h, w = grids[index]
            stop = start + t * h * w // self.config.patches_per_unit
            made[index], start = rows[start:stop], stop
        return [made[index] for index in range(len(grids))]

    def _embedded(self, pixels: Tensor) -> Tensor:
        x = self._space.take("x", products.padded_rows(pixels.shape[0], self.tile), self.config.hidden_size)
        for rows in tiles(x.shape[0], self.tile):
            x[rows] = product(filled_up(pixels[rows], self.tile).to(self.dtype), self._embed)
        return x

    def _run_block(
        self, block: FastBlock, x: Tensor, qkv: Tensor, mixed: Tensor, tables: Tables, groups: Sequence[_Group]
    ) -> None:
        eps, head_dim = self.config.norm_eps, self.config.head_dim
        num_values = self.config.num_kv_heads * head_dim
        for rows in tiles(x.shape[0], self.tile):
            turns = tables.rows(rows)
            self._before(qkv[rows], x[rows], block.norm, eps, block.qkv, turns, head_dim, num_values)
        for group in groups:
            step = max(1, ATTENTION_ELEMENTS // (group.length * mixed.shape[1]))
            for start in range(0, group.num_slices, step):
                self._attend(block, group, slice(start, min(start + step, group.num_slices)), qkv, mixed)
        for rows in tiles(x.shape[0], self.tile):
            x[rows] = self._after(x[rows], mixed[rows], eps, block.mlp)

    def _attend(self, block: FastBlock, group: _Group, slices: slice, qkv: Tensor, mixed: Tensor) -> None:
        """Reads the rows of some slices of `qkv` and writes those of `mixed`."""
        config, by_columns = self.config, block.kind == 1
        blocks = None if block.kind == -1 else group.shape.blocks
        num_kv, head_dim, groups = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
        num_slices, length = slices.stop - slices.start, group.length
        before, num_queries, num_keys = 0, length, length
        if blocks is not None:
            before, num_queries, num_keys = blocks.band.left, blocks.num_padded, blocks.num_keys
        source = group.units(qkv, slices, by_columns=by_columns)
        units = source.shape[1:4]
        q, k, v = (
            torch.unflatten(part, -1, (num_kv, -1)).permute(0, 4, 1, 2, 3, 5)
            for part in torch.split(source, [config.num_heads * head_dim, num_kv * head_dim, num_kv * head_dim], dim=-1)
        )
        queries = self._space.placed("q", (num_slices, num_kv, num_queries, groups * head_dim), 0, q)
        keys = self._space.placed("k", (num_slices, num_kv, num_keys, head_dim), before, k)
        values = self._space.placed("v", (num_slices, num_kv, num_keys, head_dim), before, v)
        flat = queries.view(num_slices, num_kv, num_queries * groups, head_dim)
        if blocks is None:
            out = whole_attention(flat, keys, values)
        else:
            out = band_attention(flat, keys, values, blocks, block.sinks, config.sink_form)
        # [B, K, S, G * D] to the rows' [B, U, V, 4, K, G * D].
        out = torch.unflatten(out.reshape(queries.shape)[:, :, :length], 2, units).permute(0, 2, 3, 4, 1, 5)
        torch.unflatten(group.units(mixed, slices, by_columns=by_columns), -1, (num_kv, -1)).copy_(out)

    def _merged(self, x: Tensor) -> Tensor:
        """`[P, C]` -> rows of whole tiles of units."""
        units = x.view(-1, self.config.hidden_size * self.config.patches_per_unit)
        tile_units = max(MIN_TILE_UNITS, self.tile // self.config.patches_per_unit)
        num_rows = products.padded_rows(units.shape[0], tile_units)
        rows = x.new_empty(num_rows, self.config.out_hidden_size)
        for chosen in tiles(num_rows, tile_units):
            tile = filled_up(units[chosen], tile_units)
            normed = self._merger_normed(tile.view(-1, self.config.hidden_size)).view(tile.shape)
            rows[chosen] = product(product(normed, self._merger[0], "gelu"), self._merger[1])
        return rows

    def _merger_normed(self, x: Tensor) -> Tensor:
        if self._merger_centered:
            return F.layer_norm(x, self._merger_norm.shape, self._merger_norm, None, self.config.norm_eps)
        return rms_norm(x, self._merger_norm, self.config.norm_eps)

    def _groups(self, grids: Sequence[Grid]) -> list[_Group]:
        slices: dict[tuple[int, int], int] = {}
        for t, h, w in grids:
            slices[h, w] = slices.get((h, w), 0) + t
        groups, start = [], 0
        for (height, width), num_slices in slices.items():
            groups.append(_Group(start, num_slices, height, width, self._shape(height, width)))
            start = groups[-1].stop
        return groups

    def _make_shape(self, height: int, width: int) -> _Shape:
        config = self.config
        tables = rotary_2d(merge_order_coordinates(height, width, self.device), config.head_dim)
        cos, sin = (table[:, : config.head_dim // 2].contiguous() for table in tables)
        blocks = None
        if any(kind != -1 for kind in config.block_types):
            band = Band(config.window_patches, config.window_patches)
            groups = config.num_heads // config.num_kv_heads
            blocks = make_blocks(band, height * width, groups, self.dtype, self.device)
        return _Shape(cos, sin, blocks)
