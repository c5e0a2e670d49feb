"""`mimo encode`: media files to embeddings in one safetensors file, by the code the encoder server runs."""

import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cli.load import ConfigError, resolve_model
from cli.media_files import MediaFileError, expand_paths, path_text
from cli.terminal import quoted
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from preprocess.config import VideoBackend, check_video_backend
from preprocess.errors import BackendUnavailable, MediaError
from preprocess.ranges import printable
from preprocess.types import OPTIONS_OF, Detail, MediaOptions, Modality

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from encoder import LocalEmbedding, LocalEncoder

    Result = LocalEmbedding | MediaError | TowerFailed | OSError

_FILES_AT_ONCE = 2
_INTERRUPTED = 130
"""The exit code by which shells know it."""
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows `[rows, width]`, what is known of them, and why a file failed, each by file name as given.

    Bytes of a name that are no UTF-8 are spelled out: neither safetensors nor JSON has a place for them.
    """

    tensors: dict[str, "NDArray[np.float32]"] = field(default_factory=dict)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def encode(
    files: Annotated[
        list[Path], typer.Argument(help="Images, videos, sounds, or directories of them.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; by default FILE.safetensors, or embeddings.safetensors for several."),
    ] = None,
    model: Annotated[str, typer.Option(help="A built-in model or a directory in Hugging Face layout.")] = "mimo-nano",
    modality: Annotated[Modality | None, typer.Option(help="Read every file as this, whatever its name.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames sampled per second of video.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="At most this many frames of a video.")] = None,
    min_frames: Annotated[int | None, typer.Option(help="At least this many frames of a video that has them.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="This many frames of a video, instead of a rate.")] = None,
    min_pixels: Annotated[int | None, typer.Option(help="At least this many pixels per picture or frame.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="At most this many pixels per picture or frame.")] = None,
    detail: Annotated[Detail | None, typer.Option(help="low: at most 512 x 512 pixels of a picture.")] = None,
    use_audio: Annotated[
        bool | None, typer.Option(help="Require, or leave out, the sound of a video; by default it is used if there.")
    ] = None,
    video_backend: Annotated[VideoBackend, typer.Option(help="What decodes videos.")] = "pyav",
    threads: Annotated[int | None, typer.Option(help="CPU threads of the tower.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file on standard output.")] = False,
) -> None:
    """Turn media into embeddings.

    Each file becomes one tensor, rows by width, named as the file was given (bytes that are no UTF-8 become \\xNN); its
    grid, time stamps, key and warnings stand as JSON under the same name in the metadata. A warning tells what of a
    file was damaged or left out. A file that cannot be decoded is reported and left out, and the exit code is 1.
    Ctrl-C keeps what is done so far; then it is 130. An option goes to the files it means something for, and is a
    mistake when there are none.

    Example: mimo encode samples/clip.mp4 samples/picture.png --fps 2 --out media.safetensors
    """
    try:
        inputs = [(path, modality) for path in files] if modality else expand_paths(files)
        options = MediaOptions(
            fps=fps,
            max_frames=max_frames,
            min_frames=min_frames,
            num_frames=num_frames,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            detail=detail,
            use_audio=use_audio,
        )
        check_video_backend(video_backend)
    except (MediaFileError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads is {threads}; allowed: 1 or more")
    inputs = list(dict.fromkeys(inputs))
    _check_names([path for path, _ in inputs])
    _check_options(options, {modality for _, modality in inputs})
    target = out or Path(f"{files[0].name}.safetensors" if len(inputs) == 1 else "embeddings.safetensors")
    _check_target(target, [path for path, _ in inputs])
    _run(inputs, options, target, model=model, video_backend=video_backend, threads=threads, as_json=as_json)


def _run(
    inputs: list[tuple[Path, Modality]],
    options: MediaOptions,
    target: Path,
    *,
    model: str,
    video_backend: VideoBackend,
    threads: int | None,
    as_json: bool,
) -> None:
    model_dir, model_name = resolve_model(model)
    started_s = time.monotonic()
    done, interrupted = Encoded(), False
    try:
        encoder = _open_encoder(model_dir, EncoderConfig(video_backend=video_backend), threads)
        _encode_all(encoder, inputs, options, done, quiet=as_json)
    except KeyboardInterrupt:
        interrupted = True
    if done.tensors:
        entries = {name: {"model": model_name} | done.metadata[name] for name in done.tensors}
        _write(target, done.tensors, {name: json.dumps(entry) for name, entry in entries.items()})
    if as_json:
        for name in done.tensors:
            typer.echo(json.dumps({"file": name, "out": path_text(target)} | done.metadata[name]))
        for name, reason in done.failures.items():
            typer.echo(json.dumps({"file": name, "error": reason}))
    num_rows = sum(len(tensor) for tensor in done.tensors.values())
    where = f"written to {path_text(target)}" if done.tensors else "nothing written"
    elapsed_s = time.monotonic() - started_s
    count = f"{len(done.tensors)} of {len(inputs)} files"
    _tell(f"{'interrupted: ' if interrupted else ''}{count}, {num_rows} rows in {elapsed_s:.1f} s, {where}")
    for name in done.tensors:
        for warning in done.metadata[name]["warnings"]:
            _tell(f"warning {name}: {warning}", style="yellow")
    for name, reason in done.failures.items():
        _tell(f"failed {name}: {reason}", style="red")
    if interrupted or done.failures:
        sys.exit(_INTERRUPTED if interrupted else 1)


def _tell(line: str, style: str | None = None) -> None:
    """One line, whatever is in a file's name."""
    console.print(printable(line), style=style, markup=False, soft_wrap=True)


def _open_encoder(model_dir: Path, config: EncoderConfig, threads: int | None) -> "LocalEncoder":
    """Raises ConfigError."""
    from encoder import LocalEncoder

    try:
        return LocalEncoder(model_dir, config, threads=threads)
    except BackendUnavailable as error:
        raise ConfigError(str(error)) from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{model_dir}: {error}") from error


def _check_names(inputs: list[Path]) -> None:
    """Refuse two files that would be one tensor. Raises ConfigError."""
    for name, count in Counter(map(path_text, inputs)).items():
        if count > 1:
            raise ConfigError(
                f"{count} files would be named {name} in the output; rename all but one, or leave them out"
            )


def _check_options(options: MediaOptions, modalities: set[Modality]) -> None:
    """Refuse an option that would do nothing. Raises ConfigError."""
    for field_name in options.given():
        takers = [modality for modality in Modality if field_name in OPTIONS_OF[modality]]
        if modalities.isdisjoint(takers):
            flag = f"--{field_name.replace('_', '-')}"
            raise ConfigError(f"{flag} is an option for {' and '.join(takers)} files; there are none among the inputs")


def _check_target(target: Path, inputs: list[Path]) -> None:
    """Refuse, before any work, an output that cannot be written or would destroy something. Raises ConfigError."""
    if not target.parent.is_dir():
        raise ConfigError(f"--out {path_text(target)}: no such directory {path_text(target.parent)}")
    if target.exists() and not target.is_file():
        raise ConfigError(f"--out {path_text(target)}: exists and is not a regular file")
    if any(path.exists() and target.exists() and path.samefile(target) for path in inputs):
        raise ConfigError(f"--out {path_text(target)}: is one of the inputs and would be overwritten")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"--out {path_text(target)}: directory {path_text(target.parent)} cannot be written to")


def _encode_all(
    encoder: "LocalEncoder",
    inputs: list[tuple[Path, Modality]],
    options: MediaOptions,
    done: Encoded,
    *,
    quiet: bool,
) -> None:
    """Fill `done`, in the order of the inputs; an interrupted run, with what is done by then. Closes the encoder.

    One bad file costs only itself.
    """

    def one(path: Path, modality: Modality) -> "Result":
        try:
            return encoder.encode(path.read_bytes(), modality, options.applying_to(modality))
        except (MediaError, TowerFailed, OSError) as error:
            return error

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress,
        # The next file is read and decoded while the tower works on this one.
        ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="file") as threads,
        # First of all that ends here: whoever interrupts does not wait for the files under way.
        closing(encoder),
    ):
        task = progress.add_task("encoding", total=len(inputs))
        results: list[Future[Result]] = []
        try:
            for path, modality in inputs:
                results.append(threads.submit(one, path, modality))
            for (path, _), result in zip(inputs, results, strict=True):
                result.result()
                progress.update(task, description=quoted(path_text(path)[-40:]), advance=1)
        finally:
            for (path, modality), result in zip(inputs, results, strict=False):
                # What has not begun never begins.
                if not result.cancel() and result.done():
                    _add(done, path_text(path), modality, result.result())


def _add(done: Encoded, name: str, modality: Modality, result: "Result") -> None:
    if isinstance(result, Exception):
        done.failures[name] = str(result)
        return
    done.metadata[name] = {
        "key": result.key,
        "modality": str(modality),
        "rows": int(result.rows.shape[0]),
        "width": int(result.rows.shape[1]),
        "grid_thw": result.layout.grid_thw,
        "timestamps_s": result.layout.timestamps_s,
        "num_audio_rows": result.layout.num_audio_rows,
        "warnings": result.warnings,
    }
    # Last: an interruption leaves no tensor without its metadata.
    done.tensors[name] = result.rows


def _write(target: Path, tensors: dict[str, "NDArray[np.float32]"], metadata: dict[str, str]) -> None:
    """Write beside the target and move into place, so that an interrupted run leaves no half file under the name."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        mask = os.umask(0)
        os.umask(mask)
        # The library makes private files; this one is an ordinary result.
        partial.chmod(0o666 & ~mask)
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        _tell(f"mimo encode: cannot write {path_text(target)}: {error}", style="red")
        raise typer.Exit(1) from error
    finally:
        partial.unlink(missing_ok=True)
