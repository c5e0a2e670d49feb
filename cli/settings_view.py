"""What a deployment runs with, for whoever asks: under the names that set it, and as the processes get it."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cli.load import BUILTIN_MODELS, ServeConfig, allowed_keys
from cli.load_role import EncoderDeployment, RoleDeployment, is_foreign
from cli.secret_settings import hide

Deployment = ServeConfig | EncoderDeployment | RoleDeployment


def as_json(config: Deployment) -> str:
    """`settings` as a file has them, then what each process gets. Paths are strings; secrets are never shown."""
    resolved = asdict(config)
    for owner in (resolved, *resolved.values()):
        for settings in owner if isinstance(owner, tuple) else (owner,):
            if isinstance(settings, dict):
                hide(settings)
    return json.dumps({"settings": settings_of(config)} | resolved, default=_plain, indent=2)


def settings_of(config: Deployment) -> dict[str, Any]:
    """Every setting with its value, named as in a file and after `--set`; secrets are hidden, and None is unset.

    A file of these gives the same deployment, unless a secret is hidden in it: that is refused.
    """
    is_shipped = config.model_dir == BUILTIN_MODELS.get(config.model_name)
    shown: dict[str, Any] = {
        **({} if isinstance(config, EncoderDeployment) else _kind(config)),
        "model": config.model_name if is_shipped else str(config.model_dir),
        "model_name": config.model_name,
    }
    if isinstance(config, EncoderDeployment):
        shown = {"role": "encoder"} | shown
        shown |= {"front": _values("front", config.front), "fetch": _values("fetch", config.front.fetch)}
        shown["sglang"] = _values("sglang", config.sglang)
    elif config.gateway is not None:
        shown |= {"gateway": _values("gateway", config.gateway), "fetch": _values("fetch", config.gateway.fetch)}
    if isinstance(config, RoleDeployment):
        cluster = _values("cluster", config.cluster)
        shown["cluster"] = {key: value for key, value in cluster.items() if not is_foreign(config.role, key)}
    if config.encoders:
        shown["encoder"] = {"replicas": len(config.encoders)} | _values("encoder", config.encoders[0])
    if not isinstance(config, EncoderDeployment):
        shown |= _engines(config)
    return shown | {"supervisor": _values("supervisor", config.supervisor)}


def _kind(config: ServeConfig | RoleDeployment) -> dict[str, Any]:
    return {"mode": config.mode} if isinstance(config, ServeConfig) else {"role": config.role}


def _engines(config: ServeConfig | RoleDeployment) -> dict[str, Any]:
    """[engine] is what the first worker has, [prefill] and [decode] what theirs have instead."""
    stages = {stage: engines for stage in ("prefill", "decode") if (engines := getattr(config, stage))}
    if not stages:
        return {}
    shared = _values("engine", next(iter(stages.values()))[0])
    shown = {"engine": shared}
    for stage, engines in stages.items():
        own = _values("engine", engines[0])
        differing = {key: value for key, value in own.items() if value != shared[key]}
        shown[stage] = {"replicas": len(engines)} | differing
    return shown


def _values(section: str, owner: object) -> dict[str, Any]:
    keys: Iterable[str] = (key for key in allowed_keys(section) if key != "replicas")
    return hide({key: getattr(owner, key) for key in keys})


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a setting")
