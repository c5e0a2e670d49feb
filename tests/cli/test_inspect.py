"""`mimo inspect`: the published numbers, its keys, its exit codes, and that it stays light."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cli.app import app
from cli.load import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "text"
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_numbers_of_v25() -> None:
    said = report("mimo-v2.5", "--context", "128", "--context", "131072", "--context", "1048576")
    assert said["total"]["num_elements"] == 310_775_040_000
    assert said["total"]["num_tensors"] == 73_081
    assert sum(part["num_elements"] for part in said["parts"]) == 310_775_040_000
    assert said["audio_tokenizer"]["num_tensors"] == 389
    assert said["model"]["modalities"] == ["text", "image", "video", "audio"]
    assert [i for i, kind in enumerate(said["model"]["layer_pattern"]) if kind == "F"] == [
        0,
        5,
        11,
        17,
        23,
        29,
        35,
        41,
        47,
    ]
    assert (said["model"]["num_mtp_layers"], said["model"]["window_tokens"]) == (3, 128)
    kv = said["kv"]
    assert kv["growing_bytes_per_token"] == 23_040
    assert kv["window_bytes_per_token"] == 199_680
    assert kv["constant_bytes"] == 25_559_040
    assert kv["single_pool_bytes_per_token"] == 222_720
    assert kv["all_full_layers_bytes_per_token"] == 122_880
    assert kv["asymptotic_ratio"] == pytest.approx(0.1034, abs=5e-5)
    assert kv["mtp_window_bytes_per_token"] == 15_360
    assert [row["size_bytes"] for row in kv["contexts"]] == [
        128 * 222_720, 23_040 * 131_072 + 25_559_040, 23_040 * 1_048_576 + 25_559_040,
    ]  # fmt: skip
    assert kv["contexts"][0]["ratio"] == 1.0


def test_numbers_of_pro() -> None:
    said = report("mimo-v2.5-pro", "--context", "1024", "--context", "8192")
    assert (said["total"]["num_elements"], said["total"]["num_tensors"]) == (1_023_244_718_976, 159_581)
    kv = said["kv"]
    assert (kv["growing_bytes_per_token"], kv["window_bytes_per_token"]) == (51_200, 307_200)
    assert kv["constant_bytes"] == 39_321_600
    assert kv["single_pool_bytes_per_token"] == kv["all_full_layers_bytes_per_token"] == 358_400
    assert kv["asymptotic_ratio"] == pytest.approx(1 / 7)
    assert [round(row["ratio"], 3) for row in kv["contexts"]] == [0.25, 0.156]
    assert said["model"]["modalities"] == ["text"]


def test_kv_dtype_scales_every_number() -> None:
    whole, half = report("mimo-nano")["kv"], report("mimo-nano", "--kv-dtype", "fp8")["kv"]
    for key in ("growing_bytes_per_token", "window_bytes_per_token", "constant_bytes", "mtp_constant_bytes"):
        assert whole[key] == 2 * half[key] > 0


def test_a_checkpoint_with_weights() -> None:
    said = report(str(GOLDEN / "fused"), "--tensors")
    assert said["check"]["matches"] is True
    assert [file["name"] for file in said["files"]] == ["model.safetensors", "model_mtp.safetensors"]
    assert [file["size_bytes"] for file in said["files"]] == [
        (GOLDEN / "fused" / file["name"]).stat().st_size for file in said["files"]
    ]
    assert sum(file["num_tensors"] for file in said["files"]) == len(said["tensors"]) == said["total"]["num_tensors"]
    listed = {tensor["name"]: tensor for tensor in said["tensors"]}
    assert listed["model.mtp.layers.2.eh_proj.weight"] == {
        "name": "model.mtp.layers.2.eh_proj.weight",
        "shape": [160, 320],
        "dtype": "BF16",
        "part": "mtp",
        "file": "model_mtp.safetensors",
    }


def test_keys_are_stable() -> None:
    said = report("mimo-nano")
    assert list(said) == [
        "checkpoint", "path", "model", "parts", "total", "audio_tokenizer", "parameters", "kv", "files", "check",
        "notes",
    ]  # fmt: skip
    assert list(said["check"]) == [
        "matches", "missing", "unexpected", "misshapen", "wrong_dtype", "faults", "conflicts", "stored_otherwise",
    ]  # fmt: skip
    assert {"num_tensors", "num_elements", "num_params", "size_bytes"} == set(said["total"])


@pytest.mark.parametrize("argument", ["fused", "fused/config.json"])
def test_for_people(argument: str) -> None:
    result = run(str(GOLDEN / argument))
    assert result.exit_code == 0
    assert "7 layers: 3 full (F), 4 with a window of 128 tokens (w)" in result.output
    assert "Fww Fww F" in result.output
    assert "8 experts, 2 per token, dense in layer 0" in result.output
    assert ("counted in the files" if argument == "fused" else "what the family has") in result.output
    last = "The files hold what" if argument == "fused" else "No weights"
    assert last in result.output.strip().splitlines()[-1]


def test_a_llama(tmp_path: Path) -> None:
    """No window, no experts, no draft heads; the head is the embedding table."""
    config = {
        "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    said = report(str(path))
    assert [part["part"] for part in said["parts"]] == ["embedding", "full_attention", "dense_mlp", "norms"]
    assert said["parameters"]["total"] == said["parameters"]["active_per_token"] == said["total"]["num_elements"]
    kv = said["kv"]
    assert (kv["growing_bytes_per_token"], kv["constant_bytes"], kv["asymptotic_ratio"]) == (2 * 2 * 8 * 2, 0, 1.0)
    output = run(str(path)).output
    assert "2 layers: 2 full (F)\nF F\n0 draft heads" in output
    assert "experts" not in output


def test_totals_for_people_are_exact() -> None:
    output = run("mimo-v2.5").output
    for number in ("310,775,040,000", "73,081", "25,559,040", "24,184,750,080"):
        assert number in output


def test_a_mismatch_is_listed_and_exits_with_one(tmp_path: Path) -> None:
    for path in (GOLDEN / "fp8").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    config = json.loads((GOLDEN / "fp8" / "config.json").read_text()) | {"n_routed_experts": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert "model.layers.1.mlp.experts.8.down_proj.weight" in result.output
    assert "36 tensors missing" in result.output
    assert "16 more" in result.output
    check = json.loads(run(str(tmp_path), "--json").stdout)["check"]
    assert (check["matches"], len(check["missing"]), len(check["misshapen"])) == (False, 36, 12)


def test_a_bad_checkpoint_exits_with_one(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert "config.json is missing" in result.stderr


def test_no_such_path_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match=r"no such path.*mimo-v2\.5-pro"):
        CliRunner().invoke(app, ["inspect", "no/where"], catch_exceptions=False)
    assert run("mimo-nano", "--kv-dtype", "int3").exit_code == 2


def test_help_has_an_example() -> None:
    assert "Example: mimo inspect mimo-v2.5" in run("--help").output


def test_torch_is_not_loaded_and_exit_codes_reach_the_shell() -> None:
    probe = (
        "import sys; from cli.app import main; sys.argv = ['mimo', 'inspect', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'safetensors' in sys.modules, file=sys.stderr)"
    )
    for argument, code in (("mimo-nano", 0), ("no/where", 2)):
        done = subprocess.run(
            [sys.executable, "-c", probe, argument], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.splitlines()[-1]) == (code, "False False"), done.stderr


def test_what_serving_lacks_is_a_note(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "fp8", tmp_path / "fp8"))
    said = report(str(folder))
    (note,) = said["notes"]
    assert note.startswith("mimo serve would refuse this directory: ")
    assert "tokenizer.json is missing" in note
    assert "Note: mimo serve would refuse" in run(str(folder)).output
    assert report("mimo-nano")["notes"] == report("mimo-v2.5")["notes"] == []


def test_nothing_from_a_checkpoint_reaches_the_terminal_raw(tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b]0;[bold]x[nope]"
    folder.mkdir()
    config = json.loads((GOLDEN / "fp8" / "config.json").read_text())
    state = load_file(GOLDEN / "fp8" / "model.safetensors")
    evil = "x\x1b[31m\r\n\u202e[/red]"
    save_file(state | {evil: state["model.norm.weight"].clone()}, folder / "a\x1b[2J.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for arguments in ([], ["--tensors"], ["--json"]):
        result = run(str(folder), *arguments)
        assert result.exit_code == 1
        assert result.output.replace("\n", "").isprintable()
        assert "[bold]x[nope]" in result.output
    assert r"x\x1b[31m\r\n\u202e[/red]" in run(str(folder)).output
    (folder / "config.json").write_text(json.dumps(config | {"model_type": evil}))
    refused = run(str(folder))
    assert refused.stderr.replace("\n", "").isprintable()
    assert "model_type" in refused.stderr


def test_contexts_are_shown_once_and_heads_are_counted() -> None:
    rows = report("mimo-nano", "--context", "5", "--context", "7", "--context", "5")["kv"]["contexts"]
    assert [row["num_tokens"] for row in rows] == [5, 7]
    assert run("mimo-nano", "--mtp-layers", "1000000").exit_code == 2


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_directory(name: str) -> None:
    with pytest.raises(ConfigError, match="no such path"):
        CliRunner().invoke(app, ["inspect", name], catch_exceptions=False)


@pytest.mark.parametrize("arguments", [["mimo-v2.5"], ["mimo-v2.5", "--json"], ["mimo-v2.5", "--tensors"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "cli", "inspect", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    if "--json" in arguments:
        said = {"command": "mimo inspect", "message": "No space left on device", "exit_code": 1}
        assert json.loads(done.stderr) == {"error": said}
    else:
        assert done.stderr == "mimo inspect: No space left on device\n"
