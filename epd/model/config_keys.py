"""Typed reads of a parsed `config.json` whose failures name the key, its value and what is allowed."""

from collections.abc import Mapping

from epd.model.config_ranges import TEXT_RANGES
from preprocess.ranges import Range, shown_value


class ConfigError(ValueError):
    """A key of the model configuration is absent, malformed or holds a value that is not implemented."""


class ConfigKeys:
    """Typed reads of a mapping that name the key when they fail. JSON null counts as absent.

    Every number that is read has its range in `TEXT_RANGES`. `section` is where the mapping lies in the file.
    """

    def __init__(self, config: Mapping[str, object], section: str = "") -> None:
        self._config = config
        self._prefix = f"{section}." if section else ""

    def get(self, key: str) -> object:
        return self._config.get(key)

    def integer(self, key: str) -> int:
        value = self._config.get(key)
        if not isinstance(value, int) or value not in TEXT_RANGES[key]:
            raise self.refusal(key, value, TEXT_RANGES[key])
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self._config.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or value not in TEXT_RANGES[key]:
            raise self.refusal(key, value, TEXT_RANGES[key])
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def integers(self, key: str, *, length: int, allowed: tuple[int, ...]) -> list[int]:
        value = self._config.get(key)
        values: list[object] = list(value) if isinstance(value, (list, tuple)) else []
        found = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v in allowed]
        if len(found) != length or len(values) != length:
            raise self.refusal(key, value, f"a list of {length} values out of {allowed}")
        return found

    def one_of(self, key: str, allowed: tuple[object, ...]) -> object:
        value = self._config.get(key)
        # By kind as well: true is not 1, 0 is not false.
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise ConfigError(f"{self._prefix}{key}: {shown_value(value)} is not implemented, allowed are {allowed}")
        return value

    def section(self, key: str) -> "ConfigKeys | None":
        """An object inside this one, None where it is absent."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refusal(key, value, "an object or null")
        return ConfigKeys(value, f"{self._prefix}{key}")

    def refusal(self, key: str, value: object, allowed: Range | str) -> ConfigError:
        """What to raise about a value."""
        return ConfigError(f"{self._prefix}{key}: expected {allowed}, got {shown_value(value)}")
