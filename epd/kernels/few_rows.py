"""Matrix products of few rows, as decode steps have them, by the compiled kernel `few_rows.cpp`.

With few rows a product is as fast as its weights are read. Torch's product of bf16 matrices first puts the weights into
another order, which costs two to three times as much as reading them (measured with AVX512-BF16, one to eight rows);
the kernel reads them where they lie. A row's result does not depend on how many others there are.

Shape letters: M rows; N outputs; K inputs; T tokens; A experts per token; E experts; D hidden width; I inner width.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from epd.kernels.native import load_library

logger = logging.getLogger(__name__)

MAX_ROWS = 8
"""From there on torch is as fast."""
DTYPES = (torch.float32, torch.bfloat16)
_SOURCE = Path(__file__).with_name("few_rows.cpp")
_POINTER = ctypes.c_void_p


class FewRows:
    """The loaded kernel. May be called from any thread; not differentiable."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.mimo_few_linear
        self._linear.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 3, *[_POINTER] * 3]
        self._experts = library.mimo_few_experts
        self._experts.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 5, *[_POINTER] * 6]
        for function in (self._linear, self._experts):
            function.restype = None

    def linear(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        """Return `x @ weight.T`, [M, N], summed in fp32 and rounded once. Both operands are as `can_take` asks."""
        x_MK = x_MK.contiguous()
        out_MN = x_MK.new_empty((x_MK.shape[0], weight_NK.shape[0]))
        self._linear(
            int(x_MK.dtype == torch.bfloat16),
            *out_MN.shape,
            x_MK.shape[1],
            x_MK.data_ptr(),
            weight_NK.data_ptr(),
            out_MN.data_ptr(),
        )
        return out_MN

    def experts(
        self, x_TD: Tensor, choice_TA: Tensor, weight_TA: Tensor, gate_up_E2ID: Tensor, down_EDI: Tensor
    ) -> Tensor:
        """Return [T, D]: what `epd.kernels.experts.looped_experts` does, each chosen matrix read once.

        Choices are int64 below E, weights fp32; the others are as `can_take` asks.
        """
        x_TD, choice_TA, weight_TA = x_TD.contiguous(), choice_TA.contiguous(), weight_TA.contiguous()
        out_TD = torch.empty_like(x_TD)
        num_experts, width, inner = down_EDI.shape
        self._experts(
            int(x_TD.dtype == torch.bfloat16),
            *choice_TA.shape,
            num_experts,
            width,
            inner,
            x_TD.data_ptr(),
            choice_TA.data_ptr(),
            weight_TA.data_ptr(),
            gate_up_E2ID.data_ptr(),
            down_EDI.data_ptr(),
            out_TD.data_ptr(),
        )
        return out_TD


def can_take(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernel may compute this: on a CPU, one of `DTYPES` throughout, weights contiguous, no gradients."""
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPES
        and all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def load_few_rows() -> FewRows | None:
    """The kernel; None, with a line in the log, where it cannot be compiled: then torch does everything."""
    library = load_library(_SOURCE)
    if isinstance(library, str):
        logger.warning("decode steps will be slower than they could be: %s", library)
        return None
    return FewRows(library)
