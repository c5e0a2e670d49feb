"""Building blocks shared by the towers: norms, rotary position, gated MLP, banded attention.

Shape legend: B slices or segments, S positions, C channels, H query heads, D head dim, N blocks of the band.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """`x / rms(x)` in fp32, cast back to the input dtype, then times the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class CenteredNorm(nn.Module):
    """LayerNorm with mean subtraction and a weight, no bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class GatedMlp(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Fp32Gelu(nn.Module):
    """Exact (erf) GELU evaluated in fp32: in lower precision it visibly moves the projection's output."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x.float()).to(x.dtype)


def rotate_half(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary position on the first `cos.shape[-1]` channels, channel c paired with c + width / 2; fp32, cast back."""
    width = cos_SD.shape[-1]
    x = x_BHSD[..., :width].float()
    first, second = x.chunk(2, dim=-1)
    turned = (x * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD).to(x_BHSD.dtype)
    return turned if width == x_BHSD.shape[-1] else torch.cat((turned, x_BHSD[..., width:]), dim=-1)


def rotary_tables(
    num_positions: int, width: int, theta: float, device: torch.device, round_to: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """fp32 cos and sin, `[num_positions, width]`, both halves alike. Frequencies are rounded to `round_to` first."""
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    frequencies = (theta**-exponents).to(round_to).float()
    angles = torch.arange(num_positions, device=device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def split_heads(x_BSC: Tensor, num_heads: int) -> Tensor:
    """`[B, S, H * D]` to `[B, H, S, D]`."""
    return x_BSC.reshape(*x_BSC.shape[:2], num_heads, -1).transpose(1, 2)


def band_mask(num_positions: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """Bool `[S, S]`: query i may see key j iff i - left <= j <= i + right; None is unbounded."""
    positions = torch.arange(num_positions, device=device)
    distance = positions[:, None] - positions[None, :]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= -distance <= right
    return mask


def attend(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention scaled by D**-0.5. `bias` is added to the scaled logits, broadcast to `[B, H, S, S]`."""
    groups = q_BHSD.shape[1] // k_BHSD.shape[1]
    if groups > 1:
        k_BHSD = k_BHSD.repeat_interleave(groups, dim=1)
        v_BHSD = v_BHSD.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=bias)


@torch.no_grad()
def init_linear_stack(
    module: nn.Module, generator: torch.Generator, *, residual_names: tuple[str, ...], depth: int
) -> None:
    """Normal(0, 0.02) weights, zero biases, unit norms; residual writers divided by sqrt(2 * depth)."""
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if parameter.dim() > 1:
            std = 0.02 / (2 * depth) ** 0.5 if owner.endswith(residual_names) else 0.02
            parameter.normal_(0.0, std, generator=generator)
        else:
            parameter.fill_(1.0 if leaf == "weight" else 0.0)
