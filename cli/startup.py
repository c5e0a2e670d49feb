"""What `mimo serve` shows while its stages come up: a live table on a terminal, lines elsewhere, JSON for machines.

On a terminal the logs of the stages go through here, so that the table stays calm: their latest message stands beside
their name, warnings are shown above, and once all are ready logs run on as they come. Of a stage that fails, the last
lines are told, and the reason.
"""

import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.logs import LogFormat, json_line
from cli.plan_units import gib
from cli.supervisor import StageEvent, StageFailed, StageRefused
from cli.terminal import printable_line, quoted

_KEPT_LINES: Final = 200
_SHOWN_LINES: Final = 12
# "2026-01-01 10:00:00,000 decode-0 INFO epd.engine.worker: the message"
_LOG_LINE: Final = re.compile(r"\S+ \S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+: (.*)")
_MENTIONED_BYTES: Final = 1 << 30
_SYMBOLS: Final = {"waiting": "·", "starting": "…", "ready": "✓", "ended": "!"}
_STYLES: Final = {"waiting": "dim", "starting": "", "ready": "green", "ended": "yellow"}


class PlainView:
    """Lines as things happen; logs of stages go to standard error by themselves."""

    captures_logs = False
    is_for_machines = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self) -> None:
        """From here on there is something to see."""

    def close(self) -> None:
        """Nothing that moves is left on the terminal. Harmless twice."""

    def event(self, event: StageEvent) -> None:
        """One line of what happened to a process."""
        said = f"  {event.name:<12} {_words(event)}"
        match event.what:
            case "started":
                self._console.print(said, style="dim")
            case "silent":
                self._console.print(said, style="yellow")
            case "exited" if _is_odd(event):
                self._console.print(said, style="yellow")

    def log(self, name: str, line: str) -> None:
        """A line that a stage has logged, where they come through here."""

    def ready(self, elapsed_s: float, url: str) -> None:
        """Every stage is ready."""
        self._console.print(f"ready after {elapsed_s:.1f} s")

    def stopping(self, within_s: float) -> None:
        """Told to stop, which takes this long at most."""
        self._console.print(_stopping_words(within_s))

    def stopped(self) -> None:
        """All has ended as it was told to."""
        self._console.print("stopped")

    def line_at_once(self, number: int, num_killed: int) -> str:
        """What is said of a second signal. A line, since whoever ends now may be in the middle of printing."""
        return _at_once_words(number, num_killed)

    def failed(self, error: StageFailed) -> None:
        """A stage is beyond restarting; what it logged stands above."""
        self.refused(str(error), stage=error.stage, exit_code=2 if isinstance(error, StageRefused) else 1)

    def refused(self, message: str, *, stage: str | None = None, exit_code: int) -> None:
        """It ends, and why."""
        self._console.print(f"[red]mimo serve:[/] {quoted(message)}")


class JsonView(PlainView):
    """An object per line on standard error, with the keys of the logs, `event` and what belongs to it."""

    is_for_machines = True

    def __init__(self, console: Console, process: str = "supervisor") -> None:
        super().__init__(console)
        self._process = process

    def event(self, event: StageEvent) -> None:
        facts: dict[str, Any] = {"stage": event.name, "pid": event.pid}
        if event.what == "exited":
            facts["returncode"] = event.returncode
        if event.what == "silent":
            facts["silent_s"] = event.silent_s
        words = f"{event.name}: {_words(event)}"
        self._tell(f"stage_{event.what}", words, level="warning" if _is_odd(event) else "info", **facts)

    def ready(self, elapsed_s: float, url: str) -> None:
        self._tell("ready", f"ready after {elapsed_s:.1f} s", elapsed_s=elapsed_s, url=url)

    def stopping(self, within_s: float) -> None:
        self._tell("stopping", _stopping_words(within_s), within_s=within_s)

    def stopped(self) -> None:
        self._tell("stopped", "stopped")

    def line_at_once(self, number: int, num_killed: int) -> str:
        facts = {"event": "killed", "num_killed": num_killed, "exit_code": 128 + number}
        return json_line(self._process, "warning", _at_once_words(number, num_killed), facts)

    def refused(self, message: str, *, stage: str | None = None, exit_code: int) -> None:
        self._tell("failed", message, level="error", stage=stage, exit_code=exit_code)

    def _tell(self, event: str, message: str, *, level: str = "info", **facts: Any) -> None:
        sys.stderr.write(json_line(self._process, level, message, {"event": event, **facts}) + "\n")
        sys.stderr.flush()


@dataclass(slots=True)
class _Row:
    """One stage. `ready_s` is when it was, None before."""

    state: Literal["waiting", "starting", "ready", "ended"] = "waiting"
    pid: int | None = None
    started_s: float | None = None
    ready_s: float | None = None
    said: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))


class LiveView(PlainView):
    """A line per stage that is kept up to date until all are ready, or one has failed."""

    captures_logs = True

    def __init__(
        self,
        console: Console,
        stages: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        super().__init__(console)
        self._rows = {name: _Row() for name in stages}
        self._clock = clock
        self._proc = proc
        self._live: Live | None = Live(console=console, get_renderable=self.table, refresh_per_second=4, transient=True)

    def start(self) -> None:
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def event(self, event: StageEvent) -> None:
        if self._live is None:
            if event.what != "ready":
                super().event(event)
            return
        row = self._rows[event.name]
        match event.what:
            case "started":
                row.state, row.pid, row.started_s = "starting", event.pid, self._clock()
            case "ready":
                row.state, row.ready_s = "ready", self._clock()
            case "silent":
                row.said = f"silent for {event.silent_s:.0f} s: killed"
            case "exited":
                row.state, row.said = "ended", f"{_ending(event)}, starting again"

    def log(self, name: str, line: str) -> None:
        row = self._rows[name]
        row.lines.append(line)
        found = _LOG_LINE.match(line)
        if self._live is None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        elif found is not None:
            row.said = found[2]
            if found[1] != "INFO":
                self._console.print(Text(printable_line(line)), style="yellow", soft_wrap=True)

    def ready(self, elapsed_s: float, url: str) -> None:
        for row in self._rows.values():
            # The last to answer the watch may be ready before it is asked again.
            row.state, row.ready_s = "ready", row.ready_s or self._clock()
        table = self.table()
        self.close()
        self._console.print(table)
        super().ready(elapsed_s, url)

    def stopping(self, within_s: float) -> None:
        self.close()
        super().stopping(within_s)

    def failed(self, error: StageFailed) -> None:
        """The last lines of whoever failed, or of all that were not ready; and the reason."""
        self.close()
        late = [name for name, row in self._rows.items() if row.state != "ready"]
        for name in [error.stage] if error.stage in self._rows else late:
            for line in list(self._rows[str(name)].lines)[-_SHOWN_LINES:]:
                self._console.print(Text(f"  {printable_line(line)}"), style="dim", soft_wrap=True)
        super().failed(error)

    def table(self) -> Table:
        """As it is now."""
        table = Table(box=None, show_header=False, padding=(0, 1))
        # Where there is little room rich shrinks what may be folded: what a stage says, which is cut instead.
        for justify in ("left", "left", "right"):
            table.add_column(justify=justify, no_wrap=True)
        table.add_column()
        for name, row in self._rows.items():
            style = _STYLES[row.state]
            since_s = 0.0 if row.started_s is None else (row.ready_s or self._clock()) - row.started_s
            clock = f"{since_s:.1f} s" if row.started_s is not None else ""
            detail = Text(self._detail(row), no_wrap=True, overflow="ellipsis")
            table.add_row(f"{_SYMBOLS[row.state]} {name}", row.state, clock, detail, style=style)
        return table

    def _detail(self, row: _Row) -> str:
        """What it says, and while it loads how much it has taken into memory: weights are most of it."""
        if row.state == "ready":
            return ""
        held_bytes = self._resident_bytes(row)
        held = f"{gib(held_bytes)} in memory" if held_bytes >= _MENTIONED_BYTES else ""
        return ", ".join(part for part in (held, printable_line(row.said)) if part)

    def _resident_bytes(self, row: _Row) -> int:
        if row.pid is None or row.state != "starting":
            return 0
        try:
            pages = int((self._proc / str(row.pid) / "statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            # It has ended meanwhile.
            return 0
        return pages * 4096


def _words(event: StageEvent) -> str:
    match event.what:
        case "exited":
            return f"pid {event.pid} {_ending(event)}"
        case "silent":
            return f"pid {event.pid} silent for {event.silent_s:.0f} s: killed"
        case "ready":
            return f"pid {event.pid} is ready"
        case "started":
            return f"pid {event.pid}"


def _ending(event: StageEvent) -> str:
    """How a process has ended; a signal by its name."""
    code = event.returncode or 0
    if event.was_told and code in (0, -signal.SIGTERM):
        return "stopped"
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


def _is_odd(event: StageEvent) -> bool:
    """Whether it is more than what starts and stops are made of."""
    return event.what == "silent" or (event.what == "exited" and event.returncode != 0 and _ending(event) != "stopped")


def _stopping_words(within_s: float) -> str:
    return (
        f"stopping: finishing what is in flight, for {within_s:.0f} s at most (drain_s); "
        "a second Ctrl-C or SIGTERM ends it now"
    )


def _at_once_words(number: int, num_killed: int) -> str:
    killed = f", {num_killed} of its processes killed" if num_killed else ""
    return f"ended at once by a second signal ({signal.Signals(number).name}){killed}; what was in flight is cut"


def startup_view(console: Console, stages: Sequence[str], log_format: LogFormat = "text") -> PlainView:
    """What suits whoever reads."""
    if log_format == "text" and console.is_terminal:
        return LiveView(console, stages)
    return plain_view(console, log_format)


def plain_view(console: Console, log_format: LogFormat, process: str = "supervisor") -> PlainView:
    """Nothing that moves: lines for people, or for machines as from `process`."""
    return JsonView(console, process) if log_format == "json" else PlainView(console)
