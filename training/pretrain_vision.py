"""Warm-up of the vision tower alone: a head that is thrown away reads off every unit what lies in it.

python -m training.pretrain_vision --minutes 15
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import architecture
from training.batch import unit_labels
from training.features import frames_to_patches
from training.nets.vision import VisionNet
from training.optim import build_optimisers, set_rate
from training.tasks import image, read, video
from training.tasks.types import HELD_OUT_SEED, Clip, Image, Sample

RUNS = Path("runs")
LABEL_SIZES = (1 + len(image.SHAPES), 1 + len(image.COLOURS), 6, 1 + len(read.CHARACTERS))
"""Shape, colour, motion, letter; 0 is none."""
NONE_WEIGHT = 0.25
"""Most units are empty; what is in the others counts for more."""

Groups = dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]]


class Probe(nn.Module):
    """All labels of a unit from its embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, sum(LABEL_SIZES))

    def forward(self, units_SUD: Tensor) -> Tensor:
        return self.head(units_SUD.float())


def loss_and_hits(logits_UC: Tensor, labels_U4: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of the four labels and, per unit, whether all are right."""
    loss = torch.zeros(())
    hits = torch.ones(len(labels_U4), dtype=torch.bool)
    for place, logits in enumerate(logits_UC.split(LABEL_SIZES, dim=-1)):
        weights = torch.ones(logits.shape[-1])
        weights[0] = NONE_WEIGHT
        loss = loss + F.cross_entropy(logits, labels_U4[:, place], weights)
        hits &= (logits.argmax(-1) == labels_U4[:, place]) | (labels_U4[:, place] < 0)
    return loss, hits


def add_slices(groups: Groups, sample: Sample) -> None:
    """Put the slices of a sample's medium to the others of their grid."""
    for part in sample.turns[0].question:
        if isinstance(part, Image):
            patches, (pairs, rows, columns) = frames_to_patches(np.stack([part.pixels_HWC] * 2), 262144)
        elif isinstance(part, Clip):
            patches, (pairs, rows, columns) = frames_to_patches(part.frames_THWC, 65536)
        else:
            continue
        members = groups.setdefault((rows, columns), ([], []))
        members[0].append(patches)
        for pair in range(pairs):
            marks = [mark for mark in sample.marks if mark.slice_index == pair]
            members[1].append(unit_labels(marks, rows // 2, columns // 2))


def run_batch(net: VisionNet, probe: Probe, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, hits per unit and labels per unit, `[U, 4]`."""
    groups: Groups = {}
    for sample in samples:
        add_slices(groups, sample)
    logits: list[Tensor] = []
    wanted: list[Tensor] = []
    for (rows, columns), (patches, labels) in groups.items():
        with torch.autocast("cpu", torch.bfloat16):
            units = net(torch.cat(patches), rows, columns)
        logits.append(probe(units).flatten(0, 1))
        wanted.append(torch.cat(labels))
    labels_U4 = torch.cat(wanted)
    return *loss_and_hits(torch.cat(logits), labels_U4), labels_U4


def draw(seed: int, start: int, num_shapes: int, num_lines: int, num_clips: int) -> list[Sample]:
    """Pictures, printed lines and clips of one step."""
    return (
        [image.sample(seed, start + place) for place in range(num_shapes)]
        + [read.sample(seed, start + place) for place in range(num_lines)]
        + [video.sample(seed, start + place) for place in range(num_clips)]
    )


def main() -> None:
    """Train for a wall-clock time and keep the tower in runs/vision.pt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--start", type=Path, help="a state of the tower or of the whole model to begin with")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    net, probe = VisionNet(architecture.VISION), Probe(architecture.HIDDEN)
    if args.start:
        kept = torch.load(args.start, weights_only=True)["net"]
        whole = {name[7:]: value for name, value in kept.items() if name.startswith("vision.")}
        net.load_state_dict(whole or kept)
    optimisers = build_optimisers(nn.ModuleList([net, probe]), 3e-3, 2e-3, ("head", "patch_embed"))
    started, step = time.time(), 0
    held_out = draw(HELD_OUT_SEED, 0, 80, 80, 20)
    while (spent := (time.time() - started) / 60 / args.minutes) < 1:
        set_rate(optimisers, min(1.0, (time.time() - started) / 15) * (0.5 + 0.5 * math.cos(math.pi * spent)))
        loss, _, _ = run_batch(net, probe, draw(1, step * 64, 16, 24, 4))
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        if step % 50 == 0:
            with torch.no_grad():
                _, hits, labels = run_batch(net, probe, held_out)
            full = {name: labels[:, place] > 0 for place, name in ((0, "shapes"), (3, "letters"), (2, "motion"))}
            scores = " ".join(f"{name} {hits[rows].float().mean():.3f}" for name, rows in full.items())
            empty = hits[(labels == 0).all(-1)].float().mean()
            print(
                f"{time.time() - started:.0f}s step {step} loss {loss.item():.3f} held out: {scores} empty {empty:.4f}",
                flush=True,
            )
            torch.save({"net": net.state_dict(), "probe": probe.state_dict(), "step": step}, RUNS / "vision.pt")
    torch.save({"net": net.state_dict(), "probe": probe.state_dict(), "step": step}, RUNS / "vision.pt")


if __name__ == "__main__":
    main()
