"""A draft head: one window layer that guesses a token further ahead from the trunk's hidden state.

Shape letters: T tokens, D hidden width.
"""

import torch
from torch import Tensor, nn

from epd.kernels.base import AttentionContext
from epd.model.attention import Attention, RMSNorm
from epd.model.config import LayerConfig, TextConfig
from epd.model.moe import DenseMlp
from epd.model.packed import linear
from epd.model.rope import Rotation


class MtpHead(nn.Module):
    """One head. It has a cache of its own and shares embedding and vocabulary projection with the trunk."""

    def __init__(
        self, config: TextConfig, layer: LayerConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        self.enorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.hnorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.eh_proj: nn.Parameter | nn.Module = nn.Parameter(torch.empty(width, 2 * width, dtype=dtype, device=device))
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer, dtype=dtype, device=device)
        self.pre_mlp_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.mlp = DenseMlp(width, config.intermediate_size, dtype=dtype, device=device)
        self.final_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)

    def forward(self, token_TD: Tensor, hidden_TD: Tensor, table: Rotation, attention: AttentionContext) -> Tensor:
        """Return [T, D] after the final norm, from token embeddings and the trunk's normed hidden states."""
        joined = torch.cat([self.enorm(token_TD), self.hnorm(hidden_TD)], dim=-1)
        x_TD = linear(joined, self.eh_proj)
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), table, attention)
        x_TD = x_TD + self.mlp(self.pre_mlp_layernorm(x_TD))
        normed: Tensor = self.final_layernorm(x_TD)
        return normed
