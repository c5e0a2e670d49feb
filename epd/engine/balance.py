"""How evenly the router spreads tokens over experts, watched in a few of the steps.

The counts stay where the model computes them: nothing waits for a device in a step, only whoever asks how even it was,
which is twice a second.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from epd.model.config import TextConfig
from epd.model.moe import RouterStats
from epd.types import LabelledCounter

_EVERY_STEPS = 16
# What was seen so many looks ago has lost two thirds of its weight.
_MEMORY_LOOKS = 50


class ExpertBalance:
    """Of the trunk's layers that have experts. Shape letters: L such layers, E experts."""

    def __init__(self, config: TextConfig) -> None:
        self._has_experts = any(layer.is_moe for layer in config.layers)
        self._num_steps = 0
        self._load_LE: Tensor | None = None

    def look(self) -> RouterStats | None:
        """Where the next forward shall count, if it shall."""
        if not self._has_experts:
            return None
        self._num_steps += 1
        return RouterStats() if self._num_steps % _EVERY_STEPS == 1 else None

    def seen(self, stats: RouterStats) -> None:
        """What a forward counted."""
        counts = stats.tokens_per_expert()
        counts_LE = torch.stack([counts[index] for index in sorted(counts)]).float()
        kept = 1.0 - 1.0 / _MEMORY_LOOKS
        self._load_LE = counts_LE if self._load_LE is None else self._load_LE * kept + counts_LE

    def told(self) -> Iterator[LabelledCounter]:
        """The busiest expert's load over the mean: the mean of the layers, and the worst. Nothing before a look."""
        if self._load_LE is None:
            return
        ratio_L = self._load_LE.amax(dim=1) / self._load_LE.mean(dim=1).clamp(min=1e-9)
        mean, worst = torch.stack([ratio_L.mean(), ratio_L.max()]).tolist()
        for layers, ratio in (("mean", mean), ("worst", worst)):
            yield LabelledCounter(name="expert_imbalance_ratio", labels={"layers": layers}, value=ratio)
