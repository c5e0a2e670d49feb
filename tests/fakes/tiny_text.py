"""A text model of five million parameters in which every awkward property of the real one is present.

Key and value widths differ, the rotary width needs truncation, layer kinds differ in KV heads, fused shards are no
multiple of 128 rows, the hidden width is no multiple of 128.
"""

import torch

from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel

CONFIG: dict[str, object] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1, 1, 0],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "v_head_dim": 32,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 48,
    "swa_v_head_dim": 32,
    "partial_rotary_factor": 0.334,
    "rope_theta": 10000000,
    "swa_rope_theta": 10000,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "attention_value_scale": 0.866,
    "attention_bias": False,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_projection_layout": "fused_qkv",
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": None,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "hidden_act": "silu",
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": 1002,
    "pad_token_id": 1000,
}


def tiny_config(**changes: object) -> TextConfig:
    """The tiny configuration with some keys of its `config.json` changed."""
    return TextConfig.from_hf(CONFIG | changes)


def tiny_model(num_mtp_layers: int = 0, *, seed: int = 0, **changes: object) -> HybridModel:
    """A tiny model with random weights large enough for layers, sinks and routing to matter."""
    model = HybridModel(tiny_config(**changes), num_mtp_layers)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sink"):
                parameter.normal_(generator=generator)
            elif not name.endswith("weight"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        for buffer in model.buffers():
            buffer.normal_(std=0.2, generator=generator)
    return model
