"""Settings of workers against the model's `config.json` and against each other, before any process starts."""

from collections.abc import Callable, Mapping
from typing import Final

from cli.load import ConfigError, ServeConfig
from cli.load_role import RoleDeployment
from encoder.checkpoint import CheckpointError, read_json_object
from epd import PoolTooSmall, TextConfig, count_heads, inspect_checkpoint, plan_worker, text_config
from epd.config import EngineConfig

# What the bytes of KV depend on, by setting: how it is compared, where several values come to the same.
_KV_SETTINGS: Final[Mapping[str, Callable[[EngineConfig, TextConfig, int], object]]] = {
    "page_size": lambda config, text, num_held: config.page_size,
    "dtype": lambda config, text, num_held: config.dtype,
    # Kept as in the files, matrices are multiplied by as what `dtype` makes of them.
    "weights": lambda config, text, num_held: config.dtype if config.weights in (None, "keep") else config.weights,
    "qkv_layout": lambda config, text, num_held: config.qkv_layout == "plain",
    "window_left": lambda config, text, num_held: (
        _window_left(text) if config.window_left is None else config.window_left
    ),
    "draft_tokens": lambda config, text, num_held: count_heads(config, num_held),
}


def check_workers(config: ServeConfig | RoleDeployment, *, num_held: int | None = None) -> None:
    """Refuse what a worker would refuse at its start, and workers that could not continue from each other's KV.

    `num_held` is how many draft heads the files hold; None looks, which takes configurations and headers, no weights.
    Raises ConfigError.
    """
    try:
        config_hf = read_json_object(config.model_dir / "config.json")
        text = TextConfig.from_hf(config_hf)
        if num_held is None:
            num_held = inspect_checkpoint(config.model_dir).inventory.num_mtp_layers
    except (CheckpointError, ValueError) as error:
        raise ConfigError(str(error)) from error
    for stage, engines in (("prefill", config.prefill), ("decode", config.decode)):
        if engines:
            _check_worker(stage, engines[0], config_hf, num_held)
    if config.prefill and config.decode:
        _check_pair(config.prefill[0], config.decode[0], text, num_held)


def _check_worker(stage: str, engine: EngineConfig, config_hf: Mapping[str, object], num_held: int) -> None:
    try:
        plan_worker(engine, text_config(engine, config_hf), num_heads=count_heads(engine, num_held))
    except (ValueError, PoolTooSmall) as error:
        raise ConfigError(f"{stage} workers cannot start: {error}") from error


def _check_pair(prefill: EngineConfig, decode: EngineConfig, text: TextConfig, num_held: int) -> None:
    for key, compared in _KV_SETTINGS.items():
        if compared(prefill, text, num_held) == compared(decode, text, num_held):
            continue
        values = [_shown(getattr(engine, key)) for engine in (prefill, decode)]
        raise ConfigError(
            f"prefill.{key} is {values[0]} and decode.{key} is {values[1]}; allowed: the same in both, since a decode "
            f"worker goes on from the KV of a prefill worker (engine.{key} sets both)"
        )


def _window_left(text: TextConfig) -> int | None:
    return None if text.window_layer is None else text.window_layer.window_left


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)
