"""What a bench found, as a table, as JSON and as a picture."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.bench_case import Case, Panel, Result, times_better

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Above this share of the machine in other hands, figures are not worth keeping.
_BUSY_SHARE = 0.1
_OURS, _PLAIN, _LIMIT = "#2f6fb5", "#777777", "#c2452d"
_PURPLE, _GREEN = "#7a4fa3", "#3f8f4f"
# Of the curves of a panel, in their order: colour, and how the line is drawn. Two servers with two quantiles each take
# the first four.
_STROKES = (
    (_OURS, "o-"),
    (_PLAIN, "o-"),
    (_OURS, "o:"),
    (_PLAIN, "o:"),
    (_LIMIT, "o-"),
    (_PURPLE, "o-"),
    (_GREEN, "o--"),
)
_PANELS_PER_LINE = 2
_PANEL_INCHES = 3.2


def as_json(machine: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    return {"machine": machine, "results": [result.as_json() for result in results]}


def write_json(path: Path, machine: dict[str, Any], results: Sequence[Result]) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(as_json(machine, results), indent=2) + "\n")


def show(console: Console, results: Sequence[Result]) -> None:
    """The table, the inputs, and a warning for each case that did not have the machine for itself."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    # A name that does not fit goes on in the next line: cut off, it would name no case.
    table.add_column("case", overflow="fold")
    # Seven columns have to fit 80 characters.
    for heading in ("ours", "plain way", "ratio", "limit", "of limit", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_row(result))
    console.print(table)
    # Without this the columns of a busy machine seem to contradict each other.
    console.print(Text("medians over the runs; ratio and of limit are taken within each run", style="dim"))
    for result in results:
        console.print(Text(f"{result.case.name}: {result.detail}"), soft_wrap=True)
        console.print(Text(f"  plain way: {result.case.baseline}; limit: {result.case.limit}"), soft_wrap=True)
        for line in result.findings.lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
    for result in results:
        if result.others_share is not None and result.others_share > _BUSY_SHARE:
            share = f"{result.others_share:.0%}"
            words = f"{result.case.name}: others took {share} of the machine meanwhile; run it again when it is quiet"
            console.print(Text(words, style="yellow"), soft_wrap=True)


def show_cases(console: Console, cases: Sequence[Case]) -> None:
    """Names, and what stands against what."""
    for case in cases:
        console.print(Text(case.name, style="bold"), soft_wrap=True)
        console.print(Text(f"  ours: {case.ours}\n  plain way: {case.baseline}\n  limit: {case.limit}"), soft_wrap=True)


def _row(result: Result) -> list[str]:
    unit = result.case.unit
    return [
        result.case.name.partition(".")[2],
        _figure(result.ours, unit),
        _figure(result.baseline, unit),
        "-" if result.ratio is None else f"{result.ratio:.2f}x",
        _figure(result.limit, unit),
        "-" if result.of_limit is None else f"{result.of_limit:.2f}",
        str(len(result.samples["ours"])),
    ]


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s" and value < 1:
        value, unit = value * 1000, "ms"
    if unit == "hits":
        return f"{value:.1%}"
    unit = {"req/s": "/s", "GFLOP/s": "GF/s", "tok/MiB": "/MiB"}.get(unit, unit)
    if unit == "B":
        return f"{value:,.0f} B"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def write_plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """One row per case: ours and the limit as multiples of the plain way; below, what curves there are. A PNG.

    Needs matplotlib. Cases without a plain way have no row. Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [result for result in reversed(results) if result.ratio is not None]
    panels = [panel for result in results for panel in result.findings.panels]
    num_lines = -(-len(panels) // _PANELS_PER_LINE)
    bars_inches = 1.6 + 0.6 * len(rows)
    # Without pyplot: no display, no global state.
    figure = Figure(figsize=(9, bars_inches + _PANEL_INCHES * num_lines), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [bars_inches, *[_PANEL_INCHES] * num_lines]
    grid = figure.add_gridspec(1 + num_lines, _PANELS_PER_LINE, height_ratios=heights)
    _draw_ratios(figure.add_subplot(grid[0, :]), title, rows)
    for index, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(grid[1 + index // _PANELS_PER_LINE, index % _PANELS_PER_LINE]), panel)
    figure.savefig(path, format="png", dpi=140)


def _draw_ratios(axes: "Axes", title: str, rows: Sequence[Result]) -> None:
    ratios = [result.ratio or 1.0 for result in rows]
    # From the plain way to the right is better, to the left worse, and equal factors are equally long.
    axes.set_xscale("log")
    axes.barh(range(len(rows)), [ratio - 1 for ratio in ratios], left=1, height=0.55, color=_OURS, label="ours")
    reaches = []
    for at, result in enumerate(rows):
        # Beside the bar, and beside the limit where that would cross the words.
        end = max(ratios[at], 1.0)
        if result.baseline is not None and result.limit is not None:
            reach = times_better(result.limit, result.baseline, result.case.unit)
            reaches.append(reach)
            axes.plot([reach] * 2, [at - 0.38, at + 0.38], color=_LIMIT, linewidth=2.5)
            end = reach if end <= reach < 3 * end else end
        words = f"{ratios[at]:.2f}x  ({_figure(result.ours, result.case.unit)})"
        axes.annotate(words, (end, at), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.plot([], [], color=_LIMIT, linewidth=2.5, label="limit")
    axes.axvline(1.0, color=_PLAIN, linewidth=1, linestyle="--", label="plain way")
    axes.set_yticks(range(len(rows)), [result.case.name for result in rows])
    # Room for the words beside the longest bar.
    axes.set_xlim(min([1.0, *ratios, *reaches]) / 1.2, max([1.0, *ratios, *reaches]) * 3)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_xlabel("times better than the plain way (median of runs)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    # Above the bars: beside them is where their words are.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    # The first curve lies on top of those that it meets.
    strokes = zip(panel.curves.items(), itertools.cycle(_STROKES))
    for index, ((who, points), (colour, style)) in enumerate(strokes):
        axes.plot(*zip(*points, strict=True), style, color=colour, label=who, markersize=4, zorder=3 - index / 100)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({x for points in panel.curves.values() for x, _ in points}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
