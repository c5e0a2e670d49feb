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
from training.pretrain_vision import Probe, loss_and_hits


class Nano(nn.Module):
    """Text trunk with MTP heads, vision tower and audio encoder; the audio tokenizer is frozen and lives apart."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TextNet(architecture.TEXT, architecture.NUM_MTP_LAYERS)
        self.vision = VisionNet(architecture.VISION)
        self.audio = AudioNet(architecture.AUDIO)
        self.probe = Probe(architecture.HIDDEN)

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Token embeddings with the towers' rows in their places, `[T, D]` float32, and the vision probe's loss."""
        hidden_TD = self.text.embed(batch.ids_T)
        logits, labels = [], []
        for (rows, columns), (patches, places, labels_SU4) in batch.pixels.items():
            units_SUD = self.vision(patches, rows, columns)
            hidden_TD = hidden_TD.index_copy(0, places, units_SUD.flatten(0, 1))
            logits.append(self.probe(units_SUD).flatten(0, 1))
            labels.append(labels_SU4.flatten(0, 1))
        if batch.sounds is not None:
            hidden_TD = hidden_TD.index_copy(0, batch.sounds[1], self.audio(batch.sounds[0]))
        probe_loss = loss_and_hits(torch.cat(logits), torch.cat(labels))[0] if logits else torch.zeros(())
        return hidden_TD, probe_loss

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embedded input, trunk states after the final norm, logits of the answer rows, and the probe's loss."""
        hidden_TD, probe_loss = self.embed(batch)
        states_TD = self.text(hidden_TD, batch.groups)
        return hidden_TD, states_TD, self.text.lm_head(states_TD[batch.rows_A]).float(), probe_loss


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
