"""What routed experts compute, once it is settled who goes where. Three ways, one function:

`looped_experts`  the definition: one expert after the other, for plain and packed matrices, differentiable
`sorted_experts`  rows gathered and summed by sorting, so that nothing is added in place; differentiable
`FewRows.experts` a compiled kernel for few rows, see `epd.kernels.few_rows`

Shape letters: T tokens; A experts per token; R = T x A rows; E experts; D hidden width; I inner width.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Matrix = Tensor | nn.Module
"""One expert's, [out, in], in whatever form it is held."""
Product = Callable[[Tensor, Matrix], Tensor]
"""`x @ weight.T` of rows [.., in]."""


def swiglu(x: Tensor, gate_up: Matrix, down: Matrix, product: Product) -> Tensor:
    """Return down(silu(gate x) * up x); `gate_up` is [2I, D], gate rows first."""
    gate, up = product(x, gate_up).chunk(2, dim=-1)
    inner = F.silu(gate).mul_(up) if not torch.is_grad_enabled() else F.silu(gate) * up
    return product(inner, down)


def looped_experts(
    hidden_TD: Tensor,
    choice_TA: Tensor,
    weight_TA: Tensor,
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    product: Product,
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D]; each expert's output is rounded, the sum is fp32."""
    out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
    for expert in range(len(down)):
        token_R, slot_R = (choice_TA == expert).nonzero(as_tuple=True)
        if token_R.shape[0]:
            rows = swiglu(hidden_TD[token_R], gate_up[expert], down[expert], product)
            out_TD = out_TD.index_add(0, token_R, rows.float() * weight_TA[token_R, slot_R][:, None])
    return out_TD.to(hidden_TD.dtype)


def sorted_experts(
    hidden_TD: Tensor,
    choice_TA: Tensor,
    weight_TA: Tensor,
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    product: Product,
) -> Tensor:
    """As `looped_experts`. Rows are put in the order of their experts once, and back once; a token's experts are added
    in the order of its choices."""
    num_tokens, num_choices = choice_TA.shape
    expert_R = choice_TA.flatten()
    order_R = expert_R.argsort(stable=True)
    counts_E = torch.bincount(expert_R, minlength=len(down)).tolist()
    rows = torch.split(hidden_TD.index_select(0, order_R // num_choices), counts_E)
    outs = [swiglu(x, gate_up[e], down[e], product) for e, x in enumerate(rows) if counts_E[e]]
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    out_RD = torch.cat(outs).index_select(0, place_R)
    return weighted_sum(out_RD.view(num_tokens, num_choices, -1), weight_TA)


def weighted_sum(out_TAD: Tensor, weight_TA: Tensor) -> Tensor:
    """Return [T, D] in the dtype of `out_TAD`, summed in fp32."""
    weighted = out_TAD.float() * weight_TA[..., None]
    return weighted.sum(dim=1).to(out_TAD.dtype)
