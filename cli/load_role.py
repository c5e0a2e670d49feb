"""Settings of one stage served by itself: `mimo serve --role encoder`. The way of a whole pipeline is `cli.load`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cli.load import (
    ConfigError,
    ServeConfig,
    SupervisorConfig,
    build,
    collect,
    fetch_policy,
    load,
    replicas,
    resolve_model,
    takes_media,
    without_replicas,
)
from encoder import FrontConfig, SglangConfig
from encoder.config import EncoderConfig

ROLES: Final = ("encoder",)
_SECTIONS: Final = ("front", "sglang", "fetch", "encoder", "supervisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDeployment:
    """Encoders behind an HTTP side of their own, resolved. `runtime_dir` is as in `ServeConfig`."""

    model_dir: Path
    model_name: str
    runtime_dir: Path
    front: FrontConfig
    sglang: SglangConfig
    encoders: tuple[EncoderConfig, ...]
    supervisor: SupervisorConfig


def given_role(file: Path | None, flag: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The role that is asked for anywhere. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    role = collect(file=file, flags={"role": flag} if flag else {}, environ=environ).get("role")
    return None if role is None else str(role)


def load_any(
    *,
    runtime_dir: Path,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServeConfig | EncoderDeployment:
    """Resolve what is to be served: a whole pipeline, or with a role one stage of it. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    settings = collect(file=file, flags=flags, environ=environ)
    role = settings.get("role")
    if role is None:
        return load(runtime_dir=runtime_dir, file=file, flags=flags, environ=environ)
    if role not in ROLES:
        raise ConfigError(
            f"role is {role!r}; allowed: {', '.join(ROLES)}. Other stages are not served by themselves; without a role "
            "the whole pipeline is"
        )
    return _load_encoder(runtime_dir, settings, environ)


def _load_encoder(runtime_dir: Path, settings: Mapping[str, Any], environ: Mapping[str, str]) -> EncoderDeployment:
    if "mode" in settings:
        raise ConfigError(f"mode is {settings['mode']!r} and role is 'encoder'; a mode is of whole pipelines, give one")
    for section, values in settings.items():
        if isinstance(values, Mapping) and values and section not in _SECTIONS:
            raise ConfigError(
                f"{section}.{next(iter(values))} is set, but role encoder has no section [{section}]; allowed: "
                f"{', '.join(f'[{known}]' for known in _SECTIONS)}"
            )
    model_dir, model_name = resolve_model(str(settings.get("model", "mimo-nano")), environ)
    if not takes_media(model_dir):
        raise ConfigError(f"model is {str(settings.get('model'))!r}, which takes text only and has no encoder")
    model: dict[str, Any] = {"model_dir": model_dir, "model_name": str(settings.get("model_name", model_name))}
    num_replicas = replicas("encoder", settings.get("encoder", {}))
    front = build(
        "front",
        FrontConfig,
        settings.get("front", {}),
        fetch=fetch_policy(settings.get("fetch", {})).limits,
        encoders=tuple(f"ipc://{runtime_dir}/encoder-{i}" for i in range(num_replicas)),
        **model,
    )
    supervisor = build("supervisor", SupervisorConfig, settings.get("supervisor", {}))
    if supervisor.drain_s <= front.drain_s:
        raise ConfigError(
            f"supervisor.drain_s is {supervisor.drain_s:g}; allowed: more than front.drain_s, {front.drain_s:g}, so "
            "that the front can end its answers itself"
        )
    encoder = build("encoder", EncoderConfig, without_replicas(settings.get("encoder", {})))
    return EncoderDeployment(
        runtime_dir=runtime_dir,
        front=front,
        sglang=build("sglang", SglangConfig, settings.get("sglang", {})),
        encoders=(encoder,) * num_replicas,
        supervisor=supervisor,
        **model,
    )
