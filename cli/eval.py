"""`mimo eval`: how well the built-in model answers what it was trained to do, asked over HTTP as any client asks."""

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cli.chat_client import server_root
from cli.eval_client import ChatClient, NoAnswer, served_model
from cli.eval_view import Tally, percent, show
from cli.interrupts import EXIT_INTERRUPTED
from cli.load import MODES, ConfigError, load
from cli.processes import free_port
from cli.runtime import run_directory
from cli.service import service
from cli.stage import die_with_parent
from cli.supervisor import StageFailed
from cli.terminal import error_console, os_words

console = error_console()

_MAX_RENDERERS = 4
# Room for answers that begin right and go on too long, so that they are seen.
_SPARE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of whom. `url` None starts a service in `mode`."""

    url: str | None
    mode: str
    model: str | None
    tasks: tuple[str, ...]
    count: int
    concurrency: int
    stream: bool


def evaluate(
    url: Annotated[
        str | None, typer.Option(help="Ask this server, e.g. http://127.0.0.1:8000; else a service is started.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help=f"Of the service that is started: {', '.join(MODES)}.", show_default="epd")
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(
            help="A built-in model or a directory; with --url the served name.",
            show_default="mimo-nano; with --url the first the server lists",
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks to ask, parted by commas; a wrong name lists them.", show_default="all")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Samples per task.")] = 1000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Streamed answers, which time the first.")
    ] = True,
    failures: Annotated[int, typer.Option(min=0, help="Wrong answers to show per task.")] = 3,
    require: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Exit with 1 when a task's exact share is below, e.g. 0.95.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON object to this file.")] = None,
) -> None:
    """Ask held-out samples of the tasks that the built-in model was trained on, and count exact answers.

    Pictures, clips and sounds are sent as real files, the answers are greedy. Samples are the same every time, and none
    took part in training. Exit code 0 means that every request got an answer.

    Example: mimo eval --count 100 --tasks shapes,keys
    """
    if url is not None and mode:
        raise ConfigError("--mode is for a service that is started here; with --url it says nothing")
    plan = Plan(
        url=None if url is None else server_root(url),
        mode=mode or MODES[0],
        model=model,
        tasks=_chosen_tasks(tasks),
        count=count,
        concurrency=concurrency,
        stream=stream,
    )
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: no such directory {out.parent}")
    if out is not None and out.exists() and not out.is_file():
        raise ConfigError(f"--out {out}: exists and is not a regular file")
    tallies = [Tally(task, count, failures) for task in plan.tasks]
    started_s = time.monotonic()
    fault: str | None = None
    code = 1
    try:
        asyncio.run(_evaluate(plan, tallies, quiet=as_json))
    except (StageFailed, NoAnswer) as error:
        fault = str(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        fault, code = "interrupted; this is what was done so far", EXIT_INTERRUPTED
    _report(plan, tallies, time.monotonic() - started_s, as_json=as_json, out=out)
    if fault is not None:
        console.print(f"mimo eval: {fault}", style="red", markup=False, soft_wrap=True)
    low = [t for t in tallies if require is not None and (t.exact_share or 0.0) < require]
    for tally in low:
        console.print(f"{tally.task}: {percent(tally.exact_share)} exact, {require} is required", style="red")
    if fault is not None or low or not all(tally.is_complete for tally in tallies):
        raise typer.Exit(code)


def _chosen_tasks(named: str | None) -> tuple[str, ...]:
    from training.tasks import TASKS

    if named is None:
        return tuple(TASKS)
    chosen = tuple(dict.fromkeys(name.strip() for name in named.split(",") if name.strip()))
    for name in chosen:
        if name not in TASKS:
            raise ConfigError(f"--tasks names {name!r}; allowed: {', '.join(TASKS)}")
    if not chosen:
        raise ConfigError(f"--tasks names no task; allowed: {', '.join(TASKS)}")
    return chosen


async def _evaluate(plan: Plan, tallies: Sequence[Tally], *, quiet: bool) -> None:
    """Fill the tallies. Raises StageFailed or NoAnswer when there is nobody to ask."""
    task = asyncio.current_task()
    assert task is not None
    # Ends like a Ctrl-C: with what was found so far, and without a service left behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    connector = aiohttp.TCPConnector(limit=plan.concurrency)
    async with _server(plan) as base_url, aiohttp.ClientSession(connector=connector) as session:
        model = await served_model(session, base_url)
        if plan.url is not None and plan.model is not None:
            model = plan.model
        client = ChatClient(session, base_url, model, stream=plan.stream)
        with _bars(tallies, quiet=quiet) as bars, _renderers() as pool:
            await _ask_all(plan, tallies, client, pool, bars)


@asynccontextmanager
async def _server(plan: Plan) -> AsyncIterator[str]:
    if plan.url is not None:
        yield plan.url
        return
    flags: dict[str, Any] = {"mode": plan.mode, "gateway": {"port": free_port("127.0.0.1")}}
    if plan.model is not None:
        flags["model"] = plan.model
    with run_directory() as runtime_dir:
        async with service(load(runtime_dir=runtime_dir, flags=flags)) as base_url:
            yield base_url


async def _ask_all(plan: Plan, tallies: Sequence[Tally], client: ChatClient, pool: Executor, bars: "Bars") -> None:
    """Samples are rendered a little ahead of the requests and dropped after them: memory does not grow with `count`."""
    from training.files import chat_json
    from training.tasks.types import HELD_OUT_SEED

    loop = asyncio.get_running_loop()
    jobs = ((tally, index) for tally in tallies for index in range(plan.count))
    rendered: asyncio.Queue[tuple[Tally, int, bytes, str] | None] = asyncio.Queue(maxsize=plan.concurrency)

    async def render() -> None:
        for tally, index in jobs:
            messages, expected = await loop.run_in_executor(pool, chat_json, tally.task, HELD_OUT_SEED, index)
            await rendered.put((tally, index, messages, expected))

    async def ask() -> None:
        while (item := await rendered.get()) is not None:
            tally, index, messages, expected = item
            try:
                # No tokenizer makes more tokens than there are bytes.
                reply = await client.ask(messages, len(expected.encode()) + _SPARE_TOKENS)
            except NoAnswer as error:
                tally.failed(error)
            else:
                tally.answered(index, expected, reply)
            bars.advance(tally)

    async with asyncio.TaskGroup() as group:
        renderers = [group.create_task(render()) for _ in range(2 * _num_renderers())]
        for _ in range(plan.concurrency):
            group.create_task(ask())
        await asyncio.gather(*renderers)
        for _ in range(plan.concurrency):
            await rendered.put(None)


def _num_renderers() -> int:
    """Half the cores at most: the service may run on the others."""
    return max(1, min(_MAX_RENDERERS, (os.cpu_count() or 1) // 2))


@contextmanager
def _renderers() -> Iterator[Executor]:
    pool = ProcessPoolExecutor(
        _num_renderers(), multiprocessing.get_context("spawn"), initializer=_settle, initargs=(os.getpid(),)
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _settle(parent_pid: int) -> None:
    """In a rendering process: a Ctrl-C is the parent's to handle, and it does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)


class Bars:
    """One progress bar per task that has begun."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, Any] = {}

    def advance(self, tally: Tally) -> None:
        if tally.task not in self._bars:
            self._bars[tally.task] = self._progress.add_task(tally.task, total=tally.num_planned, exact="")
        self._progress.update(self._bars[tally.task], advance=1, exact=f"{percent(tally.exact_share)} exact")


@contextmanager
def _bars(tallies: Sequence[Tally], *, quiet: bool) -> Iterator[Bars]:
    width = max(len(tally.task) for tally in tallies)
    columns = (
        TextColumn(f"{{task.description:<{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[exact]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        yield Bars(progress)


def _report(plan: Plan, tallies: Sequence[Tally], elapsed_s: float, *, as_json: bool, out: Path | None) -> None:
    found = {
        "url": plan.url,
        "mode": plan.mode if plan.url is None else None,
        "count": plan.count,
        "concurrency": plan.concurrency,
        "stream": plan.stream,
        "elapsed_s": round(elapsed_s, 3),
        "complete": all(tally.is_complete for tally in tallies),
        "tasks": [tally.as_json() for tally in tallies],
    }
    if as_json:
        typer.echo(json.dumps(found))
    elif any(tally.num_asked for tally in tallies):
        show(Console(highlight=False), tallies)
    if out is not None:
        try:
            out.write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            console.print(f"mimo eval: cannot write {out}: {os_words(error)}", style="red", markup=False)
            raise typer.Exit(1) from error
