"""`mimo cache`: what the embedding caches of this host hold, and emptying them."""

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cli.load import ConfigError
from cli.terminal import quoted, say
from encoder import ArenaReport, arena_reports, clear_arena
from encoder.errors import ArenaUnavailable, EncoderBusy

cache = typer.Typer(
    name="cache",
    help="""Look into the embedding caches of the encoders that run on this host.

    Example: mimo cache stats
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MIB = 2**20
_NONE_RUNS = "mimo cache: no encoder runs on this host, or none of this user's"
_STATES = {
    "evictable": "kept for reuse",
    "leased": "in use by a request",
    "reserved": "being computed",
    "free": "empty",
}


@cache.command()
def stats(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as a JSON list, an object each.")] = False,
) -> None:
    """Show what is in the shared memory of every deployment: bytes by state, embeddings, users, hits.

    Reads only; the encoders do not notice. Exit code 1 when none runs.

    Example: mimo cache stats --json
    """
    reports = arena_reports()
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports], indent=2))
    elif reports:
        console = Console(highlight=False)
        for report in reports:
            _show(console, report)
    if not reports:
        say(_NONE_RUNS)
        raise typer.Exit(1)


@cache.command()
def clear(
    arenas: Annotated[
        list[str] | None, typer.Argument(metavar="[ARENA]...", help="Only these, by the name `stats` shows.")
    ] = None,
) -> None:
    """Forget every embedding that no request uses right now, in every deployment of this host.

    What is in use stays, and no request fails: what is asked for again is computed again. A second tier
    (encoder.embedding_store) is not touched. Exit code 1 when none runs.

    Example: mimo cache clear
    """
    reports = arena_reports()
    if arenas:
        known = {report.name: report for report in reports}
        if unknown := sorted(set(arenas) - known.keys()):
            raise ConfigError(f"no arena {unknown[0]} on this host; there are: {', '.join(known) or 'none'}")
        reports = [known[name] for name in arenas]
    faults = 0
    for report in reports:
        try:
            cleared_bytes = clear_arena(report.name)
        except (ArenaUnavailable, EncoderBusy) as error:
            say(f"mimo cache: {report.name}: {error}")
            faults += 1
            continue
        typer.echo(f"{report.name}: {_mib(cleared_bytes)} given back, {_mib(report.usage.leased_bytes)} in use")
    if not reports:
        say(_NONE_RUNS)
    if faults or not reports:
        raise typer.Exit(1)


def _show(console: Console, report: ArenaReport) -> None:
    age = _span(time.time() - report.created_unix_s)
    console.print(f"[bold]{quoted(report.name)}[/]   made by pid {report.pid}, {age} ago")
    usage, capacity = report.usage, report.usage.capacity_bytes
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for state, words in _STATES.items():
        size_bytes = getattr(usage, f"{state}_bytes")
        table.add_row(state, _mib(size_bytes), f"{size_bytes / capacity:.0%}", words)
    table.add_row("total", _mib(capacity), "", f"pages of {report.page_bytes} bytes")
    console.print(table)
    rows = "" if report.width is None else f" with rows of {report.width} {report.dtype}"
    line = f"{report.num_entries:,} embeddings{rows}, {report.num_leases:,} leases"
    if report.oldest_use_age_s is not None and report.newest_use_age_s is not None:
        line += f"; last used {_span(report.newest_use_age_s)} ago, the oldest {_span(report.oldest_use_age_s)} ago"
    console.print(line, soft_wrap=True)
    console.print(_hits(report.hits, report.misses))
    for holder in report.holders:
        state = "" if holder.is_alive else ", has died"
        reserved = f", {_mib(holder.reserved_bytes)} being computed" if holder.reserved_bytes else ""
        console.print(f"  encoder pid {holder.pid}{state}: {_hits(holder.hits, holder.misses)}{reserved}")
    console.print()


def _hits(hits: int, misses: int) -> str:
    asked = hits + misses
    return f"{hits:,} found, {misses:,} computed" + (f" ({hits / asked:.0%} found)" if asked else "")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB"


def _span(seconds: float) -> str:
    """To two units: 3 s, 4 min 5 s, 2 h 10 min, 5 d 3 h."""
    total = max(0, round(seconds))
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if total >= size:
            return f"{total // size} {unit} {total % size // smaller_size} {smaller}"
    return f"{total} s"
