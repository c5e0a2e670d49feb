"""Worker settings are judged by config.json, and against each other, before anything starts."""

import json
import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.load import BUILTIN_MODELS, ConfigError, load
from cli.load_workers import check_workers
from cli.serve import serve

NANO = BUILTIN_MODELS["mimo-nano"]


def check(tmp_path: Path, settings: dict[str, object], **flags: object) -> None:
    """`settings` by section.key."""
    nested: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    check_workers(load(runtime_dir=tmp_path, environ={}, flags={**nested, **flags}))


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("page_size", "7", "16"),
        ("dtype", "bfloat16", "'float32'"),
        ("weights", "bfloat16", "not set"),
        ("qkv_layout", "plain", "'auto'"),
        ("window_left", "126", "not set"),
        ("draft_tokens", "0", "not set"),
        ("draft_tokens", "1", "not set"),
    ],
)
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_what_kv_depends_on_is_the_same_in_both_stages(
    tmp_path: Path, stage: str, key: str, value: str, other: str
) -> None:
    check(tmp_path, {f"engine.{key}": value})
    with pytest.raises(ConfigError) as refused:
        check(tmp_path, {f"{stage}.{key}": value})
    text = str(refused.value)
    second = {"prefill": "decode", "decode": "prefill"}[stage]
    assert re.search(rf"{stage}\.{key} is '?{value}'?", text)
    assert f"{second}.{key} is {other}" in text
    check(tmp_path, {f"engine.{key}": value}, mode="unified")


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill.draft_tokens": "3"},
        {"decode.window_left": "127"},
        {"decode.qkv_layout": "interleaved"},
        {"prefill.weights": "keep"},
        {"decode.weights": "float32"},
        {"decode.kv_budget_bytes": str(1 << 27), "decode.max_running": "4", "prefill.chunk_tokens": "64"},
        {"engine.expected_sequence_tokens": "9000000"},
        {"prefill.attention": "reference", "decode.prefix_cache": "false"},
    ],
)
def test_what_comes_to_the_same_and_what_may_differ_passes(tmp_path: Path, settings: dict[str, object]) -> None:
    check(tmp_path, settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine.kv_budget_bytes": "10"}, ["engine.kv_budget_bytes is 10,", "29,982,720"]),
        ({"decode.kv_budget_bytes": "10"}, ["decode workers", "kv_budget_bytes is 10,"]),
        ({"engine.kv_budget_bytes": str(1 << 60)}, ["engine.kv_budget_bytes", "this host has"]),
        ({"engine.page_size": "1024"}, ["engine.page_size 1,024", "engine.kv_budget_bytes"]),
        ({"engine.chunk_tokens": "200000"}, ["engine.chunk_tokens 200,000"]),
        ({"engine.max_running": "1000000"}, ["engine.max_running 1,000,000"]),
        ({"engine.window_left": "16000"}, ["16,000 earlier tokens (engine.window_left)"]),
        ({"engine.window_left": "16384"}, ["engine.window_left is 16,384", "0 to 16,383", "16,384 positions"]),
        (
            {"engine.expected_sequence_tokens": "9000000", "engine.kv_budget_bytes": str(30 << 20)},
            ["engine.expected_sequence_tokens 9,000,000 (the model's 16,384 positions)"],
        ),
        ({"engine.decode_release_interval_tokens": "10000000"}, ["decode_release_interval_tokens 10,000,000"]),
    ],
)
def test_a_plan_that_does_not_fit_names_every_setting(
    tmp_path: Path, settings: dict[str, object], words: list[str]
) -> None:
    for mode in ("epd", "unified") if not any("decode." in key for key in settings) else ("epd",):
        with pytest.raises(ConfigError) as refused:
            check(tmp_path, settings, mode=mode)
        assert all(word in str(refused.value) for word in words), str(refused.value)


def test_the_configuration_alone_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(NANO / "config.json", folder)
    check(tmp_path, {}, model=str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_mtp_layers": 1}))
    check(tmp_path, {"prefill.draft_tokens": "1"}, model=str(folder))
    with pytest.raises(ConfigError, match=r"engine.draft_tokens is 2, model holds 1 draft heads"):
        check(tmp_path, {"engine.draft_tokens": "2"}, model=str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": -1}))
    with pytest.raises(ConfigError, match="hidden_size"):
        check(tmp_path, {}, model=str(folder))


def test_a_model_without_windows_has_no_window_to_set(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    check(tmp_path, {}, model=str(folder))
    with pytest.raises(ConfigError, match=r"engine.window_left is 5, but this model has no window layers"):
        check(tmp_path, {"engine.window_left": "5"}, model=str(folder))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "engine.attention=foo",
            "engine.attention is 'foo'; allowed: auto, reference, cpu, cpu-torch, sdpa, flex, fla",
        ),
        ("prefill.attention=flashinfer", "prefill.attention is 'flashinfer', which needs a device of type cuda"),
        ("engine.window_left=-1", "engine.window_left is -1; allowed: 0 or more"),
        ("engine.dense_retention_tokens=-3", "engine.dense_retention_tokens is -3; allowed: 0 or more"),
        ("engine.kv_budget_bytes=10", "prefill workers cannot start: engine.kv_budget_bytes is 10, too little for"),
        ("decode.page_size=2000", "decode.page_size is 2,000; allowed: 1 to 1,024"),
        ("engine.chunk_tokens=1000000", "engine.chunk_tokens is 1,000,000; allowed: 1 to 262,144"),
        ("engine.dtype=int3", "engine.dtype is 'int3'; allowed: float32, bfloat16, float16"),
        ("engine.device=abacus", "engine.device is 'abacus'; allowed: cpu, cuda, cuda:0"),
        ("engine.cuda_graphs=maybe", "engine.cuda_graphs is 'maybe'; allowed: true or false"),
        ("engine.window_eviction=fifo", "engine.window_eviction is 'fifo'; allowed: marginal, tail, lru"),
        ("engine.draft_tokens=9", "engine.draft_tokens is 9; allowed: 0, 1, 2, 3, or leave it out"),
        ("engine.draft_tokens=x", "engine.draft_tokens is 'x'; allowed: a whole number, or leave it out"),
        ("engine.weights=q", "engine.weights is 'q'; allowed: bfloat16, float32, keep, or leave it out"),
        ("engine.peer_timeout_s=soon", "engine.peer_timeout_s is 'soon'; allowed: a number"),
        ("decode.draft_tokens=0", "prefill.draft_tokens is not set and decode.draft_tokens is 0; allowed: the same in"),
    ],
)
def test_print_config_refuses_with_key_value_and_what_is_allowed(setting: str, message: str) -> None:
    command = typer.Typer()
    command.command()(serve)
    refused = CliRunner().invoke(command, ["--print-config", "--set", setting]).exception
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith(message), str(refused)
