"""One medium through towers of MiMo-V2.5's width with random weights: what a bench of a tower times.

Few layers of each kind, so that a machine without the checkpoint's memory can run them; what a layer costs is the same.
`quick` is an eighth of the width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.flops import audio_flops, vision_flops
from encoder.towers.serving import ServingTowers
from encoder.towers.vit import Grid, VisionTower
from encoder.towers.weights import Towers

_GRID: Grid = (1, 28, 28)
_QUICK_GRID: Grid = (1, 4, 4)
_BLOCK_TYPES = (-1, 0, 0, 1, 1)
_FRAMES = 1000
_QUICK_FRAMES = 40
_CHANNELS = 20
_QUICK_PART = 8
_SQUARE = 2048
_QUICK_SQUARE = 256


@dataclass(frozen=True, slots=True)
class TowerTrial:
    """A medium, and the two forms of the tower that take it."""

    detail: str
    flops: int
    fast: Callable[[], object]
    """As a server runs it."""
    plain: Callable[[], object]
    """The tower's definition, as it is trained."""


@contextmanager
def num_threads(wanted: int) -> Iterator[None]:
    """So many threads for the products of this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matmul_flops_per_s(seconds_of: Callable[[Callable[[], object]], float], *, quick: bool) -> float:
    """What the machine reaches in a square fp32 product: `torch.mm`, as fast as `seconds_of` finds it."""
    size = _QUICK_SQUARE if quick else _SQUARE
    left, right = torch.randn(size, size), torch.randn(size, size)
    with torch.inference_mode():
        return float(2 * size**3 / seconds_of(lambda: left @ right))


def vision_trial(*, quick: bool) -> TowerTrial:
    """A 448 x 448 picture through five blocks: a whole one, two of rows and two of columns."""
    part = _QUICK_PART if quick else 1
    config = VisionConfig(
        depth=len(_BLOCK_TYPES),
        hidden_size=1280 // part,
        intermediate_size=4608 // part,
        num_heads=32 // part,
        num_kv_heads=8 // part,
        head_dim=64,
        out_hidden_size=4096 // part,
        window_patches=64,
        block_types=_BLOCK_TYPES,
    )
    grid, generator = _QUICK_GRID if quick else _GRID, torch.Generator().manual_seed(0)
    tower = VisionTower(config).eval().requires_grad_(False)
    tower.init_weights(generator)
    pixels = torch.randn(grid[0] * grid[1] * grid[2], config.patch_width, generator=generator)
    serving = ServingTowers(Towers(tower, None, None))
    return TowerTrial(
        detail=f"{grid[2] * 16} x {grid[1] * 16} picture, 5 of 28 blocks of width {config.hidden_size}, fp32",
        flops=vision_flops(config, grid),
        fast=_inferring(lambda: serving.rows_of_pictures([pixels], [grid])),
        plain=_inferring(lambda: tower(pixels, [grid])),
    )


def audio_trial(*, quick: bool) -> TowerTrial:
    """Ten seconds of sound through four tokenizer layers and the whole audio encoder."""
    part, sizes = _QUICK_PART if quick else 1, (1024, 1024, 256, *[128] * (_CHANNELS - 3))
    tokenizer_config = AudioTokenizerConfig(
        d_model=1024 // part,
        num_layers=4,
        num_heads=16 // part,
        ffn_dim=4096 // part,
        num_mels=128,
        codebook_sizes=sizes,
        skip_layer=2,
        causal=True,
        window_left=128,
        window_right=0,
        windowed_layers=(True, False, True, False),
    )
    config = AudioConfig(
        num_channels=_CHANNELS,
        group_size=4,
        segment_frames=6000,
        hidden_size=1024 // part,
        num_layers=6,
        num_heads=16 // part,
        head_dim=64,
        intermediate_size=4096 // part,
        out_hidden_size=4096 // part,
        vocab_sizes=tuple(size + 1 for size in sizes),
        zero_ids=sizes,
    )
    generator, frames = torch.Generator().manual_seed(0), _QUICK_FRAMES if quick else _FRAMES
    tokenizer = AudioTokenizer(tokenizer_config, config.segment_frames).eval().requires_grad_(False)
    encoder = AudioEncoder(config).eval().requires_grad_(False)
    for tower in (tokenizer, encoder):
        tower.init_weights(generator)
    mel = torch.randn(frames, tokenizer_config.num_mels, generator=generator)
    serving = ServingTowers(Towers(None, tokenizer, encoder))
    return TowerTrial(
        detail=f"{frames / 100:g} s of sound, 4 of 24 tokenizer layers of width {config.hidden_size}, fp32",
        flops=audio_flops(tokenizer_config, config, frames),
        fast=_inferring(lambda: serving.rows_of_sounds([mel])),
        plain=_inferring(lambda: encoder([tokenizer.encode(mel)])),
    )


def _inferring(work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return work()

    return run
