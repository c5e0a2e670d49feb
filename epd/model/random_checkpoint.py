"""Checkpoints of random numbers in the Hugging Face layout, for measuring: of any size, nothing to download."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel
from epd.model.weights import export_text_state

# What the residual branches of all layers together add to the stream, as a share of the embedding's size.
_BRANCHES_SHARE = 2.0
_SINK_STD = 1.0
_BIAS_STD = 0.02


def write_random_checkpoint(folder: Path, config: Mapping[str, object], *, seed: int) -> None:
    """Write `config.json` as given and `model.safetensors` in bf16 (routers fp32) into an existing folder.

    The numbers keep every activation near one whatever the depth and width, spread tokens over all experts, and give
    sinks and correction biases a part. The configuration must name the "split" projection layout, or none. Raises
    ConfigError for a configuration that is not implemented.
    """
    model = HybridModel(TextConfig.from_hf(config), dtype=torch.bfloat16)
    _fill(model, torch.Generator().manual_seed(seed))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(export_text_state(model), folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def _fill(model: HybridModel, generator: torch.Generator) -> None:
    branch_gain = _BRANCHES_SHARE / (2 * model.config.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        kind = name.rsplit(".", 1)[-1]
        if kind == "weight":
            parameter.fill_(1.0)
        elif kind == "sink":
            parameter.normal_(std=_SINK_STD, generator=generator)
        elif kind == "embed_tokens":
            parameter.normal_(generator=generator)
        else:
            gain = branch_gain if kind in ("o_proj", "down") else 1.0
            parameter.normal_(std=gain * parameter.shape[-1] ** -0.5, generator=generator)
    for buffer in model.buffers():
        buffer.normal_(std=_BIAS_STD, generator=generator)
