"""The model of the speed cases: MiMo-V2-Flash's architecture at 300 million parameters, random, made once and kept."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cli.bench_case import Bars

_SEED = 20
_WINDOW_PATTERN = (0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedModel:
    """What the sizes are; the rest (head widths, window, pattern of layers) is as in MiMo-V2-Flash."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Of full layers; window layers have twice as many."""
    qk_dim: int
    v_dim: int
    window: int
    intermediate_size: int
    expert_size: int
    num_experts: int
    num_experts_per_token: int
    vocab_size: int

    @property
    def num_layers(self) -> int:
        return len(_WINDOW_PATTERN)

    @property
    def hf_config(self) -> dict[str, object]:
        """`config.json`, with the keys of the published files and those that transformers' class reads instead."""
        num_layers = self.num_layers
        rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
        return {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": num_layers,
            "hybrid_layer_pattern": list(_WINDOW_PATTERN),
            "layer_types": ["sliding_attention" if is_window else "full_attention" for is_window in _WINDOW_PATTERN],
            **self._heads(),
            "partial_rotary_factor": 0.334,
            "rope_theta": 5_000_000,
            "swa_rope_theta": 10_000,
            "rope_parameters": {
                "full_attention": rope | {"rope_theta": 5_000_000.0},
                "sliding_attention": rope | {"rope_theta": 10_000.0},
            },
            # Without `sliding_window_size`, from which transformers would make a window of one token more.
            "sliding_window": self.window,
            "attention_value_scale": 0.707,
            "attention_bias": False,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "moe_intermediate_size": self.expert_size,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_token,
            "n_shared_experts": None,
            "moe_layer_freq": [0] + [1] * (num_layers - 1),
            "mlp_layer_types": ["dense"] + ["sparse"] * (num_layers - 1),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "hidden_act": "silu",
            "layernorm_epsilon": 1e-5,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 16_384,
            "tie_word_embeddings": False,
            "eos_token_id": self.vocab_size - 1,
            "pad_token_id": self.vocab_size - 2,
        }

    def _heads(self) -> dict[str, int]:
        both = {"num_attention_heads": self.num_heads, "head_dim": self.qk_dim, "v_head_dim": self.v_dim}
        return {
            **both,
            "num_key_value_heads": self.num_kv_heads,
            **{f"swa_{key}": value for key, value in both.items()},
            "swa_num_key_value_heads": 2 * self.num_kv_heads,
        }

    def folder(self, cache_dir: Path, bars: Bars) -> Path:
        """The checkpoint, written if it is not there."""
        config = self.hf_config
        name = sha256(json.dumps([_SEED, config], sort_keys=True).encode()).hexdigest()[:12]
        folder = cache_dir / f"mimo-flash-random-{name}"
        if not folder.exists():
            bars.begin("writing a random checkpoint", 1)
            _write(folder, config)
        return folder

    def num_parameters(self) -> int:
        """All of them."""
        return 2 * self.vocab_size * self.hidden_size + self._num_in_layers(self.num_experts)

    def products_per_token(self) -> int:
        """Multiplications by weights that one token takes, without the vocabulary's."""
        return self._num_in_layers(self.num_experts_per_token)

    def attention_products(self, num_tokens: int) -> int:
        """Multiplications of queries, keys and values that a prompt takes."""
        num_window = sum(_WINDOW_PATTERN)
        within = min(self.window, num_tokens)
        seen_full = num_tokens * (num_tokens + 1) // 2
        seen_window = within * (within + 1) // 2 + (num_tokens - within) * within
        pairs = (self.num_layers - num_window) * seen_full + num_window * seen_window
        return pairs * self.num_heads * (self.qk_dim + self.v_dim)

    def step_weights(self, batch: int) -> float:
        """Weights that a decode step reads: all but the embedding, and of the experts those that somebody chose."""
        share = 1 - (1 - self.num_experts_per_token / self.num_experts) ** batch
        return self.vocab_size * self.hidden_size + self._num_in_layers(self.num_experts * share)

    def _num_in_layers(self, num_experts: float) -> int:
        """With so many experts in each routed layer."""
        width, heads = self.hidden_size, self.num_heads
        per_token = heads * (self.qk_dim + self.v_dim)
        kv_heads = sum(self.num_kv_heads * (2 if is_window else 1) for is_window in _WINDOW_PATTERN)
        attention = width * (self.num_layers * per_token + kv_heads * (self.qk_dim + self.v_dim))
        routed = (self.num_layers - 1) * 3 * width * self.expert_size * num_experts
        return attention + 3 * width * self.intermediate_size + round(routed)


def _write(folder: Path, config: Mapping[str, object]) -> None:
    """Beside its place and moved there: an interrupted run leaves no half checkpoint."""
    from epd import write_random_checkpoint

    unfinished = folder.with_name(f".{os.getpid()}.partial.{folder.name}")
    unfinished.mkdir(parents=True)
    try:
        write_random_checkpoint(unfinished, config, seed=_SEED)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


SPEED_MODEL = SpeedModel(
    hidden_size=768,
    num_heads=12,
    num_kv_heads=2,
    qk_dim=192,
    v_dim=128,
    window=128,
    intermediate_size=3072,
    expert_size=256,
    num_experts=32,
    num_experts_per_token=4,
    vocab_size=24_576,
)
QUICK_MODEL = SpeedModel(
    hidden_size=64,
    num_heads=4,
    num_kv_heads=1,
    qk_dim=24,
    v_dim=16,
    window=16,
    intermediate_size=128,
    expert_size=32,
    num_experts=8,
    num_experts_per_token=2,
    vocab_size=256,
)
