"""Secrets among settings: shown as what there is in their place, which is no setting itself."""

import re
from collections.abc import Mapping
from typing import Any

from cli.errors import ConfigError
from epd.config import without_password

_PLACE = re.compile(r"\((\d+ )?hidden\)")


def hide(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings of one section, whose secrets are counted or left out."""
    if settings.get("api_keys"):
        settings["api_keys"] = [f"({len(settings['api_keys'])} hidden)"]
    if "kv_store" in settings:
        settings["kv_store"] = without_password(settings["kv_store"])
    if "embedding_store" in settings:
        scheme, at, place = settings["embedding_store"].rpartition("@")
        if at:
            settings["embedding_store"] = f"{scheme.partition('://')[0]}://(hidden)@{place}"
    return settings


def refuse_hidden(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError where `hide` has been: nobody wants a server whose key is `(1 hidden)`."""
    for section, values in settings.items():
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if any(_PLACE.search(str(item)) for item in (value if isinstance(value, list) else [value])):
                raise ConfigError(
                    f"{section}.{key} is what --print-config shows in place of a secret; give the secret itself"
                )
