"""The other side of the speed cases: transformers on the same files, in its own cache, as `generate` does it."""

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cli.bench_case import BenchFailed, Stopwatch

if TYPE_CHECKING:
    from torch import Tensor

EXPERTS = ("eager", "grouped_mm", "batched_mm")
"""What transformers offers on a CPU: a loop over experts, one call for all of them, a copy of weights per token."""
_BYTES_PER_WEIGHT = 2


class TransformersModel:
    """bf16 and eager attention: this class of theirs refuses any other on a CPU."""

    def __init__(self, folder: Path, *, dtype: str = "bfloat16") -> None:
        """Raises BenchFailed where transformers is not installed or is too old to know the model."""
        if find_spec("transformers") is None:
            raise BenchFailed("transformers is not installed: pip install 'mimo-epd[test]'")
        transformers: Any = import_module("transformers")
        if not hasattr(transformers, "MiMoV2FlashForCausalLM"):
            raise BenchFailed(f"transformers {transformers.__version__} does not know mimo_v2_flash; 5.24 does")
        import_module("transformers.utils.logging").disable_progress_bar()
        self._new_cache: Callable[..., Any] = transformers.DynamicCache
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.experts = EXPERTS[0]

    def use_experts(self, name: str) -> None:
        """One of EXPERTS, from now on."""
        self._model.set_experts_implementation(name)
        self.experts = name

    @property
    def num_parameters(self) -> int:
        return int(self._model.num_parameters())

    def copied_bytes(self, num_tokens: int) -> int:
        """Memory that `batched_mm` takes in one layer for so many tokens."""
        config = self._model.config
        per_expert = 3 * config.hidden_size * config.moe_intermediate_size * _BYTES_PER_WEIGHT
        return int(num_tokens * config.num_experts_per_tok * per_expert)

    def logits(self, ids: Sequence[int]) -> "Tensor":
        """fp32 [tokens, vocabulary] of one prompt."""
        import torch

        with torch.inference_mode():
            return cast("Tensor", self._model(torch.tensor([ids])).logits[0].float())

    def prefill(self, prompts: Sequence[Sequence[int]]) -> "Generation":
        """Compute prompts of equal length, up to their first tokens."""
        import torch

        cache = self._new_cache(config=self._model.config)
        generation = Generation(self._model, cache, torch.tensor(prompts))
        generation.step()
        return generation


class Generation:
    """A batch in the middle of its answers. `copy.deepcopy` of the cache makes one that starts again from there."""

    def __init__(self, model: Any, cache: Any, ids: "Tensor") -> None:
        self._model, self._cache, self._ids = model, cache, ids

    @property
    def tokens(self) -> list[int]:
        """The latest token of each sequence."""
        return cast("list[int]", self._ids[:, -1].tolist())

    def again(self) -> "Generation":
        """The same state once more, apart from this one."""
        return Generation(self._model, copy.deepcopy(self._cache), self._ids)

    def step(self) -> list[int]:
        """The next token of each sequence, greedy."""
        import torch

        with torch.inference_mode():
            out = self._model(self._ids, cache=self._cache, use_cache=True, logits_to_keep=1)
            self._ids = out.logits[:, -1:].argmax(dim=-1)
            return self.tokens


def fastest_experts(model: TransformersModel, names: Sequence[str], work: Callable[[], object], *, tries: int) -> str:
    """Whichever of `names` does `work` fastest, best of `tries` after one run that is not counted; it is in use then.

    The tries take turns, so that what else the machine does falls on all of them.
    """
    seconds: dict[str, float] = {}
    for attempt in range(tries + 1):
        for name in names:
            model.use_experts(name)
            with Stopwatch() as watch:
                work()
            if attempt:
                seconds[name] = min(seconds.get(name, watch.elapsed_s), watch.elapsed_s)
    fastest = min(seconds, key=lambda name: seconds[name])
    model.use_experts(fastest)
    return fastest
