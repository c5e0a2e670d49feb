"""`mimo inspect`: what a checkpoint holds and what it costs, from its configuration and headers alone."""

import json
import os
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from cli.completion import known_models
from cli.inspect_view import show
from cli.load import BUILTIN_MODELS, CONFIGS, ConfigError, resolve_model
from cli.models import PACKAGED_MODELS, is_imported
from cli.preflight import unservable
from cli.terminal import complain
from encoder import Part, TensorSpec
from encoder.checkpoint import CheckpointError
from epd import MAX_MTP_LAYERS, Inspection, KvLayout, inspect_checkpoint
from preprocess.ranges import shown_value

MODELS = CONFIGS / "models"
_CONTEXTS = (1_024, 8_192, 32_768, 131_072, 262_144, 1_048_576)


class KvDtype(StrEnum):
    """How keys and values are kept."""

    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    FLOAT32 = "float32"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return {KvDtype.BFLOAT16: 2, KvDtype.FP8: 1, KvDtype.FLOAT32: 4}[self]


class QkvLayout(StrEnum):
    """How the rows of fused q, k, v lie in the files."""

    INTERLEAVED = "interleaved"
    PLAIN = "plain"


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A directory, a config.json, a .gguf file, a built-in model (mimo-nano, smollm2) or a published one "
            "(mimo-v2.5, mimo-v2.5-pro, mimo-v2-flash).",
            show_default=False,
            autocompletion=known_models,
        ),
    ],
    mtp_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_MTP_LAYERS,
            help="Draft heads; by default what the files hold, without files what the family has.",
        ),
    ] = None,
    qkv_layout: Annotated[
        QkvLayout, typer.Option(help="Rows of fused q, k, v: shard by shard, or plain as some re-exports hold them.")
    ] = QkvLayout.INTERLEAVED,
    kv_dtype: Annotated[KvDtype, typer.Option(help="How keys and values are kept.")] = KvDtype.BFLOAT16,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length of a KV row, in tokens; repeatable.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Print what a checkpoint holds: tensors by part, parameters, KV bytes, and whether its files match.

    Weights are not loaded: headers are read, so 300 GB take a second. Without weights everything follows from
    config.json. The exit code is 1 when files do not hold what the configuration calls for.

    Example: mimo inspect mimo-v2.5

    Example: mimo inspect ~/models/MiMo-V2.5 --json
    """
    location = locate(checkpoint)
    layout: Literal["interleaved", "plain"] = "plain" if qkv_layout is QkvLayout.PLAIN else "interleaved"
    try:
        inspection = inspect_checkpoint(location, num_mtp_layers=mtp_layers, qkv_layout=layout)
    except CheckpointError as error:
        complain("mimo inspect", str(error), exit_code=1)
        raise typer.Exit(1) from error
    report = build_report(checkpoint, location, inspection, kv_dtype=kv_dtype, contexts=context, tensors=tensors)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report)
    if inspection.findings:
        raise typer.Exit(1)


def locate(checkpoint: str, argument: str = "CHECKPOINT") -> Path:
    """A built-in or published name, else a path. Raises ConfigError for a path that does not exist.

    A GGUF file, or a model that a package ships as one, is imported first, as `mimo serve` does.
    """
    if is_imported(checkpoint):
        return resolve_model(checkpoint)[0]
    published = {path.parent.name: path.parent for path in MODELS.glob("*/config.json")}
    location = (BUILTIN_MODELS | published).get(checkpoint, Path(checkpoint).expanduser())
    if not checkpoint.strip() or not os.path.lexists(location):
        names = ", ".join(sorted([*BUILTIN_MODELS, *PACKAGED_MODELS, *published]))
        raise ConfigError(
            f"{argument} is {shown_value(checkpoint)}: no such path; give a directory, a config.json, a .gguf file or "
            f"a name: {names}"
        )
    return location


def build_report(
    name: str,
    location: Path,
    inspection: Inspection,
    *,
    kv_dtype: KvDtype = KvDtype.BFLOAT16,
    contexts: list[int] | None = None,
    tensors: bool = False,
) -> dict[str, Any]:
    """Return everything the command says, as JSON has it."""
    inventory = inspection.inventory
    report: dict[str, Any] = {
        "checkpoint": name,
        "path": str(location),
        "model": _model(inspection),
        "parts": _parts(inventory.main),
        "total": _sums(inventory.main),
        "audio_tokenizer": _sums(inventory.audio_tokenizer) if inventory.audio_tokenizer else None,
        "parameters": {"total": inventory.num_params, "active_per_token": inventory.num_active_params},
        "kv": _kv(inspection, kv_dtype, contexts),
        "files": None,
        "check": None,
        "notes": [],
    }
    if inspection.tensors is not None:
        refused = unservable(location)
        report["notes"] = [] if refused is None else [f"mimo serve would refuse this directory: {refused}"]
        report |= {"files": _files(location, inspection), "check": _check(inspection)}
    if tensors:
        found = inspection.tensors or {}
        report["tensors"] = [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "part": spec.part,
                "file": found[spec.name].file.name if spec.name in found else None,
            }
            for spec in (*inventory.main, *inventory.audio_tokenizer)
        ]
    return report


def _model(inspection: Inspection) -> dict[str, Any]:
    hf, config = inspection.config_hf, inspection.inventory.config
    modalities = ["text"]
    modalities += ["image", "video"] if hf.get("vision_config") else []
    modalities += ["audio"] if hf.get("audio_config") else []
    architectures = hf.get("architectures")
    windows = [layer for layer in config.layers if layer.is_window]
    return {
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "model_type": hf.get("model_type"),
        "modalities": modalities,
        "num_layers": config.num_layers,
        "num_full_layers": config.num_layers - len(windows),
        "num_window_layers": len(windows),
        "window_tokens": _window_tokens(inspection) if windows else None,
        "layer_pattern": "".join("w" if layer.is_window else "F" for layer in config.layers),
        "dense_layers": [layer.index for layer in config.layers if not layer.is_moe],
        "num_experts": config.moe.num_experts if config.moe else None,
        "num_experts_per_token": config.moe.num_experts_per_token if config.moe else None,
        "num_mtp_layers": inspection.inventory.num_mtp_layers,
        "num_mtp_layers_from": inspection.mtp_source,
        "max_position_embeddings": config.max_position_embeddings,
    }


def _sums(specs: tuple[TensorSpec, ...] | list[TensorSpec]) -> dict[str, int]:
    return {
        "num_tensors": len(specs),
        "num_elements": sum(spec.num_elements for spec in specs),
        "num_params": sum(spec.num_params for spec in specs),
        "size_bytes": sum(spec.size_bytes for spec in specs),
    }


def _parts(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
    by_part: dict[str, list[TensorSpec]] = {part: [] for part in get_args(Part)}
    for spec in specs:
        by_part[spec.part].append(spec)
    return [{"part": part, **_sums(members)} for part, members in by_part.items() if members]


def _window_tokens(inspection: Inspection) -> int:
    """Keys a window layer sees, itself included; 0 in a family without such layers."""
    window = inspection.inventory.config.window_layer
    return 0 if window is None else (window.window_left or 0) + 1


def _kv(inspection: Inspection, dtype: KvDtype, contexts: list[int] | None) -> dict[str, Any]:
    """KV bytes of one sequence, by the geometry the engine's pools are made from."""
    config, num_heads = inspection.inventory.config, inspection.inventory.num_mtp_layers
    layers = [layer.attention for layer in config.layers]
    full, window = ([spec for spec in layers if spec.is_window is kind] for kind in (False, True))
    trunk = KvLayout.from_specs(full, window, page_size=1, dtype_bytes=dtype.size_bytes)
    mtp_specs = [config.mtp_layer(k).attention for k in range(num_heads)]
    mtp = KvLayout.from_specs([], mtp_specs, page_size=1, dtype_bytes=dtype.size_bytes)
    growing, windowed = trunk.full_bytes_per_token, trunk.window_bytes_per_token
    tokens, single = _window_tokens(inspection), growing + windowed
    limit = config.max_position_embeddings
    shown = list(dict.fromkeys(contexts or ())) or sorted({length for length in _CONTEXTS if length < limit} | {limit})
    rows = []
    for length in shown:
        size_bytes = growing * length + windowed * min(length, tokens)
        rows.append(
            {
                "num_tokens": length,
                "size_bytes": size_bytes,
                "single_pool_bytes": single * length,
                "ratio": size_bytes / (single * length),
            }
        )
    return {
        "dtype": str(dtype),
        "growing_bytes_per_token": growing,
        "window_bytes_per_token": windowed,
        "window_tokens": tokens,
        "constant_bytes": windowed * tokens,
        "single_pool_bytes_per_token": single,
        "asymptotic_ratio": growing / single,
        "all_full_layers_bytes_per_token": growing // len(full) * len(layers) if full else None,
        "mtp_window_bytes_per_token": mtp.window_bytes_per_token,
        "mtp_constant_bytes": mtp.window_bytes_per_token * tokens,
        "contexts": rows,
    }


def _files(location: Path, inspection: Inspection) -> list[dict[str, Any]]:
    """The files that hold tensors, as they lie in the directory."""
    counts = Counter(tensor.file for tensor in (inspection.tensors or {}).values())
    return [
        {"name": str(file.relative_to(location)), "size_bytes": file.stat().st_size, "num_tensors": counts[file]}
        for file in sorted(counts, key=lambda file: (len(file.parts), file))
    ]


def _check(inspection: Inspection) -> dict[str, Any]:
    findings = inspection.findings
    return {
        "matches": not findings,
        "missing": findings.missing,
        "unexpected": findings.unexpected,
        "misshapen": findings.misshapen,
        "wrong_dtype": findings.wrong_dtype,
        "faults": findings.faults,
        "conflicts": findings.conflicts,
        "stored_otherwise": list(inspection.stored_otherwise),
    }
