"""`mimo bench`: what this machine does, against the plain way and against the limit, measured in the same run."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from cli.bench_case import BenchFailed, Case, Fault, Result, Setting, run_case
from cli.bench_choice import chosen_cases, runnable_cases
from cli.bench_machine import Busyness, describe_machine, num_cores
from cli.bench_report import show, show_cases, write_json, write_plot
from cli.load import ConfigError
from cli.models import cache_dir
from cli.signals import exit_code, terminable
from cli.terminal import error_console
from encoder.errors import EncoderError
from preprocess.errors import MediaError

console = error_console()

bench = typer.Typer(
    name="bench",
    help="""Measure this machine: ours, the plain way and the limit, in turns within one run.

    Figures of different days or machines do not compare, ratios within a run do. Let nothing else run meanwhile: what
    others took of the CPU is measured and told.

    Example: mimo bench media --quick
    """,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_RUNS = 3
_PLOT_NEEDS = "matplotlib"
_PLOT_MODULES = ("matplotlib.figure", "matplotlib.backends.backend_agg")
_EXTRA = "test"
"""Brings what cases stand against."""
_PIPED_WIDTH = 1000

Only = Annotated[
    list[str] | None,
    typer.Option(
        help="Run the case of this name, or all that begin so; may be given several times. A wrong name lists them."
    ),
]
Runs = Annotated[int, typer.Option(min=1, help="Rounds per case; results are medians.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny inputs, seconds in all: shows that it works, not how fast it is.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=num_cores(), help="For ours and for the others.", show_default="the cores there are"),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write everything found to this file.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw the ratios; needs matplotlib.")
]
ListCases = Annotated[
    bool, typer.Option("--list", help="Only tell the cases, all or those of --only, and what stands against what.")
]


@bench.callback()
def group() -> None:
    """One subcommand per part of the pipeline."""


@bench.command()
def media(
    only: Only = None,
    runs: Runs = _RUNS,
    quick: Quick = False,
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    list_cases: ListCases = False,
) -> None:
    """Pictures, video and sound: fetched, decoded, cut into patches.

    Per case three contenders take turns: ours, the plain way (one item after another with the usual libraries) and the
    limit (the part that nobody can leave out, done alone). "ratio" is the median over rounds of plain way / ours, and
    "of limit" that of limit / ours: 1 is at the limit, and a planner that skips what no sample needs can pass it.
    MiMo-V2.5's settings decide how many frames and pixels there are. The video inputs take minutes to make the first
    time, and are kept in $MIMO_CACHE_DIR or ~/.cache/mimo-epd.

    Example: mimo bench media --json media.json --plot media.png

    Example: mimo bench media --only media.urls100_200ms --runs 5
    """
    from cli.bench_media import CASES, PACKAGES

    asked = _Asked(only or [], runs, quick, threads or num_cores(), json_file, plot, list_cases)
    _bench("media", CASES, PACKAGES, asked)


@bench.command()
def encoder(
    only: Only = None,
    runs: Runs = _RUNS,
    quick: Quick = False,
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    list_cases: ListCases = False,
) -> None:
    """The encoder's server: requests per second, latency, what its cache and its ring are worth.

    Two servers with mimo-nano's tower take turns, asked over HTTP for pictures that they fetch: ours, as `mimo serve
    --role encoder` starts it, and the plain way, which encodes one request after another. "ratio" is the median over
    rounds of ours / plain way where more is better, as with requests per second and hits, and plain way / ours where
    less is; above 1 ours is better. "of limit" is the share of what the tower's arithmetic alone would allow. `--plot`
    also draws latency and throughput over the number of requests at a time. All of it takes some six minutes.

    Example: mimo bench encoder --json encoder.json --plot encoder.png

    Example: mimo bench encoder --only throughput_c64 --runs 5
    """
    from cli.bench_encoder import CASES, PACKAGES

    asked = _Asked(only or [], runs, quick, threads or num_cores(), json_file, plot, list_cases)
    _bench("encoder", CASES, PACKAGES, asked)


@bench.command()
def kv(
    only: Only = None,
    runs: Runs = _RUNS,
    quick: Quick = False,
    threads: Threads = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    list_cases: ListCases = False,
    tiers: Annotated[
        bool, typer.Option("--tiers", help="Instead: host memory and store behind the device, cases tiers.*.")
    ] = False,
    workloads: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where agent.toml, conversation.toml and synthetic.toml are.",
            show_default="those of configs/bench",
        ),
    ] = None,
) -> None:
    """The KV cache: bytes per token, hits at equal bytes, time to the first token, and the engine's speed.

    Hits are counted in a replay of drawn workloads on the real cache, with no model behind it, and are the same on
    every machine: agents at work, people in conversation, questions about documents. Ours stands against a single pool
    of as many bytes, against itself without one of its parts, and against a cache that loses nothing. A hit rate is the
    share of prompt tokens that went through no model; what healing computes again counts as computed. `--plot` also
    draws hit rates over the bytes there are.

    Example: mimo bench kv --json kv.json --plot kv.png

    With `--tiers` it is the hierarchy that is measured: the first token of a prompt whose KV is on the device, in the
    host's memory, in the local store, to be healed, or nowhere; what an engine finds in the store of another that has
    ended; hits of agents with little device memory and a host behind it; and bytes that come out of a store.

    Example: mimo bench kv --only agent

    Example: mimo bench kv --tiers --json tiers.json --plot tiers.png
    """
    from cli.bench_kv import PACKAGES, kv_cases, tier_cases

    if workloads is not None and not workloads.is_dir():
        raise ConfigError(f"--workloads {workloads}: no such directory")
    asked = _Asked(only or [], runs, quick, threads or num_cores(), json_file, plot, list_cases)
    if tiers:
        _bench("tiers", tier_cases(workloads), PACKAGES, asked, command="kv --tiers")
    else:
        _bench("kv", kv_cases(workloads), PACKAGES, asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The flags that all groups share."""

    only: Sequence[str]
    runs: int
    quick: bool
    num_threads: int
    json_file: Path | None
    plot: Path | None
    list_cases: bool


def _bench(
    group_name: str, cases: Sequence[Case], packages: Sequence[str], asked: _Asked, *, command: str | None = None
) -> None:
    """`command`: what the user wrote, where that is not the group's name.

    Raises ConfigError, or Exit when something went wrong on the way.
    """
    chosen = chosen_cases(cases, asked.only, group_name)
    for case in chosen:
        if case.check is not None:
            case.check()
    if asked.list_cases:
        show_cases(_output(), chosen)
        return
    chosen, left_out = runnable_cases(chosen, are_named=bool(asked.only), extra=_EXTRA)
    _check_targets(asked.json_file, asked.plot)
    if left_out is not None:
        _complain(left_out, style="yellow")
    setting = Setting(cache_dir=cache_dir(os.environ) / "bench", num_threads=asked.num_threads, quick=asked.quick)
    machine = describe_machine(packages, num_threads=setting.num_threads, quick=asked.quick)
    busyness = Busyness()
    results, faults, interrupted = _run_all(chosen, setting, asked.runs)
    machine["others_cpu_share"] = busyness.others_share()
    quick = ", quick" if asked.quick else ""
    threads = "1 thread" if setting.num_threads == 1 else f"{setting.num_threads} threads"
    title = f"mimo bench {command or group_name}, {threads} on {machine['cpu']}{quick}"
    _report(title, machine, results, faults, asked)
    for reason in dict.fromkeys(fault.reason for fault in faults):
        _complain(f"{', '.join(fault.name for fault in faults if fault.reason == reason)}: {reason}")
    if interrupted is not None:
        _complain(f"interrupted; {len(results)} of {len(chosen)} cases were done")
        raise typer.Exit(interrupted)
    if faults:
        raise typer.Exit(1)


def _complain(words: str, style: str = "red") -> None:
    console.print(f"mimo bench: {words}", style=style, markup=False, soft_wrap=True)


def _output() -> Console:
    """Standard output; lines that go to a file or another program are as long as they are."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def _check_targets(json_file: Path | None, plot: Path | None) -> None:
    """Before minutes are spent measuring. Raises ConfigError."""
    for flag, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and str(path).startswith("-"):
            raise ConfigError(f"{flag} needs a file name, not {path}; one that begins so is written ./{path}")
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: no such directory {path.parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"{flag} {path} is a directory")
    if plot is not None and plot.suffix.lower() != ".png":
        raise ConfigError(f"--plot {plot}: allowed is a name that ends in .png")
    if plot is None:
        return
    if find_spec(_PLOT_NEEDS) is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mimo-epd[bench]'")
    try:
        for module in _PLOT_MODULES:
            import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib, which is there and does not load ({error}); "
            "pip install --force-reinstall 'mimo-epd[bench]'"
        ) from error


def _run_all(cases: Sequence[Case], setting: Setting, runs: int) -> tuple[list[Result], list[Fault], int | None]:
    """Results, cases without one and why, and the exit code of an interruption, which ends the run early."""
    results: list[Result] = []
    faults: list[Fault] = []
    with terminable(), _bars() as bars:
        for case in cases:
            try:
                results.append(run_case(case, setting, runs=runs, bars=bars))
            except (BenchFailed, MediaError, EncoderError, ConfigError, OSError) as error:
                faults.append(Fault(case.name, str(error)))
            except ImportError as error:
                package = case.needs or error.name or "a package"
                words = f"{package} is there and does not load ({error})"
                faults.append(Fault(case.name, f"{words}; pip install --force-reinstall 'mimo-epd[{_EXTRA}]'"))
            except KeyboardInterrupt as interrupt:
                return results, faults, exit_code(interrupt)
            except Exception as error:  # noqa: BLE001
                # A fault of ours in one case: the results of the others are kept, and where it was is told.
                fault = Fault(case.name, f"{type(error).__name__}: {error}")
                if fault.reason not in {known.reason for known in faults}:
                    console.print_exception(max_frames=8)
                faults.append(fault)
    return results, faults, None


def _report(
    title: str, machine: dict[str, object], results: Sequence[Result], faults: Sequence[Fault], asked: _Asked
) -> None:
    try:
        if asked.json_file is not None and (results or faults):
            write_json(asked.json_file, machine, results, faults)
        if not results:
            return
        show(_output(), results)
        if asked.plot is not None:
            write_plot(asked.plot, title, results)
    except OSError as error:
        _complain(f"cannot write {error.filename}: {error.strerror}")
        raise typer.Exit(1) from error


class _Steps:
    """One bar at a time, for the step that is under way."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, what: str, total: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total)

    def advance(self, amount: int = 1) -> None:
        if self._task is not None:
            self._progress.advance(self._task, amount)


@contextmanager
def _bars() -> Iterator[_Steps]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeLeft())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Steps(progress)
