"""What every number of a text model's `config.json` may be.

The limits are far beyond any published model and keep what follows from a number (layers, tensors, bytes) countable:
a file that asks for a million layers is refused before anything of that size is built.
"""

from collections.abc import Mapping
from types import MappingProxyType

from preprocess.ranges import Range, Real, Whole

# Layers x experts; each is three matrices, so this is some hundred thousand tensors.
MAX_EXPERTS_IN_ALL = 200_000
MAX_MTP_LAYERS = 64
TOKEN_ID = Whole(0, 2**24 - 1)

_WIDTH = Whole(1, 2**20)
_HEADS = Whole(1, 2**14)
_HEAD_WIDTH = Whole(1, 2**16)
_INNER = Whole(1, 2**24)
_TOKENS = Whole(1, 2**30)
_EPSILON = Real(0, 1, above=True)
_SCALE = Real(0, 1e6, above=True)
_THETA = Real(0, 1e15, above=True)

TEXT_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "vocab_size": Whole(1, 2**24),
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": Whole(1, 1000),
        "max_position_embeddings": _TOKENS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_WIDTH,
        "v_head_dim": _HEAD_WIDTH,
        "rope_theta": _THETA,
        "swa_num_attention_heads": _HEADS,
        "swa_num_key_value_heads": _HEADS,
        "swa_head_dim": _HEAD_WIDTH,
        "swa_v_head_dim": _HEAD_WIDTH,
        "swa_rope_theta": _THETA,
        "sliding_window": _TOKENS,
        "sliding_window_size": _TOKENS,
        "partial_rotary_factor": Real(0, 1, above=True),
        "attention_value_scale": _SCALE,
        "layernorm_epsilon": _EPSILON,
        "rms_norm_eps": _EPSILON,
        "n_routed_experts": Whole(1, 2**16),
        "num_experts_per_tok": Whole(1, 2**16),
        "n_group": Whole(1, 2**16),
        "topk_group": Whole(1, 2**16),
        "moe_intermediate_size": _INNER,
        "routed_scaling_factor": _SCALE,
        "initializer_range": Real(0, 1e3),
        "eos_token_id": TOKEN_ID,
        "pad_token_id": TOKEN_ID,
        "num_mtp_layers": Whole(0, MAX_MTP_LAYERS),
        # Of quantization_config.
        "weight_block_size": Whole(1, 2**20),
        "mxfp4_block_size": Whole(2, 2**16),
    }
)
