"""What a bench found, as a table, as JSON and as a picture."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.bench_case import Case, Fault, Panel, Result, times_better

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
# Fewer characters than this for a name are no column.
_LEAST_NAME = 16
_PANEL_INCHES = 4.2


def as_json(machine: dict[str, Any], results: Sequence[Result], faults: Sequence[Fault] = ()) -> dict[str, Any]:
    failed = {"failed": [{"name": fault.name, "reason": fault.reason} for fault in faults]} if faults else {}
    return {"machine": machine, "results": [result.as_json() for result in results], **failed}


def write_json(path: Path, machine: dict[str, Any], results: Sequence[Result], faults: Sequence[Fault] = ()) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(as_json(machine, results, faults), indent=2) + "\n")


def show(console: Console, results: Sequence[Result]) -> None:
    """The table, the inputs, and a warning for each case that did not have the machine for itself."""
    headings = ("ours", "plain way", "ratio", "limit", "of limit", "runs")
    rows = [_row(result) for result in results]
    widths = [max(map(len, column)) + 1 for column in zip(headings, *(row[1:] for row in rows), strict=True)]
    room, longest = console.width - sum(widths), max(len(row[0]) for row in rows)
    if room < min(longest, _LEAST_NAME):
        _show_narrow(console, headings, rows)
    else:
        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        # A name that does not fit goes on in the next line: cut off, it would name no case.
        table.add_column("case", overflow="fold")
        # Seven columns have to fit 80 characters.
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    # Without this the columns of a busy machine seem to contradict each other.
    console.print(Text("medians over the runs; ratio and of limit are taken within each run", style="dim"))
    for result in results:
        console.print(Text(f"{result.case.name}: {result.detail}"), soft_wrap=True)
        console.print(Text(f"  plain way: {result.case.baseline}; limit: {result.case.limit}"), soft_wrap=True)
        for line in result.findings.lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
    for result in results:
        others, is_counted = result.others_share, result.case.is_counted
        if others is not None and others > _BUSY_SHARE and not is_counted:
            share = f"{others:.0%}"
            words = f"{result.case.name}: others took {share} of the machine meanwhile; run it again when it is quiet"
            console.print(Text(words, style="yellow"), soft_wrap=True)


def _show_narrow(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A figure a line, where columns would leave no room for names."""
    for name, *figures in rows:
        console.print(Text(name, style="bold"), soft_wrap=True)
        for heading, figure in zip(headings, figures, strict=True):
            console.print(Text(f"  {heading:<9} {figure}"), soft_wrap=True)


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
    panels = joined_panels([panel for result in results for panel in result.findings.panels])
    num_lines = -(-len(panels) // _PANELS_PER_LINE)
    bars_inches = 1.6 + 0.6 * len(rows)
    # Without pyplot: no display, no global state.
    figure = Figure(figsize=(10, bars_inches + _PANEL_INCHES * num_lines), layout="constrained")
    FigureCanvasAgg(figure)
    # Apart, so that long names beside the bars take no room from the panels.
    parts = figure.subfigures(
        1 + bool(panels), 1, height_ratios=[bars_inches, _PANEL_INCHES * num_lines][: 1 + bool(panels)], squeeze=False
    )
    _draw_ratios(parts[0, 0].subplots(), title, rows)
    if panels:
        grid = parts[1, 0].add_gridspec(num_lines, _PANELS_PER_LINE)
        for index, panel in enumerate(panels):
            _draw_panel(parts[1, 0].add_subplot(grid[index // _PANELS_PER_LINE, index % _PANELS_PER_LINE]), panel)
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
        unit = result.case.unit
        words = f"{ratios[at]:.2f}x  ({_figure(result.ours, unit)} against {_figure(result.baseline, unit)})"
        axes.annotate(words, (end, at), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.plot([], [], color=_LIMIT, linewidth=2.5, label="limit")
    axes.axvline(1.0, color=_PLAIN, linewidth=1, linestyle="--", label="what ours stands against")
    axes.set_yticks(range(len(rows)), [result.case.name for result in rows])
    low, high = min([1.0, *ratios, *reaches]), max([1.0, *ratios, *reaches])
    # Room for the words beside the longest bar: a third of the axis.
    low, high = low / 1.1, high * max(high / low, 1.4) ** 0.9
    axes.set_xlim(low, high)
    axes.set_xticks(ticks_between(low, high))
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:,.12g}x")
    axes.set_xlabel("ours and what it stands against, as a ratio (median of runs): right of 1x ours is better")
    axes.set_ylim(-0.7, len(rows) - 0.3)
    # The legend is between title and bars: beside the bars is where their words are.
    axes.set_title(title, loc="left", fontsize=10, pad=24)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, frameon=False)


def ticks_between(low: float, high: float) -> list[float]:
    """Numbers that are short to write, a few to a dozen of them, for a logarithmic axis."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (*(1 + tenth / 10 for tenth in range(10)), *range(2, 10))):
        found = [float(f"{step * 10**exponent:.6g}") for exponent in exponents for step in steps]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 4:
            break
    return found


def joined_panels(panels: Sequence[Panel]) -> list[Panel]:
    """Panels that are parts of one, put together: each curve with the points of all, from left to right."""
    parts: dict[tuple[str, str, str, bool], list[Panel]] = {}
    for panel in panels:
        parts.setdefault((panel.title, panel.x_label, panel.y_label, panel.y_is_logarithmic), []).append(panel)
    joined = []
    for same in parts.values():
        names = dict.fromkeys(who for panel in same for who in panel.curves)
        curves = {who: sorted(point for panel in same for point in panel.curves.get(who, ())) for who in names}
        joined.append(replace(same[0], curves=curves))
    return joined


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    # The first curve lies on top, and those below it are wider: where lines meet, all are seen.
    strokes = zip(panel.curves.items(), itertools.cycle(_STROKES))
    for index, ((who, points), (colour, style)) in enumerate(strokes):
        how: dict[str, Any] = {
            "linewidth": 1.2 + 1.4 * index**0.5,
            "markersize": 3.5 + 2 * index**0.5,
            "zorder": 3 - index / 100,
        }
        axes.plot(*zip(*points, strict=True), style, color=colour, label=who, **how)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({x for points in panel.curves.values() for x, _ in points}))
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    if panel.y_is_logarithmic:
        axes.set_yscale("log")
        values = [y for points in panel.curves.values() for _, y in points]
        axes.set_yticks(ticks_between(min(values) / 1.2, max(values) * 1.2))
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:,.12g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the axes: inside it would cover curves.
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "borderaxespad": 0}
    axes.legend(fontsize=8, frameon=False, ncols=2, markerscale=0.6, handlelength=2.5, **place)
