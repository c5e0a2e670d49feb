"""Every number of every configuration against values that no checkpoint means: used within its range, or refused by
name with what is allowed."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from encoder.config_ranges import AUDIO_RANGES, TOKENIZER_RANGES, VISION_RANGES
from epd.model.config import ConfigError, TextConfig
from epd.model.config_ranges import MAX_EXPERTS_IN_ALL, TEXT_RANGES
from epd.model.inventory import mtp_layers_of, take_inventory
from preprocess.config import ProcessorConfig
from preprocess.processor_keys import PROCESSOR_RANGES
from preprocess.ranges import Real, Whole, printable, shown_value
from preprocess.tokens import MediaTokenIds

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs" / "models"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.02,
}
WILD: list[Any] = [
    -2, -1, 0, -0.5, math.nan, math.inf, -math.inf, 1e300, 1e-320, "x", "", [], {}, [1], [[]], {"a": 1}, True, False,
    2**31, 2**63, 10**400, 0.5,
]  # fmt: skip


def published(name: str, *path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODELS / name).joinpath(*path, "config.json").read_text())
    return content


V25, TOKENIZER = published("mimo-v2.5"), published("mimo-v2.5", "audio_tokenizer")


def text(config: dict[str, Any]) -> object:
    """The text model's part of a config.json, without the list of its tensors, which is long."""
    return TextConfig.from_hf(config), mtp_layers_of(config)


Read = Callable[[dict[str, Any]], object]
# Reader, a configuration it takes, and the numbers it must have a range for.
CONFIGS: dict[str, tuple[Read, dict[str, Any], Mapping[str, object]]] = {
    "text": (text, V25, TEXT_RANGES),
    "llama": (text, LLAMA, TEXT_RANGES),
    "quantization_config": (
        lambda section: TextConfig.from_hf(V25 | {"quantization_config": section | {"store_dtype": "mxfp4"}}),
        V25["quantization_config"] | {"mxfp4_block_size": 32},
        TEXT_RANGES,
    ),
    "vision_config": (VisionConfig.from_hf, V25["vision_config"], VISION_RANGES),
    "audio_config": (AudioConfig.from_hf, V25["audio_config"], AUDIO_RANGES),
    "audio_tokenizer": (AudioTokenizerConfig.from_hf, TOKENIZER, TOKENIZER_RANGES),
    "processor_config": (
        lambda section: ProcessorConfig.from_hf({"processor_config": section}),
        V25["processor_config"],
        PROCESSOR_RANGES,
    ),
}
FIELDS = [(name, key) for name, (_, config, ranges) in CONFIGS.items() for key in config if key in ranges]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configurations_of_this_test_are_taken(name: str) -> None:
    read, config, _ = CONFIGS[name]
    assert read(config) is not None


def refuse_or_use(name: str, key: str, value: object) -> None:
    read, config, ranges = CONFIGS[name]
    allowed = ranges[key]
    assert isinstance(allowed, Whole | Real)
    try:
        read(config | {key: value})
    except ValueError as error:
        text = str(error)
        # A number within its own range may still not fit its neighbours; then those are named.
        assert key in text or value in allowed, text
        assert len(text) < 600
        assert text.isprintable()
    else:
        if not isinstance(value, list | str):
            assert value is None or value in allowed or value == -1 or (isinstance(value, float) and value.is_integer())


@pytest.mark.parametrize(("name", "key"), FIELDS, ids=".".join)
def test_no_number_goes_unchecked(name: str, key: str) -> None:
    for value in WILD:
        refuse_or_use(name, key, value)


@given(
    field=st.sampled_from(FIELDS),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_any_value_is_refused_or_used(field: tuple[str, str], value: object) -> None:
    refuse_or_use(*field, value)


def nonsense() -> Iterator[tuple[str, str, object, str]]:
    """What was once taken: each must be refused, and say what is allowed."""
    for key in ("hidden_size", "vocab_size", "head_dim", "v_head_dim", "moe_intermediate_size", "num_key_value_heads"):
        yield from (("text", key, value, "an integer from 1 to") for value in (-1, 0, True, 2**63, 1.5))
    for key in ("swa_head_dim", "swa_num_attention_heads", "max_position_embeddings", "num_experts_per_tok"):
        yield from (("text", key, value, "an integer from 1 to") for value in (-1, 0))
    for key in ("rope_theta", "swa_rope_theta", "layernorm_epsilon", "attention_value_scale", "routed_scaling_factor"):
        yield from (("text", key, value, "a number above 0") for value in (math.nan, math.inf, 0, -1, 1e300))
    yield from (("text", "partial_rotary_factor", value, "a number above 0 up to 1") for value in (0, 1.5, -1, 3))
    yield "text", "num_experts_per_tok", 257, "more than the experts"
    yield "text", "num_hidden_layers", 2_000_000, "an integer from 1 to 1,000"
    yield "text", "n_routed_experts", 1_000_000, "an integer from 1 to 65,536"
    yield "text", "n_routed_experts", 65_536, "in each of 47 layers"
    yield "text", "num_mtp_layers", 1_000_000, "an integer from 0 to 64"
    yield "text", "eos_token_id", 152_576, "vocab_size is 152,576"
    yield "text", "pad_token_id", -5, "vocab_size is 152,576"
    yield "text", "architectures", [[]], "is not implemented"
    yield "llama", "num_key_value_heads", 0, "an integer from 1"
    yield "llama", "head_dim", 0, "an integer from 1"
    yield "vision_config", "patch_size", 0, "an integer from 1"
    yield "vision_config", "num_key_value_heads", 5, "a divisor of num_heads"
    yield "vision_config", "vit_window_attn_types", [0, 2], "a list of 28"
    yield "audio_config", "speech_zeroemb_idx", 1280, "below speech_vocab_size"
    yield "audio_config", "speech_vocab_size", "1280-x", "an integer from 1"
    yield "audio_tokenizer", "encoder_attention_heads", 3, "d_model"
    yield "audio_tokenizer", "encoder_attn_window_size", 5, "a list of 2"
    yield "processor_config", "fps", math.nan, "a number above 0"
    yield "processor_config", "image_max_pixels", -1, "an integer from 1"
    yield "processor_config", "image_min_pixels", 10**9, "lower bound"
    yield "processor_config", "audio_fmax", 50_000, "audio_sampling_rate"
    yield "processor_config", "video_audio_interleave_length", -0.5, "-1, 0 or"
    yield "processor_config", "temporal_compression_ratio", True, "allowed is 1"


@pytest.mark.parametrize(("name", "key", "value", "words"), list(nonsense()))
def test_nonsense_is_refused_with_what_is_allowed(name: str, key: str, value: object, words: str) -> None:
    read, config, _ = CONFIGS[name]
    with pytest.raises(ValueError, match=key.split("_min_", maxsplit=1)[0]) as refused:
        read(config | {key: value})
    assert words in str(refused.value)


@pytest.mark.parametrize("key", [key for key in V25["processor_config"] if key.endswith("_token_id")])
@pytest.mark.parametrize("value", [-1, 152_576, True, "7", 1.0, []])
def test_media_tokens_lie_in_the_vocabulary(key: str, value: object) -> None:
    config = {"processor_config": V25["processor_config"] | {key: value}}
    with pytest.raises(ValueError, match=rf"processor_config\.{key} is .*152,575"):
        MediaTokenIds.from_hf(config, vocab_size=152_576)


def test_a_dtype_is_a_name() -> None:
    with pytest.raises(ConfigError, match=r"torch_dtype: \['bfloat16'\] is not implemented, allowed are"):
        take_inventory(LLAMA | {"torch_dtype": ["bfloat16"]})


@pytest.mark.parametrize("section", ["vision_config", "audio_config"])
def test_towers_must_fit_the_model(section: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.out_hidden_size: expected 4096"):
        take_inventory(V25 | {section: V25[section] | {"out_hidden_size": 4095}})


def test_limits_leave_room_for_every_published_model() -> None:
    for folder in ("mimo-v2.5", "mimo-v2.5-pro", "mimo-v2-flash"):
        config = take_inventory(published(folder)).config
        assert config.moe is not None
        assert 5 * config.moe.num_experts * sum(layer.is_moe for layer in config.layers) < MAX_EXPERTS_IN_ALL


def test_what_a_message_shows_is_short_and_harmless() -> None:
    evil = "\x1b[31mred\n\u202e" + "x" * 10_000
    for value in (evil, [evil] * 1000, {evil: evil}, 10**4000, float("nan"), [[[[[[1]]]]]]):
        assert len(shown_value(value)) < 700
        assert shown_value(value).isprintable()
    assert printable("a\x1b[31m\nb\udcff日本") == "a\\x1b[31m\\nb\\udcff日本"
