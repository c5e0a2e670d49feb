"""Matrix products of a tower on tiles: always the same number of rows, so that a row's value is its own.

A matrix product may round differently with its number of rows. So every product of a fast tower takes exactly
`tile_rows` rows, whoever they belong to, and the last tile is filled up: each product of the tower has one shape, in
every pass. What is left is that a row's value does not depend on its place in the tile or on its neighbours, which
holds for the kernels used here (tests), and is checked once more when a tower starts (`encoder.self_check`).

On a CPU the weights are packed for oneDNN once, which also takes the activation, the gate or the residual into the
product. oneDNN's fp32 kernels use AVX-512 on every maker's CPU; the library behind `torch.mm` does not.

Shape legend: T rows of a tile, I columns in, O columns out.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Rows of every product on a CPU. Wide towers: few, so that little is computed for nothing; what oneDNN loses against
# large tiles is below a twentieth. Narrow ones: more, since each step costs as much as a few dozen rows do.
WIDE_TILE_ROWS = 128
NARROW_TILE_ROWS = 256
WIDE_FROM = 512
CUDA_TILE_ROWS = 1024

Activation = Literal["swish", "gelu"]


class Linear(NamedTuple):
    """`y = x weight^T + bias`; a packed weight is in oneDNN's own order."""

    weight: Tensor
    bias: Tensor | None
    packed: bool


def tile_rows(width: int, device: torch.device) -> int:
    """Rows of every product of a tower of this width."""
    if device.type == "cuda":
        return CUDA_TILE_ROWS
    return WIDE_TILE_ROWS if width >= WIDE_FROM else NARROW_TILE_ROWS


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes products of this dtype here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def should_pack(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed products are to be had, and worth the dozen microseconds more that a call costs."""
    return width >= WIDE_FROM and can_pack(dtype, device)


def pack(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Linear:
    """A weight `[O, I]` and a bias `[O]` for the functions below."""
    weight = weight.detach().contiguous()
    if packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    return Linear(weight, None if bias is None else bias.detach().contiguous(), packed)


def pack_linear(module: nn.Module, *, packed: bool) -> Linear:
    """Of an `nn.Linear`."""
    assert isinstance(module, nn.Linear)
    return pack(module.weight, module.bias, packed=packed)


def product(x: Tensor, linear: Linear, activation: Activation | None = None) -> Tensor:
    """`[T, I]` -> `activation(x W^T + b)`, `[T, O]`. gelu is the exact one."""
    weight, bias, packed = linear
    if packed:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation or "none", [], "none")
        return out
    made = F.linear(x, weight, bias)
    match activation:
        case None:
            return made
        case "swish":
            return F.silu(made, inplace=True)
        case "gelu":
            return F.gelu(made.float()).to(x.dtype)


def product_times(x: Tensor, linear: Linear, factor: Tensor) -> Tensor:
    """`(x W^T + b) * factor`."""
    return _with_other(x, linear, factor, "mul")


def product_plus(x: Tensor, linear: Linear, summand: Tensor) -> Tensor:
    """`x W^T + b + summand`."""
    return _with_other(x, linear, summand, "add")


def _with_other(x: Tensor, linear: Linear, other: Tensor, how: Literal["mul", "add"]) -> Tensor:
    weight, bias, packed = linear
    if packed:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, how)
        return out
    made = F.linear(x, weight, bias)
    return made.mul_(other) if how == "mul" else made.add_(other)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in fp32, cast back, then times the weight."""
    x32 = x.float()
    scale = torch.rsqrt((x32 * x32).mean(-1, keepdim=True).add_(eps))
    return (x32 * scale).to(x.dtype).mul_(weight)


def padded_rows(num_rows: int, tile: int) -> int:
    """Rows of all tiles that hold so many."""
    return -(-num_rows // tile) * tile


def tiles(num_rows: int, tile: int) -> Iterator[slice]:
    """Of a number of rows that is a multiple of the tile."""
    assert num_rows % tile == 0, "the last tile is filled up"
    for start in range(0, num_rows, tile):
        yield slice(start, start + tile)


def filled_up(x: Tensor, tile: int) -> Tensor:
    """Rows of zeros after `[N, C]` up to whole tiles."""
    missing = -x.shape[0] % tile
    return F.pad(x, (0, 0, 0, missing)) if missing else x
