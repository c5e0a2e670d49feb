"""Matrices kept in the 8 or 4 bits of their file, dequantised each time they are used.

What a layer multiplies by is a plain tensor or a `PackedMatrix`; `linear` takes either. A packed matrix is made of the
tensors that its file held apart (query, key and value; gate and up), each in the form the file had, rows in the order
of the model. Memory in use beyond the packed bytes is one matrix in the dtype of the arithmetic, and one piece in fp32.

Shape letters: R rows, C columns, B column blocks, T tokens.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epd.kernels.few_rows import few_rows_kernel
from epd.kernels.quantized import dequantize_fp8, dequantize_mxfp4


class PlainRows(nn.Module):
    """A piece of a packed matrix that its file held unquantised, [R, C] in the dtype of the arithmetic."""

    weight: Tensor

    def __init__(self, weight_RC: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight_RC)

    def dequantized(self) -> Tensor:
        """Return [R, C]."""
        return self.weight


class Fp8Rows(nn.Module):
    """e4m3 [R, C] and the file's fp32 scales; `scale_row` [R] names the row of scales of each row.

    Rows of one block of the file need not lie together here: blocks of a fused projection span key and value rows, and
    shards are put in the order of the model. That is why each row knows its scales.
    """

    weight: Tensor
    scale: Tensor
    scale_row: Tensor

    def __init__(self, weight_RC: Tensor, scale: Tensor, scale_row_R: Tensor, *, block_columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight_RC)
        self.register_buffer("scale", scale)
        self.register_buffer("scale_row", scale_row_R)
        self._block_columns = block_columns

    def dequantized(self) -> Tensor:
        """Return fp32 [R, C]."""
        scale_RB = self.scale.index_select(0, self.scale_row)
        return dequantize_fp8(self.weight, scale_RB, block_columns=self._block_columns)


class Mxfp4Rows(nn.Module):
    """Two e2m1 values per byte, uint8 [R, C / 2], and their exponents, uint8 [R, B]."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale_RB: Tensor, *, block_columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale_RB)
        self._block_columns = block_columns

    def dequantized(self) -> Tensor:
        """Return fp32 [R, C]."""
        return dequantize_mxfp4(self.weight, self.scale, block_columns=self._block_columns)


Rows = PlainRows | Fp8Rows | Mxfp4Rows


class PackedMatrix(nn.Module):
    """Pieces one below the other."""

    def __init__(self, pieces: list[Rows]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return [R, C], each element rounded once, from fp32 to `dtype`: what loading it as `dtype` would give."""
        parts = [cast(Rows, piece).dequantized().to(dtype) for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def linear(x_TC: Tensor, weight: Tensor | nn.Module) -> Tensor:
    """Return `x @ weight.T`, [T, R], computed in the dtype of `x` however the weight is stored."""
    if isinstance(weight, Tensor):
        if (kernel := few_rows_kernel(x_TC, weight)) is not None:
            return kernel.linear(x_TC, weight)
        # Under autocast operands differ in dtype and the product is left to it.
        same = weight.dtype == x_TC.dtype or torch.is_autocast_enabled(x_TC.device.type)
        return F.linear(x_TC, weight if same else weight.to(x_TC.dtype))
    assert isinstance(weight, PackedMatrix)
    return F.linear(x_TC, weight.dequantized(x_TC.dtype))
