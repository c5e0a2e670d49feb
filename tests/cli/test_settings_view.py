"""What `mimo serve --print-config` shows can be given back, and holds every setting under the name that sets it."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.load import ConfigError, allowed_keys
from cli.load_role import load_any
from cli.settings_view import as_json

LISTEN = {"listen": "tcp://127.0.0.1:7001"}


def shown(tmp_path: Path, **flags: Any) -> tuple[Any, dict[str, Any]]:
    config = load_any(runtime_dir=tmp_path, environ={}, flags=flags)
    return config, json.loads(as_json(config))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"mode": "e-pd", "prefill": {"replicas": 2}},
        {
            "mode": "unified",
            "engine": {"page_size": 32},
            "gateway": {"port": 9001, "cors_origins": "https://a.example"},
        },
        {"engine": {"weights": "bfloat16"}, "decode": {"weights": "null", "max_running": 3, "replicas": 2}},
        {"engine": {"prefix_cache": False}, "encoder": {"replicas": 2}, "fetch": {"media_roots": ["/tmp"]}},
        {"model_name": "another", "supervisor": {"drain_s": 20}},
        {"role": "encoder", "sglang": {"receiver_networks": "10.0.0.0/8"}, "encoder": {"replicas": 2}},
        {"role": "gateway", "cluster": {key: ["tcp://127.0.0.1:7"] for key in ("encoders", "prefill", "decode")}},
        {"role": "prefill", "cluster": LISTEN, "engine": {"page_size": 32}},
        {"role": "decode", "cluster": LISTEN, "decode": {"max_running": 3}},
        {"role": "encoder-worker", "cluster": LISTEN},
    ],
    ids=str,
)
def test_what_is_shown_gives_the_same_deployment(tmp_path: Path, flags: dict[str, Any]) -> None:
    config, told = shown(tmp_path, **flags)
    file = tmp_path / "shown.json"
    file.write_text(json.dumps(told["settings"]))
    again = load_any(runtime_dir=tmp_path, file=file, environ={})
    assert again == config
    assert json.loads(as_json(again)) == told


def test_every_setting_is_found_under_the_name_that_sets_it(tmp_path: Path) -> None:
    settings = shown(tmp_path, engine={"page_size": 32})[1]["settings"]
    assert settings["engine"]["page_size"] == 32
    for section in ("gateway", "fetch", "encoder", "engine", "supervisor"):
        assert sorted(settings[section]) == allowed_keys(section)
    assert settings["prefill"] == settings["decode"] == {"replicas": 1}


@pytest.mark.parametrize(
    ("section", "key", "secret"),
    [
        ("gateway", "api_keys", ["hush"]),
        ("encoder", "embedding_store", "redis://:hush@127.0.0.1:1/0"),
        ("engine", "kv_store", "redis://:hush@127.0.0.1:1/0"),
    ],
)
def test_a_secret_is_hidden_and_its_place_is_no_secret(tmp_path: Path, section: str, key: str, secret: Any) -> None:
    config, told = shown(tmp_path, **{section: {key: secret}})
    assert "hush" not in json.dumps(told)
    file = tmp_path / "shown.json"
    file.write_text(json.dumps(told["settings"]))
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is what --print-config shows in place of a secret"):
        load_any(runtime_dir=tmp_path, file=file, environ={})
    assert load_any(runtime_dir=tmp_path, file=file, environ={}, flags={section: {key: secret}}) == config


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_a_file_that_is_no_object_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"odd\.json"):
        load_any(runtime_dir=tmp_path, file=file, environ={})
