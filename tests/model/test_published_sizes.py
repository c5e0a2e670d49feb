"""The shapes of the published checkpoints: their element and tensor totals, counted from our own tensor names."""

from math import prod

import pytest

from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel
from epd.model.weights import file_slots, scale_name, scale_shape
from tests.fakes.tiny_text import CONFIG

NUM_PRO_LAYERS = 70
PRO_FULL_LAYERS = {0, 7, 15, 23, 31, 39, 47, 55, 62, 69}
PRO: dict[str, object] = {
    "vocab_size": 152576,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": NUM_PRO_LAYERS,
    "hybrid_layer_pattern": [int(i not in PRO_FULL_LAYERS) for i in range(NUM_PRO_LAYERS)],
    "moe_layer_freq": [int(i > 0) for i in range(NUM_PRO_LAYERS)],
    "num_attention_heads": 128,
    "swa_num_attention_heads": 128,
    "num_key_value_heads": 8,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "attention_value_scale": 0.612,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
V25_LAYER: dict[str, object] = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
QUANTISED = ("qkv_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")


def test_pro_totals() -> None:
    """Every element of the published Pro checkpoint, fp8 scales included, in as many tensors."""
    config = TextConfig.from_hf(CONFIG | PRO)
    assert config.quant_block is not None
    num_elements = num_tensors = 0
    for name, slot in file_slots(HybridModel(config, 3, device="meta"), "interleaved"):
        shapes = [tuple(slot.target.shape)]
        if name.endswith(QUANTISED):
            shapes.append(scale_shape(slot, config.quant_block))
        num_elements += sum(prod(shape) for shape in shapes)
        num_tensors += len(shapes)
    assert (num_elements, num_tensors) == (1_023_244_718_976, 159_581)


@pytest.mark.parametrize(("layer", "weight", "scale"), [(0, (13568, 4096), (108, 32)), (1, (14848, 4096), (116, 32))])
def test_fused_projections_of_v25(layer: int, weight: tuple[int, int], scale: tuple[int, int]) -> None:
    config = TextConfig.from_hf(CONFIG | V25_LAYER)
    slots = dict(file_slots(HybridModel(config, device="meta"), "interleaved"))
    name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
    assert tuple(slots[name].target.shape) == weight
    assert scale_shape(slots[name], (128, 128)) == scale
    assert scale_name(name) == f"{name}_scale_inv"
