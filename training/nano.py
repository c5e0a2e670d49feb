"""The whole of mimo-nano as one trainable module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training import architecture
from training.batch import Batch
from training.nets.audio import AudioNet
from training.nets.text import TextNet
from training.nets.vision import VisionNet


class Nano(nn.Module):
    """Text trunk with MTP heads, vision tower and audio encoder; the audio tokenizer is frozen and lives apart."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TextNet(architecture.TEXT, architecture.NUM_MTP_LAYERS)
        self.vision = VisionNet(architecture.VISION)
        self.audio = AudioNet(architecture.AUDIO)

    def embed(self, batch: Batch) -> Tensor:
        """Token embeddings with the towers' rows in their places, `[T, D]` float32."""
        hidden_TD = self.text.embed(batch.ids_T)
        for (rows, columns), (patches, places) in batch.pixels.items():
            hidden_TD = hidden_TD.index_copy(0, places, self.vision(patches, rows, columns).flatten(0, 1))
        if batch.sounds is not None:
            hidden_TD = hidden_TD.index_copy(0, batch.sounds[1], self.audio(batch.sounds[0]))
        return hidden_TD

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Embedded input, trunk states after the final norm, and logits of the answer rows."""
        hidden_TD = self.embed(batch)
        states_TD = self.text(hidden_TD, batch.groups)
        return hidden_TD, states_TD, self.text.lm_head(states_TD[batch.rows_A]).float()


def task_losses(batch: Batch, logits_AV: Tensor) -> dict[str, Tensor]:
    """Mean cross entropy per task."""
    losses_A = F.cross_entropy(logits_AV, batch.targets_A, reduction="none")
    names = sorted(set(batch.tasks))
    index_A = torch.tensor([names.index(task) for task in batch.tasks])[batch.sample_A]
    return {name: losses_A[index_A == place].mean() for place, name in enumerate(names)}


def exact_matches(batch: Batch, logits_AV: Tensor) -> dict[str, tuple[int, int]]:
    """(sequences whose every answer token is the argmax, sequences) per task: what greedy decoding would get right."""
    wrong = torch.zeros(len(batch.tasks), dtype=torch.long)
    wrong.index_add_(0, batch.sample_A, (logits_AV.argmax(-1) != batch.targets_A).long())
    found: dict[str, tuple[int, int]] = {}
    for task, misses in zip(batch.tasks, wrong.tolist(), strict=True):
        right, total = found.get(task, (0, 0))
        found[task] = right + (misses == 0), total + 1
    return found


def mtp_losses(net: Nano, batch: Batch, hidden_TD: Tensor, states_TD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per head (mean loss, share of drafts that are right) on answer rows; trunk, embedding and head are not moved.

    Head k sees state t and token t+1+k and predicts token t+2+k, for rows t whose own next token is an answer token.
    """
    results = []
    answers = torch.zeros(len(batch.ids_T), dtype=torch.bool)
    answers[batch.rows_A + 1] = True
    rows_A = batch.rows_A
    for k, head in enumerate(net.text.mtp):
        shifted = torch.roll(hidden_TD.detach(), -(1 + k), 0)
        out = head(shifted, states_TD.detach(), batch.groups)
        ahead = rows_A + 2 + k
        usable = ahead < len(batch.ids_T)
        rows, ahead = rows_A[usable], ahead[usable]
        inside = answers[ahead] & answers[ahead - 1 - k]
        rows, ahead = rows[inside], ahead[inside]
        logits = F.linear(out[rows], net.text.lm_head.weight.detach()).float()
        wanted = batch.ids_T[ahead]
        results.append((F.cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean()))
    return results
