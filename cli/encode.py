"""`mimo encode`: media files to embeddings in one safetensors file, by the code the encoder server runs."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cli.load import ConfigError, resolve_model
from cli.media_files import MediaFileError, expand_paths
from preprocess.errors import MediaError
from preprocess.types import MediaOptions, Modality

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from encoder import LocalEncoder

console = Console(stderr=True, highlight=False)


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
    max_pixels: Annotated[int | None, typer.Option(help="At most this many pixels per picture or frame.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the tower.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file on standard output.")] = False,
) -> None:
    """Turn media into embeddings.

    Each file becomes one tensor [rows, width], named as the file was given; its grid, time stamps and key stand as JSON
    under the same name in the metadata. A file that cannot be decoded is reported and left out, and the exit code is 1.

    Example: mimo encode samples/clip.mp4 samples/picture.png --out media.safetensors
    """
    try:
        inputs = [(path, modality) for path in files] if modality else expand_paths(files)
        options = MediaOptions(fps=fps, max_frames=max_frames, max_pixels=max_pixels)
    except (MediaFileError, ValueError, MediaError) as error:
        raise ConfigError(str(error)) from error
    target = out or Path(f"{files[0].name}.safetensors" if len(inputs) == 1 else "embeddings.safetensors")
    if not target.parent.is_dir():
        raise ConfigError(f"--out {target}: no such directory {target.parent}")
    model_dir, model_name = resolve_model(model)

    from encoder import LocalEncoder

    started_s = time.monotonic()
    encoder = LocalEncoder(model_dir, threads=threads)
    tensors, metadata, failures = _encode_all(encoder, inputs, options, quiet=as_json)
    _write(target, tensors, {"model": model_name} | {name: json.dumps(entry) for name, entry in metadata.items()})
    elapsed_s = time.monotonic() - started_s
    if as_json:
        for name, entry in metadata.items():
            typer.echo(json.dumps({"file": name, "out": str(target)} | entry))
        for name, reason in failures.items():
            typer.echo(json.dumps({"file": name, "error": reason}))
    num_rows = sum(len(tensor) for tensor in tensors.values())
    console.print(f"{len(tensors)} of {len(inputs)} files, {num_rows} rows in {elapsed_s:.1f} s, written to {target}")
    for name, reason in failures.items():
        console.print(f"[red]failed[/] {name}: {reason}", markup=True, soft_wrap=True)
    if failures:
        sys.exit(1)


def _encode_all(
    encoder: "LocalEncoder", inputs: list[tuple[Path, Modality]], options: MediaOptions, *, quiet: bool
) -> tuple[dict[str, "NDArray[np.float32]"], dict[str, dict[str, Any]], dict[str, str]]:
    """Embeddings, metadata and failures by file name as given. One bad file costs only itself."""
    tensors: dict[str, NDArray[np.float32]] = {}
    metadata: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("encoding", total=len(inputs))
        for path, modality in inputs:
            name = str(path)
            progress.update(task, description=path.name[:40])
            try:
                layout, rows, key = encoder.encode(path.read_bytes(), modality, options)
            except (MediaError, OSError) as error:
                failures[name] = str(error)
            else:
                tensors[name] = rows
                metadata[name] = {
                    "key": key,
                    "modality": str(modality),
                    "rows": int(rows.shape[0]),
                    "width": int(rows.shape[1]),
                    "grid_thw": layout.grid_thw,
                    "timestamps_s": layout.timestamps_s,
                    "num_audio_rows": layout.num_audio_rows,
                }
            progress.advance(task)
    return tensors, metadata, failures


def _write(target: Path, tensors: dict[str, "NDArray[np.float32]"], metadata: dict[str, str]) -> None:
    """Write beside the target and move into place, so that an interrupted run leaves no half file under the name."""
    from safetensors.numpy import save_file

    partial = target.with_name(target.name + ".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(target)
