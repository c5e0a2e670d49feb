"""Small towers of odd widths, no multiple of a vector register, with random weights none of which is zero or one."""

from dataclasses import replace

import torch

from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.vit import Grid, VisionTower

VISION = VisionConfig(
    depth=4,
    hidden_size=72,
    intermediate_size=88,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    out_hidden_size=40,
    window_patches=4,
    block_types=(-1, 0, 1, 0),
)
TOKENIZER = AudioTokenizerConfig(
    d_model=48,
    num_layers=4,
    num_heads=4,
    ffn_dim=88,
    num_mels=128,
    codebook_sizes=(64, 64, 32),
    skip_layer=1,
    causal=True,
    window_left=8,
    window_right=0,
    windowed_layers=(True, False, True, False),
)
AUDIO = AudioConfig(
    num_channels=3,
    group_size=4,
    segment_frames=100,
    hidden_size=40,
    num_layers=2,
    num_heads=2,
    head_dim=24,
    intermediate_size=56,
    out_hidden_size=40,
    vocab_sizes=(65, 65, 33),
    zero_ids=(64, 64, 32),
    rotary_dim=12,
)


def vision_tower(dtype: torch.dtype = torch.float32, **changes: object) -> VisionTower:
    tower = VisionTower(replace(VISION, **changes)).eval().requires_grad_(False)  # type: ignore[arg-type]
    _shake(tower)
    return tower.to(dtype)


def audio_towers(dtype: torch.dtype = torch.float32, **changes: object) -> tuple[AudioTokenizer, AudioEncoder]:
    tokenizer = AudioTokenizer(replace(TOKENIZER, **changes), AUDIO.segment_frames)  # type: ignore[arg-type]
    encoder = AudioEncoder(AUDIO)
    for tower in (tokenizer, encoder):
        _shake(tower.eval().requires_grad_(False))
    return tokenizer.to(dtype), encoder.to(dtype)


def _shake(tower: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in tower.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)


def picture(grid: Grid, seed: int) -> torch.Tensor:
    t, h, w = grid
    return torch.randn(t * h * w, 1536, generator=torch.Generator().manual_seed(seed))


def mel(frames: int, seed: int) -> torch.Tensor:
    return torch.randn(frames, 128, generator=torch.Generator().manual_seed(seed)) * 2
