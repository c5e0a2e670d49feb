"""Audio tokenizer (mel reconstruction through a residual VQ), then a warm-up of the audio encoder on its frozen codes.

python -m training.pretrain_audio --minutes 6 --encoder-minutes 4
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
from training.features import log_mel
from training.nets.audio import AudioNet, TokenizerNet, quantise
from training.optim import build_optimisers, set_rate
from training.tasks import audio
from training.tasks.types import HELD_OUT_SEED, Sound, generator

RUNS = Path("runs")
NOTHING = 12
"""Labels below are the ten keys, a low beep and a high beep."""
NUM_LABELS = 13
CODE_FRAME_SAMPLES = 960


def other_sound(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Neither keys nor beeps: sweeps, chords, noise bursts, so that the codes cover more than the task."""
    time_s = np.arange(num_samples) / audio.RATE_HZ
    sound = np.zeros(num_samples)
    for _ in range(int(rng.integers(1, 4))):
        low, high = np.exp(rng.uniform(math.log(150), math.log(4000), 2))
        sweep = low + (high - low) * time_s / time_s[-1] * float(rng.integers(0, 2))
        gate = np.sin(2 * np.pi * rng.uniform(0.5, 4) * time_s + rng.uniform(0, 6.28)) > rng.uniform(-1, 0.6)
        sound += np.sin(2 * np.pi * np.cumsum(sweep) / audio.RATE_HZ) * gate
    sound += rng.standard_normal(num_samples) * 10 ** rng.uniform(-3, -0.5)
    return (sound / np.abs(sound).max() * 10 ** rng.uniform(-1.3, -0.05)).astype(np.float32)


def labelled(seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """A sound and the key or beep (or NOTHING) at the centre of every 40 ms."""
    rng = generator("frames", seed, index)
    sample = audio.sample_beeps(seed, index) if rng.random() < 0.4 else audio.sample(seed, index)
    (sound,) = (part for part in sample.turns[0].question if isinstance(part, Sound))
    samples = sound.samples_N
    labels = np.full(len(samples) // CODE_FRAME_SAMPLES + 2, NOTHING)
    if rng.random() < 0.12:
        return other_sound(rng, len(samples)), np.full_like(labels, -1)
    centres = np.arange(len(labels)) * CODE_FRAME_SAMPLES + 360
    for place in range(0, len(sample.labels), 3):
        key, start, stop = sample.labels[place : place + 3]
        labels[(centres >= start) & (centres < stop)] = key
    return samples, labels


def batch(seed: int, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Log-mel `[B, T, 128]` with T a multiple of 4, frame labels `[B, T/4]`; clips are extended with silence."""
    pairs = [labelled(seed, start + place) for place in range(count)]
    num_frames = (max(len(samples) for samples, _ in pairs) // 240 + 5) // 4 * 4
    mels, labels = [], []
    for samples, label in pairs:
        padded = np.zeros((num_frames - 1) * 240, np.float32)
        padded[: len(samples)] = samples
        mels.append(log_mel(padded))
        fill = np.full(num_frames // 4, NOTHING if label[0] >= 0 else -1)
        fill[: min(len(label), len(fill))] = label[: len(fill)]
        labels.append(torch.from_numpy(fill))
    return torch.stack(mels), torch.stack(labels)


class Books:
    """Codebooks learnt by moving averages; rows that nobody uses move to a random residual."""

    def __init__(self, sizes: list[int], width: int) -> None:
        self.books = [torch.randn(size, width) * 0.1 for size in sizes]
        self.counts = [torch.zeros(size) for size in sizes]

    def start(self, x_ND: Tensor) -> None:
        """A few rounds of k-means, level by level."""
        residual = x_ND
        for q, book in enumerate(self.books):
            book = residual[torch.randperm(len(residual))[: len(book)]].clone()
            for _ in range(8):
                code = torch.cdist(residual, book).argmin(-1)
                sums = torch.zeros_like(book).index_add_(0, code, residual)
                counts = torch.bincount(code, minlength=len(book)).float()
                book = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], book)
            self.books[q], self.counts[q] = book, counts
            residual = residual - book[torch.cdist(residual, book).argmin(-1)]

    def update(self, x_ND: Tensor, codes_NQ: Tensor, decay: float = 0.98) -> None:
        """One moving-average step on a batch of encoder outputs."""
        residual = x_ND
        for q, book in enumerate(self.books):
            code = codes_NQ[:, q]
            chosen = book[code].clone()
            counts = torch.bincount(code, minlength=len(book)).float()
            means = torch.zeros_like(book).index_add_(0, code, residual) / counts.clamp_min(1)[:, None]
            weight = (1 - decay) * counts / (decay * self.counts[q] + (1 - decay) * counts).clamp_min(1e-6)
            book.lerp_(means, weight[:, None].clamp(0, 1))
            self.counts[q].mul_(decay).add_(counts, alpha=1 - decay)
            dead = self.counts[q] < 0.2
            if bool(dead.any()):
                book[dead] = residual[torch.randint(len(residual), (int(dead.sum()),))]
                self.counts[q][dead] = 1.0
            residual = residual - chosen


def train_tokenizer(minutes: float, start: Path | None = None) -> tuple[TokenizerNet, list[Tensor]]:
    """Reconstruction of the mel and recognition of the key from the first level and from all levels."""
    config = architecture.AUDIO_TOKENIZER
    net, books = TokenizerNet(config), Books(config["codebook_size"], config["d_model"])
    if start:
        net.load_state_dict(torch.load(start, weights_only=True)["tokenizer"])
    decoder = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4 * 128))
    first_head, head = nn.Linear(64, NUM_LABELS), nn.Linear(64, NUM_LABELS)
    optimisers = build_optimisers(nn.ModuleList([net, decoder, first_head, head]), 3e-3, 2e-3, ("conv", "head"))
    started, step, quantised = time.time(), 0, False
    while (spent := (time.time() - started) / 60 / minutes) < 1:
        set_rate(optimisers, min(1.0, (step + 1) / 40) * (0.5 + 0.5 * math.cos(math.pi * spent)))
        mel, labels = batch(2, step * 16, 16)
        x = net(mel)
        flat = x.reshape(-1, x.shape[-1])
        if spent > 0.2 and not quantised:
            books.start(flat.detach())
            quantised = True
        loss = torch.zeros(())
        first = mixed = flat
        if quantised:
            codes, sums = quantise(flat.detach(), books.books)
            level = int(torch.randint(1, 5, ())) if step % 2 else 4
            mixed = flat + (sums[:, level - 1] - flat).detach()
            first = flat + (sums[:, 0] - flat).detach()
            loss = loss + 0.5 * (flat - sums[:, -1]).square().mean() + 0.25 * (flat - sums[:, 0]).square().mean()
            books.update(flat.detach(), codes)
        target = mel.reshape(len(flat), -1)
        rebuilt = (decoder(mixed) - (target + 9) / 3).abs().mean()
        wanted = labels.reshape(-1)
        named = F.cross_entropy(head(mixed), wanted, ignore_index=-1)
        named_first = F.cross_entropy(first_head(first), wanted, ignore_index=-1)
        (loss + rebuilt + named + named_first).backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        if step % 50 == 0:
            right = (head(mixed).argmax(-1) == wanted)[wanted >= 0].float().mean()
            right_first = (first_head(first).argmax(-1) == wanted)[wanted >= 0].float().mean()
            used = [int((count > 0.3).sum()) for count in books.counts]
            print(
                f"{time.time() - started:.0f}s step {step} rebuilt {rebuilt:.3f} key {right:.3f} "
                f"first {right_first:.3f} "
                f"used {used}",
                flush=True,
            )
    for param in net.parameters():
        param.data = param.data.bfloat16().float()
    return net, [book.bfloat16().float() for book in books.books]


@torch.no_grad()
def codes_of(net: TokenizerNet, books: list[Tensor], samples: np.ndarray) -> Tensor:
    """Codes `[L, Q]` of one clip, alone, in pieces of `audio_segment_size` mel frames."""
    pieces = log_mel(samples).split(architecture.AUDIO["audio_segment_size"])
    return torch.cat([quantise(net(piece[None])[0], books)[0] for piece in pieces])


def to_groups(codes_LQ: Tensor) -> Tensor:
    """Repeat the last row up to a multiple of four; `[G, 4, Q]`."""
    missing = -len(codes_LQ) % 4
    return torch.cat([codes_LQ, codes_LQ[-1:].expand(missing, -1)]).view(-1, 4, codes_LQ.shape[-1])


def disturb(codes: Tensor, books: list[Tensor], share: float) -> Tensor:
    """Replace a share of the deeper codes at random: other arithmetic may flip them."""
    codes = codes.clone()
    for q in range(1, codes.shape[-1]):
        swap = torch.rand(codes.shape[:-1]) < share * q
        codes[..., q][swap] = torch.randint(len(books[q]), (int(swap.sum()),))
    return codes


def train_encoder(net: TokenizerNet, books: list[Tensor], minutes: float) -> AudioNet:
    """Key at each of the four frames of a group, read from the group's embedding by a head that is thrown away."""
    encoder, head = AudioNet(architecture.AUDIO), nn.Linear(architecture.HIDDEN, 4 * NUM_LABELS)
    optimisers = build_optimisers(nn.ModuleList([encoder, head]), 3e-3, 2e-3, ("embeddings", "head"))
    started, step = time.time(), 0
    while (spent := (time.time() - started) / 60 / minutes) < 1:
        set_rate(optimisers, min(1.0, (step + 1) / 40) * (0.5 + 0.5 * math.cos(math.pi * spent)))
        mel, labels = batch(3, step * 16, 16)
        with torch.no_grad():
            x = net(mel)
            codes = quantise(x.reshape(-1, x.shape[-1]), books)[0].view(*x.shape[:2], -1)
        usable = codes.shape[1] // 4 * 4
        groups = disturb(codes[:, :usable].reshape(-1, 4, codes.shape[-1]), books, 0.02)
        wanted = labels[:, :usable].reshape(-1)
        loss = F.cross_entropy(head(encoder(groups)).view(-1, NUM_LABELS), wanted, ignore_index=-1)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        step += 1
        if step % 50 == 0:
            right = (head(encoder(groups)).view(-1, NUM_LABELS).argmax(-1) == wanted)[wanted >= 0].float().mean()
            print(
                f"{time.time() - started:.0f}s encoder step {step} loss {loss.item():.4f} key {right:.4f}", flush=True
            )
    return encoder


def main() -> None:
    """Both parts, kept in runs/audio.pt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--encoder-minutes", type=float, default=4)
    parser.add_argument("--start", type=Path, help="an earlier audio.pt whose encoder is taken over")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, books = train_tokenizer(args.minutes, args.start)
    state = {"tokenizer": net.state_dict(), "books": books}
    torch.save(state, RUNS / "audio.pt")
    encoder = train_encoder(net, books, args.encoder_minutes)
    torch.save(state | {"encoder": encoder.state_dict()}, RUNS / "audio.pt")
    print("held-out seeds start at", HELD_OUT_SEED)


if __name__ == "__main__":
    main()
