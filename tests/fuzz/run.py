"""`scripts/fuzz_media`: a fuzzing campaign by hand, or one of its items."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from preprocess.pool import DecodePool
from tests.fuzz.campaign import SETTINGS, Item, Outcome, campaign, make_item, try_item
from tests.fuzz.seeds import seeds

_TOLD = ("fault", "crash", "late", "forbidden", "MediaDecodeTimeout", "MediaTooLarge")


def main() -> None:
    parser = argparse.ArgumentParser(description="Damaged media through isolated decoders.")
    parser.add_argument("--count", type=int, default=1000, help="items to try")
    parser.add_argument("--seed", type=int, default=1, help="which campaign")
    parser.add_argument("--first", type=int, default=0, help="number of the first item")
    parser.add_argument("--item", type=int, help="try this item alone and say everything about it")
    parser.add_argument("--save", type=Path, help="with --item: write its bytes to this file")
    parser.add_argument("--out", type=Path, help="a log of all that is not harmless, and the table")
    options = parser.parse_args()
    if options.item is not None:
        item = make_item(options.seed, options.item, seeds())
        if options.save is not None:
            options.save.write_bytes(item.content)
        sys.exit(asyncio.run(_one(item)))
    # Workers report their ends; the campaign does so with the item.
    logging.disable(logging.ERROR)
    sys.exit(asyncio.run(_many(options.seed, options.first, options.count, options.out)))


async def _one(item: Item) -> int:
    print(f"item {item.number}: {item.name}, {len(item.content)} bytes{', in parts' if item.in_parts else ''}")
    pool = DecodePool(SETTINGS)
    try:
        outcome = await try_item(pool, item)
    finally:
        pool.close()
    print(f"{outcome.kind} after {outcome.seconds:.2f} s\n{outcome.words}")
    return int(outcome.bad)


async def _many(seed: int, first: int, count: int, out: Path | None) -> int:
    started_s = time.monotonic()
    totals: Counter[str] = Counter()
    log = None if out is None else out.open("w")
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    with Progress(*columns, refresh_per_second=2) as progress:
        task = progress.add_task("", total=count, told="")

        def report(outcome: Outcome) -> None:
            totals[outcome.kind] += 1
            progress.update(task, advance=1, told=", ".join(f"{totals[kind]} {kind}" for kind in _TOLD if totals[kind]))
            if outcome.kind in _TOLD and log is not None:
                _write(log, seed, outcome)

        counts = await campaign(seed, range(first, first + count), report=report)
    seconds = time.monotonic() - started_s
    found = ", ".join(f"{number} {kind}" for kind, number in totals.most_common())
    summary = f"{sum(counts.values())} items of campaign {seed} from {first} in {seconds:.0f} s: {found}"
    for console in (Console(), *([Console(file=log, width=200)] if log is not None else [])):
        console.print(_table(counts))
        console.print(summary, soft_wrap=True)
    if log is not None:
        log.close()
    return int(any(totals[kind] for kind in ("fault", "late", "forbidden")))


def _write(log: TextIO, seed: int, outcome: Outcome) -> None:
    log.write(
        f"--seed {seed} --item {outcome.item.number} ({outcome.item.name}, {len(outcome.item.content)} bytes): "
        f"{outcome.kind} after {outcome.seconds:.2f} s {outcome.words}\n"
    )
    log.flush()


def _table(counts: Counter[tuple[str, str]]) -> Table:
    names = sorted({name for name, _ in counts})
    kinds = sorted({kind for _, kind in counts}, key=lambda kind: (kind != "ok", kind))
    table = Table("format", *kinds)
    for name in names:
        table.add_row(name, *(str(counts[name, kind] or "") for kind in kinds))
    table.add_section()
    table.add_row("all", *(str(sum(counts[name, kind] for name in names)) for kind in kinds))
    return table


if __name__ == "__main__":
    main()
