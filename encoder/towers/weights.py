"""Tower weights between modules and a Hugging Face layout directory.

A model directory holds config.json, the main checkpoint (safetensors shards, with or without an index) with `visual.*`,
`speech_embeddings.*` and `audio_encoder.*`, and `audio_tokenizer/` with its own config and weights. Only these tensors
are read; the language model's are left alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from encoder.checkpoint import CheckpointError, FileTensor, TensorReader, find_tensors, mismatches, read_json_object
from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from encoder.inventory import used_tokenizer_name
from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.vit import VisionTower

VISION_PREFIX = "visual."
AUDIO_PREFIX = "audio_encoder."
CODE_EMBEDDING_PREFIX = "speech_embeddings."
TOKENIZER_PREFIX = "encoder."
TOKENIZER_DIR = "audio_tokenizer"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


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


@dataclass(frozen=True, slots=True)
class _Part:
    """One tower, its parameters without memory yet, and the file tensors for them by parameter name.

    `label` is what a message puts before a parameter's name so that it reads as in the file.
    """

    module: nn.Module
    tensors: dict[str, FileTensor]
    label: str


def load_towers(model_dir: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Towers:
    """Build and load every tower the checkpoint has, as `dtype` on `device`.

    Headers are compared before anything is read; then one tensor at a time is in memory besides the towers.
    Raises CheckpointError for files that are missing or damaged, or one listing by name all tensors that are missing,
    unexpected, misshapen or of a dtype that is not implemented.
    """
    config = read_json_object(model_dir / "config.json")
    has_vision, has_audio = bool(config.get("vision_config")), bool(config.get("audio_config"))
    prefixes = (VISION_PREFIX,) * has_vision + (AUDIO_PREFIX, CODE_EMBEDDING_PREFIX) * has_audio
    found = find_tensors(model_dir, lambda name: name.startswith(prefixes)) if prefixes else {}
    vision = tokenizer = encoder = None
    parts = []
    # Without memory and without the random numbers that modules start from.
    with torch.device("meta"):
        if has_vision:
            tensors = _below(found, VISION_PREFIX)
            vision_config = replace(VisionConfig.from_hf(config), merger_bias="merger.mlp.0.bias" in tensors)
            vision = VisionTower(vision_config)
            parts.append(_Part(vision, tensors, VISION_PREFIX))
        if has_audio:
            audio_config = AudioConfig.from_hf(config)
            encoder = AudioEncoder(audio_config)
            top_level = {name: tensor for name, tensor in found.items() if name.startswith(CODE_EMBEDDING_PREFIX)}
            parts.append(_Part(encoder, _below(found, AUDIO_PREFIX) | top_level, AUDIO_PREFIX))
            tokenizer_config = AudioTokenizerConfig.from_hf(read_json_object(model_dir / TOKENIZER_DIR / "config.json"))
            tokenizer = AudioTokenizer(tokenizer_config, audio_config.segment_frames)
            tensors = _tokenizer_tensors(model_dir / TOKENIZER_DIR)
            parts.append(_Part(tokenizer, tensors, f"{TOKENIZER_DIR}/{TOKENIZER_PREFIX}"))
    _refuse_mismatch(parts, model_dir)
    with TensorReader() as reader:
        for part in parts:
            _fill(part, reader, dtype, device)
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


def _below(tensors: dict[str, FileTensor], prefix: str) -> dict[str, FileTensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _tokenizer_tensors(directory: Path) -> dict[str, FileTensor]:
    """The encoder's tensors of the tokenizer's own file, whose names may carry a prefix or not."""
    tensors: dict[str, FileTensor] = {}
    for name, tensor in find_tensors(directory, lambda name: used_tokenizer_name(name) is not None).items():
        known = str(used_tokenizer_name(name)).removeprefix(TOKENIZER_PREFIX)
        if known in tensors:
            raise CheckpointError(f"{tensor.file.name} in {directory.name} holds both {tensors[known].name} and {name}")
        tensors[known] = tensor
    return tensors


def _refuse_mismatch(parts: Iterable[_Part], model_dir: Path) -> None:
    needed: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    not_implemented = []
    for part in parts:
        expected = part.module.state_dict()
        needed |= {_file_name(part.label, name): tuple(tensor.shape) for name, tensor in expected.items()}
        found |= {_file_name(part.label, name): tensor.shape for name, tensor in part.tensors.items()}
        not_implemented += [
            f"{_file_name(part.label, name)} ({tensor.dtype})"
            for name, tensor in part.tensors.items()
            if name in expected and tensor.dtype not in _DTYPES
        ]
    lines = mismatches(needed, found, not_implemented)
    if lines:
        raise CheckpointError(f"towers of {model_dir.name} do not match the configuration\n" + "\n".join(lines))


def _file_name(label: str, name: str) -> str:
    return name if name.startswith(CODE_EMBEDDING_PREFIX) else label + name


def _fill(part: _Part, reader: TensorReader, dtype: torch.dtype, device: torch.device | str) -> None:
    """Read each parameter, cast and move it; the module ends in eval mode, without gradients."""
    state = {}
    for name, tensor in sorted(part.tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
        stored = torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype])
        reader.read_into(tensor, stored.reshape(-1).view(torch.uint8).numpy().data)
        state[name] = stored.to(device=device, dtype=dtype)
    part.module.load_state_dict(state, assign=True)
    part.module.eval().requires_grad_(False)
