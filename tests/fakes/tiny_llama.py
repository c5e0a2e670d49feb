"""A model whose layers are all full and dense, with a tied head: what the Llama family looks like to the engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel
from epd.model.weights import export_text_state

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 127,
}


def write_llama_checkpoint(folder: Path, **changes: object) -> HybridModel:
    """Write `config.json` and fp32 `model.safetensors` with random weights; returns the model they hold."""
    config = CONFIG | changes
    model = HybridModel(TextConfig.from_hf(config))
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("weight"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(export_text_state(model, torch.float32), folder / "model.safetensors")
    return model.eval()
