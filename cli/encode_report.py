"""What `mimo encode` tells its user: progress with rates on a terminal, a line at the end, and what went wrong."""

import json
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any, Final, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cli.encode_inputs import Input
from cli.encode_records import Totals
from cli.encode_run import End, How
from cli.terminal import quoted
from preprocess.ranges import printable

console = Console(stderr=True, highlight=False)
_HEADS: Final[dict[End, str]] = {
    "whole": "",
    "interrupted": "interrupted: ",
    "failures": "stopped by failures: ",
    "output": "stopped: ",
}


class Report:
    """Counts what is done, from any thread, and shows it while the context lasts."""

    def __init__(self, num_inputs: int, *, quiet: bool) -> None:
        self._num_inputs = num_inputs
        self._counting = threading.Lock()
        self._counts: Counter[How] = Counter()
        self._num_rows = 0
        self._num_bytes = 0
        self._begun_s = self._working_s = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._task = self._progress.add_task("loading the model", total=num_inputs, rates="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self) -> None:
        """From now on, time counts for the rates."""
        self._working_s = time.monotonic()
        self._progress.reset(self._task, description="encoding", rates="")

    def note(self, item: Input, how: How, num_rows: int, num_bytes: int) -> None:
        """An input is done."""
        with self._counting:
            self._counts[how] += 1
            if how == "encoded":
                self._num_rows += num_rows
            self._num_bytes += num_bytes
            rates = self._rates()
        name = item.label[-30:]
        self._progress.update(self._task, description=quoted(name), advance=1, rates=rates)

    def conclude(self, totals: Totals, where: str, end: End, *, as_json: bool) -> None:
        """The last lines: how much and how fast, then warnings and failures, the first few of each."""
        elapsed_s = time.monotonic() - self._begun_s
        counts = self._counts
        again = [f"{counts['kept']} were done before"] if counts["kept"] else []
        again += [f"{counts['duplicate']} had the content of others"] if counts["duplicate"] else []
        details = "; ".join([self._rates(), *again])
        _tell(
            f"{_HEADS[end]}{totals.num_done} of {self._num_inputs} files, {totals.num_rows} rows in {elapsed_s:.1f} s "
            f"({details}), {where}"
        )
        for name, warning in totals.warned:
            _tell(f"warning {name}: {warning}", style="yellow")
        if totals.num_warned > len({name for name, _ in totals.warned}):
            _tell(f"{totals.num_warned} files have warnings in all; the index has them", style="yellow")
        for name, reason in totals.failed:
            _tell(f"failed {name}: {reason}", style="red")
        if totals.num_failed > len(totals.failed):
            _tell(f"{totals.num_failed} files failed in all; the list of failures has them", style="red")
        if as_json:
            typer.echo(json.dumps({"summary": self._summary(totals, elapsed_s, end)}))

    def _summary(self, totals: Totals, elapsed_s: float, end: End) -> dict[str, Any]:
        busy_s = self._busy_s()
        return {
            "files": self._num_inputs,
            "done": totals.num_done,
            "failed": totals.num_failed,
            "rows": totals.num_rows,
            "encoded": self._counts["encoded"],
            "done_before": self._counts["kept"],
            "duplicates": self._counts["duplicate"],
            "end": end,
            "elapsed_s": round(elapsed_s, 3),
            "files_per_s": round(self._counts["encoded"] / busy_s, 3),
            "rows_per_s": round(self._num_rows / busy_s, 3),
            "bytes_per_s": round(self._num_bytes / busy_s),
        }

    def _busy_s(self) -> float:
        return max(1e-6, time.monotonic() - self._working_s)

    def _rates(self) -> str:
        """Of what was encoded, and of all bytes that were read."""
        busy_s = self._busy_s()
        return (
            f"{self._counts['encoded'] / busy_s:.1f} files/s, {self._num_rows / busy_s:.0f} rows/s, "
            f"{self._num_bytes / busy_s / 1e6:.1f} MB/s"
        )


def _tell(line: str, style: str | None = None) -> None:
    """One line, whatever is in a file's name."""
    console.print(printable(line), style=style, markup=False, soft_wrap=True)


def tell_failure(line: str) -> None:
    """Why nothing more could be done."""
    _tell(line, style="red")
