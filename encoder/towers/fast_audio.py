"""The audio towers for serving: the same numbers as `audio` up to rounding, many sounds in one pass.

Like `fast_vision`: everything that looks at one position runs on tiles of a fixed number of rows, across sounds and
their segments; attention runs on the segments of one length together. Convolutions are products over a few neighbouring
positions, laid side by side, so they run on tiles too.

Shape legend: N rows of the pass, B segments of one length, S positions, C channels, H heads, D head dim, G groups of
code frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.config import AudioConfig, AudioTokenizerConfig
from encoder.towers import products
from encoder.towers.audio import AudioEncoder, AudioTokenizer, LocalLayer, QuantizerLevel, TokenizerLayer
from encoder.towers.blockwise import Band, Blocks, band_attention, make_blocks, whole_attention
from encoder.towers.layers import RmsNorm, rotary_tables
from encoder.towers.products import (
    Activation,
    Linear,
    filled_up,
    padded_rows,
    product,
    product_plus,
    product_times,
    rms_norm,
    tiles,
)
from encoder.towers.turning import Tables, turn_into
from encoder.towers.workspace import Workspace

# Lengths of segments whose tables are kept.
MAX_KEPT_LENGTHS = 32
# Rows of a tile where four positions have become one.
POOLED_TILE_ROWS = 64


class _Norm(NamedTuple):
    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> "_Norm":
        return cls(norm.weight.detach(), norm.bias.detach(), norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _fused_qkv(q: nn.Linear, k: nn.Linear, v: nn.Linear, *, packed: bool) -> Linear:
    """One product for all three; who has no bias gets zeros."""
    weights = torch.cat([part.weight.detach() for part in (q, k, v)])
    biases = [
        part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach() for part in (q, k, v)
    ]
    return products.pack(weights, torch.cat(biases), packed=packed)


def _convolution(module: nn.Module, *, packed: bool) -> Linear:
    """A product over neighbours laid side by side, channels together."""
    assert isinstance(module, nn.Conv1d)
    return products.pack(module.weight.permute(0, 2, 1).flatten(1), module.bias, packed=packed)


def _neighbours(x_NC: Tensor, *, kernel: int, stride: int, padding: int) -> Tensor:
    """`[positions, kernel * C]` of one segment; zeros beyond its ends."""
    padded = F.pad(x_NC, (0, 0, padding, padding))
    return padded.unfold(0, kernel, stride).transpose(1, 2).flatten(1)


def _on_tiles(x: Tensor, linear: Linear, width: int, tile: int, activation: Activation | None = None) -> Tensor:
    """`[N, I]` of any N -> `[whole tiles, width]`."""
    out = x.new_empty(padded_rows(x.shape[0], tile), width)
    for rows in tiles(out.shape[0], tile):
        out[rows] = product(filled_up(x[rows].contiguous(), tile), linear, activation)
    return out


@dataclass(frozen=True, slots=True)
class _Layer:
    """A tokenizer layer's weights."""

    norm: _Norm
    qkv: Linear
    out: Linear
    second_norm: _Norm
    fc1: Linear
    fc2: Linear

    @classmethod
    def of(cls, layer: TokenizerLayer, *, packed: bool) -> "_Layer":
        pack, attention = partial(products.pack_linear, packed=packed), layer.self_attn
        qkv = _fused_qkv(attention.q_proj, attention.k_proj, attention.v_proj, packed=packed)
        norms = [_Norm.of(norm) for norm in (layer.self_attn_layer_norm, layer.final_layer_norm)]
        return cls(norms[0], qkv, pack(attention.out_proj), norms[1], pack(layer.fc1), pack(layer.fc2))

    def before(self, out: Tensor, x: Tensor, tables: Tables, head_dim: int) -> None:
        """Writes q, k and v of a tile."""
        turn_into(out, product(self.norm(x), self.qkv), tables, head_dim, x.shape[1])

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer on a tile."""
        x = product_plus(mixed, self.out, x)
        return product_plus(product(self.second_norm(x), self.fc1, "gelu"), self.fc2, x)


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive segments of one length in the packed rows."""

    start: int
    num_segments: int
    length: int


def _grouped(lengths: Sequence[int]) -> list[_Group]:
    """Of lengths in ascending order."""
    groups: list[_Group] = []
    for length in dict.fromkeys(lengths):
        start = groups[-1].start + groups[-1].num_segments * groups[-1].length if groups else 0
        groups.append(_Group(start, lengths.count(length), length))
    return groups


class FastTokenizer:
    """Weights of an `AudioTokenizer`, arranged for serving. Used under `torch.inference_mode`."""

    def __init__(self, tokenizer: AudioTokenizer, *, tile: int | None = None, packed: bool | None = None) -> None:
        """Copies the weights."""
        config, weight = tokenizer.config, tokenizer.conv1.weight
        self.config: AudioTokenizerConfig = config
        self.device, self.dtype = weight.device, weight.dtype
        self.segment_frames = tokenizer.segment_frames
        self.tile = tile or products.tile_rows(config.d_model, self.device)
        if packed is None:
            packed = products.should_pack(config.d_model, self.dtype, self.device)
        self._conv1, self._conv2 = (_convolution(conv, packed=packed) for conv in (tokenizer.conv1, tokenizer.conv2))
        self._layers = [_Layer.of(cast(TokenizerLayer, layer), packed=packed) for layer in tokenizer.layers]
        self._norm, self._pooled_norm = _Norm.of(tokenizer.layer_norm), _Norm.of(tokenizer.down_sample_norm)
        self._pool = _convolution(tokenizer.down_sample_layer[0], packed=packed)
        self._levels = []
        packed = packed and products.should_pack(config.d_model, torch.float32, self.device)
        for level in tokenizer.quantizer.vq.layers:
            embed = cast(QuantizerLevel, level)._codebook.embed.detach().float()
            self._levels.append((products.pack(embed, None, packed=packed), embed, embed.square().sum(1)))
        self._space = Workspace(self.dtype, self.device)
        self._blocks = lru_cache(MAX_KEPT_LENGTHS)(self._make_blocks)
        self._rotary = lru_cache(MAX_KEPT_LENGTHS)(self._make_rotary)

    def __call__(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Log-mels `[T, num_mels]`, T >= 1 -> int64 codes `[L2, Q]` of each. Raises ValueError for another shape."""
        for mel in mels:
            if mel.dim() != 2 or mel.shape[0] == 0 or mel.shape[1] != self.config.num_mels:
                raise ValueError(f"mel is {tuple(mel.shape)}, expected [frames >= 1, {self.config.num_mels}]")
        segments = [(clip, piece) for clip, mel in enumerate(mels) for piece in torch.split(mel, self.segment_frames)]
        order = sorted(range(len(segments)), key=lambda index: segments[index][1].shape[0])
        codes = self._encode([segments[index][1].to(self.dtype) for index in order])
        by_segment = dict(zip(order, codes, strict=True))
        clips: list[list[Tensor]] = [[] for _ in mels]
        for index, (clip, _) in enumerate(segments):
            clips[clip].append(by_segment[index])
        return [torch.cat(parts) for parts in clips]

    def _encode(self, segments: Sequence[Tensor]) -> list[Tensor]:
        """Codes of segments in ascending order of length."""
        config, kernel = self.config, self.config.kernel_size
        pad = kernel // 2
        x = self._convolved(segments, self._conv1, kernel=kernel, stride=1, padding=pad)
        x = self._convolved(self._cut(x, segments), self._conv2, kernel=kernel, stride=config.stride, padding=pad)
        lengths = [(len(segment) - 1) // config.stride + 1 for segment in segments]
        x = self._through_layers(x, _grouped(lengths))
        pieces, start = [], 0
        for length in lengths:
            pieces.append(F.pad(x[start : start + length], (0, 0, 0, -length % config.pool)))
            start += length
        x = self._convolved(pieces, self._pool, kernel=config.pool, stride=config.pool, padding=0)
        codes = torch.cat([self._codes(self._pooled_norm(x[rows])) for rows in tiles(x.shape[0], self.tile)])
        counts = [len(piece) // config.pool for piece in pieces]
        return list(torch.split(codes[: sum(counts)], counts))

    def _cut(self, x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        lengths = [len(segment) for segment in like]
        return list(torch.split(x[: sum(lengths)], lengths))

    def _convolved(self, pieces: Sequence[Tensor], weight: Linear, *, kernel: int, stride: int, padding: int) -> Tensor:
        columns = torch.cat([_neighbours(piece, kernel=kernel, stride=stride, padding=padding) for piece in pieces])
        return _on_tiles(columns, weight, self.config.d_model, self.tile, "gelu")

    def _through_layers(self, x: Tensor, groups: Sequence[_Group]) -> Tensor:
        config, width = self.config, self.config.d_model
        head_dim = width // config.num_heads
        tables = Tables.of([self._rotary(g.length) for g in groups for _ in range(g.num_segments)], x.shape[0])
        qkv = self._space.take("qkv", x.shape[0], 3 * width)
        mixed = self._space.take("mixed", x.shape[0], width)
        mixed[groups[-1].start + groups[-1].num_segments * groups[-1].length :] = 0
        skip = None
        for index, (layer, windowed) in enumerate(zip(self._layers, config.windowed_layers, strict=True)):
            for rows in tiles(x.shape[0], self.tile):
                layer.before(qkv[rows], x[rows], tables.rows(rows), head_dim)
            for group in groups:
                self._attend(group, qkv, mixed, windowed=windowed)
            for rows in tiles(x.shape[0], self.tile):
                x[rows] = layer.after(x[rows], mixed[rows])
            if index == config.skip_layer:
                skip = x.clone()
        for rows in tiles(x.shape[0], self.tile):
            x[rows] = self._norm(x[rows] if skip is None else x[rows] + skip[rows])
        return x

    def _attend(self, group: _Group, qkv: Tensor, mixed: Tensor, *, windowed: bool) -> None:
        heads, width = self.config.num_heads, self.config.d_model
        chosen = slice(group.start, group.start + group.num_segments * group.length)
        parts = qkv[chosen].view(group.num_segments, group.length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        blocks = self._blocks(group.length, windowed)
        if isinstance(blocks, Blocks):
            left = blocks.band.left
            places = ((blocks.num_padded, 0), (blocks.num_keys, left), (blocks.num_keys, left))
            q, k, v = (
                self._space.placed(name, (group.num_segments, heads, size, width // heads), before, part)
                for name, (size, before), part in zip("qkv", places, parts, strict=True)
            )
            out = band_attention(q, k, v, blocks, None, "key0")[:, :, : group.length]
        elif blocks:
            out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        else:
            out = whole_attention(parts[0], parts[1], parts[2])
        mixed[chosen].view(group.num_segments, group.length, heads, -1).copy_(out.transpose(1, 2))

    def _codes(self, x: Tensor) -> Tensor:
        """Of one tile: `[T, C]` -> int64 `[T, Q]`; each level codes what the levels before left over."""
        residual, levels = x.float(), []
        for product_with, embed, squares in self._levels:
            distance = residual.square().sum(1, keepdim=True) - 2 * product(residual, product_with) + squares
            codes = distance.argmin(dim=1)
            residual = residual - embed[codes]
            levels.append(codes)
        return torch.stack(levels, dim=1)

    def _make_blocks(self, length: int, windowed: bool) -> Blocks | bool:
        """The cut of a band; without one, whether attention is causal."""
        config = self.config
        left = config.window_left if windowed else None
        right = 0 if config.causal else config.window_right if windowed else None
        if left is None and right in (None, 0):
            return right == 0
        band = Band(*(length - 1 if side is None else side for side in (left, right)))
        return make_blocks(band, length, 1, self.dtype, self.device)

    def _make_rotary(self, length: int) -> tuple[Tensor, Tensor]:
        width = self.config.d_model // self.config.num_heads
        # Published engines hold the inverse frequencies in the module's dtype, so bf16 rounds them.
        cos, sin = rotary_tables(length, width, self.config.rope_theta, self.device, self.dtype)
        return cos[:, : width // 2].contiguous(), sin[:, : width // 2].contiguous()


@dataclass(frozen=True, slots=True)
class _Local:
    """A local layer's weights."""

    norm: Tensor
    qkv: Linear
    out: Linear
    second_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def of(cls, layer: LocalLayer, *, packed: bool) -> "_Local":
        pack, attention, mlp = partial(products.pack_linear, packed=packed), layer.self_attn, layer.mlp
        return cls(
            norm=layer.input_layernorm.weight.detach(),
            qkv=_fused_qkv(attention.q_proj, attention.k_proj, attention.v_proj, packed=packed),
            out=pack(attention.o_proj),
            second_norm=layer.post_attention_layernorm.weight.detach(),
            gate=pack(mlp.gate_proj),
            up=pack(mlp.up_proj),
            down=pack(mlp.down_proj),
        )


class FastAudioEncoder:
    """Weights of an `AudioEncoder`, arranged for serving. Used under `torch.inference_mode`."""

    def __init__(self, encoder: AudioEncoder, *, tile: int | None = None, packed: bool | None = None) -> None:
        """Copies the weights. Raises ValueError for a tile that does not hold whole groups."""
        config = encoder.config
        self.config: AudioConfig = config
        tables = [cast(nn.Embedding, table).weight.detach() for table in encoder.speech_embeddings]
        self.device, self.dtype = tables[0].device, tables[0].dtype
        # Groups are never split between tiles.
        self.tile = (tile or products.tile_rows(config.hidden_size, self.device)) // config.group_size
        self.tile *= config.group_size
        if packed is None:
            packed = products.should_pack(config.hidden_size, self.dtype, self.device)
        self._tables = tables
        local = encoder.input_local_transformer
        self._layers = [_Local.of(cast(LocalLayer, layer), packed=packed) for layer in local.layers]
        self._post_norm = local.norm.weight.detach() if isinstance(local.norm, RmsNorm) else None
        linears = [part for part in encoder.projection.mlp if isinstance(part, nn.Linear)]
        self._projection = [(products.pack_linear(part, packed=packed), part.out_features) for part in linears]
        cos, sin = rotary_tables(config.group_size, config.rotary_dim, config.rope_theta, self.device)
        half, repeats = config.rotary_dim // 2, self.tile // config.group_size
        self._turns = Tables.of([(cos[:, :half], sin[:, :half])] * repeats, self.tile)

    def __call__(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """One int `[L2, >= num_channels]` per clip -> rows `[ceil(L2 / group_size), out_hidden]` of each."""
        groups = [self._to_groups(clip) for clip in codes]
        counts, size = [len(clip) for clip in groups], self.config.group_size
        ids = torch.cat(groups).flatten(0, 1)
        x = torch.cat([self._through_layers(ids[start : start + self.tile]) for start in range(0, len(ids), self.tile)])
        rows = x[: len(ids)].view(-1, size * self.config.hidden_size)
        last = len(self._projection) - 1
        for number, (linear, width) in enumerate(self._projection):
            rows = _on_tiles(rows, linear, width, POOLED_TILE_ROWS, None if number == last else "gelu")
        return list(torch.split(rows[: sum(counts)], counts))

    def _through_layers(self, ids: Tensor) -> Tensor:
        """One tile: int `[<= T, channels]` -> `[T, hidden]`. Attention stays within groups, so within the tile."""
        config = self.config
        x = F.embedding(ids[:, 0], self._tables[0])
        for channel, table in enumerate(self._tables[1:], start=1):
            x = x + F.embedding(ids[:, channel], table)
        x = filled_up(x, self.tile)
        width = config.num_heads * config.head_dim
        for layer in self._layers:
            qkv = x.new_empty(self.tile, 3 * width)
            made = product(rms_norm(x, layer.norm, config.norm_eps), layer.qkv)
            turn_into(qkv, made, self._turns, config.head_dim, width)
            q, k, v = qkv.view(-1, config.group_size, 3, config.num_heads, config.head_dim).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=not config.full_attention)
            x = product_plus(out.transpose(1, 2).reshape(self.tile, width), layer.out, x)
            normed = rms_norm(x, layer.second_norm, config.norm_eps)
            x = product_plus(product_times(normed, layer.up, product(normed, layer.gate, "swish")), layer.down, x)
        return x if self._post_norm is None else rms_norm(x, self._post_norm, config.norm_eps)

    def _to_groups(self, codes: Tensor) -> Tensor:
        """`[G, group_size, channels]`; groups are completed with the last code row, not with the zero-embedding id."""
        channels, size = self.config.num_channels, self.config.group_size
        if codes.dim() != 2 or codes.shape[0] == 0 or codes.shape[1] < channels:
            raise ValueError(f"codes are {tuple(codes.shape)}, expected [frames >= 1, at least {channels}]")
        codes = codes[:, :channels].long()
        missing = -codes.shape[0] % size
        return torch.cat((codes, codes[-1:].expand(missing, channels))).reshape(-1, size, channels)
