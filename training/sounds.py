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


def main() -> None:
    """Write runs/sounds.pt: group codes of training and held-out clips, in index order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--few", type=int, default=5000, help="clips that keep to three different keys")
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--name", default="sounds.pt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    net, books = load_tokenizer()
    pools: dict[str, list[Tensor]] = {}
    wanted = (
        ("held_out", HELD_OUT_SEED, args.held_out),
        ("train", POOL_SEED, args.count),
        ("few", POOL_SEED, args.few),
    )
    for name, seed, count in wanted:
        pools[name] = []
        for index in range(count):
            sample = tokenise(net, books, audio.sample(seed, index, name == "few"))
            (codes,) = (part for part in sample.turns[0].question if isinstance(part, Codes))
            pools[name].append(codes.groups_GSQ.to(torch.uint8))
            if len(pools[name]) % 1000 == 0:
                print(name, index + 1, flush=True)
                torch.save(pools, RUNS / "sounds.tmp")
                (RUNS / "sounds.tmp").replace(RUNS / args.name)
    torch.save(pools, RUNS / "sounds.tmp")
    (RUNS / "sounds.tmp").replace(RUNS / args.name)


if __name__ == "__main__":
    main()
