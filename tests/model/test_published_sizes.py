"""The shipped configurations of the published models give the published totals, and the loader's own shapes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from encoder.config import AudioTokenizerConfig
from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel
from epd.model.inventory import Inventory, take_inventory
from epd.model.slots import file_slots
from preprocess.config import ProcessorConfig

MODELS = Path("configs") / "models"
GIB = 2**30


@cache
def inventory_of(name: str) -> Inventory:
    return take_inventory(config_of(name))


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return config


@pytest.mark.parametrize(
    ("name", "num_elements", "num_tensors", "size_gib", "total_params", "active_params"),
    [
        ("mimo-v2.5", 310_775_040_000, 73_081, 293.4, 310e9, 15e9),
        ("mimo-v2.5-pro", 1_023_244_718_976, 159_581, 962.4, 1.02e12, 42e9),
    ],
)
def test_published_totals(
    name: str, num_elements: int, num_tensors: int, size_gib: float, total_params: float, active_params: float
) -> None:
    """Every element of the main checkpoint, fp8 scales included; file sizes and parameter counts as published."""
    inventory = inventory_of(name)
    assert sum(spec.num_elements for spec in inventory.main) == num_elements
    assert len({spec.name for spec in inventory.main}) == len(inventory.main) == num_tensors
    assert sum(spec.size_bytes for spec in inventory.main) / GIB == pytest.approx(size_gib, abs=0.06)
    # Model cards round to two or three digits.
    assert inventory.num_params == pytest.approx(total_params, rel=0.005)
    assert inventory.num_active_params == pytest.approx(active_params, rel=0.035)


def test_parts_of_v25() -> None:
    inventory = inventory_of("mimo-v2.5")
    parts: dict[str, int] = {}
    for spec in inventory.main:
        parts[spec.part] = parts.get(spec.part, 0) + spec.num_params
    assert parts["vision"] == 728_594_432
    assert parts["audio_encoder"] + parts["speech_embeddings"] == 261_127_168


def test_flash_is_v25_without_towers_and_with_q_k_v_apart() -> None:
    """Second-hand values: no published total to compare with, only the rules."""
    flash, v25 = inventory_of("mimo-v2-flash"), inventory_of("mimo-v2.5")
    text = [spec for spec in v25.main if spec.part not in ("vision", "audio_encoder", "speech_embeddings")]
    assert flash.num_params == sum(spec.num_params for spec in text)
    # One weight and one scale of fused q, k, v become three each, in 48 layers and 3 heads.
    assert len(flash.main) == len(text) + 4 * (48 + 3)


@pytest.mark.parametrize(
    ("name", "layer", "weight", "scale"),
    [
        ("mimo-v2.5", "layers.0", (13568, 4096), (108, 32)),
        ("mimo-v2.5", "layers.1", (14848, 4096), (116, 32)),
        ("mimo-v2.5", "mtp.layers.2", (14848, 4096), (116, 32)),
        ("mimo-v2.5-pro", "layers.0", (27136, 6144), (216, 48)),
        ("mimo-v2.5-pro", "layers.1", (27136, 6144), (216, 48)),
    ],
)
def test_fused_projections(name: str, layer: str, weight: tuple[int, int], scale: tuple[int, int]) -> None:
    shapes = {spec.name: spec.shape for spec in inventory_of(name).main}
    assert shapes[f"model.{layer}.self_attn.qkv_proj.weight"] == weight
    assert shapes[f"model.{layer}.self_attn.qkv_proj.weight_scale_inv"] == scale


def test_the_loader_expects_the_same_tensors() -> None:
    config = TextConfig.from_hf(config_of("mimo-v2.5"))
    slots = file_slots(HybridModel(config, 3, device="meta"), "interleaved")
    loaded = {name: tuple(slot.target.shape) for name, slot in slots}
    towers = ("visual.", "audio_encoder.", "speech_embeddings.")
    assert loaded == {
        spec.name: spec.shape
        for spec in inventory_of("mimo-v2.5").main
        if not spec.name.startswith(towers) and not spec.name.endswith("_scale_inv")
    }


def test_configurations_are_whole() -> None:
    """What a server reads is there: processor, towers, stop and padding ids."""
    v25, pro = config_of("mimo-v2.5"), config_of("mimo-v2.5-pro")
    processor = ProcessorConfig.from_hf(v25)
    assert (processor.image.max_pixels, processor.video.max_frames, processor.video.fps) == (8_388_608, 3600, 1.0)
    assert v25["processor_config"]["audio_token_id"] == 151669
    assert TextConfig.from_hf(v25).eos_token_ids == (151645,)
    assert "vision_config" not in pro
    assert "audio_config" not in pro
    tokenizer = AudioTokenizerConfig.from_hf(json.loads((MODELS / "mimo-v2.5/audio_tokenizer/config.json").read_text()))
    assert tokenizer.codebook_sizes == (1024, 1024, 256, *[128] * 17)
    ignored = v25["quantization_config"]["ignored_layers"]
    assert ignored[-2:] == ["model.layers.47.self_attn.o_proj", "model.decoder.self_attn.o_proj"]
