"""A pool of tokenised sounds: the codes of a clip are always the same, so they are computed once.

python -m training.sounds --count 10000
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from training import architecture
from training.nets.audio import TokenizerNet
from training.pretrain_audio import codes_of, to_groups
from training.tasks import audio
from training.tasks.types import HELD_OUT_SEED, Codes, Sample, Sound, Turn

RUNS = Path("runs")
POOL_SEED = 4


def tokenise(net: TokenizerNet, books: list[Tensor], sample: Sample) -> Sample:
    """The sample with every sound replaced by its codes."""
    turns = tuple(
        Turn(
            tuple(
                Codes(to_groups(codes_of(net, books, part.samples_N))) if isinstance(part, Sound) else part
                for part in turn.question
            ),
            turn.answer,
        )
        for turn in sample.turns
    )
    return replace(sample, turns=turns)


def load_tokenizer() -> tuple[TokenizerNet, list[Tensor]]:
    """The frozen audio tokenizer that `training.pretrain_audio` left."""
    state = torch.load(RUNS / "audio.pt", weights_only=True)
    net = TokenizerNet(architecture.AUDIO_TOKENIZER)
    net.load_state_dict(state["tokenizer"])
    return net.eval(), state["books"]


def make_clip(name: str, index: int) -> Sample:
    """The clip of a pool; pools of training are named for what they hold."""
    seed = HELD_OUT_SEED if name.startswith("held_out") else POOL_SEED
    if name.endswith("beeps"):
        return audio.sample_beeps(seed, index)
    return audio.sample(seed, index, name == "few")


def main() -> None:
    """Write runs/sounds.pt: group codes of training and held-out clips, in index order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=8000, help="clips of keys")
    parser.add_argument("--few", type=int, default=4000, help="clips that keep to three different keys")
    parser.add_argument("--beeps", type=int, default=8000, help="clips of beeps")
    parser.add_argument("--held-out", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    net, books = load_tokenizer()
    pools: dict[str, list[Tensor]] = {"held_out": [], "held_out_beeps": [], "keys": [], "beeps": [], "few": []}
    wanted = {
        "held_out": args.held_out,
        "held_out_beeps": args.held_out,
        "keys": args.count,
        "beeps": args.beeps,
        "few": args.few,
    }
    for index in range(max(wanted.values())):
        for name, pool in pools.items():
            if index >= wanted[name]:
                continue
            sample = tokenise(net, books, make_clip(name, index))
            (codes,) = (part for part in sample.turns[0].question if isinstance(part, Codes))
            pool.append(codes.groups_GSQ.to(torch.uint8))
        if (index + 1) % 500 == 0:  # the trainer may start on what there is
            print(index + 1, flush=True)
            save(pools)
    save(pools)


def save(pools: dict[str, list[Tensor]]) -> None:
    """Write through a temporary file."""
    torch.save(pools, RUNS / "sounds.tmp")
    (RUNS / "sounds.tmp").replace(RUNS / "sounds.pt")


if __name__ == "__main__":
    main()
