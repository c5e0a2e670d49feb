"""Feed-forward blocks: the dense SwiGLU and the routed experts. Matrices may be packed, see `epd.model.packed`.

Shape letters: T tokens, D hidden width, I inner width, E experts, A experts per token.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epd.kernels.cuda_experts import static_experts, static_obstacle
from epd.kernels.experts import sorted_experts, swiglu
from epd.kernels.few_rows import can_take, few_rows_kernel, load_few_rows
from epd.model.config import MoeConfig
from epd.model.packed import linear

# Rows that each expert is given on average, up to which the kernel for few rows is the faster one.
_FEW_ROWS_PER_EXPERT = 4


class RouterStats:
    """Collects, over one or more forwards, how many tokens each expert of each layer was given."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    def record(self, layer_index: int, counts_E: Tensor) -> None:
        """Add int64 [E] counts of one layer."""
        seen = self._counts.get(layer_index)
        self._counts[layer_index] = counts_E if seen is None else seen + counts_E

    def tokens_per_expert(self) -> dict[int, Tensor]:
        """Return int64 [E] per layer index, of the layers that have experts."""
        return dict(self._counts)

    def imbalance(self) -> dict[int, float]:
        """Return, per layer index, the busiest expert's load over the mean load; 1.0 is perfect balance."""
        return {i: float(c.max() / c.float().mean().clamp(min=1e-9)) for i, c in self._counts.items()}


class DenseMlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x). `gate_up` is [2I, D], gate rows first."""

    def __init__(self, hidden_size: int, inner_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.inner_size = inner_size
        self.gate_up: nn.Parameter | nn.Module = nn.Parameter(
            torch.empty(2 * inner_size, hidden_size, dtype=dtype, device=device)
        )
        self.down: nn.Parameter | nn.Module = nn.Parameter(
            torch.empty(hidden_size, inner_size, dtype=dtype, device=device)
        )

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return swiglu(hidden_TD, self.gate_up, self.down, linear)


class Moe(nn.Module):
    """Routed experts. Router weight and correction bias are fp32 whatever the model's dtype is.

    `gate_up` is [E, 2I, D] and `down` [E, D, I]; packed, each is a list of E matrices.
    """

    correction_bias: Tensor

    def __init__(self, hidden_size: int, config: MoeConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self._config = config
        self.num_experts, self.inner_size = config.num_experts, config.intermediate_size
        num_experts, inner_size = self.num_experts, self.inner_size
        self.gate_up: nn.Parameter | nn.ModuleList = nn.Parameter(
            torch.empty(num_experts, 2 * inner_size, hidden_size, dtype=dtype, device=device)
        )
        self.down: nn.Parameter | nn.ModuleList = nn.Parameter(
            torch.empty(num_experts, hidden_size, inner_size, dtype=dtype, device=device)
        )
        self.router = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32, device=device))
        # A buffer: balancing moves it by counting, never by gradient.
        self.register_buffer("correction_bias", torch.empty(num_experts, dtype=torch.float32, device=device))

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [T, D] and how many tokens each expert was given, int64 [E]."""
        choice_TA, weight_TA = self.route(hidden_TD)
        expert_of_row = choice_TA.flatten()
        if self._is_static(hidden_TD, expert_of_row.shape[0]):
            return self._static(hidden_TD, choice_TA, weight_TA)
        counts_E = torch.bincount(expert_of_row, minlength=self.num_experts)
        return self._mixed(hidden_TD, choice_TA, weight_TA), counts_E

    def _mixed(self, hidden_TD: Tensor, choice_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, D]."""
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            is_few = choice_TA.numel() <= _FEW_ROWS_PER_EXPERT * self.num_experts
            if is_few and can_take(hidden_TD, gate_up, down) and (kernel := load_few_rows()) is not None:
                return kernel.experts(hidden_TD, choice_TA, weight_TA, gate_up, down)
        return sorted_experts(hidden_TD, choice_TA, weight_TA, _matrices(gate_up), _matrices(down), linear)

    def _is_static(self, hidden_TD: Tensor, num_rows: int) -> bool:
        """Whether shapes must not depend on the routing: on CUDA, where to ask for counts is to wait."""
        if not hidden_TD.is_cuda or torch.is_grad_enabled():
            return False
        if not isinstance(self.gate_up, Tensor) or not isinstance(self.down, Tensor):
            return False
        return static_obstacle(self.gate_up, self.down, num_rows=num_rows, dtype=hidden_TD.dtype) is None

    def _static(self, hidden_TD: Tensor, choice_TA: Tensor, weight_TA: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.gate_up, Tensor), "packed experts"
        assert isinstance(self.down, Tensor), "packed experts"
        expert_of_row = choice_TA.flatten()
        counts_E = torch.zeros(self.num_experts, dtype=torch.int64, device=hidden_TD.device)
        counts_E = counts_E.scatter_add(0, expert_of_row, torch.ones_like(expert_of_row))
        return static_experts(hidden_TD, choice_TA, weight_TA, self.gate_up, self.down), counts_E

    def route(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, int64 [T, A], and their weights, fp32 [T, A].

        The correction bias decides who is chosen and has no part in the weights.
        """
        config = self._config
        bias_E = self.correction_bias
        is_plain = config.num_groups == 1 and self.router.dtype == torch.float32 == bias_E.dtype
        if is_plain and self.router.is_contiguous() and (kernel := few_rows_kernel(hidden_TD)) is not None:
            return kernel.route(
                hidden_TD,
                self.router,
                bias_E,
                config.num_experts_per_token,
                is_rounded=config.router_dtype == "bfloat16",
                is_normed=config.norm_topk_prob,
                scale=config.routed_scaling_factor,
            )
        score_TE = self._scores(hidden_TD)
        choice_TE = score_TE.detach() + self.correction_bias
        if config.num_groups > 1:
            choice_TE = self._limit_groups(choice_TE)
        choice_TA = choice_TE.topk(config.num_experts_per_token, dim=-1).indices
        weight_TA = score_TE.gather(1, choice_TA)
        if config.norm_topk_prob:
            weight_TA = weight_TA / (weight_TA.sum(dim=-1, keepdim=True) + 1e-20)
        return choice_TA, weight_TA * config.routed_scaling_factor

    def _scores(self, hidden_TD: Tensor) -> Tensor:
        """Return sigmoid scores, fp32 [T, E]; autocast must not reach the router."""
        with torch.autocast(hidden_TD.device.type, enabled=False):
            operands = hidden_TD.float(), self.router.float()
            if self._config.router_dtype == "bfloat16":
                # Operands are rounded, the sum stays fp32.
                operands = operands[0].bfloat16().float(), operands[1].bfloat16().float()
            return F.linear(*operands).sigmoid()

    def _limit_groups(self, choice_TE: Tensor) -> Tensor:
        """Mask the experts outside each token's best groups; a group scores the sum of its two best experts."""
        config = self._config
        choice_TGE = torch.unflatten(choice_TE, 1, (config.num_groups, -1))
        group_TG = choice_TGE.topk(min(2, choice_TGE.shape[-1]), dim=-1).values.sum(dim=-1)
        kept = group_TG.topk(config.num_groups_per_token, dim=-1).indices
        is_kept_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter(1, kept, True)
        return choice_TGE.masked_fill(~is_kept_TG[..., None], float("-inf")).flatten(1)


def _matrices(experts: Tensor | nn.ModuleList) -> Sequence[Tensor | nn.Module]:
    # unbind, not indexing: the backward of one index fills a zero tensor as large as all experts.
    return experts.unbind(0) if isinstance(experts, Tensor) else list(experts)
