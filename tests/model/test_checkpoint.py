"""Checkpoints looked at without loading: what is found wrong is what the loader refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoder.checkpoint import CheckpointError
from epd.model.checkpoint import inspect_checkpoint
from epd.model.weights import load_text_model
from tests.encoder.conftest import TINY_TOKENIZER

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = Path("epd") / "builtin" / "mimo-nano"
NORM, ROUTER = "model.norm.weight", "model.layers.1.mlp.gate.weight"
UP = "model.layers.0.mlp.up_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"

Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The golden fp8 checkpoint without its index, free to be damaged."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "text" / "fp8" / name, tmp_path)
    return tmp_path


def rewrite(model_dir: Path, change: Change) -> None:
    state = load_file(model_dir / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, model_dir / "model.safetensors")


def put(name: str, tensor: Tensor) -> Change:
    return lambda state: state.update({name: tensor})


def drop(*names: str) -> Change:
    def change(state: dict[str, Tensor]) -> None:
        for name in names:
            del state[name]

    return change


def put_unscaled(state: dict[str, Tensor]) -> None:
    """A matrix exempted from quantisation, as the loader decides from tensors."""
    del state[f"{UP}_scale_inv"]
    state[UP] = torch.zeros(96, 160)


@pytest.mark.parametrize("folder", ["text/split", "text/fused", "text/fp8"])
def test_golden_checkpoints_match(folder: str) -> None:
    inspection = inspect_checkpoint(GOLDEN / folder)
    assert not inspection.findings
    assert inspection.mtp_source == "weights"
    assert inspection.inventory.num_mtp_layers == (3 if folder == "text/fused" else 0)
    assert inspection.stored_otherwise == ()
    assert inspection.tensors is not None
    assert len(inspection.tensors) == len(inspection.inventory.main)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (drop(NORM), "missing", NORM),
        (put("model.layers.9.extra", torch.ones(1)), "unexpected", "model.layers.9.extra"),
        (put(NORM, torch.ones(3)), "misshapen", f"{NORM} is [3], expected [160]"),
        (put(NORM, torch.ones(160, dtype=torch.int8)), "wrong_dtype", f"{NORM} is I8, expected BF16"),
        (drop(f"{UP}_scale_inv"), "missing", f"{UP}_scale_inv"),
        (put(f"{QKV}_scale_inv", torch.ones(3, 2)), "misshapen", f"{QKV}_scale_inv is [3, 2], expected [4, 2]"),
        (put(UP, torch.zeros(96, 160)), "unexpected", f"{UP}_scale_inv"),
        (put(UP, torch.zeros(96, 160, dtype=torch.uint8)), "wrong_dtype", f"{UP} is U8, expected F8_E4M3"),
    ],
)
def test_what_is_found_is_what_the_loader_refuses(model_dir: Path, change: Change, kind: str, text: str) -> None:
    rewrite(model_dir, change)
    assert text in getattr(inspect_checkpoint(model_dir).findings, kind)
    with pytest.raises(CheckpointError, match=text.split(" ", maxsplit=1)[0]):
        load_text_model(model_dir)


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (put(ROUTER, torch.zeros(8, 160, dtype=torch.bfloat16)), (f"{ROUTER} is BF16, published F32",)),
        (put(NORM, torch.ones(160)), (f"{NORM} is F32, published BF16",)),
        (put_unscaled, (f"{UP} is F32, published F8_E4M3",)),
    ],
)
def test_what_loads_is_only_noted(model_dir: Path, change: Change, notes: tuple[str, ...]) -> None:
    rewrite(model_dir, change)
    inspection = inspect_checkpoint(model_dir)
    assert not inspection.findings
    assert inspection.stored_otherwise == notes
    load_text_model(model_dir)


def test_plain_row_order_takes_other_scales(model_dir: Path) -> None:
    """As one matrix the 352 rows of a full layer need three rows of scales, shard by shard they need four."""
    for layer in (0, 3, 6):
        rewrite(model_dir, put(f"model.layers.{layer}.self_attn.qkv_proj.weight_scale_inv", torch.ones(3, 2)))
    assert len(inspect_checkpoint(model_dir).findings.misshapen) == 3
    assert not inspect_checkpoint(model_dir, qkv_layout="plain").findings
    load_text_model(model_dir, qkv_layout="plain")


def test_a_file_that_was_cut_short(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    findings = inspect_checkpoint(model_dir).findings
    assert any("model.safetensors is cut short" in fault for fault in findings.faults)
    assert findings.missing == []


def test_a_file_of_the_index_that_is_not_there(model_dir: Path) -> None:
    weight_map = {NORM: "model.safetensors", "model.x": "gone.safetensors"}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert any("gone.safetensors is missing" in fault for fault in inspect_checkpoint(model_dir).findings.faults)


def test_towers_and_the_audio_tokenizer(tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(NANO, tmp_path / "nano"))
    inspection = inspect_checkpoint(model_dir)
    assert not inspection.findings
    assert inspection.tensors is not None
    assert "audio_tokenizer/encoder.conv1.bias" in inspection.tensors

    rewrite(model_dir / "audio_tokenizer", drop("encoder.conv1.bias"))
    rewrite(model_dir / "audio_tokenizer", put("decoder.vocoder", torch.ones(2)))
    rewrite(model_dir, drop("visual.merger.ln_q.weight"))
    findings = inspect_checkpoint(model_dir).findings
    assert findings.missing == ["audio_tokenizer/encoder.conv1.bias", "visual.merger.ln_q.weight"]
    assert findings.unexpected == []

    rewrite(model_dir / "audio_tokenizer", lambda state: state.update({"conv1.bias": torch.zeros(64)}))
    assert inspect_checkpoint(model_dir).findings.missing == ["visual.merger.ln_q.weight"]

    shutil.rmtree(model_dir / "audio_tokenizer")
    assert inspect_checkpoint(model_dir).findings.faults == [
        "audio_tokenizer/config.json is missing, and the configuration has an audio tower"
    ]
    (model_dir / "audio_tokenizer").mkdir()
    (model_dir / "audio_tokenizer" / "config.json").write_text(json.dumps(TINY_TOKENIZER))
    assert inspect_checkpoint(model_dir).findings.faults == [
        "audio_tokenizer/*.safetensors is missing: audio_tokenizer has no .safetensors file"
    ]


def test_draft_heads_are_those_of_the_argument_the_configuration_the_weights_or_the_family(tmp_path: Path) -> None:
    fused = GOLDEN / "text" / "fused"
    asked = inspect_checkpoint(fused, num_mtp_layers=1)
    assert (asked.mtp_source, asked.inventory.num_mtp_layers) == ("argument", 1)
    assert len(asked.findings.unexpected) == 2 * 12
    alone = inspect_checkpoint(fused / "config.json")
    assert (alone.mtp_source, alone.inventory.num_mtp_layers, alone.tensors) == ("family", 3, None)
    config = json.loads((fused / "config.json").read_text()) | {"num_mtp_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = inspect_checkpoint(tmp_path)
    assert (said.mtp_source, said.inventory.num_mtp_layers) == ("configuration", 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ('{"model_type": "mimo_v2"}', "num_hidden_layers|scoring_func"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(tmp_path)
