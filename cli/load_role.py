"""Settings of one stage served by itself: `mimo serve --role ...`. The way of a whole pipeline is `cli.load`.

encoder                             encoders and an HTTP side of their own, on one machine
gateway                             the API; finds the other stages by their addresses
prefill, decode, encoder-worker     one process that listens for gateways and workers of other machines
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cli.cluster import ClusterConfig, with_advertised
from cli.load import (
    ConfigError,
    ServeConfig,
    SupervisorConfig,
    build,
    collect,
    engine_config,
    fetch_policy,
    load,
    replicas,
    resolve_model,
    takes_media,
    without_replicas,
)
from cli.models import cache_dir
from encoder import FrontConfig, SglangConfig
from encoder.config import EncoderConfig
from epd.config import EngineConfig, GatewayConfig
from epd.types import Role

ENCODER_WORKER: Final = "encoder-worker"
# The sections of each role's settings.
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "encoder": ("front", "sglang", "fetch", "encoder", "supervisor"),
    "gateway": ("cluster", "gateway", "fetch", "supervisor"),
    "prefill": ("cluster", "engine", "prefill", "supervisor"),
    "decode": ("cluster", "engine", "decode", "supervisor"),
    ENCODER_WORKER: ("cluster", "encoder", "supervisor"),
}
ROLES: Final = tuple(_SECTIONS)
# Keys of [cluster] that only the gateway has, and those that it has not.
_OF_GATEWAY: Final = ("prefill", "decode", "encoders")
_OF_WORKERS: Final = ("listen", "advertise", "health_host", "health_port")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDeployment:
    """One process of a pipeline that is spread over machines, resolved: a gateway, an encoder or a worker."""

    role: str
    model_dir: Path
    model_name: str
    runtime_dir: Path
    cluster: ClusterConfig
    supervisor: SupervisorConfig
    gateway: GatewayConfig | None = None
    encoders: tuple[EncoderConfig, ...] = ()
    prefill: tuple[EngineConfig, ...] = ()
    decode: tuple[EngineConfig, ...] = ()


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
) -> ServeConfig | EncoderDeployment | RoleDeployment:
    """Resolve what is to be served: a whole pipeline, or with a role one stage of it. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    settings = collect(file=file, flags=flags, environ=environ)
    role = settings.get("role")
    if role is None:
        return load(runtime_dir=runtime_dir, file=file, flags=flags, environ=environ)
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}; allowed: {', '.join(ROLES)}; without a role the whole pipeline is served")
    _refuse_foreign(role, settings)
    if role == "encoder":
        return _load_encoder(runtime_dir, settings, environ)
    return _load_role(role, runtime_dir, settings, environ)


def _refuse_foreign(role: str, settings: Mapping[str, Any]) -> None:
    """What does not concern a role is no setting of it. Raises ConfigError."""
    if "mode" in settings:
        raise ConfigError(f"mode is {settings['mode']!r} and role is {role!r}; a mode is of whole pipelines, give one")
    allowed = _SECTIONS[role]
    for section, values in settings.items():
        if isinstance(values, Mapping) and values and section not in allowed:
            raise ConfigError(
                f"{section}.{next(iter(values))} is set, but role {role} has no section [{section}]; allowed: "
                f"{', '.join(f'[{known}]' for known in allowed)}"
            )
    for key in settings.get("cluster", {}):
        if is_foreign(role, key):
            why = "answers on its own port" if role == "gateway" else "is told with each request whom it needs"
            raise ConfigError(f"cluster.{key} is set, but role {role} has no such setting: it {why}")
    section = "encoder" if role == ENCODER_WORKER else role
    if role not in ("encoder", "gateway") and replicas(section, settings.get(section, {})) != 1:
        raise ConfigError(f"{section}.replicas is set; role {role} is one process, allowed: 1")


def is_foreign(role: str, key: str) -> bool:
    """Whether this key of [cluster] is one that the role does not have."""
    return key in (_OF_WORKERS if role == "gateway" else _OF_GATEWAY)


def _load_role(role: str, runtime_dir: Path, settings: Mapping[str, Any], environ: Mapping[str, str]) -> RoleDeployment:
    model_dir, model_name = resolve_model(str(settings.get("model", "mimo-nano")), environ)
    model: dict[str, Any] = {"model_dir": model_dir, "model_name": str(settings.get("model_name", model_name))}
    cluster = with_advertised(build("cluster", ClusterConfig, settings.get("cluster", {})))
    stage: dict[str, Any]
    if role == "gateway":
        stage = {"gateway": _gateway(settings, cluster, environ, model)}
    elif not cluster.listen:
        raise ConfigError(f"role {role} needs an address to listen on: --listen tcp://HOST:PORT")
    elif role == ENCODER_WORKER:
        _require_media(model_dir, settings)
        stage = {"encoders": (build("encoder", EncoderConfig, without_replicas(settings.get("encoder", {}))),)}
    else:
        # Where it is reached tells it apart from every other worker, wherever they run.
        name = f"{role}@{cluster.advertise.removeprefix('tcp://')}"
        stage = {role: (engine_config(role, settings, environ, role=Role(role), name=name, **model),)}
    return RoleDeployment(
        role=role,
        runtime_dir=runtime_dir,
        cluster=cluster,
        supervisor=_supervisor(settings, stage.get("gateway"), "gateway"),
        **stage,
        **model,
    )


def _gateway(
    settings: Mapping[str, Any], cluster: ClusterConfig, environ: Mapping[str, str], model: Mapping[str, Any]
) -> GatewayConfig:
    has_media = takes_media(model["model_dir"])
    for key in _OF_GATEWAY:
        if not getattr(cluster, key) and (key != "encoders" or has_media):
            raise ConfigError(f"role gateway needs the addresses of all stages; cluster.{key} (--{key}) has none")
    if cluster.encoders and not has_media:
        raise ConfigError("cluster.encoders is set, but the model takes text only and has no encoder")
    own = {"ready_needs_all": False, "files_dir": cache_dir(environ).absolute() / "files"}
    return build(
        "gateway",
        GatewayConfig,
        own | dict(settings.get("gateway", {})),
        fetch=fetch_policy(settings.get("fetch", {})),
        encoders=cluster.encoders,
        prefill=cluster.prefill,
        decode=cluster.decode,
        **model,
    )


def _require_media(model_dir: Path, settings: Mapping[str, Any]) -> None:
    if not takes_media(model_dir):
        raise ConfigError(f"model is {str(settings.get('model'))!r}, which takes text only and has no encoder")


def _supervisor(
    settings: Mapping[str, Any], head: GatewayConfig | FrontConfig | None, section: str
) -> SupervisorConfig:
    """Raises ConfigError where it would kill the head before that has ended its answers itself."""
    supervisor = build("supervisor", SupervisorConfig, settings.get("supervisor", {}))
    if head is not None and supervisor.drain_s <= head.drain_s:
        raise ConfigError(
            f"supervisor.drain_s is {supervisor.drain_s:g}; allowed: more than {section}.drain_s, {head.drain_s:g}, so "
            f"that the {section} can end its answers itself"
        )
    return supervisor


def _load_encoder(runtime_dir: Path, settings: Mapping[str, Any], environ: Mapping[str, str]) -> EncoderDeployment:
    model_dir, model_name = resolve_model(str(settings.get("model", "mimo-nano")), environ)
    _require_media(model_dir, settings)
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
    encoder = build("encoder", EncoderConfig, without_replicas(settings.get("encoder", {})))
    return EncoderDeployment(
        runtime_dir=runtime_dir,
        front=front,
        sglang=build("sglang", SglangConfig, settings.get("sglang", {})),
        encoders=(encoder,) * num_replicas,
        supervisor=_supervisor(settings, front, "front"),
        **model,
    )
