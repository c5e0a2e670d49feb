"""The inventory against published totals, against the modules it describes, and against real files."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from encoder import TensorSpec
from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.vit import VisionTower
from epd.model.config import ConfigError, TextConfig
from epd.model.hybrid import HybridModel
from epd.model.inventory import Inventory, stored_mtp_layers, take_inventory
from epd.model.slots import file_slots
from tests.encoder.conftest import TINY_CONFIG, TINY_TOKENIZER
from tests.fakes.tiny_text import CONFIG

TINY: dict[str, object] = TINY_CONFIG | CONFIG
FP8: dict[str, object] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def by_name(specs: tuple[TensorSpec, ...]) -> dict[str, TensorSpec]:
    named = {spec.name: spec for spec in specs}
    assert len(named) == len(specs)
    return named


def sums(inventory: Inventory) -> dict[str, int]:
    totals: dict[str, int] = {}
    for spec in inventory.main:
        totals[spec.part] = totals.get(spec.part, 0) + spec.num_elements
    return totals


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def test_every_part_of_the_tiny_model() -> None:
    inventory = take_inventory(TINY, audio_tokenizer_hf=TINY_TOKENIZER)
    assert sums(inventory) == {
        "embedding": 196_608,
        "lm_head": 196_608,
        "full_attention": 3 * 153_600,
        "window_attention": 5 * 184_328,
        "dense_mlp": 221_184,
        "router": 7 * (8 * 192 + 8),
        "experts": 7 * 8 * 3 * 96 * 192,
        "norms": 17 * 192,
        "mtp": 3 * 480_200,
        "vision": 438_096,
        "speech_embeddings": 4 * 80 * 32,
        "audio_encoder": 194_912 - 4 * 80 * 32,
    }
    assert inventory.num_params == sum(spec.num_elements for spec in inventory.main) == 7_181_096
    assert sum(spec.num_elements for spec in inventory.audio_tokenizer) == 191_360
    experts, chosen = sums(inventory)["experts"], 2 / 8
    assert inventory.num_active_params == 5_107_488 - experts + experts * chosen


def test_an_fp8_export_adds_its_scales() -> None:
    inventory = take_inventory(TINY | {"quantization_config": FP8})
    scales = [spec for spec in inventory.main if spec.name.endswith("_scale_inv")]
    assert sum(spec.num_elements for spec in scales) == 540
    assert {spec.dtype for spec in scales} == {"F32"}
    assert {spec.num_params for spec in scales} == {0}
    assert inventory.num_params == 7_181_096
    named = by_name(inventory.main)
    assert named["model.layers.0.self_attn.qkv_proj.weight"].dtype == "F8_E4M3"
    assert named["model.layers.0.self_attn.qkv_proj.weight_scale_inv"].shape == (6, 2)
    assert named["model.layers.1.self_attn.qkv_proj.weight_scale_inv"].shape == (6, 2)
    for name in ("lm_head.weight", "model.layers.0.self_attn.o_proj.weight", "model.mtp.layers.0.eh_proj.weight"):
        assert named[name].dtype == "BF16"
    plain = by_name(take_inventory(TINY | {"quantization_config": FP8}, qkv_layout="plain").main)
    assert plain["model.layers.0.self_attn.qkv_proj.weight_scale_inv"].shape == (5, 2)


def test_four_bit_experts() -> None:
    quantization = FP8 | {"store_dtype": "mxfp4", "mxfp4_block_size": 32}
    inventory = take_inventory(TINY | {"quantization_config": quantization})
    named = by_name(inventory.main)
    expert = "model.layers.1.mlp.experts.0.down_proj.weight"
    assert (named[expert].dtype, named[expert].shape) == ("U8", (192, 48))
    assert (named[f"{expert}_scale"].dtype, named[f"{expert}_scale"].shape) == ("U8", (192, 3))
    assert named["model.layers.0.mlp.down_proj.weight"].dtype == "F8_E4M3"
    assert inventory.num_params == 7_181_096


def test_modules_named_in_the_configuration_stay_plain() -> None:
    ignored = FP8 | {"ignored_layers": ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.gate"]}
    named = by_name(take_inventory(TINY | {"quantization_config": ignored}).main)
    assert named["model.layers.0.mlp.up_proj.weight"].dtype == "BF16"
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" not in named
    assert named["model.layers.0.mlp.gate_proj.weight"].dtype == "F8_E4M3"
    assert named["model.layers.1.mlp.gate.weight"].dtype == "F32"


def test_tensors_decide_what_is_quantised() -> None:
    stored = {
        "model.layers.0.self_attn.o_proj.weight": "F8_E4M3",
        "model.layers.0.mlp.up_proj.weight": "F32",
        "model.norm.weight": "F16",
        "model.layers.1.mlp.experts.0.up_proj.weight": "U8",
        "model.layers.2.input_layernorm.weight": "F8_E4M3",
    }
    named = by_name(take_inventory(TINY | {"quantization_config": FP8}, stored=stored).main)
    assert named["model.layers.0.self_attn.o_proj.weight_scale_inv"].shape == (2, 2)
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" not in named
    found = {name: named[name].dtype for name in stored}
    # What could not be read keeps its published dtype, so that a comparison shows it.
    assert found == stored | {
        "model.layers.1.mlp.experts.0.up_proj.weight": "F8_E4M3",
        "model.layers.2.input_layernorm.weight": "BF16",
    }


@pytest.mark.parametrize("layout", ["split", "fused_qkv"])
def test_text_tensors_are_those_of_the_loader(layout: str) -> None:
    config_hf = CONFIG | {"attention_projection_layout": layout}
    model = HybridModel(TextConfig.from_hf(config_hf), 2, device="meta")
    slots = file_slots(model, "interleaved" if layout == "fused_qkv" else None)
    loaded = {name: tuple(slot.target.shape) for name, slot in slots}
    assert {s.name: s.shape for s in take_inventory(config_hf, num_mtp_layers=2).main} == loaded


def test_tower_tensors_are_those_of_the_towers() -> None:
    specs = by_name(take_inventory(TINY, audio_tokenizer_hf=TINY_TOKENIZER).main)
    vision, audio = VisionTower(VisionConfig.from_hf(TINY)), AudioEncoder(AudioConfig.from_hf(TINY))
    wanted = {f"visual.{name}": shape for name, shape in shapes(vision).items()}
    for name, shape in shapes(audio).items():
        wanted[name if name.startswith("speech_embeddings.") else f"audio_encoder.{name}"] = shape
    assert {name: spec.shape for name, spec in specs.items() if not name.startswith(("model.", "lm_head."))} == wanted
    tokenizer = AudioTokenizer(AudioTokenizerConfig.from_hf(TINY_TOKENIZER))
    own = by_name(take_inventory(TINY, audio_tokenizer_hf=TINY_TOKENIZER).audio_tokenizer)
    assert {name: spec.shape for name, spec in own.items()} == {
        f"encoder.{name}": shape for name, shape in shapes(tokenizer).items()
    }


@pytest.mark.parametrize("changes", [{"projection_layers": 1}, {"add_post_norm": False}])
def test_variants_of_the_audio_encoder(changes: dict[str, Any]) -> None:
    config_hf = TINY | {"audio_config": TINY_CONFIG["audio_config"] | changes}
    encoder = AudioEncoder(AudioConfig.from_hf(config_hf))
    named = {spec.name for spec in take_inventory(config_hf).main if spec.part == "audio_encoder"}
    assert named == {f"audio_encoder.{name}" for name in shapes(encoder) if not name.startswith("speech")}


def test_merger_biases_where_the_file_has_them() -> None:
    assert "visual.merger.mlp.0.bias" not in by_name(take_inventory(TINY).main)
    named = by_name(take_inventory(TINY, stored={"visual.merger.mlp.0.bias": "BF16"}).main)
    assert named["visual.merger.mlp.0.bias"].shape == (256,)
    assert named["visual.merger.mlp.2.bias"].shape == (192,)


def test_a_llama_has_neither_experts_nor_heads() -> None:
    config_hf: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    inventory = take_inventory(config_hf)
    loaded = dict(file_slots(HybridModel(TextConfig.from_hf(config_hf), device="meta"), None))
    assert {spec.name: spec.shape for spec in inventory.main} == {
        name: tuple(slot.target.shape) for name, slot in loaded.items()
    }
    assert inventory.num_mtp_layers == 0
    assert inventory.num_active_params == inventory.num_params


def test_draft_heads() -> None:
    assert take_inventory(TINY).num_mtp_layers == 3
    assert take_inventory(TINY | {"num_mtp_layers": 1}).num_mtp_layers == 1
    assert take_inventory(TINY | {"num_mtp_layers": 1}, num_mtp_layers=0).num_mtp_layers == 0
    with pytest.raises(ConfigError, match="num_mtp_layers"):
        take_inventory(TINY | {"num_mtp_layers": "3"})
    assert stored_mtp_layers(["model.mtp.layers.0.enorm.weight", "model.mtp.layers.0.hnorm.weight"]) == 1
    # A name is no reason to build a billion heads.
    assert stored_mtp_layers(["model.mtp.layers.0.enorm.weight", "model.mtp.layers.999999999.enorm.weight"]) == 2
    assert stored_mtp_layers(["model.layers.3.mlp.gate.weight"]) == 0


@pytest.mark.parametrize(("key", "value"), [("torch_dtype", "int8"), ("vision_config", 3), ("audio_config", "yes")])
def test_refusals_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        take_inventory(TINY | {key: value})


def test_sizes_are_those_of_the_golden_files() -> None:
    """The index of each golden checkpoint names its tensors and says how many bytes they take."""
    golden = Path(__file__).parents[1] / "golden" / "text"
    for folder, num_mtp_layers in (("split", 0), ("fused", 3), ("fp8", 0)):
        config_hf = json.loads((golden / folder / "config.json").read_text())
        index = json.loads((golden / folder / "model.safetensors.index.json").read_text())
        inventory = take_inventory(config_hf, num_mtp_layers=num_mtp_layers)
        assert by_name(inventory.main).keys() == index["weight_map"].keys()
        assert sum(spec.size_bytes for spec in inventory.main) == index["metadata"]["total_size"]
