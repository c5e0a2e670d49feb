"""`mimo plan`: what a model takes and gives on a GPU, from its configuration alone.

The command's function is long because every flag is one of its parameters.
"""

import functools
import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.completion import known_models, one_of
from cli.errors import ConfigError
from cli.inspect import locate
from cli.plan_memory import WEIGHTS, Asked, plan_worker_memory
from cli.plan_report import Question, build_report
from cli.plan_units import GPUS, parse_bytes, parse_link, parse_picture, parse_tokens
from cli.plan_view import show
from cli.plan_work import Workload, media_work, stage_work
from cli.terminal import complain
from encoder.checkpoint import CheckpointError
from epd import Inspection, inspect_checkpoint
from epd.config import DTYPE_BYTES, EngineConfig
from epd.types import Role
from preprocess.errors import MediaError

_DEFAULT_GPU: Final = "h200"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="As for `mimo inspect`: a published model (mimo-v2.5, mimo-v2.5-pro, mimo-v2-flash), a directory, a "
            "config.json, a .gguf file or a built-in one.",
            show_default=False,
            autocompletion=known_models,
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(help=f"One of: {', '.join(GPUS)}.", show_default=_DEFAULT_GPU, autocompletion=one_of(*GPUS)),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU that is not listed, e.g. 80GiB; nothing is known of its speed.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of a sequence, prompt and answer together: 32768, 32k.")] = "32k",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sequences that run at once.", show_default="as many as fit, up to 256")
    ] = None,
    weights: Annotated[
        str, typer.Option(help=f"How weights are held: {', '.join(WEIGHTS)}.", autocompletion=one_of(*WEIGHTS))
    ] = "keep",
    dtype: Annotated[
        str, typer.Option(help=f"Of KV: {', '.join(DTYPE_BYTES)}.", autocompletion=one_of(*DTYPE_BYTES))
    ] = "bfloat16",
    tp: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="GPUs of one worker (tensor parallel).", show_default="as few as do"),
    ] = None,
    usable: Annotated[float, typer.Option(min=0.1, max=1.0, help="Share of the memory for weights and KV.")] = 0.9,
    page_size: Annotated[int, typer.Option(min=1, max=4096, help="As engine.page_size.")] = 16,
    chunk: Annotated[int, typer.Option(min=1, help="As engine.chunk_tokens.")] = 2048,
    images: Annotated[int, typer.Option(min=0, help="Pictures of a request.")] = 0,
    image_size: Annotated[str, typer.Option(help="Their size in pixels.")] = "1024x1024",
    video_seconds: Annotated[float, typer.Option(min=0.0, help="Video of a request, without its sound.")] = 0.0,
    video_size: Annotated[str, typer.Option(help="Its size in pixels.")] = "1280x720",
    audio_seconds: Annotated[float, typer.Option(min=0.0, help="Sound of a request.")] = 0.0,
    prompt: Annotated[str, typer.Option(help="Text tokens of a prompt.")] = "2048",
    answer: Annotated[str, typer.Option(help="Tokens of an answer.")] = "256",
    cached: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the prompt that the prefix cache has.")
    ] = 0.0,
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Idle conversations to keep in host memory.", show_default="four times what runs"),
    ] = None,
    link: Annotated[str, typer.Option(help="Between prefill and decode: 400Gb/s, 50GB/s.")] = "400Gb/s",
    mfu: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the peak arithmetic that is reached.")] = 0.4,
    mbu: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the peak bandwidth that is reached.")] = 0.6,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw KV bytes over the context; needs matplotlib.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Tell what a model takes on a GPU: weights, KV, how many sequences fit, what each stage has to compute.

    Everything follows from the configuration; nothing is downloaded and no GPU is needed. Memory is split as the engine
    splits it. Seconds are estimates: a share of the data sheet's arithmetic and bandwidth. The exit code is 1 when what
    is asked for does not fit.

    Example: mimo plan mimo-v2.5

    Example: mimo plan mimo-v2.5-pro --gpu h200 --tp 16 --context 128k --concurrency 32

    Example: mimo plan mimo-v2.5 --images 4 --video-seconds 60 --prompt 1k --answer 300 --json
    """
    for flag, value, allowed in (("--weights", weights, WEIGHTS), ("--dtype", dtype, tuple(DTYPE_BYTES))):
        _require(flag, value, allowed)
    if memory is not None and gpu is not None:
        raise ConfigError(f"--gpu is {gpu} and --memory is {memory}; give one")
    gpu_name = None if memory is not None else (gpu or _DEFAULT_GPU).lower()
    _require("--gpu", gpu_name, (None, *GPUS))
    inspection, directory = _inspected(model)
    engine = EngineConfig(model_dir=directory, model_name=model, role=Role.BOTH)
    asked = Asked(
        gpu_memory_bytes=GPUS[gpu_name].memory_bytes if gpu_name else parse_bytes(memory or "", "--memory"),
        usable_share=usable,
        context_tokens=_context(inspection, context),
        concurrency=concurrency,
        weights=weights,
        dtype=dtype,
        tp=tp,
        page_size=page_size,
        chunk_tokens=chunk,
        retention_stride_tokens=engine.retention_stride_tokens,
        release_interval_tokens=engine.decode_release_interval_tokens,
    )
    workload = Workload(
        num_images=images,
        image_size=parse_picture(image_size, "--image-size"),
        video_s=video_seconds,
        video_size=parse_picture(video_size, "--video-size"),
        audio_s=audio_seconds,
        prompt_tokens=parse_tokens(prompt, "--prompt"),
        answer_tokens=parse_tokens(answer, "--answer"),
        cached_share=cached,
    )
    report = _report(
        inspection,
        directory,
        Question(
            model=model,
            gpu_name=gpu_name,
            asked=asked,
            workload=workload,
            num_sessions=sessions,
            link_bytes_per_s=parse_link(link),
            mfu=mfu,
            mbu=mbu,
        ),
    )
    if plot is not None:
        _plot(report, plot)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report)
    if not report["fits"]:
        complain("mimo plan", str(report["why_not"]), exit_code=1)
        raise typer.Exit(1)


def _report(inspection: Inspection, directory: Path, question: Question) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        media = media_work(inspection, directory, question.workload)
        memory = plan_worker_memory(inspection, question.asked)
    except (ValueError, MediaError) as error:
        raise ConfigError(str(error)) from error
    work = stage_work(
        inspection,
        media,
        question.workload,
        memory,
        page_size=question.asked.page_size,
        gpu=None if question.gpu_name is None else GPUS[question.gpu_name],
        mfu=question.mfu,
        mbu=question.mbu,
    )
    return build_report(inspection, question, memory, work)


def _require(flag: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value!r}; allowed: {', '.join(str(word) for word in allowed if word)}")


@functools.cache
def _inspected(model: str) -> tuple[Inspection, Path]:
    """The model and the directory of its configuration. Raises ConfigError, or Exit for one that cannot be read."""
    location = locate(model, "MODEL")
    try:
        return inspect_checkpoint(location), location if location.is_dir() else location.parent
    except CheckpointError as error:
        complain("mimo plan", str(error), exit_code=1)
        raise typer.Exit(1) from error


def _context(inspection: Inspection, text: str) -> int:
    """Raises ConfigError."""
    num_tokens, most = parse_tokens(text, "--context"), inspection.inventory.config.max_position_embeddings
    if num_tokens > most:
        raise ConfigError(f"--context is {text}, {num_tokens:,} tokens; this model has {most:,} positions")
    return num_tokens


def _plot(report: dict[str, Any], path: Path) -> None:
    """Raises ConfigError, OSError."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is {path}; allowed: a name that ends in .png, .svg or .pdf")
    try:
        from cli.plan_plot import draw
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'mimo-epd[bench]'") from error
    draw(report, path)
