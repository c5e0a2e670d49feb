"""A checkpoint looked at without loading it: its inventory and, where weights are present, whether they match."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from encoder import TensorSpec, used_tokenizer_name
from encoder.checkpoint import INDEX_FILE, CheckpointError, FileTensor, find_tensors
from epd.model.inventory import MTP_KEY, Inventory, QkvRows, stored_mtp_layers, take_inventory

MtpSource = Literal["argument", "configuration", "weights", "family"]
TOKENIZER_DIR = "audio_tokenizer"


@dataclass(frozen=True, slots=True)
class Findings:
    """How headers differ from an inventory, each entry naming its tensor. `faults` are files that cannot be used."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen or self.wrong_dtype or self.faults)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of one checkpoint.

    `tensors` are those the files hold, None where there are no weights beside the configuration; names of the audio
    tokenizer's tensors carry its directory, and of them only those that are used are listed. `stored_otherwise` are
    tensors that load, though their dtype is not the published one.
    """

    config_hf: Mapping[str, object]
    inventory: Inventory
    mtp_source: MtpSource
    tensors: Mapping[str, FileTensor] | None
    findings: Findings
    stored_otherwise: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Files:
    """The tensors of one directory by name, or why they cannot be read."""

    tensors: dict[str, FileTensor] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}


def inspect_checkpoint(
    location: Path, *, num_mtp_layers: int | None = None, qkv_layout: QkvRows = "interleaved"
) -> Inspection:
    """Inspect a directory, or the `config.json` given alone (then weights beside it are not looked at).

    `num_mtp_layers` None: what the configuration says under `num_mtp_layers`, else what the weights hold, else what the
    model family has. Reads configurations and headers only. Raises CheckpointError when the configuration cannot be
    read or is refused.
    """
    directory = location if location.is_dir() else location.parent
    config_hf = _read_json(directory / "config.json" if location.is_dir() else location)
    tokenizer_dir = directory / TOKENIZER_DIR
    has_tokenizer = bool(config_hf.get("audio_config")) and (tokenizer_dir / "config.json").is_file()
    tokenizer_hf = _read_json(tokenizer_dir / "config.json") if has_tokenizer else None
    has_weights = location.is_dir() and ((directory / INDEX_FILE).is_file() or any(directory.glob("*.safetensors")))
    main = _read_files(directory) if has_weights else _Files()
    own = _read_files(tokenizer_dir, f"{TOKENIZER_DIR}/") if has_weights and has_tokenizer else _Files()
    used = {known: own.tensors[name] for name in own.tensors if (known := used_tokenizer_name(name)) is not None}

    source: MtpSource = "argument"
    if num_mtp_layers is None:
        is_counted = has_weights and config_hf.get(MTP_KEY) is None
        source = "weights" if is_counted else "family" if config_hf.get(MTP_KEY) is None else "configuration"
        num_mtp_layers = stored_mtp_layers(main.tensors) if is_counted else None

    def taken(stored: Mapping[str, str], stored_tokenizer: Mapping[str, str]) -> Inventory:
        return take_inventory(
            config_hf,
            num_mtp_layers=num_mtp_layers,
            audio_tokenizer_hf=tokenizer_hf,
            qkv_layout=qkv_layout,
            stored=stored,
            stored_audio_tokenizer=stored_tokenizer,
        )

    try:
        published = taken({}, {})
        if not has_weights:
            return Inspection(config_hf, published, source, None, Findings())
        inventory = taken(main.dtypes, {known: tensor.dtype for known, tensor in used.items()})
    except ValueError as error:
        raise CheckpointError(f"{location}: {error}") from error
    faults = [*main.faults, *own.faults]
    if config_hf.get("audio_config") and not has_tokenizer:
        faults.append(f"{TOKENIZER_DIR}/config.json is missing, and the configuration has an audio tower")
    found = main.tensors | {f"{TOKENIZER_DIR}/{known}": tensor for known, tensor in used.items()}
    findings = Findings(faults=faults) if faults else compare(_all(inventory), found)
    return Inspection(config_hf, inventory, source, found, findings, _differences(published.main, inventory.main))


def compare(expected: Iterable[TensorSpec], found: Mapping[str, FileTensor]) -> Findings:
    """Compare names, shapes and dtypes; `expected` should have been taken with the found dtypes (`stored`)."""
    specs = {spec.name: spec for spec in expected}
    findings = Findings(sorted(specs.keys() - found.keys()), sorted(found.keys() - specs.keys()))
    for name, spec in specs.items():
        tensor = found.get(name)
        if tensor is None:
            continue
        if tensor.shape != spec.shape:
            findings.misshapen.append(f"{name} is {list(tensor.shape)}, expected {list(spec.shape)}")
        if tensor.dtype != spec.dtype:
            findings.wrong_dtype.append(f"{name} is {tensor.dtype}, expected {spec.dtype}")
    return findings


def _read_files(directory: Path, prefix: str = "") -> _Files:
    try:
        return _Files(find_tensors(directory, lambda name: True))
    except CheckpointError as error:
        # Of several lines the first says what the others are, which begin with file names.
        headline, *faults = str(error).splitlines()
        return _Files(faults=[f"{prefix}{fault}" for fault in faults] or [headline])


def _all(inventory: Inventory) -> list[TensorSpec]:
    own = [replace(spec, name=f"{TOKENIZER_DIR}/{spec.name}") for spec in inventory.audio_tokenizer]
    return [*inventory.main, *own]


def _differences(published: Iterable[TensorSpec], stored: Iterable[TensorSpec]) -> tuple[str, ...]:
    dtypes = {spec.name: spec.dtype for spec in published}
    return tuple(
        f"{spec.name} is {spec.dtype}, published {dtypes[spec.name]}"
        for spec in stored
        if spec.name in dtypes and dtypes[spec.name] != spec.dtype
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a checkpoint is a directory with config.json, or that file alone")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return content
