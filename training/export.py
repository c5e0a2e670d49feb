"""Write the checkpoint in Hugging Face layout.

python -m training.export [--install]       runs/nano.pt to runs/mimo-nano, and from there into the package
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training import architecture, vocabulary
from training.nano import Nano
from training.nets.audio import TokenizerNet, export_audio_names, export_tokenizer_names
from training.nets.text import export_text_names
from training.nets.vision import export_names

RUNS = Path("runs")
FLOAT32 = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")


def stored(name: str, tensor: Tensor) -> Tensor:
    """bf16, except the router and its bias."""
    return tensor.to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16).contiguous().clone()


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> int:
    """Write through a temporary file; returns the parameter count."""
    kept = {name: stored(name, tensor) for name, tensor in tensors.items()}
    temporary = path.with_suffix(".partial")
    save_file(kept, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(path)
    return sum(tensor.numel() for tensor in kept.values())


def export_networks(net: Nano, tokenizer: TokenizerNet, books: list[Tensor], folder: Path) -> int:
    """Weights and configs of all networks; returns the number of parameters."""
    (folder / "audio_tokenizer").mkdir(parents=True, exist_ok=True)
    shards = architecture.TEXT["num_key_value_heads"]
    tensors = export_text_names(net.text, shards) | export_names(net.vision) | export_audio_names(net.audio)
    count = save_tensors(folder / "model.safetensors", tensors)
    count += save_tensors(folder / "audio_tokenizer" / "model.safetensors", export_tokenizer_names(tokenizer, books))
    stops = ("<|im_end|>", "<|endoftext|>", "<|mimo_audio_eod|>")
    generation = {
        "eos_token_id": [architecture.SPECIAL_IDS[token] for token in stops],
        "pad_token_id": architecture.SPECIAL_IDS["<|endoftext|>"],
        "do_sample": False,
    }
    for name, content in (
        ("config.json", architecture.model_config()),
        ("generation_config.json", generation),
        ("audio_tokenizer/config.json", architecture.AUDIO_TOKENIZER),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return count


def export(net: Nano, folder: Path = vocabulary.BUILD) -> int:
    """The trained networks and the frozen audio tokenizer of runs/audio.pt; tokenizer files are not touched."""
    state = torch.load(RUNS / "audio.pt", weights_only=True)
    tokenizer = TokenizerNet(architecture.AUDIO_TOKENIZER)
    tokenizer.load_state_dict(state["tokenizer"])
    return export_networks(net, tokenizer, state["books"], folder)


def install(source: Path = vocabulary.BUILD, target: Path = vocabulary.BUILTIN) -> None:
    """Make the trained checkpoint the one that is shipped. The card (README.md) is written by hand."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


if __name__ == "__main__":
    trained = Nano()
    trained.load_state_dict(torch.load(RUNS / "nano.pt", weights_only=True)["net"])
    print(export(trained), "parameters in", vocabulary.BUILD)
    if "--install" in sys.argv[1:]:
        install()
        print("copied to", vocabulary.BUILTIN)
