"""Everything is read from config.json, and what is not implemented is refused by name."""

import json
from pathlib import Path

import pytest

from epd.model.config import ConfigError, TextConfig
from tests.fakes.tiny_text import CONFIG, tiny_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 72,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 0],
}
GOLDEN = Path(__file__).parents[1] / "golden" / "text"


def test_layers_differ_by_kind() -> None:
    config = tiny_config()
    full, window = config.layers[0], config.layers[1]
    assert [layer.is_window for layer in config.layers] == [False, True, True, False, True, True, True, False]
    assert [layer.index for layer in config.layers] == list(range(8))
    assert (full.window_left, full.num_kv_heads, full.rope_theta, full.has_sink, full.is_moe) == (
        None, 2, 1e7, False, False,
    )  # fmt: skip
    assert (window.window_left, window.num_kv_heads, window.rope_theta, window.has_sink, window.is_moe) == (
        15, 4, 1e4, True, True,
    )  # fmt: skip
    assert full.qkv_rows == (384, 96, 64)
    assert window.qkv_rows == (384, 192, 128)
    assert window.attention.scale == 48**-0.5


def test_rotary_width_is_truncated() -> None:
    assert tiny_config().layers[0].rotary_dim == 16
    real = tiny_config(head_dim=192, swa_head_dim=192)
    assert {layer.rotary_dim for layer in real.layers} == {64}


def test_draft_layers_are_dense_window_layers_after_the_trunk() -> None:
    layer = tiny_config().mtp_layer(2)
    assert (layer.index, layer.is_window, layer.is_moe, layer.window_left) == (10, True, False, 15)


def test_draft_layers_do_not_need_a_window_layer_in_the_trunk() -> None:
    assert tiny_config(hybrid_layer_pattern=[0] * 8).mtp_layer(0).num_kv_heads == 4


def test_window_left_can_be_set() -> None:
    assert TextConfig.from_hf(CONFIG, window_left=16).layers[1].window_left == 16
    assert TextConfig.from_hf(CONFIG, window_left=16).mtp_layer(0).window_left == 16
    with pytest.raises(ConfigError, match="window_left"):
        TextConfig.from_hf(CONFIG, window_left=-1)


@pytest.mark.parametrize(("value", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8))])
def test_eos_token_ids(value: object, expected: tuple[int, ...]) -> None:
    assert tiny_config(eos_token_id=value).eos_token_ids == expected


def test_null_scaling_factor_is_one() -> None:
    assert tiny_config().moe.routed_scaling_factor == 1.0
    assert tiny_config(routed_scaling_factor=2.5).moe.routed_scaling_factor == 2.5


def test_default_rope_scaling_is_nothing() -> None:
    assert tiny_config(rope_scaling={"type": "default"}) == tiny_config(rope_scaling=None) == tiny_config()


def test_quantisation_is_read() -> None:
    config = TextConfig.from_hf(json.loads((GOLDEN / "fp8" / "config.json").read_text()))
    assert config.quant_block == (128, 128)
    assert config.num_qkv_shards == 2
    assert tiny_config().quant_block is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_projection_layout", "fused_kv"),
        ("rope_scaling", {"type": "yarn", "factor": 4}),
        ("rope_scaling", "default"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("n_shared_experts", 1),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("moe_router_dtype", "float16"),
        ("hidden_size", None),
        ("hidden_size", "192"),
        ("hidden_size", True),
        ("attention_value_scale", None),
        ("norm_topk_prob", None),
        ("hybrid_layer_pattern", [0, 1]),
        ("hybrid_layer_pattern", [0, 1, 1, 0, 1, 1, 1, 2]),
        ("moe_layer_freq", 1),
        ("sliding_window", 32),
        ("num_key_value_heads", 3),
        ("swa_num_key_value_heads", 1),
        ("partial_rotary_factor", 0.32),
        ("n_group", 3),
        ("num_experts_per_tok", 9),
        ("eos_token_id", "end"),
        ("quantization_config", {"quant_method": "awq"}),
        ("quantization_config", {"quant_method": "fp8", "store_dtype": "mxfp4"}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128]}),
    ],
)
def test_refusals_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key if key != "quantization_config" else "quant_method|store_dtype|block"):
        tiny_config(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen3"),
        ("model_type", "llama4"),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", "MiMoV2ForCausalLM"),
        ("architectures", ["LlamaForCausalLM"]),
    ],
)
def test_other_architectures_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key) as refused:
        tiny_config(**{"model_type": "mimo_v2", key: value})
    assert str(value) in str(refused.value)


def test_llama_layers_are_all_full_dense_and_alike() -> None:
    config = TextConfig.from_hf(LLAMA)
    assert config.num_layers == 3
    for index, layer in enumerate(config.layers):
        assert (layer.index, layer.window_left, layer.is_moe, layer.has_sink) == (index, None, False, False)
        assert (layer.num_heads, layer.num_kv_heads, layer.qk_dim, layer.v_dim) == (9, 3, 8, 8)
        assert (layer.rope_theta, layer.rotary_dim) == (1e5, 8)
    assert (config.value_scale, config.tie_word_embeddings, config.moe) == (1.0, True, None)
    assert config.eos_token_ids == (2, 0)
    with pytest.raises(ConfigError, match="draft"):
        config.mtp_layer(0)


def test_llama_theta_may_stand_under_rope_parameters() -> None:
    old = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = old | {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "head_dim": 8}
    assert TextConfig.from_hf(new) == TextConfig.from_hf(LLAMA)


def test_llama_heads_are_untied_and_all_kv_heads_unless_said() -> None:
    silent = {k: v for k, v in LLAMA.items() if k not in ("tie_word_embeddings", "num_key_value_heads")}
    config = TextConfig.from_hf(silent)
    assert not config.tie_word_embeddings
    assert config.layers[0].num_kv_heads == 9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("pretraining_tp", 2),
        ("sliding_window", 64),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "llama3"}),
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_parameters", 3),
        ("head_dim", 7),
        ("num_key_value_heads", 2),
        ("rope_theta", None),
        ("rms_norm_eps", None),
        ("tie_word_embeddings", "yes"),
        ("architectures", ["MiMoV2ForCausalLM"]),
    ],
)
def test_llama_refusals_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key if key != "rope_parameters" else "rope_"):
        TextConfig.from_hf(LLAMA | {key: value})


def test_a_window_cannot_be_set_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="window_left"):
        TextConfig.from_hf(LLAMA, window_left=16)
