"""Attention of a chunk of one sequence's new tokens, and of single ones, in plain torch.

Parts of the keys are attended over apart by torch's fused kernel, which keeps no scores, and joined by the logarithms
of their sums of exponentials, which it returns. That is also how the sink takes part.

Shape letters: C new tokens; S keys and values of earlier tokens; N query heads; K KV heads; G query heads per KV head;
H query/key width; V value width; M blocks of B queries; W tokens that a window query sees besides itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from epd.kernels.base import AttentionSpec

# The fused kernel works on as many rows at a time; longer blocks would meet more keys that they do not see.
_QUERY_BLOCK = 32


def attend_single(spec: AttentionSpec, q_NH: Tensor, k_SKH: Tensor, v_SKV: Tensor, sink_N: Tensor | None) -> Tensor:
    """Return [N, V]: one query that sees all the keys."""
    num_kv_heads = spec.num_kv_heads
    q_KGH = torch.unflatten(q_NH * spec.scale, 0, (num_kv_heads, -1))
    # A matrix product per head reads keys where they lie; one for all heads would copy them first, or be slow.
    score_NS = torch.cat([torch.mm(q_KGH[head], k_SKH[:, head].t()) for head in range(num_kv_heads)]).float()
    if sink_N is not None:
        score_NS = torch.cat([score_NS, sink_N.float()[:, None]], dim=1)
    prob_NS = score_NS.softmax(dim=1)[:, : k_SKH.shape[0]].to(v_SKV.dtype)
    prob_KGS = torch.unflatten(prob_NS, 0, (num_kv_heads, -1))
    return torch.cat([torch.mm(prob_KGS[head], v_SKV[:, head]) for head in range(num_kv_heads)])


def attend_singles(
    spec: AttentionSpec, q_LNH: Tensor, k_LKSH: Tensor, v_LKSV: Tensor, hidden_LS: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Return [L, N, V]: one query per sequence, for L sequences with few keys; `hidden_LS` marks those unseen."""
    q_LKGH = torch.unflatten(q_LNH * spec.scale, 1, (spec.num_kv_heads, -1))
    score_LKGS = torch.matmul(q_LKGH, k_LKSH.transpose(2, 3)).float()
    score_LNS = score_LKGS.flatten(1, 2).masked_fill_(hidden_LS[:, None], float("-inf"))
    if sink_N is not None:
        score_LNS = torch.cat([score_LNS, sink_N.float()[:, None].expand(q_LNH.shape[0], -1, 1)], dim=2)
    prob_LNS = score_LNS.softmax(dim=2)[..., : k_LKSH.shape[2]].to(v_LKSV.dtype)
    prob_LKGS = torch.unflatten(prob_LNS, 1, (spec.num_kv_heads, -1))
    return torch.matmul(prob_LKGS, v_LKSV).flatten(1, 2)


def attend_full(spec: AttentionSpec, q_CNH: Tensor, k_RKH: Tensor, v_RKV: Tensor, sink_N: Tensor | None) -> Tensor:
    """Return [C, N, V]: the queries belong to the last C of R keys and see all keys up to their own."""
    num_before = k_RKH.shape[0] - q_CNH.shape[0]
    out_CNV, lse_CN = _causal(spec, q_CNH, k_RKH[num_before:], v_RKV[num_before:])
    if num_before:
        part_CNV, part_CN = _all_seen(spec, q_CNH, k_RKH[:num_before], v_RKV[:num_before])
        both_CN = torch.logaddexp(lse_CN, part_CN)
        # In fp32: a rounded weight would not sum to one with the other.
        out_CNV = out_CNV * (lse_CN - both_CN).exp()[..., None] + part_CNV * (part_CN - both_CN).exp()[..., None]
        lse_CN = both_CN
    return _with_sink(out_CNV, lse_CN, sink_N).to(q_CNH.dtype)


def window_mask(num_new: int, num_held: int, window_left: int, dtype: torch.dtype) -> Tensor:
    """Return [M, 1, B, B + W], 0 where a query sees a key and -inf elsewhere, for `attend_window`.

    `num_held` of the W keys before the first query are there.
    """
    block = _block(num_new)
    query_B1 = torch.arange(block)[:, None]
    key_R = torch.arange(block + window_left)
    seen_BR = (key_R >= query_B1) & (key_R <= query_B1 + window_left)
    mask_MBR = torch.zeros(-(-num_new // block), *seen_BR.shape, dtype=dtype)
    mask_MBR.masked_fill_(~seen_BR, float("-inf"))
    missing = window_left - num_held
    for start in range(0, min(missing, num_new), block):
        mask_MBR[start // block, :, : missing - start] = float("-inf")
    return mask_MBR[:, None]


def attend_window(
    spec: AttentionSpec, q_CNH: Tensor, k_RKH: Tensor, v_RKV: Tensor, mask: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Return [C, N, V]: the queries belong to the last C of R keys; before them are those of the W positions that are
    held, see `window_mask`.

    Blocks of queries meet their own keys and the W before them. The blocks' keys overlap, and are views of one row.
    """
    assert spec.window_left is not None
    num_new, block = q_CNH.shape[0], _block(q_CNH.shape[0])
    num_blocks = -(-num_new // block)
    tail = num_blocks * block - num_new
    missing = spec.window_left + num_new - k_RKH.shape[0]
    width = max(spec.qk_dim, spec.v_dim)
    k_MKSH, v_MKSH = (
        F.pad(x, (0, width - x.shape[-1], 0, 0, missing, tail))
        .unfold(0, block + spec.window_left, block)
        .transpose(2, 3)
        for x in (k_RKH, v_RKV)
    )
    q_MBNH = torch.unflatten(F.pad(q_CNH, (0, width - spec.qk_dim, 0, 0, 0, tail)), 0, (num_blocks, block))
    out_MNBV, lse_MNB = _fused(q_MBNH.transpose(1, 2), k_MKSH, v_MKSH, scale=spec.scale, mask=mask)
    out_CNV = out_MNBV.transpose(1, 2).flatten(0, 1)[:num_new, :, : spec.v_dim]
    lse_CN = lse_MNB.transpose(1, 2).flatten(0, 1)[:num_new]
    return _with_sink(out_CNV, lse_CN, sink_N).to(q_CNH.dtype)


def _block(num_new: int) -> int:
    return min(_QUERY_BLOCK, num_new)


def _causal(spec: AttentionSpec, q_CNH: Tensor, k_CKH: Tensor, v_CKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return [C, N, V] and [C, N]: query i sees keys 0 to i."""
    width = max(spec.qk_dim, spec.v_dim)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(0, 1)[None] for x in (q_CNH, k_CKH, v_CKV))
    out_1NCV, lse_1NC = _fused(q, k, v, scale=spec.scale, is_causal=True)
    return out_1NCV[0, :, :, : spec.v_dim].transpose(0, 1), lse_1NC[0].t()


def _all_seen(spec: AttentionSpec, q_CNH: Tensor, k_SKH: Tensor, v_SKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return [C, N, V] and [C, N]: every query sees every key. Query heads of a KV head are rows of one product."""
    num_new, num_kv_heads, width = q_CNH.shape[0], spec.num_kv_heads, max(spec.qk_dim, spec.v_dim)
    q_CNH, k_SKH, v_SKV = (F.pad(x, (0, width - x.shape[-1])) for x in (q_CNH, k_SKH, v_SKV))
    q_KRH = torch.unflatten(q_CNH.transpose(0, 1), 0, (num_kv_heads, -1)).flatten(1, 2)
    out_1KRV, lse_1KR = _fused(q_KRH[None], k_SKH.transpose(0, 1)[None], v_SKV.transpose(0, 1)[None], scale=spec.scale)
    out_NCV = torch.unflatten(out_1KRV[0], 1, (-1, num_new)).flatten(0, 1)
    lse_NC = torch.unflatten(lse_1KR[0], 1, (-1, num_new)).flatten(0, 1)
    return out_NCV[..., : spec.v_dim].transpose(0, 1), lse_NC.t()


def _fused(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return torch's fused attention over [batch, heads, rows, width] of one width, and the fp32 logarithm of each
    row's sum of exponentials."""
    out: Tensor
    lse: Tensor
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _with_sink(out_CNV: Tensor, lse_CN: Tensor, sink_N: Tensor | None) -> Tensor:
    if sink_N is None:
        return out_CNV
    return out_CNV * (lse_CN - sink_N.float()).sigmoid()[..., None]
