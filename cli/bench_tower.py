"""Cases of `mimo bench encoder` that run a tower alone: how much of the machine's matmul rate it reaches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cli.bench_case import Bars, Case, Contest, Setting, Stopwatch

if TYPE_CHECKING:
    from encoder import TowerTrial

_PRODUCTS = 3


@contextmanager
def _tower(setting: Setting, bars: Bars, *, make: "Callable[..., TowerTrial]", what: str) -> Iterator[Contest]:
    from encoder import matmul_flops_per_s, num_threads

    bars.begin(f"{what}: making the tower", 1)
    with num_threads(setting.num_threads):
        trial = make(quick=setting.quick)
        for run in (trial.fast, trial.plain):
            run()
        yield Contest(
            detail=f"{trial.detail}, {trial.flops / 1e9:.1f} GFLOP",
            ours=_rate(trial.fast, trial.flops),
            baseline=_rate(trial.plain, trial.flops),
            limit=lambda: matmul_flops_per_s(_best_seconds, quick=setting.quick) / 1e9,
        )


def _rate(work: Callable[[], object], flops: int) -> Callable[[], float]:
    def run() -> float:
        with Stopwatch() as watch:
            work()
        return flops / watch.elapsed_s / 1e9

    return run


def _best_seconds(work: Callable[[], object]) -> float:
    """The first product of a size pays for its memory."""
    seconds = []
    for _ in range(_PRODUCTS):
        with Stopwatch() as watch:
            work()
        seconds.append(watch.elapsed_s)
    return min(seconds)


def _vision(*, quick: bool) -> "TowerTrial":
    from encoder import vision_trial

    return vision_trial(quick=quick)


def _audio(*, quick: bool) -> "TowerTrial":
    from encoder import audio_trial

    return audio_trial(quick=quick)


_OURS = "the tower as the encoder runs it"
_PLAIN = "the tower's definition in plain torch, as it is trained"
_LIMIT = "torch.mm of two square fp32 matrices, same threads"

CASES: tuple[Case, ...] = (
    Case(
        name="encoder.tower_vision_flops",
        unit="GFLOP/s",
        ours=_OURS,
        baseline=_PLAIN,
        limit=_LIMIT,
        open=partial(_tower, make=_vision, what="encoder.tower_vision_flops"),
    ),
    Case(
        name="encoder.tower_audio_flops",
        unit="GFLOP/s",
        ours=_OURS,
        baseline=_PLAIN,
        limit=_LIMIT,
        open=partial(_tower, make=_audio, what="encoder.tower_audio_flops"),
    ),
)
