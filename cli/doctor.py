"""`mimo doctor`: what of this machine would keep a deployment from serving well, and what to do about it."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.completion import served_models, shipped_configs
from cli.doctor_check import Check, Level, worst
from cli.errors import ConfigError
from cli.terminal import counted, printable_line

_COLOURS: Final[dict[Level, str]] = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Check for this deployment, as `mimo serve --config`: a TOML file or a shipped name.",
            autocompletion=shipped_configs,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="As for `mimo serve`.", show_default="mimo-nano", autocompletion=served_models)
    ] = "",
    role: Annotated[str, typer.Option(help="As for `mimo serve`.", show_default="the whole pipeline")] = "",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The port to serve on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Check this machine: software, processors, memory, limits, decoders, stores, and what killed servers left.

    One line each, with what to do where something is amiss. Environment and files are read as `mimo serve` reads them;
    nothing is changed and nothing is left behind. The exit code is 1 when something would keep a deployment from
    starting; warnings are allowed.

    Example: mimo doctor

    Example: mimo doctor --config epd --json
    """
    started_s = time.monotonic()
    sections: dict[str, list[Check]] = {}

    def told(section: str, checks: list[Check]) -> None:
        sections[section] = checks
        if not as_json:
            _show(section, checks)

    _examine(told, file=config, model=model, role=role, port=port)
    found = [check for checks in sections.values() for check in checks]
    level = worst(found)
    if as_json:
        typer.echo(json.dumps(_as_json(sections, level, time.monotonic() - started_s), indent=2))
    else:
        counts = {kind: sum(check.level == kind for check in found) for kind in ("warn", "fail")}
        amiss = f"{counted(counts['warn'], 'warning')}, {counted(counts['fail'], 'failure')}"
        typer.echo(f"\n{counted(len(found), 'check')}, {amiss}")
    if level == "fail":
        raise typer.Exit(1)


def _examine(
    told: Callable[[str, list[Check]], None], *, file: Path | None, model: str, role: str, port: int | None
) -> None:
    """All sections, each told as it is found."""
    # Only here: completion and help are quick.
    from cli.doctor_deployment import check_caches, check_settings, check_stale, configured, needs_of
    from cli.doctor_machine import Needs, check_machine
    from cli.doctor_media import check_media
    from cli.doctor_software import check_software
    from cli.load_role import given_role, load_any

    needs = Needs()
    try:
        http = "front" if given_role(file, role) == "encoder" else "gateway"
        flags: dict[str, Any] = {key: value for key, value in (("model", model), ("role", role)) if value}
        flags |= {http: {"port": port}} if port is not None else {}
        # A name for sockets that nobody makes.
        resolved = load_any(runtime_dir=Path(tempfile.gettempdir()) / "mimo-doctor", file=file, flags=flags)
    except ConfigError as error:
        told("deployment", [Check("settings", "fail", str(error), "correct the file, MIMO_* variables or flags")])
    else:
        needs = needs_of(resolved)
        told("deployment", [Check("settings", "ok", configured(resolved)), *check_settings(resolved)])
    told("machine", check_machine(needs))
    told("software", check_software(wants_cuda=needs.on_cuda, on_cpu=needs.on_cpu))
    told("media", check_media())
    told("storage", [*check_caches(os.environ), check_stale()])


def _show(section: str, checks: list[Check]) -> None:
    typer.echo(f"\n{section}")
    for check in checks:
        level = typer.style(f"{check.level:<4}", fg=_COLOURS[check.level])
        typer.echo(f"  {level}  {check.name:<15} {printable_line(check.message)}")
        if check.fix and check.level != "ok":
            typer.echo(f"        {'':<15} -> {printable_line(check.fix)}")


def _as_json(sections: dict[str, list[Check]], level: Level, elapsed_s: float) -> dict[str, Any]:
    checks = [{"section": section} | asdict(check) for section, found in sections.items() for check in found]
    return {"level": level, "checks": checks, "elapsed_s": elapsed_s}
