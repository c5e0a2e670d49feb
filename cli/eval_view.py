"""What an evaluation found: counted per task, shown as a table or as JSON."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.eval_client import NoAnswer, Reply


@dataclass(frozen=True, slots=True)
class Miss:
    """An answer that is not the expected one."""

    index: int
    expected: str
    got: str


@dataclass(slots=True)
class Tally:
    """One task. A request without an answer counts as asked, and as not exact. Keeps at most `max_misses` answers."""

    task: str
    num_planned: int
    max_misses: int = 3
    num_exact: int = 0
    tokens: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each kind of error."""
    misses: list[Miss] = field(default_factory=list)

    def answered(self, index: int, expected: str, reply: Reply) -> None:
        self.tokens.append(reply.completion_tokens)
        self.total_s.append(reply.total_s)
        if reply.ttft_s is not None:
            self.ttft_s.append(reply.ttft_s)
        if reply.text == expected:
            self.num_exact += 1
        elif len(self.misses) < self.max_misses:
            self.misses.append(Miss(index, expected, reply.text))

    def failed(self, error: NoAnswer) -> None:
        self.errors[error.kind] += 1
        self.messages.setdefault(error.kind, str(error))

    @property
    def num_asked(self) -> int:
        return len(self.tokens) + self.errors.total()

    @property
    def is_complete(self) -> bool:
        """Every request that was planned got an answer."""
        return len(self.tokens) == self.num_planned

    @property
    def exact_share(self) -> float | None:
        """0 to 1 of what was asked; None when nothing was."""
        return self.num_exact / self.num_asked if self.num_asked else None

    def as_json(self) -> dict[str, Any]:
        """Plain values; what was not measured is null."""
        return {
            "task": self.task,
            "planned": self.num_planned,
            "asked": self.num_asked,
            "answered": len(self.tokens),
            "exact": self.num_exact,
            "exact_share": self.exact_share,
            "answer_tokens": {
                "mean": sum(self.tokens) / len(self.tokens) if self.tokens else None,
                "min": min(self.tokens, default=None),
                "max": max(self.tokens, default=None),
            },
            "ttft_p50_s": median(self.ttft_s) if self.ttft_s else None,
            "total_p50_s": median(self.total_s) if self.total_s else None,
            "errors": {kind: {"count": n, "message": self.messages[kind]} for kind, n in self.errors.most_common()},
            "misses": [{"index": miss.index, "expected": miss.expected, "got": miss.got} for miss in self.misses],
        }


def table(tallies: Sequence[Tally]) -> Table:
    """One row per task that was begun, and one for all of them."""
    # Seven columns have to fit 80 characters.
    shown = Table(title="Held-out tasks", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("task", no_wrap=True)
    for heading in ("asked", "exact", "tokens (min-max)", "TTFT p50", "total p50", "errors"):
        shown.add_column(heading, justify="right", no_wrap=True)
    begun = [tally for tally in tallies if tally.num_asked]
    for tally in begun:
        shown.add_row(*_row(tally))
    if len(begun) > 1:
        shown.add_section()
        shown.add_row(*_row(_sum(begun)))
    return shown


def _row(tally: Tally) -> list[str]:
    tokens = tally.tokens
    return [
        tally.task,
        f"{tally.num_asked}" if tally.num_asked == tally.num_planned else f"{tally.num_asked} of {tally.num_planned}",
        percent(tally.exact_share),
        f"{sum(tokens) / len(tokens):.1f} ({min(tokens)}-{max(tokens)})" if tokens else "-",
        f"{median(tally.ttft_s):.3f} s" if tally.ttft_s else "-",
        f"{median(tally.total_s):.3f} s" if tally.total_s else "-",
        str(tally.errors.total()),
    ]


def _sum(tallies: Sequence[Tally]) -> Tally:
    whole = Tally("all", sum(tally.num_planned for tally in tallies))
    for tally in tallies:
        whole.num_exact += tally.num_exact
        whole.tokens += tally.tokens
        whole.ttft_s += tally.ttft_s
        whole.total_s += tally.total_s
        whole.errors += tally.errors
    return whole


def percent(share: float | None) -> str:
    """One decimal, rounded down: 100.0% means all."""
    return "-" if share is None else f"{math.floor(share * 1000) / 10:.1f}%"


def show(console: Console, tallies: Sequence[Tally]) -> None:
    """The table, then what went wrong."""
    console.print(table(tallies))
    for tally in tallies:
        for kind, count in tally.errors.most_common():
            console.print(Text(f"{tally.task}: {count} x {kind}: {tally.messages[kind]}", style="red"), soft_wrap=True)
        for miss in tally.misses:
            console.print(Text(f"{tally.task} {miss.index}"), soft_wrap=True)
            console.print(Text(f"  expected {miss.expected!r}\n  got      {miss.got!r}"), soft_wrap=True)
