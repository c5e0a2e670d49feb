"""What `mimo encode` tells its user: progress with rates on a terminal, a line at the end, and what went wrong."""

import json
import threading
import time
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

import typer
from rich.cells import cell_len
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from cli.encode_inputs import Input
from cli.encode_records import Totals
from cli.encode_run import End, How
from cli.terminal import error_console
from preprocess.ranges import printable

console = error_console()
_BAR_CHARS: Final = 20
_TOLD_EVERY_S: Final = 10.0
"""Where there is no terminal that a bar could move on."""
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
        self._num_failed = 0
        self._doing = "loading the model"
        self._ended = threading.Event()
        self._teller: threading.Thread | None = None
        self._progress = Progress(
            _Line(self), console=console, disable=quiet or not console.is_terminal, refresh_per_second=5
        )
        self._progress.add_task("")

    def __enter__(self) -> Self:
        self._progress.start()
        if not console.is_terminal:
            self._teller = threading.Thread(target=self._tell_now_and_then, name="report", daemon=True)
            self._teller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._ended.set()
        if self._teller is not None:
            self._teller.join()

    def begin(self) -> None:
        """From now on, time counts for the rates."""
        self._working_s = time.monotonic()
        self._doing = "encoding"

    def note(self, item: Input, how: How, num_rows: int, num_bytes: int) -> None:
        """An input is done."""
        with self._counting:
            self._counts[how] += 1
            self._num_failed += how == "failed"
            if how == "encoded":
                self._num_rows += num_rows
                self._num_bytes += num_bytes
            self._doing = item.label[-30:]

    @property
    def num_made(self) -> int:
        """Inputs whose rows were written by this run."""
        return self._counts["encoded"] + self._counts["duplicate"]

    def line(self, width: int) -> str:
        """How far it has come, in so many columns: what matters most comes first, and what does not fit is left out."""
        num_done = self._counts.total()
        total = self._num_inputs
        count = f"{num_done}/{total}"
        if self._num_failed:
            count += f", {self._num_failed} failed"
        busy_s = self._busy_s()
        parts = [count]
        if num_done:
            parts.append(f"{num_done / busy_s:.1f} files/s")
            parts.append(f"{timedelta(seconds=round((total - num_done) * busy_s / num_done))} left")
        full = num_done * _BAR_CHARS // total
        bar = "#" * full + "-" * (_BAR_CHARS - full)
        text = ""
        for part in (*parts, bar, f"{self._num_rows / busy_s:.0f} rows/s", printable(self._doing)):
            longer = f"{text}  {part}" if text else part
            if text and cell_len(longer) > width:
                break
            text = longer
        return text

    def _tell_now_and_then(self) -> None:
        while not self._ended.wait(_TOLD_EVERY_S):
            _tell(self.line(200))

    def conclude(self, totals: Totals, where: str, end: End, *, as_json: bool) -> None:
        """The last lines: how much and how fast, then warnings and failures, the first few of each."""
        elapsed_s, busy_s = time.monotonic() - self._begun_s, self._busy_s()
        counts = self._counts
        again = [f"{counts['kept']} done before"] if counts["kept"] else []
        again += [f"{counts['encoded']} encoded now: {self._rates(busy_s)}"]
        again += [f"{counts['duplicate']} with the content of others"] if counts["duplicate"] else []
        _tell(
            f"{_HEADS[end]}{totals.num_done} of {self._num_inputs} files, {totals.num_rows} rows in {busy_s:.1f} s "
            f"({'; '.join(again)}), {where}"
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
            typer.echo(json.dumps({"summary": self._summary(totals, elapsed_s, busy_s, end)}))

    def _summary(self, totals: Totals, elapsed_s: float, busy_s: float, end: End) -> dict[str, Any]:
        """`elapsed_s` is with loading the model, `busy_s` without: what the rates, of what was encoded, are over."""
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
            "busy_s": round(busy_s, 3),
            "files_per_s": round(self._counts["encoded"] / busy_s, 3),
            "rows_per_s": round(self._num_rows / busy_s, 3),
            "bytes_per_s": round(self._num_bytes / busy_s),
        }

    def _busy_s(self) -> float:
        return max(1e-6, time.monotonic() - self._working_s)

    def _rates(self, busy_s: float) -> str:
        """Of what was encoded."""
        return (
            f"{self._counts['encoded'] / busy_s:.1f} files/s, {self._num_rows / busy_s:.0f} rows/s, "
            f"{self._num_bytes / busy_s / 1e6:.1f} MB/s"
        )


class _Line(ProgressColumn):
    """As wide as the terminal."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def render(self, task: Task) -> Text:
        return Text(self._report.line(console.width), no_wrap=True)


def _tell(line: str, style: str | None = None) -> None:
    """One line, whatever is in a file's name."""
    console.print(printable(line), style=style, markup=False, soft_wrap=True)


def tell_note(line: str) -> None:
    """What may surprise later."""
    _tell(line, style="yellow")


def tell_failure(line: str) -> None:
    """Why nothing more could be done."""
    _tell(line, style="red")
