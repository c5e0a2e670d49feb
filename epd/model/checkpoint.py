"""A checkpoint looked at without loading it: its inventory and, where weights are present, whether they match."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from encoder import TensorSpec, used_tokenizer_name
from epd.model.headers import Findings, HeaderError, Headers, compare, read_headers
from epd.model.inventory import MTP_KEY, Inventory, QkvRows, mtp_layers_of, stored_mtp_layers, take_inventory

MtpSource = Literal["argument", "configuration", "weights", "family"]
TOKENIZER_DIR = "audio_tokenizer"


class CheckpointError(ValueError):
    """A checkpoint of which nothing can be said. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of one checkpoint.

    `headers` are None where there are no weights beside the configuration, `audio_tokenizer_headers` also where there
    is no audio tower; `findings` and `faults` are empty then. Names of the audio tokenizer's tensors carry its
    directory. `stored_otherwise` are tensors that load, though their dtype is not the published one.
    """

    config_hf: dict[str, Any]
    inventory: Inventory
    mtp_source: MtpSource
    headers: Headers | None
    audio_tokenizer_headers: Headers | None
    findings: Findings
    faults: tuple[str, ...]
    stored_otherwise: tuple[str, ...]

    @property
    def matches(self) -> bool:
        """Whether the files hold exactly what the configuration calls for; true without weights."""
        return not self.findings and not self.faults


def inspect_checkpoint(
    location: Path, *, num_mtp_layers: int | None = None, qkv_layout: QkvRows = "interleaved"
) -> Inspection:
    """Inspect a directory, or the `config.json` given alone (then weights beside it are not looked at).

    `num_mtp_layers` None: what the configuration says under `num_mtp_layers`, else what the weights hold, else what the
    model family has. Reads configurations and headers only. Raises CheckpointError when the configuration cannot be
    read or is refused.
    """
    directory = location if location.is_dir() else location.parent
    config_hf = _read_json(location / "config.json" if location.is_dir() else location)
    tokenizer_config = directory / TOKENIZER_DIR / "config.json"
    has_audio = bool(config_hf.get("audio_config"))
    tokenizer_hf = _read_json(tokenizer_config) if has_audio and tokenizer_config.is_file() else None
    try:
        headers = read_headers(directory) if location.is_dir() else None
        own = read_headers(directory / TOKENIZER_DIR) if headers is not None and tokenizer_hf is not None else None
        mtp_source: MtpSource = "argument"
        if num_mtp_layers is None:
            num_mtp_layers, mtp_source = _mtp_layers(config_hf, headers)
        published = take_inventory(
            config_hf, num_mtp_layers=num_mtp_layers, audio_tokenizer_hf=tokenizer_hf, qkv_layout=qkv_layout
        )
        if headers is None:
            return Inspection(config_hf, published, mtp_source, None, None, Findings(), (), ())
        own_tensors = {} if own is None else own.tensors
        used = {known: name for name in own_tensors if (known := used_tokenizer_name(name)) is not None}
        stored = take_inventory(
            config_hf,
            num_mtp_layers=num_mtp_layers,
            audio_tokenizer_hf=tokenizer_hf,
            qkv_layout=qkv_layout,
            stored=headers.dtypes,
            stored_audio_tokenizer={known: own_tensors[name].dtype for known, name in used.items()},
        )
    except (HeaderError, ValueError) as error:
        raise CheckpointError(f"{location}: {error}") from error
    found = headers.tensors | {f"{TOKENIZER_DIR}/{known}": own_tensors[name] for known, name in used.items()}
    faults = [*headers.faults, *(f"{TOKENIZER_DIR}/{fault}" for fault in (own.faults if own else ()))]
    if has_audio and (tokenizer_hf is None or own is None):
        absent = "config.json" if tokenizer_hf is None else "model.safetensors"
        faults.append(f"{TOKENIZER_DIR}/{absent} is missing, and the configuration has an audio tower; download it")
    return Inspection(
        config_hf=config_hf,
        inventory=stored,
        mtp_source=mtp_source,
        headers=headers,
        audio_tokenizer_headers=own,
        findings=compare(_all(stored) if own is not None else stored.main, found),
        faults=tuple(faults),
        stored_otherwise=_differences(published.main, stored.main),
    )


def _mtp_layers(config_hf: Mapping[str, object], headers: Headers | None) -> tuple[int, MtpSource]:
    if headers is None or config_hf.get(MTP_KEY) is not None:
        return mtp_layers_of(config_hf), "family" if config_hf.get(MTP_KEY) is None else "configuration"
    return stored_mtp_layers(headers.tensors), "weights"


def _all(inventory: Inventory) -> list[TensorSpec]:
    own = [replace(spec, name=f"{TOKENIZER_DIR}/{spec.name}") for spec in inventory.audio_tokenizer]
    return [*inventory.main, *own]


def _differences(published: tuple[TensorSpec, ...], stored: tuple[TensorSpec, ...]) -> tuple[str, ...]:
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
