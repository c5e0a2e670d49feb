"""Typed reads of a parsed `config.json` whose failures name the key."""

from collections.abc import Mapping


class ConfigError(ValueError):
    """A key of the model configuration is absent, malformed or holds a value that is not implemented."""


class ConfigKeys:
    """Typed reads of a mapping that name the key when they fail. JSON null counts as absent."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def get(self, key: str) -> object:
        return self._config.get(key)

    def integer(self, key: str) -> int:
        value = self._config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key}: expected an integer, got {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self._config.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigError(f"{key}: expected a number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if not isinstance(value, bool):
            raise ConfigError(f"{key}: expected true or false, got {value!r}")
        return value

    def integers(self, key: str, *, length: int, allowed: tuple[int, ...]) -> list[int]:
        value = self._config.get(key)
        if not isinstance(value, (list, tuple)) or len(value) != length or any(v not in allowed for v in value):
            raise ConfigError(f"{key}: expected a list of {length} values out of {allowed}, got {value!r}")
        return [int(v) for v in value]

    def one_of(self, key: str, allowed: tuple[object, ...]) -> object:
        value = self._config.get(key)
        if value not in allowed:
            raise ConfigError(f"{key}: {value!r} is not implemented, allowed are {allowed}")
        return value
