"""A checkpoint looked at before any process starts on it: everything that would keep a stage from starting, at once.

Configurations and headers are read, weights are not: 300 GB take a second. What is found here is what `mimo inspect`
finds, plus what serving needs besides: tokenizer and chat template.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cli.load import ConfigError, ServeConfig
from cli.load_role import RoleDeployment
from cli.load_workers import check_workers
from encoder.checkpoint import CheckpointError
from epd import Findings, inspect_checkpoint
from epd.config import GatewayConfig
from preprocess.ranges import printable

NUM_NAMES_SHOWN = 20
# What `Findings` lists, by the words for one and for several.
DIFFERENCES = {
    "faults": ("file that cannot be used", "files that cannot be used"),
    "conflicts": ("contradiction between files", "contradictions between files"),
    "missing": ("tensor missing", "tensors missing"),
    "unexpected": ("tensor unexpected", "tensors unexpected"),
    "misshapen": ("tensor of another shape", "tensors of another shape"),
    "wrong_dtype": ("tensor of another dtype", "tensors of another dtype"),
}


def check_deployment(config: ServeConfig | RoleDeployment) -> None:
    """Raises ConfigError with everything that is wrong with the checkpoint of a deployment, or with what its workers
    are to do with it."""
    is_plain = any(engine.qkv_layout == "plain" for engine in config.prefill + config.decode)
    try:
        inspection = inspect_checkpoint(config.model_dir, qkv_layout="plain" if is_plain else "interleaved")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    findings = inspection.findings
    if inspection.tensors is None:
        findings = replace(findings, faults=["*.safetensors is missing: the directory has no weights"])
    unusable = unservable(config.model_dir)
    if findings:
        lines = [f"{printable(str(config.model_dir))} does not hold what its config.json calls for:"]
        lines += [f"  {line}" for line in difference_lines(findings)]
        lines += [f"  {advice}" for advice in advices(findings)]
        raise ConfigError("\n".join([*lines, *([] if unusable is None else [unusable])]))
    if unusable is not None:
        raise ConfigError(unusable)
    check_workers(config, num_held=inspection.inventory.num_mtp_layers)
    if config.gateway is not None:
        _check_gateway(config.gateway)


def _check_gateway(config: GatewayConfig) -> None:
    """Raises ConfigError for files of keys or certificates that cannot be used."""
    # Only here: the command line is completed without it.
    from epd import check_gateway

    try:
        check_gateway(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def unservable(model_dir: Path) -> str | None:
    """Why the gateway could not read the checkpoint's tokenizer, template and settings; None when it can."""
    # Only here: the command line is completed without it.
    from epd import Renderer

    try:
        Renderer.load(model_dir)
    except CheckpointError as error:
        return str(error)
    return None


def difference_lines(findings: Findings) -> list[str]:
    """A line per kind of difference: how many, and the first of them by name."""
    lines = []
    for kind in DIFFERENCES:
        entries: Sequence[str] = getattr(findings, kind)
        if entries:
            more = len(entries) - NUM_NAMES_SHOWN
            shown = "; ".join(map(printable, entries[:NUM_NAMES_SHOWN]))
            lines.append(f"{counted(kind, len(entries))}: {shown}{f'; and {more:,} more' if more > 0 else ''}")
    return lines


def counted(kind: str, count: int) -> str:
    """1 file that cannot be used, 2 tensors missing."""
    return f"{count:,} {DIFFERENCES[kind][count > 1]}"


def advices(findings: Findings) -> list[str]:
    """What may help against each kind of difference, a sentence or two each."""
    said = []
    if findings.faults:
        said.append("Download files that cannot be used again.")
    if findings.conflicts:
        said.append(
            "Remove files that are not of this checkpoint, or model.safetensors.index.json if that is not of this one."
        )
    if findings.missing or findings.unexpected or findings.misshapen or findings.wrong_dtype:
        said.append("Are config.json and all files of one revision of one model?")
    if any("qkv_proj.weight_scale_inv" in name for name in findings.misshapen):
        said.append(
            "Scales of fused q, k, v of another shape can mean the other row order: try engine.qkv_layout "
            "(mimo inspect --qkv-layout)."
        )
    return said
