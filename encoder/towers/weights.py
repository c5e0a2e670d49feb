"""Tower weights between modules and a Hugging Face layout directory.

A model directory holds config.json, the main checkpoint (safetensors shards, with or without an index) with `visual.*`,
`speech_embeddings.*` and `audio_encoder.*`, and `audio_tokenizer/` with its own config and weights. Only these tensors
are read; the language model's are left alone.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.vit import VisionTower

VISION_PREFIX = "visual."
AUDIO_PREFIX = "audio_encoder."
CODE_EMBEDDING_PREFIX = "speech_embeddings."
TOKENIZER_PREFIX = "encoder."
TOKENIZER_DIR = "audio_tokenizer"
INDEX_FILE = "model.safetensors.index.json"
# Training state of the codebooks and the vocoder's half of the tokenizer: present in files, used by nothing here.
IGNORED_SUFFIXES = ("_codebook.inited", "_codebook.cluster_size", "_codebook.embed_avg")


class CheckpointError(ValueError):
    """A checkpoint does not hold what its config promises."""


@dataclass(frozen=True, slots=True)
class Towers:
    """The towers of one checkpoint, in eval mode; None where the config has no such tower."""

    vision: VisionTower | None
    audio_tokenizer: AudioTokenizer | None
    audio_encoder: AudioEncoder | None

    @property
    def out_hidden_size(self) -> int | None:
        """Width of an embedding row, None for a text-only checkpoint."""
        if self.vision is not None:
            return self.vision.config.out_hidden_size
        return None if self.audio_encoder is None else self.audio_encoder.config.out_hidden_size


def load_towers(model_dir: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Towers:
    """Build and load every tower the checkpoint has, as `dtype` on `device`.

    Raises CheckpointError listing by name all tensors that are missing, unexpected or misshapen.
    """
    config = _read_json(model_dir / "config.json")
    shards = list(_shards(model_dir, (VISION_PREFIX, AUDIO_PREFIX, CODE_EMBEDDING_PREFIX)))
    vision = tokenizer = encoder = None
    problems: list[str] = []
    if config.get("vision_config"):
        state = _read(shards, _without_prefix(VISION_PREFIX))
        vision_config = replace(VisionConfig.from_hf(config), merger_bias="merger.mlp.0.bias" in state)
        vision = VisionTower(vision_config)
        problems += _fill(vision, state, VISION_PREFIX, dtype, device)
    if config.get("audio_config"):
        audio_config = AudioConfig.from_hf(config)
        encoder = AudioEncoder(audio_config)
        problems += _fill(encoder, _read(shards, _audio_name), AUDIO_PREFIX, dtype, device)
        directory = model_dir / TOKENIZER_DIR
        tokenizer_config = AudioTokenizerConfig.from_hf(_read_json(directory / "config.json"))
        tokenizer = AudioTokenizer(tokenizer_config, audio_config.segment_frames)
        state = _read(list(_shards(directory, None)), _tokenizer_name)
        problems += _fill(tokenizer, state, f"{TOKENIZER_DIR}/{TOKENIZER_PREFIX}", dtype, device)
    if problems:
        raise CheckpointError(f"{model_dir}: " + "; ".join(problems))
    return Towers(vision, tokenizer, encoder)


def export_vision_state(tower: VisionTower) -> dict[str, Tensor]:
    """The tower's tensors under checkpoint names (views, not copies)."""
    return {VISION_PREFIX + name: tensor.detach() for name, tensor in tower.state_dict().items()}


def export_audio_state(encoder: AudioEncoder) -> dict[str, Tensor]:
    """The audio encoder's tensors under checkpoint names; `speech_embeddings` stays at top level."""
    return {
        name if name.startswith(CODE_EMBEDDING_PREFIX) else AUDIO_PREFIX + name: tensor.detach()
        for name, tensor in encoder.state_dict().items()
    }


def export_tokenizer_state(tokenizer: AudioTokenizer) -> dict[str, Tensor]:
    """The audio tokenizer's tensors under the names of `audio_tokenizer/model.safetensors`."""
    return {TOKENIZER_PREFIX + name: tensor.detach() for name, tensor in tokenizer.state_dict().items()}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _shards(directory: Path, prefixes: tuple[str, ...] | None) -> Iterator[Path]:
    """Files that may hold tensors with one of the prefixes; every safetensors file where there is no index."""
    index = directory / INDEX_FILE
    if not index.is_file():
        yield from sorted(directory.glob("*.safetensors"))
        return
    weight_map: dict[str, str] = _read_json(index)["weight_map"]
    names = {file for name, file in weight_map.items() if prefixes is None or name.startswith(prefixes)}
    for name in sorted(names):
        if not (directory / name).is_file():
            raise CheckpointError(f"{index} names {name}, which does not exist")
        yield directory / name


def _without_prefix(prefix: str) -> Callable[[str], str | None]:
    return lambda name: name[len(prefix) :] if name.startswith(prefix) else None


def _audio_name(name: str) -> str | None:
    return name if name.startswith(CODE_EMBEDDING_PREFIX) else _without_prefix(AUDIO_PREFIX)(name)


def _tokenizer_name(name: str) -> str | None:
    if name.startswith("decoder.") or name.endswith(IGNORED_SUFFIXES):
        return None
    return name.removeprefix(TOKENIZER_PREFIX)


def _read(shards: list[Path], rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Tensors whose name `rename` maps to a module parameter name."""
    state = {}
    for path in shards:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not iterable
                target = rename(name)
                if target is not None:
                    state[target] = file.get_tensor(name)
    return state


def _fill(
    module: nn.Module, state: dict[str, Tensor], label: str, dtype: torch.dtype, device: torch.device | str
) -> list[str]:
    """Load `state` into the module, cast and move it, set eval mode; returns what does not fit, naming each tensor."""
    expected = module.state_dict()
    problems = [f"missing {label}{name}" for name in sorted(expected.keys() - state.keys())]
    problems += [f"unexpected {label}{name}" for name in sorted(state.keys() - expected.keys())]
    for name in sorted(expected.keys() & state.keys()):
        if expected[name].shape != state[name].shape:
            problems.append(f"{label}{name} is {list(state[name].shape)}, expected {list(expected[name].shape)}")
    if not problems:
        module.load_state_dict(state)
        module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return problems
