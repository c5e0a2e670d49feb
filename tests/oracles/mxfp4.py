"""4-bit matrices decoded one value at a time, from the definition of the format's bits."""

import torch
from torch import Tensor


def e2m1(nibble: int) -> float:
    """One sign bit, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = nibble >> 3, (nibble >> 1) & 3, nibble & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def decode_mxfp4(packed: Tensor, exponents: Tensor, *, block: int = 32) -> Tensor:
    """fp32 [rows, columns]; a byte's low four bits are its even column. Exponent byte b is 2^(b - 127)."""
    rows = []
    for row_bytes, row_exponents in zip(packed.tolist(), exponents.tolist(), strict=True):
        row = []
        for column in range(2 * len(row_bytes)):
            byte = row_bytes[column // 2]
            nibble = byte >> 4 if column % 2 else byte & 15
            row.append(e2m1(nibble) * 2.0 ** (row_exponents[column // block] - 127))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float32)
