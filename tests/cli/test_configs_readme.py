"""configs/README.md names every setting there is, with its default, and none besides."""

import json
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from cli.cluster import ClusterConfig
from cli.load import load
from cli.load_role import EncoderDeployment, load_any

README = Path(__file__).parent.parent.parent / "configs" / "README.md"
ROW = re.compile(r"^\| `([a-z_.]+)` \| \*{0,2}(.+?)\*{0,2} \| \S.* \|$", re.MULTILINE)
# What --print-config shows and nobody sets: addresses and names that follow from the rest.
DERIVED = {"model_dir", "model_name", "role", "name", "encoders", "prefill", "decode", "fetch"}


def documented() -> dict[str, Any]:
    """Setting and default; None where the README says unset."""
    rows = ROW.findall(README.read_text().partition("\n## ")[0])
    assert len({key for key, _ in rows}) == len(rows), "a setting is listed twice"
    return {
        key: None if default == "unset" else tomllib.loads(f"value = {default.strip('`')}")["value"]
        for key, default in rows
    }


def resolved(tmp_path: Path) -> dict[str, Any]:
    """What a deployment with nothing set runs with, by the key that would set it."""
    config = load(runtime_dir=tmp_path, environ={"MIMO_KV_STORE_DIR": "/kv"})
    alone = load_any(runtime_dir=tmp_path, environ={}, flags={"role": "encoder"})
    assert isinstance(alone, EncoderDeployment)
    found: dict[str, Any] = {"mode": config.mode, "role": None, "model": config.model_name, "model_name": None}
    sections = {
        "gateway": config.gateway,
        "fetch": config.gateway.fetch,
        "encoder": config.encoders[0],
        "engine": config.prefill[0],
        "supervisor": config.supervisor,
        "front": alone.front,
        "sglang": alone.sglang,
        "cluster": ClusterConfig(),
    }
    for section, settings in sections.items():
        for field in fields(settings):
            if field.name not in DERIVED or section == "cluster":
                assert field.default is not MISSING or field.default_factory is not MISSING
                value = getattr(settings, field.name)
                found[f"{section}.{field.name}"] = list(value) if isinstance(value, tuple) else value
    assert found["engine.kv_store"] == "local:/kv"
    found["engine.kv_store"] = "local"
    assert Path(found["gateway.files_dir"]).name == "files"
    # In words: it follows from where the user's cache is.
    found["gateway.files_dir"] = None
    stages = {"encoder": config.encoders, "prefill": config.prefill, "decode": config.decode}
    return found | {f"{stage}.replicas": len(processes) for stage, processes in stages.items()}


def test_every_setting_is_documented_with_its_default_and_nothing_else_is(tmp_path: Path) -> None:
    told, true = documented(), resolved(tmp_path)
    assert told.keys() == true.keys()
    assert {key: (told[key], true[key]) for key in true if json.dumps(told[key]) != json.dumps(true[key])} == {}
