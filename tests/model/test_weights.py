"""Reading every file layout into the one in-memory form, writing it back, and refusals that name tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from epd.config import QkvLayout
from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel
from epd.model.slots import FileSlot, RowRun
from epd.model.weights import CheckpointError, WeightsError, export_text_state, load_text_model
from tests.fakes.quantized_files import QUANT, fuse, quantize_state
from tests.fakes.tiny_text import CONFIG, tiny_model

GOLDEN = Path(__file__).parents[1] / "golden" / "text"
# Two layers, one full and one window, keep the files small.
SMALL: dict[str, object] = {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1]}


def small_model(num_mtp_layers: int = 1) -> HybridModel:
    model = tiny_model(num_mtp_layers, **SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def write(model_dir: Path, state: dict[str, Tensor], **changes: object) -> Path:
    (model_dir / "config.json").write_text(json.dumps(CONFIG | SMALL | changes))
    save_file(state, model_dir / "model.safetensors")
    return model_dir


def assert_same(actual: HybridModel, expected: HybridModel) -> None:
    assert actual.num_mtp_layers == expected.num_mtp_layers
    torch.testing.assert_close(dict(actual.state_dict()), dict(expected.state_dict()), atol=0, rtol=0)


def test_export_then_load_is_exact(tmp_path: Path) -> None:
    model = small_model(2)
    state = export_text_state(model)
    assert state["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert state["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert state["model.layers.1.mlp.experts.7.down_proj.weight"].dtype == torch.bfloat16
    assert_same(load_text_model(write(tmp_path, state, attention_projection_layout="split")), model)


def test_export_does_not_share_memory_with_the_model() -> None:
    model = small_model()
    state = export_text_state(model, torch.float32)
    for tensor in state.values():
        tensor.fill_(9.0)
    assert not any(bool((parameter == 9.0).any()) for parameter in model.parameters())


def test_export_names_are_those_of_the_published_split_layout() -> None:
    exported = export_text_state(load_text_model(GOLDEN / "split"))
    published = load_file(GOLDEN / "split" / "model.safetensors")
    torch.testing.assert_close(exported, published, atol=0, rtol=0)
    assert {name: t.dtype for name, t in exported.items()} == {name: t.dtype for name, t in published.items()}


@pytest.mark.parametrize(("layout", "num_shards"), [("auto", 2), ("interleaved", 2), ("plain", 1)])
def test_fused_layouts(tmp_path: Path, layout: QkvLayout, num_shards: int) -> None:
    model = small_model()
    write(tmp_path, fuse(export_text_state(model), num_shards=num_shards))
    assert_same(load_text_model(tmp_path, qkv_layout=layout), model)


def test_the_wrong_fused_layout_is_not_noticed_by_shape(tmp_path: Path) -> None:
    """Why the switch exists: both orders have the same shapes, and give different models."""
    model = small_model()
    write(tmp_path, fuse(export_text_state(model), num_shards=2))
    loaded = load_text_model(tmp_path, qkv_layout="plain")
    assert not torch.equal(loaded.state_dict()["layers.0.self_attn.qkv_proj"], model.layers[0].self_attn.qkv_proj)


@pytest.mark.parametrize(("layout", "num_shards"), [("auto", 2), ("plain", 1)])
def test_fp8_round_trip(tmp_path: Path, layout: QkvLayout, num_shards: int) -> None:
    model = small_model()
    state = quantize_state(fuse(export_text_state(model), num_shards=num_shards), num_shards=num_shards)
    scales = {name: tuple(t.shape) for name, t in state.items() if "qkv_proj.weight_scale" in name}
    # The full layer's shard of 272 rows takes three scale rows, two shards six; as one matrix it would take five.
    assert scales["model.layers.0.self_attn.qkv_proj.weight_scale_inv"] == ((6, 2) if num_shards == 2 else (5, 2))
    assert scales["model.layers.1.self_attn.qkv_proj.weight_scale_inv"] == (6, 2)
    write(tmp_path, state, quantization_config=QUANT)
    loaded = load_text_model(tmp_path, qkv_layout=layout).state_dict()
    for name, expected in model.state_dict().items():
        tolerance = float(expected.abs().max()) / 16 if name.endswith(("qkv_proj", "gate_up", "down")) else 0.0
        torch.testing.assert_close(loaded[name], expected, atol=tolerance, rtol=0)


def test_rows_and_scales_of_shards() -> None:
    """Two shards of five rows, blocks of two: a shard's blocks start at its own first row, its last one is partial."""
    slot = FileSlot(nn.Module(), "qkv_proj", num_shards=2, shard_rows=(3, 1, 1))
    assert slot.scale_rows(0, 10, rows=10, block_rows=2).tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert slot.scale_rows(4, 3, rows=10, block_rows=2).tolist() == [2, 3, 3]
    order = [(0, 0, 3), (3, 6, 1), (4, 8, 1), (5, 3, 3), (8, 7, 1), (9, 9, 1)]
    assert list(slot.runs(10)) == [RowRun(*run) for run in order]
    assert list(FileSlot(nn.Module(), "o_proj").runs(10)) == [RowRun(0, 0, 10)]


def test_shards_of_the_index_and_towers_and_heads(tmp_path: Path) -> None:
    model = small_model()
    state = export_text_state(model) | {
        "visual.patch_embed.weight": torch.ones(3),
        "speech_embeddings.0": torch.ones(1),
    }
    write(tmp_path, {}, attention_projection_layout="split")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(sorted(state)):
        weight_map[name] = "model_mtp.safetensors" if name.startswith("model.mtp.") else f"part{i % 3}.safetensors"
    for file in set(weight_map.values()):
        save_file({name: state[name] for name, f in weight_map.items() if f == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load_text_model(tmp_path), model)
    assert load_text_model(tmp_path, with_mtp=False).num_mtp_layers == 0
    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part1\.safetensors is missing: .* says it holds .*model\."):
        load_text_model(tmp_path)


def test_heads_in_their_own_file_without_an_index(tmp_path: Path) -> None:
    model = small_model()
    state = export_text_state(model)
    heads = {name: state.pop(name) for name in list(state) if name.startswith("model.mtp.")}
    write(tmp_path, state, attention_projection_layout="split")
    save_file(heads, tmp_path / "model_mtp.safetensors")
    assert_same(load_text_model(tmp_path), model)


def test_a_draft_head_left_out_is_named(tmp_path: Path) -> None:
    state = export_text_state(small_model(1))
    renamed = {name.replace("model.mtp.layers.0.", "model.mtp.layers.2000000000."): t for name, t in state.items()}
    write(tmp_path, renamed, attention_projection_layout="split")
    with pytest.raises(
        WeightsError, match=r"missing: model\.mtp\.layers\.0\..*\n.*unexpected: model\.mtp\.layers\.2000000000"
    ):
        load_text_model(tmp_path)


@pytest.mark.parametrize("indexed", [False, True])
def test_all_problems_are_named_in_one_error(tmp_path: Path, indexed: bool) -> None:
    state = export_text_state(small_model())
    promised = dict.fromkeys([*state, "model.needless"], "model.safetensors")
    del state["model.norm.weight"]
    state["model.layers.9.extra"] = torch.ones(1)
    state["lm_head.weight"] = torch.ones(3, 4)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].to(torch.int8)
    write(tmp_path, state, attention_projection_layout="split")
    index = tmp_path / "model.safetensors.index.json"
    if indexed:
        index.write_text(json.dumps({"weight_map": promised}))
    with pytest.raises(WeightsError) as raised:
        load_text_model(tmp_path)
    needless = f"{index.name} lists tensors that no file holds and nothing calls for: model.needless"
    assert str(raised.value).splitlines()[1:] == [
        "1 missing: model.norm.weight",
        "1 unexpected: model.layers.9.extra",
        "1 of the wrong shape: lm_head.weight (expected [1024, 192], found [3, 4])",
        "1 of a dtype that is not implemented: model.embed_tokens.weight (I8)",
        *([needless] if indexed else []),
    ]


def test_missing_and_misshapen_scales_are_named(tmp_path: Path) -> None:
    state = quantize_state(fuse(export_text_state(small_model()), num_shards=2), num_shards=2)
    gone, wrong = "model.layers.0.mlp.up_proj.weight_scale_inv", "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    del state[gone]
    state[wrong] = state[wrong][:5].contiguous()
    write(tmp_path, state, quantization_config=QUANT)
    with pytest.raises(WeightsError) as raised:
        load_text_model(tmp_path)
    assert f"1 missing: {gone}" in str(raised.value)
    assert f"{wrong} (expected [6, 2], found [5, 2])" in str(raised.value)


def test_fp8_without_a_block_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path, quantize_state(fuse(export_text_state(small_model()), num_shards=2), num_shards=2))
    with pytest.raises(WeightsError, match=r"qkv_proj\.weight \(F8_E4M3\)"):
        load_text_model(tmp_path)


def test_a_fused_switch_for_split_files_is_refused() -> None:
    with pytest.raises(WeightsError, match="apart"):
        load_text_model(GOLDEN / "split", qkv_layout="plain")


def test_routers_stay_fp32_in_a_bf16_model() -> None:
    model = load_text_model(GOLDEN / "fused", dtype=torch.bfloat16, window_left=128)
    dtypes = {name.rsplit(".", 1)[-1]: value.dtype for name, value in model.state_dict().items()}
    assert {kind for kind, dtype in dtypes.items() if dtype == torch.float32} == {"router", "correction_bias"}
    assert model.config == TextConfig.from_hf(json.loads((GOLDEN / "fused" / "config.json").read_text()), 128)
    assert model.num_mtp_layers == 3
