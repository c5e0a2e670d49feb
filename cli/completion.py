"""Values that a shell completes. Light: a key press waits for it.

Where none of the names begins as the word does, the shell completes file names itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

CONFIGS: Final = Path(__file__).parent.parent / "configs"
SERVED_MODELS: Final = ("mimo-nano", "smollm2")


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Completes to those of `words` that begin so."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def served_models(incomplete: str) -> list[str]:
    """Built-in and packaged models."""
    return one_of(*SERVED_MODELS)(incomplete)


def known_models(incomplete: str) -> list[str]:
    """Those, and the published ones whose configurations are shipped."""
    return one_of(*SERVED_MODELS, *sorted(path.parent.name for path in CONFIGS.glob("models/*/config.json")))(
        incomplete
    )


def shipped_configs(incomplete: str) -> list[str]:
    """The shipped deployments by name."""
    return one_of(*sorted(path.stem for path in CONFIGS.glob("*.toml")))(incomplete)
