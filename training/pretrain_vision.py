"""Warm-up of the vision tower alone: a head that is thrown away reads shape, colour and direction from its output.

python -m training.pretrain_vision --minutes 12
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
from training.features import frames_to_patches
from training.nets.vision import VisionNet
from training.optim import build_optimisers, set_rate
from training.tasks import image, video
from training.tasks.types import HELD_OUT_SEED, Clip, Image, Sample

RUNS = Path("runs")


def pixels_of(sample: Sample) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches and grid of the one medium of a sample."""
    for part in sample.turns[0].question:
        if isinstance(part, Image):
            return frames_to_patches(np.stack([part.pixels_HWC] * 2), 262144)
        if isinstance(part, Clip):
            return frames_to_patches(part.frames_THWC, 65536)
    raise ValueError("the sample holds no picture and no clip")


class Probe(nn.Module):
    """Shape, colour, direction from the mean and the maximum over the units of a slice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(2 * width, 18)

    def forward(self, units_SUD: Tensor) -> Tensor:
        return self.head(torch.cat([units_SUD.mean(1), units_SUD.amax(1)], dim=-1).float())


def loss_and_hits(logits_SC: Tensor, labels_S3: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy and, per slice, whether shape, colour and (if any) direction are right."""
    shape, colour, direction = logits_SC.split((6, 8, 4), dim=-1)
    moving = labels_S3[:, 2] >= 0
    loss = F.cross_entropy(shape, labels_S3[:, 0]) + F.cross_entropy(colour, labels_S3[:, 1])
    hits = (shape.argmax(-1) == labels_S3[:, 0]) & (colour.argmax(-1) == labels_S3[:, 1])
    if bool(moving.any()):
        loss = loss + F.cross_entropy(direction[moving], labels_S3[moving, 2])
        hits &= ~moving | (direction.argmax(-1) == labels_S3[:, 2])
    return loss, hits


def run_batch(net: VisionNet, probe: Probe, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Group the slices by grid and run each group at once."""
    groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for sample in samples:
        patches, (pairs, rows, columns) = pixels_of(sample)
        labels = torch.tensor([*sample.labels, -1][:3]).expand(pairs, 3)
        groups.setdefault((rows, columns), []).append((patches, labels))
    logits: list[Tensor] = []
    wanted: list[Tensor] = []
    for (rows, columns), members in groups.items():
        with torch.autocast("cpu", torch.bfloat16):
            units = net(torch.cat([patches for patches, _ in members]), rows, columns)
        logits.append(probe(units))
        wanted.append(torch.cat([label for _, label in members]))
    return loss_and_hits(torch.cat(logits), torch.cat(wanted))


def draw(seed: int, start: int, num_images: int, num_clips: int) -> list[Sample]:
    """Images and clips of one step."""
    return [image.sample(seed, start + place) for place in range(num_images)] + [
        video.sample(seed, start + place) for place in range(num_clips)
    ]


def main() -> None:
    """Train for a wall-clock time and keep the tower in runs/vision.pt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    net, probe = VisionNet(architecture.VISION), Probe(architecture.HIDDEN)
    optimisers = build_optimisers(nn.ModuleList([net, probe]), 3e-3, 2e-3, ("head", "patch_embed"))
    started, step = time.time(), 0
    if (RUNS / "vision.pt").exists():
        kept = torch.load(RUNS / "vision.pt", weights_only=True)
        net.load_state_dict(kept["net"])
        probe.load_state_dict(kept["probe"])
        step = kept["step"]
    held_out = draw(HELD_OUT_SEED, 0, 150, 40)
    while (spent := (time.time() - started) / 60 / args.minutes) < 1:
        set_rate(optimisers, min(1.0, (time.time() - started) / 15) * (0.5 + 0.5 * math.cos(math.pi * spent)))
        loss, hits = run_batch(net, probe, draw(1, step * 64, 40, 6))
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        if step % 50 == 0:
            with torch.no_grad():
                _, right = run_batch(net, probe, held_out)
            print(
                f"{time.time() - started:.0f}s step {step} loss {loss.item():.3f} train {hits.float().mean():.3f} "
                f"held-out images {right[:].float().mean():.3f}",
                flush=True,
            )
            torch.save({"net": net.state_dict(), "probe": probe.state_dict(), "step": step}, RUNS / "vision.pt")
    torch.save({"net": net.state_dict(), "probe": probe.state_dict(), "step": step}, RUNS / "vision.pt")


if __name__ == "__main__":
    main()
