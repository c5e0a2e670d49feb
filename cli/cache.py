"""`mimo cache`: what the caches of this host hold, embeddings and KV; emptying them; where a deployment found KV."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cli.cache_view import mib, show_arena, show_kv_store, show_worker
from cli.cache_workers import DeploymentSilent, deployment_tiers
from cli.load import ConfigError
from cli.models import kv_store_dir
from cli.terminal import complain, os_words, say
from encoder import ArenaReport, arena_reports, clear_arena
from encoder.errors import ArenaUnavailable, EncoderBusy
from epd import LocalStoreReport, clear_local_store, local_store_reports

cache = typer.Typer(
    name="cache",
    help="""Look into the caches of this host: embeddings of the encoders that run on it, and local stores of KV.

    Example: mimo cache stats
    """,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_NO_ARENA = "no encoder runs on this host, or none of this user's"
_NO_STORE = "no local store of KV on this host, or none of this user's"

Embeddings = Annotated[bool, typer.Option("--embeddings", help="Embeddings only, unless --kv is given too.")]
Kv = Annotated[bool, typer.Option("--kv", help="KV only, unless --embeddings is given too.")]
Stores = Annotated[
    list[Path] | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help='Of KV, the store in this directory: DIR of engine.kv_store = "local:DIR". May be given several times.',
        show_default='all that this user has in shared memory, and that of "local"',
    ),
]


@cache.command()
def stats(
    embeddings: Embeddings = False,
    kv: Kv = False,
    store: Stores = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Instead: where the workers behind this gateway found KV, and how their stores are."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show what the caches of this host hold: embeddings in shared memory, KV in local stores.

    Of embeddings: bytes by state, users, hits. Of KV: bytes in memory and on disk, pages, ages. Reads only; servers do
    not notice. What was found, missed or damaged is counted by those who asked: with --url it is told, by tier (l1 the
    device, l2 the host's memory, l3 the store, healed), with pages by state and, of each store node, its breaker and
    the pages it did not keep.
    Exit code 1 when there is nothing to show.

    Example: mimo cache stats --json

    Example: mimo cache stats --url http://127.0.0.1:8000
    """
    if url is not None:
        if embeddings or kv or store:
            raise ConfigError("--url asks a deployment; allowed beside it: --json")
        _show_deployment(url, as_json=as_json)
        return
    arenas = arena_reports() if _wants_embeddings(embeddings, kv, store) else []
    stores = _stores("stats", store) if _wants_kv(embeddings, kv) else []
    if as_json:
        typer.echo(json.dumps(_as_json(arenas, stores), indent=2))
    console = Console(highlight=False)
    for arena in () if as_json else arenas:
        show_arena(console, arena)
    for found in () if as_json else stores:
        show_kv_store(console, found)
    if not arenas and not stores:
        _say_none("stats", embeddings, kv, store)
        raise typer.Exit(1)


@cache.command()
def clear(
    arenas: Annotated[
        list[str] | None, typer.Argument(metavar="[ARENA]...", help="Only these, by the name `stats` shows.")
    ] = None,
    embeddings: Embeddings = False,
    kv: Kv = False,
    store: Stores = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was given back as one JSON object.")] = False,
) -> None:
    """Forget every embedding that no request uses right now, and all KV in local stores.

    What is in use stays, and no request fails: what is asked for again is computed again. Servers go on, and fill
    their caches anew. Not touched are an encoder's second tier (encoder.embedding_store), KV that running workers have
    on their devices or in their own memory, and stores on other hosts. Exit code 1 when there is nothing to clear.

    Example: mimo cache clear

    Example: mimo cache clear --kv
    """
    if arenas and (kv or store):
        raise ConfigError(f"{arenas[0]} names an arena, and those hold embeddings; allowed beside it: --embeddings")
    wants_kv = _wants_kv(embeddings, kv) and not arenas
    cleared = _chosen(arenas) if _wants_embeddings(embeddings, kv, store) else []
    stores = _stores("clear", store) if wants_kv else []
    done = [_clear_arena(arena, quiet=as_json) for arena in cleared]
    done += [_clear_store(found, quiet=as_json) for found in stores]
    if as_json:
        typer.echo(json.dumps({"cleared": [one for one in done if one is not None]}, indent=2))
    if not done:
        _say_none("clear", embeddings, kv, store)
    if None in done or not done:
        raise typer.Exit(1)


def _wants_embeddings(embeddings: bool, kv: bool, stores: Sequence[Path] | None) -> bool:
    return embeddings or not (kv or stores)


def _wants_kv(embeddings: bool, kv: bool) -> bool:
    return kv or not embeddings


def _stores(word: str, named: Sequence[Path] | None) -> Sequence[LocalStoreReport]:
    """Raises ConfigError for a directory that holds no store, Exit when one cannot be read."""
    try:
        if not named:
            return local_store_reports([kv_store_dir(os.environ)])
        found = local_store_reports(named, others=False)
    except OSError as error:
        complain(f"mimo cache {word}", f"cannot read the store of KV: {os_words(error)}: {error.filename}", exit_code=1)
        raise typer.Exit(1) from error
    missing = {str(directory) for directory in named} - {report.directory for report in found}
    if missing:
        raise ConfigError(f"--store {min(missing)}: no local store of KV is there")
    return found


def _chosen(names: Sequence[str] | None) -> list[ArenaReport]:
    """Raises ConfigError."""
    reports = arena_reports()
    if not names:
        return reports
    known = {report.name: report for report in reports}
    if unknown := sorted(set(names) - known.keys()):
        raise ConfigError(f"no arena {unknown[0]} on this host; there are: {', '.join(known) or 'none'}")
    return [known[name] for name in names]


def _clear_arena(report: ArenaReport, *, quiet: bool) -> dict[str, Any] | None:
    """What was given back, told unless `quiet`; None where that failed, which is told."""
    try:
        cleared_bytes = clear_arena(report.name)
    except (ArenaUnavailable, EncoderBusy) as error:
        complain("mimo cache clear", f"{report.name}: {error}", exit_code=1)
        return None
    if not quiet:
        typer.echo(f"{report.name}: {mib(cleared_bytes)} given back, {mib(report.usage.leased_bytes)} in use")
    return {"arena": report.name, "cleared_bytes": cleared_bytes, "leased_bytes": report.usage.leased_bytes}


def _clear_store(report: LocalStoreReport, *, quiet: bool) -> dict[str, Any] | None:
    """As `_clear_arena`."""
    try:
        cleared_bytes = clear_local_store(Path(report.directory))
    except OSError as error:
        complain("mimo cache clear", f"{report.directory}: {os_words(error)}", exit_code=1)
        return None
    if not quiet:
        typer.echo(f"{report.directory}: {mib(cleared_bytes)} of KV given back")
    return {"store": report.directory, "cleared_bytes": cleared_bytes}


def _show_deployment(url: str, *, as_json: bool) -> None:
    """Raises ConfigError, Exit."""
    try:
        workers = deployment_tiers(url)
    except DeploymentSilent as error:
        complain("mimo cache stats", str(error), exit_code=1)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({"url": url, "workers": [asdict(worker) for worker in workers]}, indent=2))
    console = Console(highlight=False)
    for worker in () if as_json else workers:
        show_worker(console, worker)
    if not workers:
        complain("mimo cache stats", f"no worker has been heard of at {url}", exit_code=1)
        raise typer.Exit(1)


def _as_json(arenas: Sequence[ArenaReport], stores: Sequence[LocalStoreReport]) -> dict[str, Any]:
    return {"embeddings": [asdict(report) for report in arenas], "kv_stores": [asdict(report) for report in stores]}


def _say_none(word: str, embeddings: bool, kv: bool, stores: Sequence[Path] | None) -> None:
    if _wants_embeddings(embeddings, kv, stores):
        say(f"mimo cache {word}: {_NO_ARENA}")
    if _wants_kv(embeddings, kv):
        say(f"mimo cache {word}: {_NO_STORE}")
