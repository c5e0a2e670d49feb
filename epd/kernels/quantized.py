"""Matrices stored in 8 or 4 bits back to fp32: the arithmetic alone, wherever the bytes lie.

Both functions take any run of rows, so a caller may work piece by piece. The numbers are exact up to the one fp32
multiplication per element, on every device.

Shape letters: R rows, C columns, B column blocks.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

# Which half of a byte holds the even column of a pair. Low is the convention of the MX formats; no published file was
# at hand to confirm it, so it is said here once.
MXFP4_EVEN_COLUMN_IS_LOW_NIBBLE = True
# Sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# A power of two per byte; the last code is not a number.
_E8M0 = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float32)
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def dequantize_fp8(weight_RC: Tensor, scale_RB: Tensor, *, block_columns: int) -> Tensor:
    """Return fp32 [R, C]: e4m3 values times one fp32 scale per row and `block_columns` columns, the last block partial.

    The scale multiplies, although files call it an inverse. Rows of a block share their scale: the caller repeats it.
    """
    return _scale_blocks(_fp8_to_fp32(weight_RC), scale_RB, block_columns)


def dequantize_mxfp4(packed: Tensor, exponent_RB: Tensor, *, block_columns: int) -> Tensor:
    """Return fp32 [R, C]: e2m1 values, two per byte of uint8 [R, C / 2], times 2^(byte - 127) of uint8 [R, B].

    A byte of 255 makes its block NaN, as the format has it.
    """
    values_RC = _mxfp4_to_fp32(packed)
    return _scale_blocks(values_RC, _E8M0.to(packed.device)[exponent_RB.int()], block_columns)


def _fp8_to_fp32(weight_RC: Tensor) -> Tensor:
    if weight_RC.device.type != "cpu":
        return weight_RC.float()
    # A table is two to three times as fast as torch's conversion on one core.
    return torch.from_numpy(np.take(_E4M3, weight_RC.contiguous().view(torch.uint8).numpy()))


def _mxfp4_to_fp32(packed: Tensor) -> Tensor:
    pairs = _byte_pairs(even_is_low=MXFP4_EVEN_COLUMN_IS_LOW_NIBBLE)
    if packed.device.type != "cpu":
        return pairs.to(packed.device)[packed.int()].flatten(1)
    # Both columns of a byte move as one 8-byte item.
    taken = np.take(pairs.numpy().view(np.int64).reshape(-1), packed.numpy())
    return torch.from_numpy(taken).view(torch.float32)


@cache
def _byte_pairs(*, even_is_low: bool) -> Tensor:
    """fp32 [256, 2]: the even and the odd column of every byte."""
    values = torch.tensor(_E2M1, dtype=torch.float32)
    byte = torch.arange(256)
    low, high = values[byte & 15], values[byte >> 4]
    return torch.stack((low, high) if even_is_low else (high, low), dim=1)


def _scale_blocks(values_RC: Tensor, scale_RB: Tensor, block_columns: int) -> Tensor:
    """Multiply in place, each row's blocks by their scales."""
    rows, columns = values_RC.shape
    if columns % block_columns == 0:
        values_RC.view(rows, -1, block_columns).mul_(scale_RB[:, :, None])
    else:
        values_RC.mul_(scale_RB.repeat_interleave(block_columns, dim=1)[:, :columns])
    return values_RC
