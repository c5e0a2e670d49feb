"""A model directory with random fp32 weights, smaller still than the tiny text model: for tests of the engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from epd.model.hybrid import HybridModel
from epd.model.weights import export_text_state
from tests.fakes.tiny_text import CONFIG, tiny_model

CHANGES: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "max_position_embeddings": 2048,
    "eos_token_id": 127,
    "pad_token_id": 126,
    "attention_projection_layout": "split",
}


def write_checkpoint(folder: Path, model: HybridModel | None = None) -> HybridModel:
    """Write `config.json` and `model.safetensors`; returns the model they hold: `model`, of the same configuration, or
    a random one without draft heads."""
    model = tiny_model(**CHANGES) if model is None else model
    (folder / "config.json").write_text(json.dumps(CONFIG | CHANGES))
    save_file(export_text_state(model, torch.float32), folder / "model.safetensors")
    return model.eval()
