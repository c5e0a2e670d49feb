"""The training networks and the served ones compute the same thing from the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from encoder.towers.weights import load_towers
from epd.kernels.reference import BatchedDenseAttention
from epd.model.weights import load_text_model
from preprocess.config import ProcessorConfig
from preprocess.types import Waveform
from training import architecture
from training.export import export_networks
from training.features import frames_to_patches, log_mel
from training.nano import Nano
from training.nets.audio import TokenizerNet, quantise
from training.tasks import audio, image, video
from training.tasks.types import Clip, Image, Sound


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Nano, TokenizerNet, list[torch.Tensor]]:
    """Random networks, rounded to bf16, and the checkpoint they are exported to."""
    torch.manual_seed(3)
    nano, tokenizer = Nano().eval(), TokenizerNet(architecture.AUDIO_TOKENIZER)
    books = [torch.randn(size, 64) for size in architecture.AUDIO_TOKENIZER["codebook_size"]]
    for name, param in nano.named_parameters():
        if name.endswith(("sinks", "sink")):
            torch.nn.init.normal_(param)
        if "router" not in name:
            param.data = param.data.bfloat16().float()
    for layer in nano.text.layers[1:]:
        layer.mlp.correction.normal_(std=0.2)
    for param in tokenizer.parameters():
        param.data = param.data.bfloat16().float()
    books = [book.bfloat16().float() for book in books]
    folder = tmp_path_factory.mktemp("nano")
    export_networks(nano, tokenizer, books, folder)
    return folder, nano, tokenizer, books


def largest_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("length", [37, 250, 700])
def test_text_and_mtp(checkpoint: tuple[Path, Nano, TokenizerNet, list[torch.Tensor]], length: int) -> None:
    folder, nano, _, _ = checkpoint
    served = load_text_model(folder)
    ids = torch.randint(0, 900, (2 * length,), generator=torch.Generator().manual_seed(length))
    positions = torch.arange(length).repeat(2)
    attention = BatchedDenseAttention(2, length)
    with torch.no_grad():
        embedded = nano.text.embed(ids)
        states = nano.text(embedded, ((2, length),))
        wanted = served(served.embed(ids), positions, attention)
        assert largest_gap(states, wanted) < 1e-4
        for k, head in enumerate(nano.text.mtp):
            shifted = torch.roll(embedded, -1 - k, 0)
            drafted = served.draft(k, shifted, wanted, positions, attention)
            assert largest_gap(head(shifted, wanted, ((2, length),)), drafted) < 1e-4


def test_vision(checkpoint: tuple[Path, Nano, TokenizerNet, list[torch.Tensor]]) -> None:
    folder, nano, _, _ = checkpoint
    tower = load_towers(folder, torch.float32).vision
    assert tower is not None
    for grid in ((1, 6, 8), (3, 10, 6)):
        pixels = torch.randn(grid[0] * grid[1] * grid[2], 1536)
        with torch.no_grad():
            rows = nano.vision(pixels, grid[1], grid[2]).flatten(0, 1)
            assert largest_gap(rows, tower(pixels, [grid])) < 1e-4


def test_audio(checkpoint: tuple[Path, Nano, TokenizerNet, list[torch.Tensor]]) -> None:
    folder, nano, tokenizer, books = checkpoint
    towers = load_towers(folder, torch.float32)
    assert towers.audio_tokenizer is not None
    assert towers.audio_encoder is not None
    mel = torch.randn(171, 128)
    with torch.no_grad():
        codes = quantise(tokenizer(mel[None])[0], books)[0]
        assert float((codes == towers.audio_tokenizer.encode(mel)).float().mean()) > 0.995
        missing = -len(codes) % 4
        groups = torch.cat([codes, codes[-1:].expand(missing, -1)]).view(-1, 4, 4)
        assert largest_gap(nano.audio(groups), towers.audio_encoder([codes])) < 1e-4


def test_front_end_equals_preprocess() -> None:
    from preprocess.audio import log_mel as served_mel
    from preprocess.patchify import patchify
    from preprocess.resize import smart_resize
    from preprocess.types import Frames, MediaOptions

    config = ProcessorConfig.from_hf(architecture.model_config())
    stills = [
        part for index in range(40) for part in image.sample(5, index).turns[0].question if isinstance(part, Image)
    ]
    clips = [part for index in range(3) for part in video.sample(5, index).turns[0].question if isinstance(part, Clip)]
    for frames, budget in (
        *((still.pixels_HWC[None], config.image_budget(MediaOptions())) for still in stills),
        *((clip.frames_THWC, config.video_budget(MediaOptions())) for clip in clips),
    ):
        height, width = smart_resize(*frames.shape[1:3], min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
        served = patchify(Frames(frames, np.zeros(len(frames), np.float32)), height=height, width=width)
        doubled = np.repeat(frames, 2, axis=0) if len(frames) == 1 else frames
        patches, grid = frames_to_patches(doubled, 262144)
        assert grid == served.grid_thw
        assert float((patches - torch.from_numpy(served.pixel_values)).abs().max()) < 1e-4
    (sound,) = (part for part in audio.sample(5, 0).turns[0].question if isinstance(part, Sound))
    served_frames = served_mel(Waveform(sound.samples_N[None], 24000), config.audio)
    assert float((log_mel(sound.samples_N) - torch.from_numpy(served_frames.log_mel)).abs().max()) < 2e-3
