"""What the program itself makes of the arguments that a deployment gives it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from typer.testing import CliRunner

from cli.app import app

# Variables of the image and of containers that are no settings: everything else that begins with MIMO_ is one.
PROGRAM = "serve"


def resolved(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings, by the real loader: an unknown flag, section or key fails here as it would there."""
    done = CliRunner().invoke(app, [*arguments, "--print-config"], env=dict(environment), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    settings: dict[str, Any] = json.loads(done.stdout)
    return settings


def seconds(duration: str) -> float:
    """Of Compose's and Docker's 75s, 1m30s."""
    total, number = 0.0, ""
    for character in duration:
        if character.isdigit() or character == ".":
            number += character
        else:
            total += float(number) * {"s": 1, "m": 60, "h": 3600}[character]
            number = ""
    return total


def size_bytes(size: str) -> int:
    """Of 512Mi, 3Gi (Kubernetes) and 512m (Compose)."""
    units = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "m": 1 << 20, "g": 1 << 30}
    unit = size.lstrip("0123456789.").lower()
    return int(float(size[: len(size) - len(unit)]) * units[unit])
