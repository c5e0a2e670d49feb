"""Routed experts in shapes that do not depend on the routing, for CUDA graphs and for CUDA at large.

Counting tokens per expert on the host, as a plain loop over experts does, waits for the device and cannot be recorded.
`grouped_experts` hands the counts to a grouped matrix product on the device; `gathered_experts` copies the matrices of
each token's experts, which is right for a few tokens of small experts and on devices without that product. Written for
CUDA; so far it has run on CPUs alone.

Shape letters: T tokens; A experts per token; R = T x A rows; D hidden width; I inner width; E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Bytes of matrices that `gathered_experts` may copy in one layer.
_MAX_GATHERED_BYTES = 256 << 20
# The grouped product of Hopper and later; before it torch counts on the host.
_GROUPED_CAPABILITY = (9, 0)
# Row strides in bytes that it takes.
_GROUPED_ALIGNMENT_BYTES = 16


def static_obstacle(gate_up: Tensor, down: Tensor, *, num_rows: int, dtype: torch.dtype) -> str | None:
    """Why `static_experts` cannot compute this many token-expert pairs in this dtype here, None where it can."""
    size_bytes = num_rows * (gate_up.nbytes + down.nbytes) // gate_up.shape[0]
    if can_group(gate_up, down, dtype) or size_bytes <= _MAX_GATHERED_BYTES:
        return None
    return (
        f"{num_rows} token-expert pairs would copy {size_bytes:,} bytes of expert matrices in each layer, and this "
        "device has no grouped product for them"
    )


def static_experts(
    hidden_TD: Tensor, choice_TA: Tensor, weight_TA: Tensor, gate_up_E2ID: Tensor, down_EDI: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D], by whichever way suits the device."""
    is_grouped = can_group(gate_up_E2ID, down_EDI, hidden_TD.dtype)
    compute = grouped_experts if is_grouped else gathered_experts
    return compute(hidden_TD, choice_TA, weight_TA, gate_up_E2ID, down_EDI)


def can_group(gate_up_E2ID: Tensor, down_EDI: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device has a grouped product for these matrices, in this dtype, that does not wait for it."""
    matrices = gate_up_E2ID, down_EDI
    return (
        gate_up_E2ID.device.type == "cuda"
        and all(matrix.dtype == dtype == torch.bfloat16 for matrix in matrices)
        and all(matrix.stride(1) * matrix.itemsize % _GROUPED_ALIGNMENT_BYTES == 0 for matrix in matrices)
        and torch.cuda.get_device_capability(gate_up_E2ID.device) >= _GROUPED_CAPABILITY
    )


def grouped_experts(
    hidden_TD: Tensor, choice_TA: Tensor, weight_TA: Tensor, gate_up_E2ID: Tensor, down_EDI: Tensor
) -> Tensor:
    """Rows sorted by expert, one grouped product for all of them."""
    num_experts, per_token = gate_up_E2ID.shape[0], choice_TA.shape[1]
    expert_of_row = choice_TA.flatten()
    sorted_expert, order = expert_of_row.sort(stable=True)
    expert_E = torch.arange(num_experts, device=choice_TA.device)
    ends_E = torch.searchsorted(sorted_expert, expert_E, right=True).to(torch.int32)
    token_of_row = order // per_token
    rows_RD = hidden_TD.index_select(0, token_of_row)
    gate_RI, up_RI = F.grouped_mm(rows_RD, gate_up_E2ID.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    out_RD = F.grouped_mm(F.silu(gate_RI) * up_RI, down_EDI.transpose(1, 2), offs=ends_E)
    # Back in the order of tokens before they are added up, so that the sum's order is always the same.
    out_RD = torch.empty_like(out_RD).index_copy(0, order, out_RD)
    out_TAD = torch.unflatten(out_RD.float(), 0, choice_TA.shape) * weight_TA[..., None]
    return out_TAD.sum(dim=1).to(hidden_TD.dtype)


def gathered_experts(
    hidden_TD: Tensor, choice_TA: Tensor, weight_TA: Tensor, gate_up_E2ID: Tensor, down_EDI: Tensor
) -> Tensor:
    """The matrices of each token's experts side by side, batched products over them."""
    num_tokens, per_token = choice_TA.shape
    expert_of_row = choice_TA.flatten()
    row_RD = hidden_TD[:, None].expand(-1, per_token, -1).flatten(0, 1)
    gate_up_R2ID, down_RDI = (
        matrix.index_select(0, expert_of_row).to(hidden_TD.dtype) for matrix in (gate_up_E2ID, down_EDI)
    )
    gate_RI, up_RI = torch.bmm(row_RD[:, None], gate_up_R2ID.transpose(1, 2))[:, 0].chunk(2, dim=-1)
    out_RD = torch.bmm((F.silu(gate_RI) * up_RI)[:, None], down_RDI.transpose(1, 2))[:, 0]
    out_TAD = torch.unflatten(out_RD.float(), 0, (num_tokens, per_token)) * weight_TA[..., None]
    return out_TAD.sum(dim=1).to(hidden_TD.dtype)
