"""What `mimo doctor` finds: one line each, and what to do about it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Level = Literal["ok", "warn", "fail"]
LEVELS: Final[tuple[Level, ...]] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Check:
    """`fix` is what to do, a sentence or a command; empty where nothing is to be done."""

    name: str
    level: Level
    message: str
    fix: str = ""


def worst(checks: list[Check]) -> Level:
    return max((check.level for check in checks), key=LEVELS.index, default="ok")


def read_text(path: Path) -> str | None:
    """A file of /proc or /sys without its line end; None where there is none, or it is not for us."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
