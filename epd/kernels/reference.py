"""Attention in plain torch: the oracle, the training path and the paged path.

`DenseAttention` is the definition, one sequence at a time and nothing cached. `BatchedDenseAttention` is the same
function for equal lengths at a cost that training can bear. Both are differentiable, the sink included.

Shape letters: T tokens over all sequences; B sequences; L tokens per sequence; N query heads; K KV heads; G query heads
per KV head; H query/key width; V value width; C tokens per window block; M blocks.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from epd.kernels.base import AttentionSpec


class DenseAttention:
    """Causal attention over whole sequences laid end to end, without a cache."""

    def __init__(self, seq_lens: Sequence[int]) -> None:
        self._seq_lens = list(seq_lens)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V]; T must be the sum of the sequence lengths."""
        rows = zip(*(torch.split(x, self._seq_lens) for x in (q_TNH, k_TKH, v_TKV)), strict=True)
        return torch.cat([self._one(spec, q, k, v, sink_N) for q, k, v in rows])

    @staticmethod
    def _one(spec: AttentionSpec, q_LNH: Tensor, k_LKH: Tensor, v_LKV: Tensor, sink_N: Tensor | None) -> Tensor:
        position_L = torch.arange(q_LNH.shape[0], device=q_LNH.device)
        visible_LL = visible_keys(position_L, position_L, spec.window_left)
        return softmax_attention(spec, q_LNH[None], k_LKH[None], v_LKV[None], visible_LL[None], sink_N)[0]


class BatchedDenseAttention:
    """Causal attention over `batch` sequences of `length` tokens each; window layers cost length x window."""

    def __init__(self, batch: int, length: int) -> None:
        self._batch = batch
        self._length = length

    def attend(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, sink_N: Tensor | None) -> Tensor:
        """Return [T, N, V]; T must be batch x length."""
        q_BLNH, k_BLKH, v_BLKV = (torch.unflatten(x, 0, (self._batch, self._length)) for x in (q_TNH, k_TKH, v_TKV))
        if spec.window_left is not None and spec.window_left + 1 < self._length:
            out_BLNV = _block_window_attention(spec, q_BLNH, k_BLKH, v_BLKV, sink_N)
        elif sink_N is None:
            out_BLNV = _causal_attention(spec, q_BLNH, k_BLKH, v_BLKV)
        else:
            position_L = torch.arange(self._length, device=q_TNH.device)
            visible_LL = visible_keys(position_L, position_L, spec.window_left)
            out_BLNV = softmax_attention(spec, q_BLNH, k_BLKH, v_BLKV, visible_LL[None], sink_N)
        return out_BLNV.flatten(0, 1)


def visible_keys(query_position: Tensor, key_position: Tensor, window_left: int | None) -> Tensor:
    """Return which keys each query sees: positions [..., Q] and [..., S] give bool [..., Q, S]."""
    distance = query_position[..., :, None] - key_position[..., None, :]
    seen = distance >= 0
    return seen if window_left is None else seen & (distance <= window_left)


def softmax_attention(
    spec: AttentionSpec, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, visible_BQS: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Return [B, Q, N, V]: the definition, with the sink as one more column that has no value.

    The softmax runs in fp32. A query that sees nothing gives zeros where there is a sink and NaN where there is none.
    """
    groups = spec.num_heads // spec.num_kv_heads
    q_BQKGH = torch.unflatten(q_BQNH, 2, (spec.num_kv_heads, groups))
    score_BKGQS = torch.einsum("bqkgh,bskh->bkgqs", q_BQKGH * spec.scale, k_BSKH).float()
    score_BKGQS = score_BKGQS.masked_fill(~visible_BQS[:, None, None], float("-inf"))
    if sink_N is None:
        prob_BKGQS = score_BKGQS.softmax(dim=-1)
    else:
        sink_KG = sink_N.float().view(1, spec.num_kv_heads, groups, 1, 1)
        sink_BKGQ1 = sink_KG.expand(*score_BKGQS.shape[:-1], 1)
        prob_BKGQS = torch.cat([score_BKGQS, sink_BKGQ1], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("bkgqs,bskv->bqkgv", prob_BKGQS.to(v_BSKV.dtype), v_BSKV).flatten(2, 3)


def _causal_attention(spec: AttentionSpec, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKV: Tensor) -> Tensor:
    """Return [B, L, N, V] without a window or a sink, in memory linear in L."""
    # Values are padded to the key width: the fused kernels want equal widths, and without one L x L scores are stored.
    v_BLKH = F.pad(v_BLKV, (0, spec.qk_dim - spec.v_dim)) if spec.v_dim < spec.qk_dim else v_BLKV
    out_BNLH = F.scaled_dot_product_attention(
        q_BLNH.transpose(1, 2),
        k_BLKH.transpose(1, 2),
        v_BLKH.transpose(1, 2),
        is_causal=True,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return out_BNLH.transpose(1, 2)[..., : spec.v_dim]


def _block_window_attention(
    spec: AttentionSpec, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKV: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Return [B, L, N, V]: blocks of window_left + 1 queries, each against its own and the previous block of keys.

    With that block size a query reaches back into the previous block and never beyond it. Keys before the start of the
    sequence are zero padding, masked in the first block; padding after the end is behind every real query.
    """
    assert spec.window_left is not None
    batch, length = q_BLNH.shape[:2]
    block = spec.window_left + 1
    num_blocks = -(-length // block)
    tail = num_blocks * block - length
    q_BMCNH = torch.unflatten(F.pad(q_BLNH, (0, 0, 0, 0, 0, tail)), 1, (num_blocks, block))
    k_BMSKH, v_BMSKV = (_own_and_previous(x, num_blocks, block, tail) for x in (k_BLKH, v_BLKV))
    query_C = torch.arange(block, device=q_BLNH.device) + block
    key_S = torch.arange(2 * block, device=q_BLNH.device)
    visible_CS = visible_keys(query_C, key_S, spec.window_left)
    visible_MCS = visible_CS.expand(num_blocks, -1, -1).clone()
    visible_MCS[0, :, :block] = False
    visible_BCS = visible_MCS.expand(batch, -1, -1, -1).flatten(0, 1)
    out_BCNV = softmax_attention(
        spec, q_BMCNH.flatten(0, 1), k_BMSKH.flatten(0, 1), v_BMSKV.flatten(0, 1), visible_BCS, sink_N
    )
    return torch.unflatten(out_BCNV, 0, (batch, num_blocks)).flatten(1, 2)[:, :length]


def _own_and_previous(x_BLKD: Tensor, num_blocks: int, block: int, tail: int) -> Tensor:
    """Return [B, M, 2C, K, D]: for each block the previous block's rows (zeros before the first) and its own."""
    padded = torch.unflatten(F.pad(x_BLKD, (0, 0, 0, 0, block, tail)), 1, (num_blocks + 1, block))
    return torch.cat([padded[:, :-1], padded[:, 1:]], dim=2)
