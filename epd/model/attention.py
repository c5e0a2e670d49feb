"""The attention block: projections, rotation and value scale. Where keys live is the attention context's business.

Shape letters: T tokens, D hidden width, N query heads, K KV heads, H query/key width, V value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epd.kernels.base import AttentionContext
from epd.kernels.few_rows import few_rows_kernel
from epd.model.config import LayerConfig, TextConfig
from epd.model.packed import linear
from epd.model.rope import Rotation, rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm: computed in fp32, cast back, then multiplied by the weight as it is."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and (kernel := few_rows_kernel(x, self.weight)) is not None:
            return kernel.norm(x, self.weight, self._eps)
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self._eps)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    """One layer's attention. `qkv_proj` is plain [Q; K; V] with heads in natural order, whatever the file held.

    Both projections may be packed, see `epd.model.packed`.
    """

    def __init__(
        self, config: TextConfig, layer: LayerConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.layer = layer
        self._spec = layer.attention
        self._value_scale = config.value_scale
        width, out_width = config.hidden_size, layer.num_heads * layer.v_dim
        self.qkv_proj: nn.Parameter | nn.Module = nn.Parameter(
            torch.empty(sum(layer.qkv_rows), width, dtype=dtype, device=device)
        )
        self.o_proj: nn.Parameter | nn.Module = nn.Parameter(torch.empty(width, out_width, dtype=dtype, device=device))
        self.sink: nn.Parameter | None = None
        if layer.has_sink:
            self.sink = nn.Parameter(torch.empty(layer.num_heads, dtype=dtype, device=device))

    def forward(self, hidden_TD: Tensor, table: Rotation, context: AttentionContext) -> Tensor:
        """Return [T, D]. `table` is the rotation of the layer's own theta at the tokens' positions."""
        q_TNH, k_TKH, v_TKV = self._turned(linear(hidden_TD, self.qkv_proj), table)
        out_TNV = context.attend(self._spec, q_TNH, k_TKH, v_TKV, self.sink)
        return linear(out_TNV.flatten(1), self.o_proj)

    def _turned(self, qkv: Tensor, table: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, N, H] and keys [T, K, H], rotated, and scaled values [T, K, V]."""
        layer = self.layer
        if (kernel := few_rows_kernel(qkv)) is not None:
            heads, widths = (layer.num_heads, layer.num_kv_heads), (layer.qk_dim, layer.v_dim)
            return kernel.turn(qkv, table, heads, widths, self._value_scale)
        num_qk = layer.num_heads + layer.num_kv_heads
        qk, v = torch.split(qkv, [num_qk * layer.qk_dim, layer.qkv_rows[2]], dim=-1)
        turned = rotate(torch.unflatten(qk, -1, (num_qk, layer.qk_dim)), table)
        q_TNH, k_TKH = torch.split(turned, [layer.num_heads, layer.num_kv_heads], dim=1)
        # Scaled here, once: caches hold the scaled value.
        v_TKV = torch.unflatten(v, -1, (layer.num_kv_heads, layer.v_dim)) * self._value_scale
        return q_TNH, k_TKH, v_TKV
