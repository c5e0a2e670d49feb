"""Rotary position embedding over the leading channels of each head.

Shape letters: T tokens, N heads, H head width, R rotary width.
"""

from functools import cache

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]


def rotation(positions_T: Tensor, *, theta: float, rotary_dim: int) -> Rotation:
    """Return the cosine and sine tables, fp32 [T, R / 2] each. `positions_T` is any integer dtype."""
    inv_freq = _inverse_frequencies(theta, rotary_dim, positions_T.device)
    angle = positions_T.to(torch.float32)[:, None] * inv_freq
    return angle.cos(), angle.sin()


@cache
def _inverse_frequencies(theta: float, rotary_dim: int, device: torch.device) -> Tensor:
    # Built on the CPU in fp32 whatever the default dtype or device is, so that every backend rotates alike; kept, so it
    # must not be a tensor of inference mode, which training could not use. Kept on the device, since nothing may be
    # copied from the host while a CUDA graph is recorded.
    with torch.inference_mode(False):
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        return (1.0 / theta**exponent).to(device)


def rotate(x_TNH: Tensor, table: Rotation) -> Tensor:
    """Rotate the first R channels, channel j paired with j + R / 2; the others pass through. Returns x's dtype."""
    cos_T1R, sin_T1R = table[0][:, None], table[1][:, None]
    half = cos_T1R.shape[-1]
    low, high, rest = torch.split(x_TNH, [half, half, x_TNH.shape[-1] - 2 * half], dim=-1)
    low, high = low.float(), high.float()
    turned_low = torch.addcmul(low * cos_T1R, high, sin_T1R, value=-1)
    turned_high = torch.addcmul(high * cos_T1R, low, sin_T1R)
    return torch.cat([turned_low.to(x_TNH.dtype), turned_high.to(x_TNH.dtype), rest], dim=-1)
