"""Where files, environment and flags meet, once: TOML, then `MIMO_*`, then flags, into frozen settings.

    [gateway]                      MIMO_GATEWAY__PORT=9000              --port 9000
    port = 8000

Where a list comes as text it is `a,b` or, in JSON, `["a", "b"]`.

Every key is checked against the dataclass it fills. An unknown key, section or environment variable is refused with its
name and the allowed ones; nothing is accepted and ignored.
"""

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from cli.cluster import KEY_VARIABLE, ClusterConfig
from cli.errors import ConfigError as ConfigError
from cli.logs import LogFormat
from cli.models import PACKAGED_MODELS, ModelUnavailable, cache_dir, imported_model, is_imported, kv_store_dir
from cli.secret_settings import refuse_hidden
from encoder import FrontConfig, SglangConfig
from encoder.checkpoint import CheckpointError, read_json_object
from encoder.config import EncoderConfig
from epd.config import EngineConfig, FetchPolicy, GatewayConfig
from epd.types import Role

Mode = Literal["epd", "e-pd", "unified"]
MODES: tuple[Mode, ...] = ("epd", "e-pd", "unified")
BUILTIN_MODELS = {"mimo-nano": Path(__file__).parent.parent / "epd" / "builtin" / "mimo-nano"}
CONFIGS = Path(__file__).parent.parent / "configs"
ENV_PREFIX = "MIMO_"
HOST_BUDGET_BYTES = 256 << 20
"""Of a worker's host tier, where a deployment says nothing of it."""
# Of scripts/check, of the tests, of cli.models, where local stores are, and a secret: no settings of a deployment.
_NOT_SETTINGS = ("MIMO_VENV", "MIMO_TEST_EFFORT", "MIMO_CACHE_DIR", "MIMO_KV_STORE_DIR", KEY_VARIABLE)

# Types of settings, for people.
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", tuple: "a list of texts"}

SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """How many processes a stage has."""

    replicas: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= 64:
            raise ValueError(f"replicas is {self.replicas}; allowed: 1 to 64 processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """Restarts: the pause doubles from `backoff_s` to `max_backoff_s` while a process keeps dying young."""

    backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    young_s: float = 20.0
    max_early_exits: int = 4
    drain_s: float = 15.0
    # A process that answered before and then says nothing for this long is killed, and started again like any other.
    silence_s: float = 20.0
    probe_period_s: float = 1.0
    start_timeout_s: float = 300.0
    # Of the logs of all processes, on standard error.
    log_format: LogFormat = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything one deployment needs, resolved. `runtime_dir` holds the sockets of this run and dies with it."""

    mode: Mode
    model_dir: Path
    model_name: str
    runtime_dir: Path
    gateway: GatewayConfig
    encoders: tuple[EncoderConfig, ...]
    prefill: tuple[EngineConfig, ...]
    decode: tuple[EngineConfig, ...]
    supervisor: SupervisorConfig


# Sections of the file, the dataclass each fills, and the keys that only this module may set.
_DERIVED = {"model_dir", "model_name", "name", "role", "address", "arena", "encoders", "prefill", "decode", "fetch"}
_SECTIONS: dict[str, type[Any]] = {
    "gateway": GatewayConfig,
    "fetch": FetchPolicy,
    "encoder": EncoderConfig,
    "engine": EngineConfig,
    "supervisor": SupervisorConfig,
    "front": FrontConfig,
    "sglang": SglangConfig,
    "cluster": ClusterConfig,
}
# [prefill] and [decode] override [engine] for their role; the replica counts live with the stages.
_STAGES = ("encoder", "prefill", "decode")
_TOP_LEVEL = ("mode", "role", "model", "model_name")
# Sections of single roles, see `cli.load_role`.
_OF_ROLE = {"front": "encoder", "sglang": "encoder", "cluster": "gateway, prefill, decode or encoder-worker"}


def allowed_keys(section: str) -> list[str]:
    """What may stand in a section, by name."""
    owner = _SECTIONS["engine" if section in ("prefill", "decode") else section]
    keys = [field.name for field in fields(owner) if section == "cluster" or field.name not in _DERIVED]
    return sorted([*keys, "replicas"] if section in _STAGES else keys)


def _is_list(section: str, key: str) -> bool:
    owner = StageConfig if key == "replicas" else _SECTIONS["engine" if section in ("prefill", "decode") else section]
    return get_origin(get_type_hints(owner)[key]) is tuple


def _listed(key: str, text: str) -> list[str]:
    """The items of a list that came as text: parted by commas, or a JSON list where they hold some themselves."""
    shown = "a text" if key.endswith("api_keys") else repr(text)
    refused = ConfigError(
        f'{key} is {shown}; allowed: items parted by commas, a,b, or a JSON list of texts, ["a", "b"]'
    )
    if text.lstrip().startswith("["):
        try:
            items = msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            raise refused from None
    else:
        items = [item.strip() for item in text.split(",")] if text.strip() else []
    if not all(items):
        raise refused
    return items


def _dec_hook(kind: type[Any], value: Any) -> Any:
    if kind is Path:
        return Path(str(value)).expanduser()
    raise NotImplementedError(f"no conversion to {kind}")


def _convert(section: str, owner: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(owner)
    converted = {}
    for key, value in values.items():
        try:
            converted[key] = msgspec.convert(value, hints[key], strict=False, dec_hook=_dec_hook)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{section}.{key} is {value!r}; allowed: {_allowed(hints[key])}") from error
    return converted


def _allowed(hint: Any) -> str:
    """What a setting may be, as the end of a sentence."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    others = [_WORDS.get(get_origin(kind) or kind) for kind in kinds if get_origin(kind) is not Literal]
    words = [*([", ".join(literals)] if literals else []), *(word for word in others if word is not None)]
    return f"{' or '.join(words)}{', or leave it out' if type(None) in kinds else ''}"


def build(section: str, owner: type[SettingsT], values: Mapping[str, Any], **derived: Any) -> SettingsT:
    """Make the dataclass of a section from converted values; ValueErrors of the dataclass become ConfigErrors."""
    needed = {f.name for f in fields(owner) if f.default is MISSING and f.default_factory is MISSING}  # type: ignore[arg-type]
    known = {f.name for f in fields(owner)}  # type: ignore[arg-type]
    arguments = _convert(section, owner, values) | {key: value for key, value in derived.items() if key in known}
    absent = needed - arguments.keys()
    if absent:
        raise ConfigError(f"{section} lacks {', '.join(sorted(absent))}")
    try:
        return owner(**arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def read_file(path: Path) -> dict[str, Any]:
    """Parse one TOML file, or one of JSON; a bare name is looked up in the shipped `configs/`."""
    found = path if path.is_file() else CONFIGS / (path.name if path.suffix else f"{path.name}.toml")
    if not found.is_file():
        shipped = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.toml")))
        raise ConfigError(f"no configuration file {path}; give a path, or one of the shipped ones: {shipped}")
    try:
        if found.suffix == ".json":
            return msgspec.json.decode(found.read_bytes(), type=dict[str, Any])
        return tomllib.loads(found.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{found}: {error}") from error


def env_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """`MIMO_MODE=unified`, `MIMO_GATEWAY__PORT=9000`: section and key are parted by two underscores."""
    settings: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in _NOT_SETTINGS:
            continue
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if key:
            settings.setdefault(section, {})[key] = value
        else:
            settings[section] = value
    return settings


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win, key by key inside sections. Unknown sections and keys are refused, whatever their source."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if name in _TOP_LEVEL:
                merged[name] = value
                continue
            if name not in (*_SECTIONS, *_STAGES):
                allowed = ", ".join([*_TOP_LEVEL, *(f"[{s}]" for s in dict.fromkeys([*_SECTIONS, *_STAGES]))])
                raise ConfigError(f"unknown setting {name!r}; allowed: {allowed}")
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} is {value!r}; it is a section and holds keys: {', '.join(allowed_keys(name))}"
                )
            for key, item in value.items():
                if key not in allowed_keys(name):
                    raise ConfigError(f"unknown key {name}.{key}; allowed: {', '.join(allowed_keys(name))}")
                # From the environment and from --set a list comes as text.
                as_list = isinstance(item, str) and _is_list(name, key)
                merged.setdefault(name, {})[key] = _listed(f"{name}.{key}", item) if as_list else item
    refuse_hidden(merged)
    return merged


def collect(*, file: Path | None, flags: Mapping[str, Any] | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """All settings that are given anywhere, merged. Raises ConfigError."""
    layers = [read_file(file)] if file else []
    return merge(*layers, env_settings(environ), flags or {})


def resolve_model(model: str, environ: Mapping[str, str] | None = None) -> tuple[Path, str]:
    """A built-in or packaged name, a directory in Hugging Face layout, or a GGUF file, which is imported first.

    The served name is the directory's or the file's. Raises ConfigError.
    """
    if is_imported(model):
        try:
            return imported_model(model, os.environ if environ is None else environ)
        except ModelUnavailable as error:
            raise ConfigError(str(error)) from error
    model_dir = BUILTIN_MODELS.get(model, Path(model).expanduser())
    if not model.strip() or not os.path.lexists(model_dir / "config.json"):
        names = ", ".join([*BUILTIN_MODELS, *PACKAGED_MODELS])
        raise ConfigError(
            f"model is {model!r}: no {model_dir / 'config.json'}; give a built-in name ({names}), a model directory or "
            "a .gguf file"
        )
    return model_dir, model if model in BUILTIN_MODELS else model_dir.resolve().name


def takes_media(model_dir: Path) -> bool:
    """A checkpoint without a processor is text only and has no towers for an encoder to run. Raises ConfigError."""
    try:
        config = read_json_object(model_dir / "config.json")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return isinstance(config.get("processor_config"), dict)


def load(
    *,
    runtime_dir: Path,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServeConfig:
    """Resolve one deployment. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    settings = collect(file=file, flags=flags, environ=environ)
    if settings.get("role") is not None:
        raise ConfigError(f"role is {settings['role']!r}; that is for mimo serve, this command starts whole pipelines")
    for section, role in _OF_ROLE.items():
        if settings.get(section):
            key = f"{section}.{next(iter(settings[section]))}"
            raise ConfigError(f"{key} is set, but only role {role} has a section [{section}]; add --role")
    mode = settings.get("mode", "epd")
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
    model_dir, model_name = resolve_model(str(settings.get("model", "mimo-nano")), environ)
    model: dict[str, Any] = {"model_dir": model_dir, "model_name": str(settings.get("model_name", model_name))}

    counts = _counts(mode, settings, file, takes_media=takes_media(model_dir))

    def address(stage: str, index: int) -> str:
        return f"inproc://{stage}-{index}" if mode == "unified" else f"ipc://{runtime_dir}/{stage}-{index}"

    # Built, and thereby checked, also where it is not used.
    encoder = build("encoder", EncoderConfig, without_replicas(settings.get("encoder", {})))
    encoders = (encoder,) * counts["encoder"]

    def engines(stage: str, role: Role) -> tuple[EngineConfig, ...]:
        names = [f"{stage}-{i}" for i in range(counts[stage])]
        return tuple(engine_config(stage, settings, environ, role=role, name=name, **model) for name in names)

    gateway = build(
        "gateway",
        GatewayConfig,
        {"files_dir": cache_dir(environ).absolute() / "files"} | settings.get("gateway", {}),
        fetch=fetch_policy(settings.get("fetch", {})),
        encoders=tuple(address("encoder", i) for i in range(counts["encoder"])),
        prefill=tuple(address("prefill", i) for i in range(counts["prefill"])),
        decode=tuple(address("decode", i) for i in range(counts["decode"])),
        **model,
    )
    supervisor = build("supervisor", SupervisorConfig, settings.get("supervisor", {}))
    if supervisor.drain_s <= gateway.drain_s:
        raise ConfigError(
            f"supervisor.drain_s is {supervisor.drain_s:g}; allowed: more than gateway.drain_s, {gateway.drain_s:g}, "
            "so that the gateway can end its streams itself"
        )
    return ServeConfig(
        mode=mode,
        runtime_dir=runtime_dir,
        gateway=gateway,
        encoders=encoders,
        prefill=engines("prefill", Role.PREFILL if mode == "epd" else Role.BOTH),
        decode=engines("decode", Role.DECODE),
        supervisor=supervisor,
        **model,
    )


def engine_config(stage: str, settings: Mapping[str, Any], environ: Mapping[str, str], **derived: Any) -> EngineConfig:
    """One worker of a stage: [engine], and what the stage's own section has instead. Raises ConfigError."""
    # Converted one by one, so that an error names the section that holds the value.
    shared = _convert("engine", EngineConfig, settings.get("engine", {}))
    own = _convert(stage, EngineConfig, without_replicas(settings.get(stage, {})))
    shared = tiers_unless_chosen(shared | own) | shared
    for values in (shared, own):
        if values.get("kv_store") == "local":
            values["kv_store"] = f"local:{kv_store_dir(environ)}"
    try:
        return build(stage, EngineConfig, shared | own, **derived)
    except ConfigError as error:
        raise ConfigError(named_by_section(str(error), stage, own)) from error


def tiers_unless_chosen(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A deployment keeps KV in host memory and in the store of this host, unless its settings say otherwise."""
    if not chosen.get("prefix_cache", True) or chosen.get("host_budget_bytes") == 0:
        return {}
    return {"host_budget_bytes": HOST_BUDGET_BYTES, "kv_store": "local"}


def _counts(mode: Mode, settings: Mapping[str, Any], file: Path | None, *, takes_media: bool) -> dict[str, int]:
    """Processes per stage; no decode stage where prefill workers decode, no encoder for a model of text alone."""
    counts = {stage: replicas(stage, settings.get(stage, {})) for stage in _STAGES}
    if mode == "unified":
        for stage, count in counts.items():
            if count != 1:
                raise ConfigError(f"{stage}.replicas is {count}; unified mode is one process, allowed: 1")
    if not takes_media:
        if counts["encoder"] > 1:
            raise ConfigError(f"encoder.replicas is {counts['encoder']}; this model takes text only and has no encoder")
        counts["encoder"] = 0
    if mode == "epd":
        return counts
    if settings.get("decode"):
        key = next(iter(settings["decode"]))
        where = f" in {file}" if file and key in read_file(file).get("decode", {}) else ""
        raise ConfigError(f"decode.{key} is set{where}, but mode {mode} has no decode stage")
    return counts | {"decode": 0}


def replicas(stage: str, values: Mapping[str, Any]) -> int:
    chosen = _convert(stage, StageConfig, {key: value for key, value in values.items() if key == "replicas"})
    try:
        return StageConfig(**chosen).replicas
    except ValueError as error:
        raise ConfigError(f"{stage}.{error}") from error


def fetch_policy(values: Mapping[str, Any]) -> FetchPolicy:
    policy = build("fetch", FetchPolicy, values)
    for root in policy.media_roots:
        if not root.is_dir():
            raise ConfigError(f"fetch.media_roots (--media-root) names {root}, which is not a directory")
    return policy


def named_by_section(message: str, stage: str, own: Collection[str]) -> str:
    """A message about `engine.KEY`, with the section that sets it: the stage's where the key is among its `own`."""
    for key in own:
        message = re.sub(rf"\bengine\.{key}\b", f"{stage}.{key}", message)
    return message


def without_replicas(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "replicas"}
