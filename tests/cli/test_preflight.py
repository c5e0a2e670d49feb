"""Before anything starts: one error for everything that is wrong with a checkpoint, by name, exit code 2."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from cli.app import app
from cli.load import BUILTIN_MODELS, ConfigError, load
from cli.preflight import check_deployment
from encoder.checkpoint import INDEX_FILE

ROOT = Path(__file__).parents[2]
NANO = BUILTIN_MODELS["mimo-nano"]
GOLDEN = ROOT / "tests" / "golden" / "text"
NORM, EVIL = "model.norm.weight", "evil\x1b[31m\nred"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NANO, tmp_path / "nano", copy_function=shutil.copy))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def configure(folder: Path, section: str | None = None, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config if section is None else config[section]).update(values)
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, tmp_path: Path, **flags: Any) -> str:
    config = load(runtime_dir=tmp_path, environ={}, flags={"model": str(folder), **flags})
    with pytest.raises(ConfigError) as refused:
        check_deployment(config)
    return str(refused.value)


def damage(state: dict[str, Tensor]) -> None:
    del state[NORM], state["visual.merger.ln_q.weight"]
    some = state["model.embed_tokens.weight"][:1].clone()
    state |= {"model.zzz": some, "visual.zzz": some.clone(), EVIL: some.clone()}
    for name in ("model.layers.0.mlp.down_proj.weight", "visual.blocks.0.mlp.down_proj.weight"):
        state[name] = state[name].T


@pytest.mark.parametrize("indexed", [False, True])
def test_one_error_names_what_is_wrong_with_every_part(model_dir: Path, tmp_path: Path, indexed: bool) -> None:
    promised = dict.fromkeys(load_file(model_dir / "model.safetensors"), "model.safetensors")
    rewrite(model_dir, damage)
    rewrite(model_dir / "audio_tokenizer", lambda state: state.pop("encoder.conv1.bias"))
    if indexed:
        (model_dir / INDEX_FILE).write_text(json.dumps({"weight_map": promised}))
    lines = refusal(model_dir, tmp_path).splitlines()
    assert lines == [
        f"{model_dir} does not hold what its config.json calls for:",
        f"  3 tensors missing: audio_tokenizer/encoder.conv1.bias; {NORM}; visual.merger.ln_q.weight",
        r"  3 tensors unexpected: evil\x1b[31m\nred; model.zzz; visual.zzz",
        "  2 tensors of another shape: model.layers.0.mlp.down_proj.weight is [256, 128], expected [128, 256]; "
        "visual.blocks.0.mlp.down_proj.weight is [192, 96], expected [96, 192]",
        "  Are config.json and all files of one revision of one model?",
    ]


def test_names_are_cut_off_and_counted(model_dir: Path, tmp_path: Path) -> None:
    rewrite(model_dir, lambda state: [state.update({f"x.{name}": state.pop(name)}) for name in list(state)])
    text = refusal(model_dir, tmp_path)
    assert len(text) < 5000
    num_tensors = len(load_file(model_dir / "model.safetensors"))
    assert f"; and {num_tensors - 20} more" in text


def test_files_and_tensors_are_told_apart(model_dir: Path, tmp_path: Path) -> None:
    whole = load_file(model_dir / "model.safetensors")
    second = {name: tensor for name, tensor in whole.items() if name.startswith("visual.")}
    first = {name: tensor for name, tensor in whole.items() if name not in second and name != NORM}
    save_file(first, model_dir / "model.safetensors")
    save_file(second, model_dir / "second.safetensors")
    with (model_dir / "second.safetensors").open("r+b") as file:
        file.truncate(5000)
    weight_map = {name: "second.safetensors" if name in second else "model.safetensors" for name in whole}
    (model_dir / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (model_dir / "tokenizer.json").unlink()
    lines = refusal(model_dir, tmp_path).splitlines()
    assert lines[1].startswith("  1 file that cannot be used: second.safetensors is cut short")
    assert lines[2] == f"  1 tensor missing: {NORM}"
    assert lines[3] == "  Download files that cannot be used again."
    assert lines[-1].startswith(f"{model_dir}/tokenizer.json is missing")
    (model_dir / INDEX_FILE).unlink()
    (model_dir / "second.safetensors").unlink()
    shutil.copy(model_dir / "model.safetensors", model_dir / "copy.safetensors")
    text = refusal(model_dir, tmp_path)
    assert "1 contradiction between files: audio_encoder." in text
    assert "Remove files that are not of this checkpoint" in text
    assert "Download" not in text


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "hidden_size", -1),
        (None, "rope_theta", float("nan")),
        (None, "num_experts_per_tok", 0),
        ("vision_config", "patch_size", 0),
        ("audio_config", "group_size", 0),
        ("processor_config", "fps", float("nan")),
        ("processor_config", "image_max_pixels", -1),
        ("processor_config", "audio_token_id", 1536),
    ],
)
def test_a_number_is_named_with_its_file(
    model_dir: Path, tmp_path: Path, section: str | None, key: str, value: float
) -> None:
    configure(model_dir, section, **{key: value})
    text = refusal(model_dir, tmp_path)
    assert text.startswith(f"{model_dir}/config.json: ")
    assert key in text
    assert str(value) in text
    assert "\n" not in text


def test_a_directory_without_weights(tmp_path: Path) -> None:
    text = refusal(ROOT / "configs" / "models" / "mimo-v2.5", tmp_path)
    assert "the directory has no weights" in text


def test_the_other_row_order_is_suggested(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "fp8", tmp_path / "fp8", copy_function=shutil.copy))
    assert refusal(folder, tmp_path).endswith(
        "tokenizer.json is missing: the model cannot be served without its tokenizer"
    )
    assert "try engine.qkv_layout" in refusal(folder, tmp_path, engine={"qkv_layout": "plain"})


@pytest.mark.parametrize("mode", ["epd", "unified"])
def test_serve_says_it_in_one_line_before_anything_runs(model_dir: Path, tmp_path: Path, mode: str) -> None:
    (model_dir / "chat_template.jinja").write_text("{% if %}")
    command = [sys.executable, "-m", "cli", "serve", "--mode", mode, "--model", str(model_dir), "--port", "0"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mimo serve: {model_dir}/chat_template.jinja: chat template, line 1:")
    assert not list(tmp_path.glob("mimo-*"))


def test_a_directory_for_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    command = [sys.executable, "-m", "cli", "serve", "--mode", "epd", "--port", "0"]
    environ = os.environ | {"TMPDIR": str(tmp_path), "MIMO_CACHE_DIR": str(tmp_path / "cache")}
    environ.pop("MIMO_GATEWAY__FILES_DIR", None)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"gateway.files_dir is {tmp_path}/cache/files, which cannot be used" in line


def test_encode_says_it_in_one_line_too(model_dir: Path) -> None:
    configure(model_dir, "vision_config", patch_size=0)
    with pytest.raises(
        ConfigError, match=r"nano: vision_config\.patch_size is 0; supported: an integer from 1"
    ) as refused:
        CliRunner().invoke(
            app, ["encode", "--model", str(model_dir), str(ROOT / "samples" / "picture.png")], catch_exceptions=False
        )
    assert "\n" not in str(refused.value)
