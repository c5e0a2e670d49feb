"""The speed cases of `mimo bench kv`: tokens per second of the engine against transformers on the same weights.

Ours is a whole engine (scheduler, prefix cache, pools, runner), theirs the bare model in a loop: what a scheduler costs
is on our side of the scales. A case refuses to run when the two do not compute the same function.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from cli.bench_case import Bars, BenchFailed, Case, Contest, Findings, Setting, Stopwatch
from cli.bench_kv_speed_model import QUICK_MODEL, SPEED_MODEL, SpeedModel
from cli.bench_kv_speed_plain import EXPERTS, TransformersModel, fastest_experts
from epd.config import EngineConfig
from epd.types import Role

if TYPE_CHECKING:
    from epd import EngineTrial

SPEED_PACKAGES = ("torch", "transformers")
"""Whose versions matter for the figures."""
_CONTEXT = 1024
_STEPS = 12
_PROMPT = 4096
_CHUNK_TOKENS = 2048
_CHECKED_TOKENS = 48
# Rounding turns a few choices of experts around, and with them the logits of a few tokens.
_MOST_APART = 0.25
_BYTES_PER_WEIGHT = 2


def speed_cases() -> tuple[Case, ...]:
    """`kv.prefill_4k`, `kv.decode_b1` and `kv.decode_b8`."""
    return (
        Case(
            name="kv.prefill_4k",
            unit="s",
            ours="the engine, from a prompt to its first token",
            baseline="transformers' mimo_v2_flash, same weights and threads",
            limit="its matrix products alone, at the rate of a large bf16 product",
            open=_prefill,
        ),
        *(
            Case(
                name=f"kv.decode_b{batch}",
                unit="s",
                ours=f"the engine, {_STEPS} tokens of each of {batch} answers",
                baseline="transformers' mimo_v2_flash with its DynamicCache, same weights and threads",
                limit="reading the weights of as many steps from memory once each",
                open=partial(_decode, batch=batch),
            )
            for batch in (1, 8)
        ),
    )


@dataclass(slots=True)
class _Rates:
    """What each side took, to tell it in tokens per second."""

    num_tokens: int
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)

    def findings(self, experts: str) -> Findings:
        ours, theirs = (self.num_tokens / median(seconds) for seconds in (self.ours_s, self.theirs_s))
        return Findings(
            lines=(f"{ours:,.0f} tokens/s, transformers {theirs:,.0f} tokens/s with {experts} experts",),
            figures={"tokens_per_s": round(ours, 1), "baseline_tokens_per_s": round(theirs, 1), "experts": experts},
        )


@contextmanager
def _prefill(setting: Setting, bars: Bars) -> Iterator[Contest]:
    model, folder = _model(setting, bars)
    length = 64 if setting.quick else _PROMPT
    with _threads(setting.num_threads):
        trial, theirs = _sides(folder, model, setting, max_running=1, context=length + 1)
        prompts = _Prompts(model, length)
        # A batch of weight copies of every token has to fit in memory.
        names = [name for name in EXPERTS if name != "batched_mm" or theirs.copied_bytes(length) < 1 << 30]
        bars.begin("kv.prefill_4k: choosing transformers' experts", 1)
        # By a part of the prompt: experts cost the same for every token, and attention is not what is compared.
        part = prompts.take()[: length // 4]
        experts = fastest_experts(theirs, names, lambda: theirs.prefill([part]), tries=1)
        rates = _Rates(length)
        _first_token(trial, prompts.take())
        products = length * model.products_per_token() + model.attention_products(length)
        yield Contest(
            detail=f"{length} tokens, {model.num_parameters() / 1e6:.0f} M parameters, {2 * products / 1e9:.0f} GFLOP",
            ours=_noted(rates.ours_s, lambda: _first_token(trial, prompts.take())),
            baseline=_noted(rates.theirs_s, lambda: theirs.prefill([prompts.take()])),
            limit=lambda: 2 * products / _product_rate(quick=setting.quick),
            findings=lambda: rates.findings(experts),
        )


@contextmanager
def _decode(setting: Setting, bars: Bars, *, batch: int) -> Iterator[Contest]:
    model, folder = _model(setting, bars)
    context, steps = (32, 4) if setting.quick else (_CONTEXT, _STEPS)
    with _threads(setting.num_threads):
        trial, theirs = _sides(folder, model, setting, max_running=batch, context=context + steps + _ahead(batch))
        taken = _Prompts(model, context)
        prompts = [taken.take() for _ in range(batch)]
        bars.begin(f"kv.decode_b{batch}: prompts and choosing transformers' experts", 1)
        ready = theirs.prefill(prompts)

        def theirs_run(num_steps: int = steps) -> float:
            generation = ready.again()
            with Stopwatch() as watch:
                for _ in range(num_steps):
                    generation.step()
            return watch.elapsed_s

        experts = fastest_experts(theirs, EXPERTS, lambda: theirs_run(2), tries=1)
        rates = _Rates(batch * steps)
        ours_run = partial(_decoding_s, trial, prompts, steps)
        ours_run()
        yield Contest(
            detail=f"{batch} answers of {steps} tokens after {context} tokens each, "
            f"{model.num_parameters() / 1e6:.0f} M parameters",
            ours=_kept(rates.ours_s, ours_run),
            baseline=_kept(rates.theirs_s, theirs_run),
            limit=lambda: steps * _BYTES_PER_WEIGHT * model.step_weights(batch) / _read_rate(quick=setting.quick),
            findings=lambda: rates.findings(experts),
        )


def _model(setting: Setting, bars: Bars) -> tuple[SpeedModel, Path]:
    model = QUICK_MODEL if setting.quick else SPEED_MODEL
    return model, model.folder(setting.cache_dir, bars)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    from encoder import num_threads as so_many

    with so_many(num_threads):
        yield


def _sides(
    folder: Path, model: SpeedModel, setting: Setting, *, max_running: int, context: int
) -> "tuple[EngineTrial, TransformersModel]":
    """Both models, loaded. Raises BenchFailed unless they compute the same function."""
    theirs = TransformersModel(folder)
    trial = _trial(folder, setting, max_running=max_running, context=context)
    apart = _apart(trial, theirs, _Prompts(model, _CHECKED_TOKENS).take())
    if not apart < _MOST_APART:
        raise BenchFailed(f"ours and transformers' logits are {apart:.0%} apart; more than rounding explains")
    return trial, theirs


def _trial(folder: Path, setting: Setting, *, max_running: int, context: int) -> "EngineTrial":
    from epd import EngineTrial

    return EngineTrial(
        EngineConfig(
            model_dir=folder,
            model_name="random",
            role=Role.BOTH,
            dtype="bfloat16",
            threads=setting.num_threads,
            kv_budget_bytes=512 << 20,
            expected_sequence_tokens=context,
            chunk_tokens=_CHUNK_TOKENS,
            max_running=max_running,
        )
    )


def _apart(trial: "EngineTrial", theirs: TransformersModel, prompt: Sequence[int]) -> float:
    """How far the logits of a prompt are apart, root mean square, as a share of their own spread."""
    wanted = theirs.logits(prompt)
    return float((trial.logits(prompt) - wanted).square().mean().sqrt() / wanted.std())


class _Prompts:
    """Random tokens, another prompt each time: no answer comes from a cache."""

    def __init__(self, model: SpeedModel, length: int) -> None:
        import numpy as np

        self._chance = np.random.default_rng(3)
        # The last two ids are marks.
        self._num_ids = model.vocab_size - 2
        self._length = length

    def take(self) -> list[int]:
        ids: list[int] = self._chance.integers(0, self._num_ids, self._length).tolist()
        return ids


def _first_token(trial: "EngineTrial", prompt: Sequence[int]) -> None:
    trial.submit(prompt, max_tokens=1)
    trial.finish()


def _decoding_s(trial: "EngineTrial", prompts: Sequence[Sequence[int]], num_steps: int) -> float:
    """Time of steps in which every prompt gets a token and nothing else is done."""
    ids = [trial.submit(prompt, max_tokens=num_steps + _ahead(len(prompts))) for prompt in prompts]
    while not all(trial.answers[request_id] for request_id in ids):
        trial.step()
    num_before = sum(map(len, trial.answers.values()))
    with Stopwatch() as watch:
        for _ in range(num_steps):
            trial.step()
    num_tokens = sum(map(len, trial.answers.values())) - num_before
    trial.finish()
    if num_tokens != num_steps * len(prompts):
        raise BenchFailed(f"{num_steps} steps of {len(prompts)} answers gave {num_tokens} tokens")
    return watch.elapsed_s


def _ahead(batch: int) -> int:
    """Tokens that the first of so many prompts may have by the time that the last has its first."""
    return 2 * batch + 8


def _noted(seconds: list[float], work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        with Stopwatch() as watch:
            work()
        seconds.append(watch.elapsed_s)
        return watch.elapsed_s

    return run


def _kept(seconds: list[float], measured: Callable[[], float]) -> Callable[[], float]:
    def run() -> float:
        seconds.append(measured())
        return seconds[-1]

    return run


def _product_rate(*, quick: bool) -> float:
    """FLOP/s of a square bf16 product, the best of three."""
    import torch

    size = 256 if quick else 2048
    left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
    return 2.0 * size**3 / _best_s(lambda: left @ right)


def _read_rate(*, quick: bool) -> float:
    """Bytes/s of reading memory far larger than any cache, the best of three."""
    import torch

    words = torch.ones((1 if quick else 256) << 17, dtype=torch.int64)
    return words.nbytes / _best_s(words.sum)


def _best_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        with Stopwatch() as watch:
            work()
        seconds.append(watch.elapsed_s)
    return min(seconds)
