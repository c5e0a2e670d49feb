"""The hybrid text model: full and window attention layers in one stack, with draft heads beside it.

Parameters live in one fixed form (fused plain qkv, stacked experts); `weights` translates to and from files.

Shape letters: T tokens of one forward over all its sequences, D hidden width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epd.kernels.base import AttentionContext
from epd.model.attention import Attention, RMSNorm
from epd.model.config import LayerConfig, TextConfig
from epd.model.moe import DenseMlp, Moe, RouterStats
from epd.model.mtp import MtpHead
from epd.model.packed import linear
from epd.model.rope import Rotation, rotation


class DecoderLayer(nn.Module):
    """One pre-norm layer: attention, then a dense or routed feed-forward."""

    def __init__(
        self, config: TextConfig, layer: LayerConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.mlp: Moe | DenseMlp
        if layer.is_moe:
            assert config.moe is not None, "a routed layer in a model without experts"
            self.mlp = Moe(width, config.moe, dtype=dtype, device=device)
        else:
            self.mlp = DenseMlp(width, config.intermediate_size, dtype=dtype, device=device)

    def forward(
        self, hidden_TD: Tensor, table: Rotation, attention: AttentionContext, router_stats: RouterStats | None
    ) -> Tensor:
        """Return [T, D]."""
        hidden_TD = hidden_TD + self.self_attn(self.input_layernorm(hidden_TD), table, attention)
        normed_TD = self.post_attention_layernorm(hidden_TD)
        out_TD: Tensor
        if isinstance(self.mlp, Moe):
            out_TD, counts_E = self.mlp(normed_TD)
            if router_stats is not None:
                router_stats.record(self.layer.index, counts_E)
        else:
            out_TD = self.mlp(normed_TD)
        return hidden_TD + out_TD


class HybridModel(nn.Module):
    """The trunk, its vocabulary projection and `num_mtp_layers` draft heads.

    Parameters are created in `dtype` (routers in fp32) and hold nothing until `init_weights` or a weight
    file fills them.
    """

    def __init__(
        self,
        config: TextConfig,
        num_mtp_layers: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        table_shape = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Parameter(torch.empty(table_shape, dtype=dtype, device=device))
        self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype=dtype, device=device) for layer in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        # Tied: one parameter under two names.
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else nn.Parameter(torch.empty(table_shape, dtype=dtype, device=device))
        )
        self.mtp = nn.ModuleList(
            MtpHead(config, config.mtp_layer(k), dtype=dtype, device=device) for k in range(num_mtp_layers)
        )

    @property
    def num_mtp_layers(self) -> int:
        """Draft heads present."""
        return len(self.mtp)

    @property
    def dtype(self) -> torch.dtype:
        """What the arithmetic is in. Norms are held in it; matrices may be stored in another dtype, or packed."""
        return self.norm.weight.dtype

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return token embeddings [T, D]; every id must be inside the vocabulary."""
        return F.embedding(ids_T, self.embed_tokens).to(self.dtype)

    def forward(
        self,
        hidden_TD: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        *,
        router_stats: RouterStats | None = None,
    ) -> Tensor:
        """Return the hidden states after the last norm, [T, D], from embeddings and positions (integer [T])."""
        layers = range(self.config.num_layers)
        hidden_TD = self.run_layers(layers, hidden_TD, positions_T, attention, router_stats=router_stats)
        normed: Tensor = self.norm(hidden_TD)
        return normed

    def run_layers(
        self,
        layers: range,
        hidden_TD: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        *,
        router_stats: RouterStats | None = None,
    ) -> Tensor:
        """Return the hidden states [T, D] after these of the trunk's layers, not normed; `forward` runs them all."""
        tables: dict[tuple[float, int], Rotation] = {}
        for index in layers:
            layer = self.config.layers[index]
            key = layer.rope_theta, layer.rotary_dim
            if key not in tables:
                tables[key] = rotation(positions_T, theta=layer.rope_theta, rotary_dim=layer.rotary_dim)
            hidden_TD = self.layers[index](hidden_TD, tables[key], attention, router_stats)
        return hidden_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return fp32 [T, vocabulary] from normed hidden states, the trunk's or a draft head's."""
        return linear(hidden_TD, self.lm_head).float()

    def draft(
        self, k: int, token_hidden_TD: Tensor, hidden_TD: Tensor, positions_T: Tensor, attention: AttentionContext
    ) -> Tensor:
        """Return draft head k's normed hidden states [T, D]; `logits` of row t guess token t + 2 + k.

        Row t takes the embedding of token t + 1 + k, the trunk's normed hidden state of token t, and position t.
        """
        layer = self.config.mtp_layer(k)
        table = rotation(positions_T, theta=layer.rope_theta, rotary_dim=layer.rotary_dim)
        out_TD: Tensor = self.mtp[k](token_hidden_TD, hidden_TD, table, attention)
        return out_TD

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fill every parameter for training from scratch.

        Matrices are normal with the config's `initializer_range`, those that write to the residual stream smaller by
        sqrt(2 x layers); norms are one, sinks and correction biases zero.
        """
        std = self.config.initializer_range
        residual_std = std / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            kind = name.rsplit(".", 1)[-1]
            if kind == "weight":
                parameter.fill_(1.0)
            elif kind == "sink":
                parameter.zero_()
            else:
                parameter.normal_(std=residual_std if kind in ("o_proj", "down") else std, generator=generator)
        for buffer in self.buffers():
            buffer.zero_()
