"""`mimo encode`: media to embeddings in safetensors files, by the code the encoder server runs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.encode_inputs import Input, check_names, check_places, find_inputs
from cli.encode_outputs import SUFFIX, FileTree, Output, PackedFile, ShardLimits, Shards, is_shard
from cli.encode_records import OutputFailed, RecordPaths, Records
from cli.encode_report import Report, tell_failure, tell_note
from cli.encode_run import End, Run
from cli.encode_sources import Sources
from cli.encode_workspace import Workspace
from cli.load import ConfigError, resolve_model
from cli.media_files import path_text
from cli.signals import exit_code, terminable
from encoder.config import EncoderConfig
from preprocess.config import FetchLimits, VideoBackend, check_video_backend
from preprocess.errors import BackendUnavailable
from preprocess.types import Detail, MediaOptions, Modality

if TYPE_CHECKING:
    from encoder import LocalEncoder

_MAX_TOWERS = 4
"""Unless more are asked for: a large model's weights take memory each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to do, checked."""

    inputs: list[Input]
    target: Path
    """The packed file, or the directory."""
    is_packed: bool
    shards: ShardLimits | None
    overwrite: bool
    concurrency: int
    max_failures: int | None
    limits: FetchLimits

    @property
    def workspace(self) -> Path:
        return self.target.with_name(f".{self.target.name}.spool") if self.is_packed else self.target / ".spool"

    @property
    def records(self) -> RecordPaths | None:
        """None where the one file says it all."""
        if not self.is_packed:
            return RecordPaths(self.target / "index.jsonl", self.target / "failed.jsonl", self.workspace)
        if len(self.inputs) == 1:
            return None
        index, failed = (self.target.with_name(f"{self.target.name}.{kind}.jsonl") for kind in ("index", "failed"))
        return RecordPaths(index, failed, self.workspace)


def _named(text: str) -> Path:
    """Raises BadParameter: an empty name, of a variable that is not set, is not the working directory."""
    if not text:
        raise typer.BadParameter("the name is empty")
    return Path(text)


def encode(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Images, videos, sounds: files, directories, URLs, or quoted patterns such as 'photos/**/*.jpg'.",
            show_default=False,
        ),
    ] = None,
    manifest: Annotated[
        list[str] | None,
        typer.Option(
            help="A file that names inputs, one per line: a path, a URL, or JSON; - is standard input. See below.",
            show_default=False,
        ),
    ] = None,
    recursive: Annotated[bool, typer.Option(help="Whether a directory's own directories are searched too.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=_named,
            metavar="FILE",
            help="One packed file; by default FILE.safetensors, or embeddings.safetensors for several.",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            parser=_named, metavar="DIR", help="Instead of one file, a file per input below this directory, or shards."
        ),
    ] = None,
    shard_rows: Annotated[
        int | None, typer.Option(min=1, help="Pack inputs into shards of at most so many rows; with --out-dir.")
    ] = None,
    shard_bytes: Annotated[
        int | None, typer.Option(min=1, help="Pack inputs into shards of at most so many bytes; with --out-dir.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Encode all anew, whatever is done.")] = False,
    max_failures: Annotated[
        int | None, typer.Option(min=0, help="Stop after more failures than this; by default, never.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, help="Inputs read or fetched at a time; more helps with slow servers.")
    ] = 8,
    allow_private_addresses: Annotated[
        bool, typer.Option("--allow-private-addresses", help="Let URLs reach loopback and private networks.")
    ] = False,
    model: Annotated[str, typer.Option(help="A built-in model or a directory in Hugging Face layout.")] = "mimo-nano",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="What the towers compute in, and what is written.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="Where the towers run: cpu, cuda, cuda:1, ...")] = "cpu",
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
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of a tower; other numbers may give other last bits.")
    ] = None,
    towers: Annotated[
        int | None,
        typer.Option(min=1, help="Towers at work, each with weights of its own; by default one per CPU, up to 4."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per file on standard output, and a summary last.")
    ] = False,
) -> None:
    """Turn media into embeddings.

    Each input becomes one tensor, rows by width, named as the input was given (bytes that are no UTF-8 become \\xNN) or
    by its id; its grid, time stamps, key and warnings stand as JSON under the same name in the file's metadata. A
    warning tells what of a file was damaged or left out. An option goes to the files it means something for, and is a
    mistake when there are none.

    \b
    mimo encode clip.mp4                            clip.mp4.safetensors
    mimo encode photos clips --out all.safetensors  one file; index in all.safetensors.index.jsonl
    mimo encode photos --out-dir rows               rows/photos/cat.jpg.safetensors, ..., rows/index.jsonl
    mimo encode 'photos/**/*.jpg' --out-dir rows --shard-rows 100000
                                                    rows/shard-00000.safetensors, ..., rows/index.jsonl
    find . -name '*.wav' | mimo encode --manifest - --out-dir rows

    A manifest's line is a path or a URL (no directory, no pattern), a comment (# and a blank; ./# begins a name that
    does so), or JSON with path or url, and, as needed, id (names the tensor and the output
    file), modality and the options below in their JSON names, which go before the command's. Paths in it are relative
    to the working directory. For example:

    \b
    {"path": "a/clip.mp4", "id": "clip-1", "fps": 2, "max_frames": 64}
    {"url": "https://example.com/cat", "modality": "image", "detail": "low"}

    The same command again goes on where it was broken off, by Ctrl-C, SIGTERM, a crash, or failures, and gives the same
    bytes as if it had not been. A file counts as done when its content and all settings are those of the output; a
    URL, when it was encoded with these settings (it is not fetched again). --overwrite begins anew. Same content is
    encoded once. Rows wait in a hidden .spool directory beside the output until they are in place.

    The index has one JSON line per input, in order: input, id, output, tensor, key, modality, rows, width, dtype,
    grid_thw, timestamps_s, warnings, or else error and code. Inputs that failed are also in failed.jsonl, and are tried
    again by the next run.

    The last line tells the rows of all outputs, then what this run did: its rates are of what it encoded, over the
    seconds told, which are without loading the model. Outputs of other runs in the directory are told, and left.

    Exit code: 0 all done, 1 some inputs failed or the output could not be written, 2 wrong usage, 130 interrupted
    (Ctrl-C), 143 terminated (SIGTERM, which keeps what is done as Ctrl-C does).
    """
    try:
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
        if threads is not None and threads < 1:
            raise ConfigError(f"--threads is {threads}; allowed: 1 or more")
        inputs = find_inputs(files or [], manifest or [], modality=modality, options=options, recursive=recursive)
        config = _encoder_config(device, dtype, video_backend, concurrency)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shards = None if shard_rows is shard_bytes is None else ShardLimits(max_rows=shard_rows, max_bytes=shard_bytes)
    plan = _Plan(
        inputs=inputs,
        target=out_dir or out or _default_target(inputs),
        is_packed=out_dir is None,
        shards=shards,
        overwrite=overwrite,
        concurrency=concurrency,
        max_failures=max_failures,
        limits=FetchLimits(allow_private_addresses=allow_private_addresses),
    )
    _check_plan(plan, out)
    num_towers = towers or _num_towers(device, threads)
    _run(plan, config, model=model, threads=threads, num_towers=num_towers, as_json=as_json)


def _encoder_config(device: str, dtype: str, video_backend: VideoBackend, concurrency: int) -> EncoderConfig:
    """Raises ValueError."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype is {dtype!r}; allowed: float32, bfloat16")
    num_decoders = min(concurrency, max(2, os.cpu_count() or 1))
    return EncoderConfig(
        device=device,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        video_backend=video_backend,
        decode_threads=num_decoders,
    )


def _num_towers(device: str, threads: int | None) -> int:
    """A GPU is kept busy by one."""
    if device != "cpu":
        return 1
    return max(1, min(_MAX_TOWERS, (os.cpu_count() or 1) // (threads or EncoderConfig().tower_threads)))


def _default_target(inputs: list[Input]) -> Path:
    if len(inputs) > 1:
        return Path(f"embeddings{SUFFIX}")
    (item,) = inputs
    return Path(f"{Path(item.place if item.is_url else item.location).name}{SUFFIX}")


def _check_plan(plan: _Plan, out: Path | None) -> None:
    """Refuse, before any work, what cannot be written or would destroy something. Raises ConfigError."""
    check_names(plan.inputs)
    if plan.is_packed:
        if plan.shards is not None:
            raise ConfigError("--shard-rows and --shard-bytes need --out-dir, the directory for the shards")
        _check_target(plan.target, [Path(item.location) for item in plan.inputs if not item.is_url])
        return
    if out is not None:
        raise ConfigError("--out and --out-dir exclude each other; give one")
    if plan.target.exists() and not plan.target.is_dir():
        raise ConfigError(f"--out-dir {path_text(plan.target)}: exists and is not a directory")
    if plan.shards is None:
        check_places(plan.inputs, SUFFIX)
    try:
        plan.target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out-dir {path_text(plan.target)}: {error.strerror}") from error
    if not os.access(plan.target, os.W_OK):
        raise ConfigError(f"--out-dir {path_text(plan.target)}: cannot be written to")


def _check_target(target: Path, inputs: list[Path]) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"--out {path_text(target)}: no such directory {path_text(target.parent)}")
    if target.exists() and not target.is_file():
        raise ConfigError(f"--out {path_text(target)}: exists and is not a regular file")
    if target.exists() and any(path.exists() and path.samefile(target) for path in inputs):
        raise ConfigError(f"--out {path_text(target)}: is one of the inputs and would be overwritten")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"--out {path_text(target)}: directory {path_text(target.parent)} cannot be written to")


def _run(
    plan: _Plan, config: EncoderConfig, *, model: str, threads: int | None, num_towers: int, as_json: bool
) -> None:
    model_dir, model_name = resolve_model(model)
    end: End = "interrupted"
    code = 1
    try:
        workspace = Workspace(plan.workspace)
    except OSError as error:
        raise ConfigError(f"cannot write to {path_text(plan.workspace.parent)}: {error.strerror}") from error
    records = Records(plan.records, typer.echo if as_json else None)
    report = Report(len(plan.inputs), quiet=as_json)
    try:
        with terminable(), report:
            output = _open_output(plan, workspace, records)
            encoder = _open_encoder(model_dir, config, threads, min(num_towers, len(plan.inputs)))
            report.begin()
            run = Run(
                encoder,
                Sources(plan.limits),
                output,
                report.note,
                model=model_name,
                max_failures=plan.max_failures,
            )
            end = run.run(plan.inputs, plan.concurrency)
            code = run.exit_code or 1
    except KeyboardInterrupt as interrupt:
        code = exit_code(interrupt)
    except OutputFailed as error:
        end = "output"
        tell_failure(f"mimo encode: {error}")
    finally:
        records.close()
        num_kept = workspace.num_kept
        workspace.close()
    totals = records.totals
    report.conclude(totals, _where(plan, totals.num_done, report.num_made, num_kept), end, as_json=as_json)
    if end == "whole":
        _tell_strays(plan)
    if end == "interrupted":
        sys.exit(code)
    if end != "whole" or totals.num_failed:
        sys.exit(1)


def _where(plan: _Plan, num_done: int, num_made: int, num_kept: int) -> str:
    """What became of the rows: `num_kept` contents wait in the workspace for the next run."""
    target = path_text(plan.target)
    # A file per input is in its place at once; all else is when its file is whole.
    is_in_place = num_made if not plan.is_packed and plan.shards is None else num_done and not num_kept
    if num_kept:
        contents = "1 content is" if num_kept == 1 else f"{num_kept} contents are"
        is_shard = plan.shards is not None and num_done
        return f"{f'written to {target}; ' if is_shard else ''}{contents} kept for the next run"
    if is_in_place or num_done:
        return f"written to {target}"
    if plan.records is not None and plan.records.failed.exists():
        return f"nothing written but {path_text(plan.records.failed)}"
    return "nothing written"


def _tell_strays(plan: _Plan) -> None:
    """Outputs in the directory that are not of these inputs, or not of this layout: they are nobody's to delete."""
    if plan.is_packed:
        return
    own = {str(plan.target / f"{item.place}{SUFFIX}") for item in plan.inputs} if plan.shards is None else set[str]()
    strays = [
        path
        for path in plan.target.rglob(f"*{SUFFIX}")
        if str(path) not in own and not (plan.shards is not None and is_shard(path, plan.target))
    ]
    if strays:
        first = path_text(min(strays))
        are = "1 file of" if len(strays) == 1 else f"{len(strays)} files of"
        tell_note(f"{are} other runs in {path_text(plan.target)} not in the index, left as they are: {first}, ...")


def _open_output(plan: _Plan, workspace: Workspace, records: Records) -> Output:
    """Raises ConfigError."""
    if plan.is_packed:
        return PackedFile(plan.target, workspace, records, overwrite=plan.overwrite)
    if plan.shards is not None:
        return Shards(plan.target, plan.shards, workspace, records, overwrite=plan.overwrite)
    return FileTree(plan.target, workspace, records, overwrite=plan.overwrite)


def _open_encoder(model_dir: Path, config: EncoderConfig, threads: int | None, num_towers: int) -> "LocalEncoder":
    """Raises ConfigError."""
    from encoder import LocalEncoder

    try:
        return LocalEncoder(model_dir, config, threads=threads, num_towers=num_towers)
    except BackendUnavailable as error:
        raise ConfigError(str(error)) from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{model_dir}: {error}") from error
