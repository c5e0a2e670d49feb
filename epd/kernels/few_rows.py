"""What a layer does with few rows, as decode steps have them, by the compiled kernel `few_rows.cpp`.

With few rows a product is as fast as its weights are read. Torch's product of bf16 matrices first puts the weights into
another order, which costs two to three times as much as reading them (measured with AVX512-BF16, one to eight rows);
the kernel reads them where they lie. What else there is, norms, rotation and routing, costs torch more in calls than in
arithmetic: here each is one call. A row's result does not depend on how many others there are.

Shape letters: M rows; N outputs; K inputs; T tokens; A experts per token; E experts; D hidden width; I inner width.
Of heads: N query heads; K KV heads; H query/key width; V value width; R rotary width.
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


class _Split(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "num_heads", "num_kv_heads", "qk_dim", "v_dim", "half")
    )


class _Routing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "num_choices", "num_experts", "width")),
        *((name, ctypes.c_int32) for name in ("is_rounded", "is_normed")),
        ("scale", ctypes.c_float),
    )


class FewRows:
    """The loaded kernel. May be called from any thread; not differentiable."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.mimo_few_linear
        self._linear.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 3, *[_POINTER] * 3]
        self._experts = library.mimo_few_experts
        self._experts.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 5, *[_POINTER] * 6]
        self._norm = library.mimo_few_norm
        self._norm.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_float, *[_POINTER] * 3]
        self._turn = library.mimo_few_turn
        self._turn.argtypes = [ctypes.c_int, ctypes.POINTER(_Split), ctypes.c_float, *[_POINTER] * 6]
        self._route = library.mimo_few_route
        self._route.argtypes = [ctypes.c_int, ctypes.POINTER(_Routing), *[_POINTER] * 5]
        for function in (self._linear, self._experts, self._norm, self._turn, self._route):
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

    def norm(self, x_MD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Return [M, D]: each row's root-mean-square norm, rounded, times the weight. As `can_take` asks."""
        x_MD = x_MD.contiguous()
        out_MD = torch.empty_like(x_MD)
        self._norm(
            int(x_MD.dtype == torch.bfloat16),
            *x_MD.shape,
            eps,
            x_MD.data_ptr(),
            weight_D.data_ptr(),
            out_MD.data_ptr(),
        )
        return out_MD

    def turn(
        self,
        qkv_M: Tensor,
        table: tuple[Tensor, Tensor],
        heads: tuple[int, int],
        widths: tuple[int, int],
        value_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [M, N, H], keys [M, K, H] and values [M, K, V] out of [M, N H + K H + K V].

        Queries and keys are rotated by the table of `epd.model.rope`, fp32 [M, R / 2] twice; values are scaled. `heads`
        are N and K, `widths` H and V.
        """
        (num_heads, num_kv_heads), (qk_dim, v_dim) = heads, widths
        qkv_M, cos_MR, sin_MR = qkv_M.contiguous(), table[0].contiguous(), table[1].contiguous()
        rows = qkv_M.shape[0]
        q_MNH = qkv_M.new_empty((rows, num_heads, qk_dim))
        k_MKH = qkv_M.new_empty((rows, num_kv_heads, qk_dim))
        v_MKV = qkv_M.new_empty((rows, num_kv_heads, v_dim))
        self._turn(
            int(qkv_M.dtype == torch.bfloat16),
            ctypes.byref(_Split(rows, num_heads, num_kv_heads, qk_dim, v_dim, cos_MR.shape[1])),
            value_scale,
            *(part.data_ptr() for part in (qkv_M, cos_MR, sin_MR, q_MNH, k_MKH, v_MKV)),
        )
        return q_MNH, k_MKH, v_MKV

    def route(
        self,
        x_TD: Tensor,
        router_ED: Tensor,
        bias_E: Tensor,
        num_choices: int,
        *,
        is_rounded: bool,
        is_normed: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return each token's experts, int64 [T, A], and their weights, fp32 [T, A], as `epd.model.moe.Moe.route` does
        without groups. Router and bias are fp32 and contiguous; `is_rounded` rounds the operands to bf16."""
        x_TD = x_TD.contiguous()
        choice_TA = torch.empty((x_TD.shape[0], num_choices), dtype=torch.int64)
        weight_TA = torch.empty((x_TD.shape[0], num_choices), dtype=torch.float32)
        routing = _Routing(x_TD.shape[0], num_choices, *router_ED.shape, is_rounded, is_normed, scale)
        self._route(
            int(x_TD.dtype == torch.bfloat16),
            ctypes.byref(routing),
            *(part.data_ptr() for part in (x_TD, router_ED, bias_E, choice_TA, weight_TA)),
        )
        return choice_TA, weight_TA


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


def few_rows_kernel(x: Tensor, *weights: Tensor) -> FewRows | None:
    """The kernel if these are few rows that it can take, see `can_take`; otherwise torch does it."""
    return load_few_rows() if len(x) <= MAX_ROWS and can_take(x, *weights) else None
