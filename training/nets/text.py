"""Text trunk and MTP heads for training: tokens of many sequences share the matrix products.

Legend: T tokens of all sequences, B sequences of a group, L length of a sequence, D width, N query heads, K key heads,
H query/key head width, V value head width, E experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 128

Groups = tuple[tuple[int, int], ...]
"""(sequences, length) of each group; tokens of the groups follow one another."""


class Norm(nn.Module):
    """RMS normalisation with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@functools.lru_cache(maxsize=512)
def rope_tables(length: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, `[length, 1, width]` float32."""
    angles = torch.arange(length).float()[:, None] * base ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=64)
def band_mask(length: int, reach: int | None) -> Tensor:
    """0 where a key is visible, -inf elsewhere, `[L, L]`."""
    place = torch.arange(length)
    gap = place[:, None] - place[None, :]
    hidden = gap < 0 if reach is None else (gap < 0) | (gap > reach)
    return torch.zeros(length, length).masked_fill(hidden, float("-inf"))


@functools.lru_cache(maxsize=1)
def block_masks() -> Tensor:
    """Masks of a first and of a later query block against (previous block, own block), `[2, 128, 256]`."""
    query, key = torch.arange(BLOCK)[:, None] + BLOCK, torch.arange(2 * BLOCK)[None, :]
    hidden = (key > query) | (key < query - (BLOCK - 1))
    both = torch.stack([hidden | (key < BLOCK), hidden])
    return torch.zeros(2, BLOCK, 2 * BLOCK).masked_fill(both, float("-inf"))


class Attention(nn.Module):
    """Full or sliding-window attention; projections are kept in one matrix ordered q, k, v."""

    def __init__(self, config: dict[str, Any], windowed: bool) -> None:
        super().__init__()
        prefix = "swa_" if windowed else ""
        self.num_heads, self.num_kv = config[f"{prefix}num_attention_heads"], config[f"{prefix}num_key_value_heads"]
        self.head, self.value_head = config[f"{prefix}head_dim"], config[f"{prefix}v_head_dim"]
        self.rotary = int(self.head * config["partial_rotary_factor"])
        self.base = float(config["swa_rope_theta" if windowed else "rope_theta"])
        self.reach = config["sliding_window"] - 1 if windowed else None
        self.value_scale = config["attention_value_scale"]
        width = config["hidden_size"]
        self.qkv = nn.Linear(
            width, self.num_heads * self.head + self.num_kv * (self.head + self.value_head), bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * self.value_head, width, bias=False)
        self.sink = nn.Parameter(torch.zeros(self.num_heads)) if windowed else None

    def mix(self, query_BNLH: Tensor, key_BNLH: Tensor, value_BNLV: Tensor) -> Tensor:
        """Attention of one group, `[B, N, L, V]`."""
        length = query_BNLH.shape[2]
        if self.reach is None and length > 2 * BLOCK:
            value = F.pad(value_BNLV, (0, self.head - self.value_head))
            mixed = F.scaled_dot_product_attention(query_BNLH, key_BNLH, value, is_causal=True)
            return mixed[..., : self.value_head]
        if self.reach is None or length <= 2 * BLOCK:
            scores = query_BNLH @ key_BNLH.mT
            return self.normalise(scores, band_mask(length, self.reach)) @ value_BNLV
        return self.mix_blocks(query_BNLH, key_BNLH, value_BNLV)

    def mix_blocks(self, query_BNLH: Tensor, key_BNLH: Tensor, value_BNLV: Tensor) -> Tensor:
        """Sliding window over blocks of 128: each block sees itself and the one before."""
        length = query_BNLH.shape[2]
        missing = -length % BLOCK
        query, key, value = (
            F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK)) for x in (query_BNLH, key_BNLH, value_BNLV)
        )
        key, value = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], dim=3) for x in (key, value))
        first, later = block_masks()
        masks = torch.cat([first[None], later.expand(query.shape[2] - 1, -1, -1)])
        mixed = self.normalise(query @ key.mT, masks) @ value
        return mixed.flatten(2, 3)[:, :, :length]

    def normalise(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Masked softmax over keys, with the sink as one more logit that has no value."""
        scores = scores.float() * self.head**-0.5 + mask
        if self.sink is None:
            return scores.softmax(-1)
        sink = self.sink.view(-1, *[1] * (scores.ndim - 2)).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]

    def forward(self, x_TD: Tensor, groups: Groups) -> Tensor:
        qkv = self.qkv(x_TD).float()
        sizes = [self.num_heads * self.head, self.num_kv * self.head, self.num_kv * self.value_head]
        mixed, start = [], 0
        for num_rows, length in groups:
            part = qkv[start : start + num_rows * length].view(num_rows, length, -1)
            start += num_rows * length
            heads = part[..., : sizes[0] + sizes[1]].view(num_rows, length, -1, self.head)
            cos, sin = rope_tables(length, self.rotary, self.base)
            turned = heads[..., : self.rotary]
            left, right = turned.chunk(2, dim=-1)
            turned = turned * cos + torch.cat([-right, left], dim=-1) * sin
            heads = torch.cat([turned, heads[..., self.rotary :]], dim=-1)
            value = part[..., sizes[0] + sizes[1] :].view(num_rows, length, self.num_kv, self.value_head)
            value = value * self.value_scale
            query, key, value = (
                x.transpose(1, 2) for x in (heads[:, :, : self.num_heads], heads[:, :, self.num_heads :], value)
            )
            repeats = self.num_heads // self.num_kv
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
            with torch.autocast("cpu", enabled=False):  # short products: float32 needs no per-shape kernel
                out = self.mix(query, key, value)
            mixed.append(out.transpose(1, 2).reshape(num_rows * length, -1))
        return self.o_proj(torch.cat(mixed)).float()


class Dense(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up).float()


class Moe(nn.Module):
    """Sigmoid-gated experts; the correction bias takes part in the choice only and is moved by the load alone."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner, num_experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
        self.top = config["num_experts_per_tok"]
        self.router = nn.Parameter(torch.randn(num_experts, width) * 0.05)
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * inner, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, inner) * inner**-0.5 * 0.3)
        self.correction: Tensor
        self.load: Tensor
        self.register_buffer("correction", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(num_experts), persistent=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        num_tokens = x_TD.shape[0]
        with torch.autocast("cpu", enabled=False):
            scores_TE = torch.sigmoid(x_TD.float() @ self.router.T)
        chosen = (scores_TE + self.correction).topk(self.top, dim=-1).indices
        weights = scores_TE.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.correction))
        if self.training:
            self.load += counts
            self.seen += counts
        # Every expert gets the same number of places, a multiple of 128: one batched product, few distinct shapes.
        places = -(-int(counts.max()) // 128) * 128
        expert = chosen.reshape(-1)[order]
        slots = torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert] + expert * places
        rows = order // self.top
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        buffer = torch.zeros(len(counts) * places, x_TD.shape[1], dtype=dtype)
        buffer = buffer.index_copy(0, slots, x_TD.to(dtype)[rows]).view(len(counts), places, -1)
        gate, up = (buffer @ self.gate_up.to(dtype).mT).chunk(2, dim=-1)
        outputs = ((F.silu(gate) * up) @ self.down.to(dtype).mT).flatten(0, 1)
        weighted = outputs[slots].float() * weights.reshape(-1)[order][:, None]
        return torch.zeros(num_tokens, x_TD.shape[1]).index_add(0, rows, weighted)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Raise the bias of idle experts, lower that of busy ones."""
        share = self.load / self.load.sum().clamp_min(1) * len(self.load)
        self.correction += rate * (1 - share).clamp(-1, 1)
        self.correction -= self.correction.mean()
        self.load.zero_()

    def evenness(self) -> float:
        """Mean over largest number of tokens per expert since the last call; 1 is a perfect balance."""
        evenness = float(self.seen.mean() / self.seen.max().clamp_min(1))
        self.seen.zero_()
        return evenness


class Layer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: dict[str, Any], windowed: bool, experts: bool) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layernorm_epsilon"]
        self.input_norm, self.post_norm = Norm(width, eps), Norm(width, eps)
        self.attention = Attention(config, windowed)
        self.mlp = Moe(config) if experts else Dense(width, config["intermediate_size"])

    def forward(self, x_TD: Tensor, groups: Groups) -> Tensor:
        x_TD = x_TD + self.attention(self.input_norm(x_TD), groups)
        return x_TD + self.mlp(self.post_norm(x_TD))


class MtpHead(nn.Module):
    """Draft layer: (next token, trunk state) -> the token after it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layernorm_epsilon"]
        self.enorm, self.hnorm, self.final_norm = Norm(width, eps), Norm(width, eps), Norm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = Layer(config, windowed=True, experts=False)

    def forward(self, embedded_TD: Tensor, trunk_TD: Tensor, groups: Groups) -> Tensor:
        joined = torch.cat([self.enorm(embedded_TD), self.hnorm(trunk_TD)], dim=-1)
        return self.final_norm(self.layer(self.eh_proj(joined).float(), groups))


class TextNet(nn.Module):
    """Embedding, trunk, head and the three MTP heads."""

    def __init__(self, config: dict[str, Any], num_mtp_heads: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.embed = nn.Embedding(config["vocab_size"], width)
        nn.init.normal_(self.embed.weight, std=0.7)
        self.layers = nn.ModuleList(
            Layer(config, bool(windowed), bool(experts))
            for windowed, experts in zip(config["hybrid_layer_pattern"], config["moe_layer_freq"], strict=True)
        )
        self.norm = Norm(width, config["layernorm_epsilon"])
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.mtp = nn.ModuleList(MtpHead(config) for _ in range(num_mtp_heads))
        for module in self.modules():
            if isinstance(module, Attention):
                nn.init.normal_(module.o_proj.weight, std=0.03)

    def forward(self, hidden_TD: Tensor, groups: Groups) -> Tensor:
        """Trunk states after the final norm."""
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, groups)
        return self.norm(hidden_TD)

    def routers(self) -> list[Moe]:
        """The MoE layers."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Moe)]


def interleave_qkv(attention: Attention, shards: int) -> Tensor:
    """The fused layout of the checkpoint: per shard its query, key and value rows."""
    sizes = [attention.num_heads * attention.head, attention.num_kv * attention.head]
    query, key, value = attention.qkv.weight.tensor_split([sizes[0], sizes[0] + sizes[1]])
    return torch.cat(
        [piece for parts in zip(*(x.chunk(shards) for x in (query, key, value)), strict=True) for piece in parts]
    )


def export_layer(layer: Layer, stem: str, shards: int, post_name: str) -> dict[str, Tensor]:
    """One trunk or MTP layer under checkpoint names."""
    attention = layer.attention
    tensors = {
        f"{stem}input_layernorm.weight": layer.input_norm.weight,
        f"{stem}{post_name}.weight": layer.post_norm.weight,
        f"{stem}self_attn.qkv_proj.weight": interleave_qkv(attention, shards),
        f"{stem}self_attn.o_proj.weight": attention.o_proj.weight,
    }
    if attention.sink is not None:
        tensors[f"{stem}self_attn.attention_sink_bias"] = attention.sink
    mlp = layer.mlp
    if isinstance(mlp, Dense):
        gate, up = mlp.gate_up.weight.chunk(2)
        named = {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down.weight}
        return tensors | {f"{stem}mlp.{name}.weight": tensor for name, tensor in named.items()}
    tensors[f"{stem}mlp.gate.weight"] = mlp.router
    tensors[f"{stem}mlp.gate.e_score_correction_bias"] = mlp.correction
    for expert in range(len(mlp.correction)):
        gate, up = mlp.gate_up[expert].chunk(2)
        named = {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down[expert]}
        tensors |= {f"{stem}mlp.experts.{expert}.{name}.weight": tensor for name, tensor in named.items()}
    return tensors


def export_text_names(net: TextNet, shards: int) -> dict[str, Tensor]:
    """All text tensors under their checkpoint names; router and correction bias stay float32."""
    tensors = {
        "model.embed_tokens.weight": net.embed.weight,
        "model.norm.weight": net.norm.weight,
        "lm_head.weight": net.lm_head.weight,
    }
    for place, layer in enumerate(net.layers):
        assert isinstance(layer, Layer)
        tensors |= export_layer(layer, f"model.layers.{place}.", shards, "post_attention_layernorm")
    for place, head in enumerate(net.mtp):
        assert isinstance(head, MtpHead)
        stem = f"model.mtp.layers.{place}."
        tensors |= export_layer(head.layer, stem, shards, "pre_mlp_layernorm")
        named = {"enorm": head.enorm, "hnorm": head.hnorm, "eh_proj": head.eh_proj, "final_layernorm": head.final_norm}
        tensors |= {f"{stem}{name}.weight": module.weight for name, module in named.items()}
    return {name: tensor.detach() for name, tensor in tensors.items()}
