"""A checkpoint looked at without loading it: its inventory and, where weights are present, whether they match."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from encoder import TensorSpec, used_tokenizer_name
from encoder.checkpoint import INDEX_FILE, CheckpointError, FileTensor, Scan, read_json_object, scan_tensors, shown
from epd.model.config import TextConfig
from epd.model.inventory import MTP_KEY, Inventory, QkvRows, stored_mtp_layers, take_inventory
from preprocess.config import ProcessorConfig
from preprocess.ranges import printable
from preprocess.tokens import MediaTokenIds

MtpSource = Literal["argument", "configuration", "weights", "family"]
TOKENIZER_DIR = "audio_tokenizer"


@dataclass(frozen=True, slots=True)
class Findings:
    """How headers differ from an inventory, each entry naming its tensor.

    `faults` are files that cannot be used; what the index puts into those is not counted as missing. `conflicts` are
    files, or files and index, that contradict each other.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        differences = self.missing, self.unexpected, self.misshapen, self.wrong_dtype
        return any((*differences, self.faults, self.conflicts))


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


def inspect_checkpoint(
    location: Path, *, num_mtp_layers: int | None = None, qkv_layout: QkvRows = "interleaved"
) -> Inspection:
    """Inspect a directory, or the `config.json` given alone (then weights beside it are not looked at).

    `num_mtp_layers` None: what the configuration says under `num_mtp_layers`, else what the weights hold, else what the
    model family has. Reads configurations and headers only. Raises CheckpointError when the configuration cannot be
    read or is refused.
    """
    is_directory = location.is_dir()
    directory = location if is_directory else location.parent
    config_path = location / "config.json" if is_directory else location
    config_hf = read_json_object(config_path)
    tokenizer_dir = directory / TOKENIZER_DIR
    has_audio = bool(config_hf.get("audio_config"))
    has_tokenizer = has_audio and os.path.lexists(tokenizer_dir / "config.json")
    tokenizer_hf = read_json_object(tokenizer_dir / "config.json") if has_tokenizer else None
    has_weights = is_directory and (os.path.lexists(directory / INDEX_FILE) or any(directory.glob("*.safetensors")))
    main = _scan(directory) if has_weights else Scan()
    own = _scan(tokenizer_dir, f"{TOKENIZER_DIR}/") if has_weights and has_tokenizer else Scan()
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
        _check_media(config_hf, published.config)
        if not has_weights:
            return Inspection(config_hf, published, source, None, Findings())
        inventory = taken(_dtypes(main.tensors), _dtypes(used))
    except ValueError as error:
        raise CheckpointError(f"{printable(str(config_path))}: {error}") from error
    found = main.tensors | {f"{TOKENIZER_DIR}/{known}": tensor for known, tensor in used.items()}
    findings = _findings(inventory, found, main, own)
    if has_audio and not has_tokenizer:
        findings.faults.append(f"{TOKENIZER_DIR}/config.json is missing, and the configuration has an audio tower")
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


def _findings(inventory: Inventory, found: Mapping[str, FileTensor], main: Scan, own: Scan) -> Findings:
    """Compare as much as can be: tensors of a file that cannot be read are not missing, the file is at fault."""
    findings = compare(_all(inventory), found)
    unread = main.unread | {f"{TOKENIZER_DIR}/{used_tokenizer_name(name)}" for name in own.unread}
    for scan, is_own in ((main, False), (own, True)):
        if not scan.knows_all:
            unread |= {name for name in findings.missing if name.startswith(f"{TOKENIZER_DIR}/") is is_own}
    missing = [name for name in findings.missing if name not in unread]
    faults = [*main.faults, *(f"{TOKENIZER_DIR}/{fault}" for fault in own.faults)]
    conflicts = [*main.conflicts, *(f"{TOKENIZER_DIR}/{conflict}" for conflict in own.conflicts)]
    for scan, prefix in ((main, ""), (own, f"{TOKENIZER_DIR}/")):
        promised = {prefix + name for names in scan.absent.values() for name in names}
        if needless := sorted(promised - set(missing)):
            conflicts.append(
                f"{prefix}{INDEX_FILE} lists tensors that no file holds and nothing calls for: {shown(needless)}"
            )
    return replace(findings, missing=missing, faults=faults, conflicts=conflicts)


def _check_media(config_hf: Mapping[str, object], config: TextConfig) -> None:
    """What the gateway and the encoder read of the configuration besides the towers. Raises ValueError."""
    if config_hf.get("processor_config") is None:
        return
    ProcessorConfig.from_hf(config_hf)
    MediaTokenIds.from_hf(config_hf, vocab_size=config.vocab_size)


def _scan(directory: Path, prefix: str = "") -> Scan:
    try:
        return scan_tensors(directory, lambda name: True)
    except CheckpointError as error:
        return Scan(faults=[str(error).removeprefix(f"{printable(str(directory))}/")], knows_all=False)


def _dtypes(tensors: Mapping[str, FileTensor]) -> dict[str, str]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


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
