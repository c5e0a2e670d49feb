"""Begin with a model of another vocabulary: keep the rows of tokens both know, start the others from means."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.nano import Nano


def row_sources(old: Tokenizer, new: Tokenizer) -> list[list[int]]:
    """For each id of the new vocabulary, the old ids whose mean row it starts from."""
    known = old.get_vocab()
    sources = []
    for place in range(new.get_vocab_size()):
        token = new.id_to_token(place)
        if token in known:
            sources.append([known[token]])
        else:
            sources.append(old.encode(new.decode([place]), add_special_tokens=False).ids or [known["<|endoftext|>"]])
    return sources


def remap(rows_VD: Tensor, sources: list[list[int]]) -> Tensor:
    """The new table, `[V, D]`."""
    return torch.stack([rows_VD[ids].mean(0) for ids in sources])


def take_over(net: Nano, state: Path, old_tokenizer: Path, new_tokenizer: Path) -> int:
    """Load everything that fits; returns how many tokens are new."""
    kept = torch.load(state, weights_only=True)["net"]
    sources = row_sources(Tokenizer.from_file(str(old_tokenizer)), Tokenizer.from_file(str(new_tokenizer)))
    for name in ("text.embed.weight", "text.lm_head.weight"):
        kept[name] = remap(kept[name], sources)
    shapes = {name: value.shape for name, value in net.state_dict().items()}
    fitting = {name: value for name, value in kept.items() if shapes.get(name) == value.shape}
    net.load_state_dict(fitting, strict=False)
    return sum(len(ids) > 1 for ids in sources)
