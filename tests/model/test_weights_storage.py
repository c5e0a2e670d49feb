"""How matrices are stored in files (fp8, 4-bit, plain, mixed) and in memory (converted, or kept): the same numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from epd.config import WeightStorage
from epd.kernels.reference import DenseAttention
from epd.model.hybrid import HybridModel
from epd.model.inventory import take_inventory
from epd.model.packed import Fp8Rows, Mxfp4Rows, PackedMatrix, PlainRows
from epd.model.weights import WeightsError, export_text_state, load_text_model
from tests.fakes.quantized_files import MXFP4, QUANT, fuse, quantize_state, random_mxfp4
from tests.fakes.tiny_checkpoint import CHANGES
from tests.fakes.tiny_text import CONFIG, tiny_model
from tests.oracles.mxfp4 import decode_mxfp4

GOLDEN = Path(__file__).parents[1] / "golden" / "text"
FUSED = CHANGES | {"attention_projection_layout": "fused_qkv"}
# Equal matrices at other addresses: products may differ in their last bits, nothing else can.
TOLERANCE = 1e-5
IDS = torch.arange(40) * 7 % 128


@torch.no_grad()
def logits_of(model: HybridModel, ids: Tensor = IDS) -> Tensor:
    return model.logits(model(model.embed(ids), torch.arange(len(ids)), DenseAttention([len(ids)])))


@torch.no_grad()
def draft_logits_of(model: HybridModel) -> Tensor:
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    return model.logits(model.draft(0, model.embed(IDS[:6]), hidden, torch.arange(6), DenseAttention([6])))


def write(model_dir: Path, state: dict[str, Tensor], quantization: dict[str, object] | None) -> None:
    (model_dir / "config.json").write_text(json.dumps(CONFIG | FUSED | {"quantization_config": quantization}))
    save_file(state, model_dir / "model.safetensors")


def fp8_state() -> dict[str, Tensor]:
    return quantize_state(fuse(export_text_state(tiny_model(1, **CHANGES)), num_shards=2), num_shards=2)


def with_mxfp4_experts(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The fp8 state with random 4-bit experts, and what the slow decoder makes of those."""
    generator = torch.Generator().manual_seed(5)
    changed, decoded = dict(state), {}
    for name in [name for name in state if ".experts." in name and name.endswith(".weight")]:
        del changed[f"{name}_scale_inv"]
        packed, exponents = random_mxfp4(*state[name].shape, generator)
        changed[name], changed[f"{name}_scale"] = packed, exponents
        decoded[name] = decode_mxfp4(packed, exponents)
    return changed, decoded


@pytest.fixture
def mxfp4_dir(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    state, decoded = with_mxfp4_experts(fp8_state())
    write(tmp_path, state, MXFP4)
    return tmp_path, decoded


def test_mxfp4_experts_are_what_the_slow_decoder_says(mxfp4_dir: tuple[Path, dict[str, Tensor]]) -> None:
    model_dir, decoded = mxfp4_dir
    exported = export_text_state(load_text_model(model_dir), torch.float32)
    assert len(decoded) == 3 * 4 * 3
    for name, expected in decoded.items():
        assert torch.equal(exported[name], expected), name
    # The rest is fp8 as ever.
    in_fp8 = tiny_model(1, **CHANGES).layers[1].self_attn.qkv_proj
    torch.testing.assert_close(exported["model.layers.1.self_attn.q_proj.weight"], in_fp8[:96], atol=0.04, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_mxfp4_equals_converted(mxfp4_dir: tuple[Path, dict[str, Tensor]], dtype: torch.dtype) -> None:
    model_dir, decoded = mxfp4_dir
    kept = load_text_model(model_dir, dtype=dtype, weights="keep")
    converted = load_text_model(model_dir, dtype=dtype)
    down = kept.layers[2].mlp.down[3]
    assert isinstance(down, PackedMatrix)
    assert isinstance(down.pieces[0], Mxfp4Rows)
    expected = decoded["model.layers.2.mlp.experts.3.down_proj.weight"].to(dtype)
    assert torch.equal(down.dequantized(dtype), expected)
    torch.testing.assert_close(logits_of(kept), logits_of(converted), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(draft_logits_of(kept), draft_logits_of(converted), atol=TOLERANCE, rtol=0)
    one = IDS[:1]
    torch.testing.assert_close(logits_of(kept, one), logits_of(converted, one), atol=TOLERANCE, rtol=0)


def test_4_bit_experts_need_the_configuration_to_say_so(tmp_path: Path) -> None:
    write(tmp_path, with_mxfp4_experts(fp8_state())[0], QUANT)
    with pytest.raises(WeightsError, match=r"not implemented: .*experts\.0\.gate_proj\.weight \(U8\)"):
        load_text_model(tmp_path)


def test_missing_and_misshapen_exponents_are_named(tmp_path: Path) -> None:
    state, _ = with_mxfp4_experts(fp8_state())
    prefix = "model.layers.1.mlp.experts.0"
    del state[f"{prefix}.gate_proj.weight_scale"]
    state[f"{prefix}.up_proj.weight"] = torch.zeros(32, 64, dtype=torch.uint8)
    state[f"{prefix}.down_proj.weight_scale"] = torch.zeros(64, 1)
    write(tmp_path, state, MXFP4)
    with pytest.raises(WeightsError) as raised:
        load_text_model(tmp_path)
    assert str(raised.value).splitlines()[1:] == [
        f"1 missing: {prefix}.gate_proj.weight_scale",
        f"1 of the wrong shape: {prefix}.up_proj.weight (expected [32, 32], found [32, 64])",
        f"1 of a dtype that is not implemented: {prefix}.down_proj.weight_scale (F32)",
    ]


@pytest.mark.parametrize("window_left", [127, 128])
@pytest.mark.parametrize("case", range(4))
def test_kept_fp8_gives_the_golden_logits(window_left: int, case: int) -> None:
    golden = load_file(GOLDEN / f"expected_hf_fp8_wl{window_left}.safetensors")
    ids = torch.cat([golden[f"case{case}.input_ids"].long(), golden[f"case{case}.greedy"].long()[:-1]])
    kept = load_text_model(GOLDEN / "fp8", window_left=window_left, weights="keep")
    logits = logits_of(kept, ids)
    positions = golden[f"case{case}.positions"].long()
    torch.testing.assert_close(logits[positions], golden[f"case{case}.logits"], atol=2e-3, rtol=0)
    converted = load_text_model(GOLDEN / "fp8", window_left=window_left)
    torch.testing.assert_close(logits, logits_of(converted, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_matrices_are_those_converted_on_load(dtype: torch.dtype) -> None:
    """Fused shards in natural order with each row's own scales: bit for bit."""
    kept = load_text_model(GOLDEN / "fp8", dtype=dtype, weights="keep")
    converted = load_text_model(GOLDEN / "fp8", dtype=dtype).state_dict()
    packed = {name: module for name, module in kept.named_modules() if isinstance(module, PackedMatrix)}
    assert {name.rsplit(".", 1)[-1] for name in packed if ".mlp." not in name} == {"qkv_proj"}
    for name, module in packed.items():
        parameter, _, expert = name.rpartition(".")
        expected = converted[parameter][int(expert)] if expert.isdecimal() else converted[name]
        assert torch.equal(module.dequantized(dtype), expected), name
    plain = {name for name, _ in kept.named_parameters()}
    assert {name.rsplit(".", 1)[-1] for name in plain} == {
        "embed_tokens",
        "weight",
        "o_proj",
        "sink",
        "router",
        "lm_head",
    }
    for name in plain:
        assert torch.equal(kept.state_dict()[name], converted[name]), name


def test_kept_weights_take_the_bytes_of_the_file() -> None:
    kept = load_text_model(GOLDEN / "fp8", weights="keep")
    pieces = [module for module in kept.modules() if isinstance(module, Fp8Rows)]
    stored = load_file(GOLDEN / "fp8" / "model.safetensors")
    assert {piece.weight.dtype for piece in pieces} == {torch.float8_e4m3fn}
    fp8_bytes = sum(tensor.nbytes for tensor in stored.values() if tensor.dtype == torch.float8_e4m3fn)
    assert sum(piece.weight.nbytes for piece in pieces) == fp8_bytes


def test_the_tensor_decides_not_its_name(tmp_path: Path) -> None:
    """An expert's gate in bf16 beside its fp8 up, a whole layer's attention in bf16, fp8 o_proj, head and embedding."""
    model = tiny_model(1, **CHANGES)
    plain = fuse(export_text_state(model), num_shards=2)
    state = quantize_state(plain, num_shards=2)
    for name in ("model.layers.1.mlp.experts.2.gate_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"):
        state[name] = plain[name]
        del state[f"{name}_scale_inv"]
    otherwise = ("o_proj.weight", "lm_head.weight", "embed_tokens.weight", "eh_proj.weight", "mlp.gate.weight")
    state = quantize_state(state, num_shards=1, suffixes=otherwise)
    write(tmp_path, state, QUANT)
    converted, kept = load_text_model(tmp_path), load_text_model(tmp_path, weights="keep")
    torch.testing.assert_close(logits_of(kept), logits_of(converted), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(draft_logits_of(kept), draft_logits_of(converted), atol=TOLERANCE, rtol=0)
    for name, expected in model.state_dict().items():
        loaded = converted.state_dict()[name]
        torch.testing.assert_close(loaded, expected, atol=float(expected.abs().max()) / 16 + 1e-6, rtol=0)
    mixed = kept.layers[1].mlp.gate_up[2]
    assert [type(piece) for piece in mixed.pieces] == [PlainRows, Fp8Rows]
    kinds = {
        name.rsplit(".", 1)[-1]: type(value)
        for name, value in kept.named_modules()
        if "_proj" in name or "head" in name
    }
    assert kinds["lm_head"] is kinds["eh_proj"] is kinds["o_proj"] is PackedMatrix
    assert isinstance(kept.embed_tokens, Tensor), "rows of the table are gathered, it is converted"
    assert isinstance(kept.layers[0].self_attn.qkv_proj, Tensor), "nothing in it was quantised"
    assert kept.layers[1].mlp.router.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "weights", "stored"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "float32", torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.bfloat16, "keep", torch.bfloat16),
    ],
)
def test_storage_and_arithmetic_are_apart(
    tmp_path: Path, dtype: torch.dtype, weights: WeightStorage | None, stored: torch.dtype
) -> None:
    write(tmp_path, fuse(export_text_state(tiny_model(1, **CHANGES)), num_shards=2), None)
    model = load_text_model(tmp_path, dtype=dtype, weights=weights)
    kinds = {name.rsplit(".", 1)[-1]: value.dtype for name, value in model.state_dict().items()}
    assert {kinds.pop("router"), kinds.pop("correction_bias")} == {torch.float32}
    assert {kinds.pop("weight"), kinds.pop("sink"), model.dtype} == {dtype}
    assert set(kinds.values()) == {stored}
    assert model.embed(IDS).dtype == dtype
    # bf16 files: every storage holds their values exactly, so the arithmetic alone decides.
    reference = load_text_model(tmp_path, dtype=dtype)
    torch.testing.assert_close(logits_of(model), logits_of(reference), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(draft_logits_of(model), draft_logits_of(reference), atol=TOLERANCE, rtol=0)


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {spec.name: spec.shape for spec in take_inventory(config).main}
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    for weights in (None, "bfloat16", "keep"):
        model = load_text_model(tmp_path, weights=weights)
        assert model.lm_head is model.embed_tokens
    assert torch.equal(model.lm_head.detach(), load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize("form", ["plain", "fp8", "mxfp4"])
def test_inventory_and_loader_name_the_same_tensors(tmp_path: Path, form: str) -> None:
    """What `mimo inspect` says of a configuration is what the loader takes, names, shapes and dtypes alike."""
    if form == "plain":
        state, quantization = fuse(export_text_state(tiny_model(1, **CHANGES)), num_shards=2), None
    elif form == "fp8":
        state, quantization = fp8_state(), QUANT
    else:
        (state, _), quantization = with_mxfp4_experts(fp8_state()), MXFP4
    write(tmp_path, state, quantization)
    load_text_model(tmp_path)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
    config_hf = json.loads((tmp_path / "config.json").read_text())
    listed = {spec.name: (spec.shape, spec.dtype) for spec in take_inventory(config_hf, num_mtp_layers=1).main}
    assert listed == {name: (tuple(tensor.shape), names[tensor.dtype]) for name, tensor in state.items()}
