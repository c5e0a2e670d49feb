"""Audio tokenizer encoder with residual VQ, and the audio encoder over groups of codes, for training.

Legend: B clips, T mel frames, L code frames, Q quantizers, G groups, D width, N heads, H head width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.nets.vision import RmsNorm, rotate


@functools.lru_cache(maxsize=256)
def rope_tables(length: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, `[length, width]` float32."""
    angles = torch.arange(length).float()[:, None] * base ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class TokenizerAttention(nn.Module):
    """Causal attention, banded when `reach` is given; the key projection has no bias."""

    def __init__(self, width: int, num_heads: int, reach: int | None, base: float) -> None:
        super().__init__()
        self.num_heads, self.reach, self.base = num_heads, reach, base
        self.q_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.out_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        num_clips, length, width = x_BTD.shape
        head = width // self.num_heads
        cos, sin = rope_tables(length, head, self.base)
        query, key, value = (
            layer(x_BTD).float().view(num_clips, length, self.num_heads, head).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        place = torch.arange(length)
        gap = place[:, None] - place[None, :]
        visible = gap >= 0
        if self.reach is not None:
            visible &= gap <= self.reach
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.out_proj(mixed.transpose(1, 2).reshape(num_clips, length, width)).float()


class TokenizerLayer(nn.Module):
    """Pre-norm attention and GELU MLP."""

    def __init__(self, config: dict[str, Any], place: int) -> None:
        super().__init__()
        width, inner = config["d_model"], config["encoder_ffn_dim"]
        banded = place % config["swa_per_block"] < config["swa_per_block"] - 1
        reach = config["encoder_attn_window_size"][0] if banded else None
        self.self_attn = TokenizerAttention(width, config["encoder_attention_heads"], reach, config["rope_theta"])
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.self_attn_layer_norm(x_BTD))
        return x_BTD + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x_BTD)))).float()


class TokenizerNet(nn.Module):
    """Log-mel `[B, T, 128]` -> features `[B, ceil(ceil(T/2)/2), D]`, one attention segment per clip."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["d_model"]
        self.skip = config["encoder_skip_layer_id"]
        self.conv1 = nn.Conv1d(config["n_mels"], width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(TokenizerLayer(config, place) for place in range(config["encoder_layers"]))
        self.layer_norm = nn.LayerNorm(width)
        self.down_sample_layer = nn.Sequential(nn.Conv1d(width, width, 2, stride=2, bias=False))
        self.down_sample_norm = nn.LayerNorm(width)

    def forward(self, mel_BTM: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel_BTM.mT)))).mT.float()
        kept = x
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == self.skip - 1:
                kept = x
        x = self.layer_norm(x + kept)
        if x.shape[1] % 2:
            x = F.pad(x, (0, 0, 0, 1))
        return self.down_sample_norm(F.gelu(self.down_sample_layer(x.mT)).mT.float())


def nearest(x_ND: Tensor, book_CD: Tensor) -> Tensor:
    """Index of the closest codebook row for each vector."""
    return (x_ND.square().sum(-1, keepdim=True) - 2 * x_ND @ book_CD.T + book_CD.square().sum(-1)).argmin(-1)


def quantise(x_ND: Tensor, books: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Residual VQ: codes `[N, Q]` and the running sums of the chosen rows `[N, Q, D]`."""
    residual, total, codes, sums = x_ND, torch.zeros_like(x_ND), [], []
    for book in books:
        code = nearest(residual, book)
        residual, total = residual - book[code], total + book[code]
        codes.append(code)
        sums.append(total)
    return torch.stack(codes, -1), torch.stack(sums, 1)


class LocalLayer(nn.Module):
    """Qwen2-style block, bidirectional over the few positions of a group."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["input_local_dim"], config["input_local_intermediate_size"]
        self.num_heads, self.head = config["input_local_attn_heads"], config["input_local_head_dim"]
        self.base = float(config["rope_theta"])
        total = self.num_heads * self.head
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(width), RmsNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, total) for _ in range(3))
        self.o_proj = nn.Linear(total, width, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_GSD: Tensor) -> Tensor:
        num_groups, length, _ = x_GSD.shape
        inner = self.input_layernorm(x_GSD)
        cos, sin = rope_tables(length, self.head, self.base)
        query, key, value = (
            layer(inner).float().view(num_groups, length, self.num_heads, self.head).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        x_GSD = x_GSD + self.o_proj(mixed.transpose(1, 2).reshape(num_groups, length, -1)).float()
        inner = self.post_attention_layernorm(x_GSD)
        return x_GSD + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner)).float()


class AudioNet(nn.Module):
    """Codes `[G, 4, Q]` -> one embedding per group `[G, out]`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, rows = config["input_local_dim"], int(config["speech_vocab_size"])
        tables = [nn.Embedding(rows, width) for _ in range(config["audio_channels"])]
        for table in tables:
            nn.init.normal_(table.weight, std=0.5)
        self.speech_embeddings = nn.ModuleList(tables)
        self.layers = nn.ModuleList(LocalLayer(config) for _ in range(config["input_local_layers"]))
        self.norm = RmsNorm(width)
        flat = width * config["group_size"]
        self.project_in = nn.Linear(flat, flat * 4, bias=False)
        self.project_out = nn.Linear(flat * 4, config["out_hidden_size"], bias=False)

    def forward(self, codes_GSQ: Tensor) -> Tensor:
        x = torch.stack([table(codes_GSQ[..., q]) for q, table in enumerate(self.speech_embeddings)]).sum(0)
        for layer in self.layers:
            x = layer(x)
        return self.project_out(F.gelu(self.project_in(self.norm(x).flatten(1)).float())).float()


def export_audio_names(net: AudioNet) -> dict[str, Tensor]:
    """Tensors of the audio encoder under their checkpoint names."""
    tensors = {f"speech_embeddings.{q}.weight": table.weight for q, table in enumerate(net.speech_embeddings)}
    stem = "audio_encoder.input_local_transformer."
    for place, layer in enumerate(net.layers):
        for name, param in layer.named_parameters():
            group = "self_attn." if name[0] in "qkvo" else "mlp." if "_proj" in name else ""
            if name.startswith("post_attention"):
                group = ""
            tensors[f"{stem}layers.{place}.{group}{name}"] = param
    tensors[f"{stem}norm.weight"] = net.norm.weight
    tensors["audio_encoder.projection.mlp.0.weight"] = net.project_in.weight
    tensors["audio_encoder.projection.mlp.2.weight"] = net.project_out.weight
    return {name: tensor.detach() for name, tensor in tensors.items()}


def export_tokenizer_names(net: TokenizerNet, books: list[Tensor]) -> dict[str, Tensor]:
    """Tensors of the audio tokenizer under their checkpoint names."""
    tensors = {f"encoder.{name}": param.detach() for name, param in net.named_parameters()}
    for q, book in enumerate(books):
        tensors[f"encoder.quantizer.vq.layers.{q}._codebook.embed"] = book
    return tensors
