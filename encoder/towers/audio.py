"""The audio towers: log-mel -> discrete codes (audio tokenizer encoder) -> embedding rows (audio encoder).

The tokenizer works on segments: a mel is cut into pieces of `segment_frames`, each encoded alone (positions, attention
and convolution padding restart), the codes joined. Lengths: mel frames T -> L1 = ceil(T / 2) -> codes L2 = ceil(L1 / 2)
-> rows ceil(L2 / 4).

Shape legend: B segments of equal length, T mel frames, L positions, C channels, Q quantizers, G groups of code frames.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.config import AudioConfig, AudioTokenizerConfig
from encoder.towers.layers import (
    Fp32Gelu,
    GatedMlp,
    RmsNorm,
    attend,
    band_mask,
    init_linear_stack,
    rotary_tables,
    rotate_half,
    split_heads,
)

Rotary = tuple[Tensor, Tensor]


class TokenizerAttention(nn.Module):
    """Multi-head attention with rotary position; the key projection has no bias."""

    def __init__(self, config: AudioTokenizerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x_BLC: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        q = rotate_half(split_heads(self.q_proj(x_BLC), self.num_heads), *rotary)
        k = rotate_half(split_heads(self.k_proj(x_BLC), self.num_heads), *rotary)
        v = split_heads(self.v_proj(x_BLC), self.num_heads)
        mixed: Tensor = self.out_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return mixed


class TokenizerLayer(nn.Module):
    """Pre-norm attention and a two-layer GELU MLP."""

    def __init__(self, config: AudioTokenizerConfig) -> None:
        super().__init__()
        self.self_attn = TokenizerAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.fc1 = nn.Linear(config.d_model, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), rotary, mask)
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class Codebook(nn.Module):
    """One level of the quantizer: `embed [codes, C]`."""

    def __init__(self, num_codes: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(num_codes, width))


class QuantizerLevel(nn.Module):
    """Holds the codebook under the checkpoint's name."""

    def __init__(self, num_codes: int, width: int) -> None:
        super().__init__()
        self._codebook = Codebook(num_codes, width)

    def codes_and_values(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest code of each fp32 row `[N, C]`: int64 `[N]` and its vectors `[N, C]`."""
        embed = self._codebook.embed.float()
        distance = residual.square().sum(1, keepdim=True) - 2 * residual @ embed.T + embed.square().sum(1)
        codes = (-distance).argmax(dim=1)
        return codes, embed[codes]


class QuantizerLevels(nn.Module):
    """The levels under the checkpoint's name."""

    def __init__(self, config: AudioTokenizerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(QuantizerLevel(size, config.d_model) for size in config.codebook_sizes)


class ResidualQuantizer(nn.Module):
    """Residual vector quantization in fp32, each level coding what the levels before left over."""

    def __init__(self, config: AudioTokenizerConfig) -> None:
        super().__init__()
        self.vq = QuantizerLevels(config)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C]` of any float dtype -> int64 codes `[N, Q]`."""
        residual, levels = x.float(), []
        for level in self.vq.layers:
            codes, values = cast(QuantizerLevel, level).codes_and_values(residual)
            residual = residual - values
            levels.append(codes)
        return torch.stack(levels, dim=1)


class AudioTokenizer(nn.Module):
    """Log-mel to codes. Parameter names are the checkpoint's without the `encoder.` prefix."""

    def __init__(self, config: AudioTokenizerConfig, segment_frames: int = 6000) -> None:
        super().__init__()
        self.config = config
        self.segment_frames = segment_frames
        pad = config.kernel_size // 2
        self.conv1 = nn.Conv1d(config.num_mels, config.d_model, config.kernel_size, padding=pad)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, config.kernel_size, stride=config.stride, padding=pad)
        self.layers = nn.ModuleList(TokenizerLayer(config) for _ in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.down_sample_layer = nn.Sequential(
            nn.Conv1d(config.d_model, config.d_model, config.pool, stride=config.pool, bias=False), nn.GELU()
        )
        self.down_sample_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.quantizer = ResidualQuantizer(config)

    def encode(self, mel: Tensor) -> Tensor:
        """Log-mel `[T, num_mels]`, T >= 1 -> int64 codes `[L2, Q]`. Raises ValueError for another shape."""
        codes: Tensor = self.quantizer(self.encoder_out(mel))
        return codes

    def encoder_out(self, mel: Tensor) -> Tensor:
        """What the quantizer sees: `[T, num_mels]` -> `[L2, d_model]` in the module's dtype, segment by segment."""
        if mel.dim() != 2 or mel.shape[0] == 0 or mel.shape[1] != self.config.num_mels:
            raise ValueError(f"mel is {tuple(mel.shape)}, expected [frames >= 1, {self.config.num_mels}]")
        return torch.cat([self.encode_segments(piece[None])[0] for piece in torch.split(mel, self.segment_frames)])

    def encode_segments(self, mel_BTC: Tensor) -> Tensor:
        """Segments of one length as a batch: `[B, T, num_mels]` -> `[B, L2, d_model]`, before the quantizer."""
        x = mel_BTC.to(self.conv1.weight.dtype).transpose(1, 2)
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2)
        masks = [self._mask(x.shape[1], windowed, x.device) for windowed in (False, True)]
        # Published engines hold the inverse frequencies in the module's dtype, so bf16 rounds them.
        rotary = rotary_tables(
            x.shape[1], self.config.d_model // self.config.num_heads, self.config.rope_theta, x.device, x.dtype
        )
        skip = None
        for index, (layer, windowed) in enumerate(zip(self.layers, self.config.windowed_layers, strict=True)):
            x = layer(x, rotary, masks[windowed])
            if index == self.config.skip_layer:
                skip = x
        x = self.layer_norm(x if skip is None else x + skip)
        missing = -x.shape[1] % self.config.pool
        x = self.down_sample_layer(F.pad(x.transpose(1, 2), (0, missing))).transpose(1, 2)
        out: Tensor = self.down_sample_norm(x)
        return out

    def init_weights(self, generator: torch.Generator) -> None:
        """Fresh weights for training; codebooks normal(0, 1), the scale of the normalised rows they code."""
        init_linear_stack(self, generator, residual_names=("out_proj", "fc2"), depth=self.config.num_layers)
        with torch.no_grad():
            for name, parameter in self.quantizer.named_parameters():
                level = int(name.split(".")[2])
                parameter.normal_(0.0, 0.7**level, generator=generator)

    def _mask(self, length: int, windowed: bool, device: torch.device) -> Tensor | None:
        left = self.config.window_left if windowed else None
        right = self.config.window_right if windowed else None
        if self.config.causal:
            right = 0
        return None if left is None and right is None else band_mask(length, left, right, device)


class LocalAttention(nn.Module):
    """Attention inside one group of code frames; q, k, v with bias, output without."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, width)
        self.k_proj = nn.Linear(config.hidden_size, width)
        self.v_proj = nn.Linear(config.hidden_size, width)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        q = rotate_half(split_heads(self.q_proj(x), self.num_heads), *rotary)
        k = rotate_half(split_heads(self.k_proj(x), self.num_heads), *rotary)
        v = split_heads(self.v_proj(x), self.num_heads)
        mixed: Tensor = self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return mixed


class LocalLayer(nn.Module):
    """Pre-norm attention and gated MLP with RMSNorm."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.self_attn = LocalAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LocalTransformer(nn.Module):
    """A transformer over sequences of `group_size` positions, bidirectional unless the config says otherwise."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(LocalLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.norm_eps) if config.add_post_norm else nn.Identity()

    def forward(self, x_GSC: Tensor) -> Tensor:
        length = x_GSC.shape[1]
        rotary = rotary_tables(length, self.config.rotary_dim, self.config.rope_theta, x_GSC.device)
        mask = None if self.config.full_attention else band_mask(length, None, 0, x_GSC.device)
        for layer in self.layers:
            x_GSC = layer(x_GSC, rotary, mask)
        out: Tensor = self.norm(x_GSC)
        return out


class AudioProjection(nn.Module):
    """A flattened group to one row of the language model's width."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        width = config.hidden_size * config.group_size
        if config.projection_layers == 1:
            self.mlp = nn.Sequential(nn.Linear(width, config.out_hidden_size, bias=False))
        else:
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width, bias=False),
                Fp32Gelu(),
                nn.Linear(4 * width, config.out_hidden_size, bias=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.mlp(x)
        return rows


class AudioEncoder(nn.Module):
    """Codes to embedding rows. In the checkpoint `speech_embeddings` is top level, the rest is in `audio_encoder.`"""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        # With weights of its own: the random ones it would begin with import all of torch's compiler on device meta.
        self.speech_embeddings = nn.ModuleList(
            nn.Embedding(size, config.hidden_size, _weight=torch.zeros(size, config.hidden_size))
            for size in config.vocab_sizes
        )
        self.input_local_transformer = LocalTransformer(config)
        self.projection = AudioProjection(config)

    def forward(self, codes: Sequence[Tensor]) -> Tensor:
        """One int `[L2, >= num_channels]` per clip -> `[sum ceil(L2 / group_size), out_hidden]`, clips in order."""
        rows: Tensor = self.projection(self.local_out(codes).flatten(1))
        return rows

    def local_out(self, codes: Sequence[Tensor]) -> Tensor:
        """After the local transformer: `[G, group_size, hidden]`. Raises ValueError for empty or narrow codes."""
        groups = torch.cat([self._to_groups(clip) for clip in codes])
        tables = list(self.speech_embeddings)
        x: Tensor = tables[0](groups[..., 0])
        for channel, table in enumerate(tables[1:], start=1):
            x = x + table(groups[..., channel])
        out: Tensor = self.input_local_transformer(x)
        return out

    def init_weights(self, generator: torch.Generator) -> None:
        """Fresh weights for training; the row that stands for silence is zero in every table."""
        depth = self.config.num_layers
        init_linear_stack(self, generator, residual_names=("o_proj", "mlp.down_proj"), depth=depth)
        with torch.no_grad():
            for table, zero_id in zip(self.speech_embeddings, self.config.zero_ids, strict=True):
                assert isinstance(table, nn.Embedding)
                table.weight[zero_id] = 0.0

    def _to_groups(self, codes: Tensor) -> Tensor:
        channels, size = self.config.num_channels, self.config.group_size
        if codes.dim() != 2 or codes.shape[0] == 0 or codes.shape[1] < channels:
            raise ValueError(f"codes are {tuple(codes.shape)}, expected [frames >= 1, at least {channels}]")
        codes = codes[:, :channels].long()
        missing = -codes.shape[0] % size
        # Groups are completed with the last code row, not with the zero-embedding id.
        return torch.cat((codes, codes[-1:].expand(missing, channels))).reshape(-1, size, channels)
